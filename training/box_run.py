"""A training of the model in the box: text, backbone, heads; each part is skipped if its result is there."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk

from ..modeling import EvaByteForMTPC
from .box_loop import Loop, Schedule
from .box_model import backbone_loss, backbone_optimizer, box_config, can_compile, held_out_bits
from .box_text import collect, pack, windows
from .recipe import has_fast_bfloat16

_BACKBONE_SHARE = 0.79


@dataclass(frozen=True)
class Plan:
    """What is trained, and for how long.

    Attributes:
        hours: Time for the backbone and all heads.
        hidden_size: Width of the backbone.
        layers: Its depth.
        attention_heads: Its attention heads.
        intermediate_size: Width of its MLPs.
        phases: (share of the backbone's time, ids per window, packed rows of 1,023 bytes per step) in order.
        matrix_rate: Peak learning rate of Muon.
        rate: Peak learning rate of AdamW.
        seed: Of weights and order.
        compile_step: Compile the backbone's step; needs a C++ compiler.
    """

    hours: float
    hidden_size: int = 256
    layers: int = 4
    attention_heads: int = 4
    intermediate_size: int = 704
    phases: tuple[tuple[float, int, int], ...] = ((0.5, 256, 4), (0.4, 512, 6), (0.1, 1024, 8))
    matrix_rate: float = 0.03
    rate: float = 0.01
    seed: int = 0
    compile_step: bool = True


class BoxRun:
    """One run in one folder.

    Args:
        folder: Of text, checkpoints, log and result.
        plan: What is trained.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.amp = has_fast_bfloat16()

    def run(self, until: str = "heads") -> None:
        """Does what is not done yet, up to the part named `until`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prepare_text()
        if until == "text":
            return
        model = self.train_backbone()
        if until == "heads":
            self.train_heads(model)

    def prepare_text(self) -> None:
        """Collects and packs the text."""
        text = self.folder / "text"
        if (text / "manifest.json").exists():
            return
        train, held_out, manifest = collect()
        text.mkdir(exist_ok=True)
        for name, part in (("train", train), ("held_out", held_out)):
            if not (text / name).exists():
                pack(part, text / name, self.plan.seed)
        (text / "manifest.json").write_text(json.dumps(manifest.as_dict(), indent=1))

    def rows(self, name: str) -> Dataset:
        """Packed rows of `train` or `held_out`, memory-mapped."""
        return load_from_disk(str(self.folder / "text" / name))

    def held_out_windows(self, count: int, length: int) -> torch.Tensor:
        """About `count` windows spread evenly over the held-out text, [count, length]."""
        rows = self.rows("held_out").with_format("numpy")
        return windows(rows[list(range(0, len(rows), -(-len(rows) // count)))]["ids"], length)

    def new_model(self) -> EvaByteForMTPC:
        """Fresh weights; attention is eager, which on CPUs is faster than the fused kernel with a mask."""
        plan = self.plan
        torch.manual_seed(plan.seed)
        config = box_config(plan.hidden_size, plan.layers, plan.attention_heads, plan.intermediate_size)
        model = EvaByteForMTPC(config)
        model.set_attn_implementation("eager")
        return model

    def train_backbone(self) -> EvaByteForMTPC:
        """Trains the backbone with its FF heads."""
        plan, model = self.plan, self.new_model()
        sample = self.held_out_windows(64, 1024)

        def evaluate() -> dict[str, float]:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
                return held_out_bits(model, sample)

        loop = Loop(
            name="backbone",
            folder=self.folder,
            module=model,
            optimizer=backbone_optimizer(model, plan.matrix_rate, plan.rate),
            loss=backbone_loss(model, plan.compile_step and can_compile()),
            rows=self.rows("train"),
            schedule=Schedule(
                seconds=3600 * plan.hours * _BACKBONE_SHARE,
                phases=plan.phases,
                seed=plan.seed,
                amp=self.amp,
            ),
            evaluate=evaluate,
        )
        is_new = not loop.checkpoint.exists()
        if is_new:
            loop.write({"plan": asdict(plan), "parameters": model.num_parameters(), "started": time.strftime("%F %T")})
        loop.run()
        loop.write({"held_out": evaluate()})
        return model.eval()
