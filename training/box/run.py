"""A training of the model in the box: text, backbone, heads; each part is skipped if its result is there."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk

from ...modeling import EvaByteForMTPC
from ..demo.recipe import has_fast_bfloat16
from ..files import replace_text
from .folder import LOG, load_box
from .heads import States, backbone_states, head_step, kept_states, window_nll
from .loop import Batch, Loop, Schedule
from .model import backbone_loss, backbone_optimizer, box_config, can_compile, held_out_bits
from .text import RowOrder, collect, pack, windows

_EARLIER = "earlier.jsonl"
"""The log of the box that a run began with, as it was then."""


@dataclass(frozen=True)
class Plan:
    """What is trained, and for how long.

    Attributes:
        hours: Time for the backbone and all heads.
        backbone_share: Part of it for the backbone; 0 where only the heads of `start` learn on.
        hidden_size: Width of the backbone.
        layers: Its depth.
        attention_heads: Its attention heads.
        intermediate_size: Width of its MLPs.
        phases: (share of the backbone's time, ids per window, packed rows of 1,023 bytes per step) in order.
        matrix_rate: Peak learning rate of Muon.
        rate: Peak learning rate of AdamW.
        seed: Of weights and order.
        compile_step: Compile the steps; needs a C++ compiler.
        ranks: Rank of each head.
        head_rate: Peak learning rate of the heads (AdamW).
        head_rows: Packed rows whose hidden states the heads learn from.
        start: Directory of an earlier box of the same sizes and ranks, whose backbone and heads this training begins
            with: so it goes on on a machine where the earlier run's directory is not. None: fresh weights.

    Raises:
        ValueError: A share out of range.
    """

    hours: float
    backbone_share: float = 0.79
    hidden_size: int = 256
    layers: int = 4
    attention_heads: int = 4
    intermediate_size: int = 704
    phases: tuple[tuple[float, int, int], ...] = ((0.5, 256, 4), (0.4, 512, 6), (0.1, 1024, 8))
    matrix_rate: float = 0.03
    rate: float = 0.01
    seed: int = 0
    compile_step: bool = True
    ranks: dict[str, int] = field(default_factory=lambda: {"ff": 1, "cp": 4, "hmm": 4, "btree": 4})
    head_rate: float = 3e-3
    head_rows: int = 1024
    start: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.backbone_share < 1 or (self.backbone_share == 0 and self.start is None):
            raise ValueError(
                f"backbone_share={self.backbone_share} must lie in [0, 1), and be above 0 where no start is given: "
                "heads need a backbone that has learned"
            )


class BoxRun:
    """One run in one directory.

    Args:
        folder: Of text, checkpoints, log and result.
        plan: What is trained.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.amp = has_fast_bfloat16()

    @classmethod
    def load(cls, folder: Path) -> BoxRun:
        """The run that was made in `folder`."""
        return cls(folder, Plan(**json.loads((folder / "plan.json").read_text())))

    def trained_models(self) -> dict[str, EvaByteForMTPC]:
        """The backbone with each head that is trained; FF heads that were not trained alone are the backbone's own."""
        backbone = self.new_model()
        backbone.load_state_dict(self._weights("backbone"))
        models = {"ff": copy.deepcopy(backbone)}
        for kind, rank in self.plan.ranks.items():
            if not (self.folder / f"head-{kind}.pt").exists():
                continue
            models[kind] = copy.deepcopy(backbone)
            if kind != "ff":
                models[kind].set_head(head_type=kind, rank=rank, gamma=0.9)
            models[kind].head.load_state_dict(self._weights(f"head-{kind}"))
        return {kind: model.eval() for kind, model in models.items()}

    def log_lines(self) -> list[str]:
        """The log behind that of its start, without what was lost: steps after a checkpoint, beginnings without one."""
        before, last = self.folder / _EARLIER, {}
        kept = before.read_text().splitlines(keepends=True) if before.exists() else []
        lines = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        begins = max((index for index, line in enumerate(lines) if "plan" in line), default=0)
        for line in lines[begins:]:
            stage = line["stage"]
            if stage not in last:
                file = self.folder / f"{stage}.pt"
                last[stage] = torch.load(file, weights_only=True)["position"]["step"] if file.exists() else -1
            if line["step"] <= last[stage]:
                kept.append(json.dumps(line) + "\n")
        return kept

    def _weights(self, name: str) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / f"{name}.pt", weights_only=True)["module"]

    def run(self, until: str = "heads") -> None:
        """Does what is not done yet, up to the part named `until`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plan.json").write_text(json.dumps(asdict(self.plan)))
        earlier = self.folder / _EARLIER
        if self.plan.start is not None and not earlier.exists():  # the box may be replaced by what comes of this run
            replace_text(earlier, (Path(self.plan.start) / LOG).read_text())
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
        if plan.start is not None:
            model.load_state_dict(load_box("ff", plan.start)[0].state_dict())
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
            batches=self._text_batches(),
            schedule=Schedule(
                seconds=3600 * plan.hours * plan.backbone_share,
                phases=plan.phases,
                amp=self.amp,
            ),
            evaluate=evaluate,
        )
        is_new = not loop.checkpoint.exists()
        if is_new:
            told = asdict(plan) | {"start": plan.start and Path(plan.start).name}  # a log is published: no local path
            loop.write({"plan": told, "parameters": model.num_parameters(), "started": time.strftime("%F %T")})
        if loop.run():
            loop.write({"held_out": evaluate()})
        return model.eval()

    def _text_batches(self) -> Callable[[int, int, int], Batch]:
        order = RowOrder(self.rows("train"), self.plan.seed)

        def batch(first: int, count: int, length: int) -> Batch:
            ids = order.windows(first, count, length)
            return Batch((ids,), ids.numel() - len(ids))

        return batch

    def states(self, model: EvaByteForMTPC, name: str, rows: int) -> States:
        """Hidden states of `rows` rows of `train` or `held_out`, from their file if it is there."""
        order = RowOrder(self.rows(name), self.plan.seed + 1)

        def make() -> States:
            return backbone_states(model, order, rows, 512, self.amp, self.plan.seed)

        return kept_states(self.folder / f"states-{name}.safetensors", make)

    def train_heads(self, backbone: EvaByteForMTPC) -> dict[str, EvaByteForMTPC]:
        """Trains every head on the frozen backbone for the same time, from its FF heads or from the start's own."""
        states = self.states(backbone, "train", self.plan.head_rows)
        held_out = self.states(backbone, "held_out", 32)
        return {kind: self.train_head(backbone, kind, states, held_out) for kind in self.plan.ranks}

    def train_head(self, backbone: EvaByteForMTPC, kind: str, states: States, held_out: States) -> EvaByteForMTPC:
        """Trains one head on a copy of the backbone."""
        plan, model = self.plan, copy.deepcopy(backbone)
        torch.manual_seed(plan.seed)
        if kind != "ff":
            model.set_head(head_type=kind, rank=plan.ranks[kind], gamma=0.9)
            if plan.start is not None:
                model.head.load_state_dict(load_box(kind, plan.start)[0].head.state_dict())
        model.train_only("heads")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        loop = Loop(
            name=f"head-{kind}",
            folder=self.folder,
            module=model.head,
            optimizer=torch.optim.AdamW(trained, lr=plan.head_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
            loss=head_step(model, plan.compile_step and can_compile()),
            batches=states.batch,
            schedule=Schedule(
                seconds=3600 * plan.hours * (1 - plan.backbone_share) / len(plan.ranks),
                phases=((1.0, 1, 1),),
                log_every=50,
                save_every=60.0,
                amp=self.amp,
            ),
            clock=_processor_seconds,
        )
        if not loop.checkpoint.exists():
            loop.write({"before": window_nll(model, held_out)})
        loop.run()
        loop.write({"after": window_nll(model, held_out)})
        return model.eval()


def _processor_seconds() -> float:
    """Time for which this process has computed, per thread of PyTorch: the same for every head on a busy machine."""
    return time.process_time() / torch.get_num_threads()
