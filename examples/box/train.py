"""Train the model in the box: one small byte-level EvaByte, and every head family on it.

    python examples/box/train.py --output box-run
    python examples/box/train.py --output box-run --threads 1 --recipe '{"head_steps": 2000}'

The backbone learns with FF heads; then it is frozen, and FF, CP, HMM and BTree heads start from those FF heads. The
same command goes on where an interrupted run stopped, even after SIGKILL.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from text import StepBatches, write_text
from transformers import TrainerCallback, TrainingArguments, set_seed

from tokenahead import EvaByteConfig, EvaByteForMTPC
from tokenahead.generation.tensors.saving import whole_directory
from tokenahead.training import MTPTrainer, TrainingStrategy

BOX_CONFIG = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
    "window_size": 256, "chunk_size": 2, "num_pred_heads": 16, "max_position_embeddings": 4096, "rope_theta": 1e5,
    "norm_add_unit_offset": True, "initializer_range": 0.04, "pad_token_id": 0,
}  # fmt: skip
_SMALL = {"rank": 8, "leaf_size": 64, "context": 3}
HEADS = {"ff": {"context": 3}, "cp": _SMALL, "hmm": _SMALL | {"transition_context": True}, "btree": _SMALL}
"""Options of every head: leaves read the three bytes before them, and those of circuits are small."""
GAMMA = 0.9
"""Discount of the depths of a head that learns alone."""


@dataclass(frozen=True)
class Recipe:
    """What is trained, and for how long; sizes, steps and rates are those of the released box.

    Attributes:
        config: Fields of `EvaByteConfig` that differ from `BOX_CONFIG`.
        phases: (steps, ids per window, packed rows of 1,023 bytes per step) of the backbone, in order.
        matrix_rate: Peak learning rate of Muon, for the matrices of the layers.
        rate: Peak learning rate of AdamW, for the rest.
        gamma: Discount of the depths while the backbone learns.
        heads: Options of each head.
        head_steps: Steps of each head, on 4 windows of 512 ids.
        head_rate: Peak learning rate of the heads (AdamW).
        save_steps: Steps between checkpoints, and between evaluations on held-out text.
        seed: Of weights and order.
    """

    config: dict[str, Any] = field(default_factory=dict)
    phases: list[tuple[int, int, int]] = field(
        default_factory=lambda: [(2070, 256, 2), (5950, 512, 4), (2390, 1024, 4)]
    )
    matrix_rate: float = 0.02
    rate: float = 0.007
    gamma: float = 0.6
    heads: dict[str, dict[str, Any]] = field(default_factory=lambda: dict(HEADS))
    head_steps: int = 5000
    head_rate: float = 3e-3
    save_steps: int = 500
    seed: int = 0


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers of different parameters as one, whose state a checkpoint holds."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """List the parts' own groups, so that a schedule that changes a learning rate changes the part's."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: None = None) -> None:
        """Take one step of every part."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the parts."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def train(folder: Path, recipe: Recipe, until: str = "heads", callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Do what is not done yet: the text, the backbone in `backbone/`, every head in `ff/`, `cp/`, ...

    Args:
        folder: Of the run.
        recipe: What is trained.
        until: `"text"`, `"backbone"` or `"heads"`: the last part to do.
        callbacks: Further callbacks of every trainer.
    """
    write_text(folder / "text", recipe.seed)
    (folder / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n")
    if until == "text":
        return
    set_seed(recipe.seed)
    if not (folder / "backbone").exists():
        _train_stage(folder, "backbone", new_model(recipe), recipe, recipe.phases, callbacks)
    for kind, options in recipe.heads.items() if until == "heads" else ():
        if (folder / kind).exists():
            continue
        set_seed(recipe.seed)
        model = EvaByteForMTPC.from_pretrained(folder / "backbone")
        model.set_head(head_type=kind, **options)
        _train_stage(folder, kind, model, recipe, [(recipe.head_steps, 512, 2)], callbacks)


def new_model(recipe: Recipe) -> EvaByteForMTPC:
    """Return a backbone with FF heads, untrained."""
    return EvaByteForMTPC(
        EvaByteConfig(**BOX_CONFIG | recipe.config, mtp_head={"loss_options": {"decay": recipe.gamma}})
    )


def _train_stage(
    folder: Path,
    stage: str,
    model: EvaByteForMTPC,
    recipe: Recipe,
    phases: list[tuple[int, int, int]],
    callbacks: Sequence[TrainerCallback],
) -> None:
    """Train one model from its last checkpoint, if there is one, and save it in `folder / stage`."""
    is_backbone = stage == "backbone"
    model.set_attn_implementation("eager")  # on CPUs faster than the fused kernel with a mask
    data = StepBatches(np.load(folder / "text" / "train.npy", mmap_mode="r"), phases, recipe.seed)
    rows = np.load(folder / "text" / "held_out.npy", mmap_mode="r")
    trainer = MTPTrainer(
        model,
        _arguments(folder / "checkpoints" / stage, recipe, len(data)),
        strategy=TrainingStrategy(train="all") if is_backbone else TrainingStrategy(loss={"decay": GAMMA}),
        train_dataset=data,
        eval_dataset=StepBatches(rows[:: -(-len(rows) // 64)], [(8, 1024, 8)], None),
        data_collator=itemgetter(0),
        optimizers=(backbone_optimizer(model, recipe) if is_backbone else None, None),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(folder / "checkpoints" / stage))
    lines = [_log_line(stage, line, data) for line in trainer.state.log_history if "train_runtime" not in line]
    with whole_directory(folder / stage) as scratch:
        model.save_pretrained(scratch, remote_code=None)
        (scratch / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _arguments(folder: Path, recipe: Recipe, steps: int) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,  # an entry of the data is a batch
        per_device_eval_batch_size=1,
        train_sampling_strategy="sequential",
        learning_rate=recipe.head_rate,
        adam_beta2=0.95,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": round(0.6 * steps), "decay_type": "linear"},
        warmup_steps=round(0.02 * steps),
        use_cpu=not torch.cuda.is_available(),
        bf16=has_fast_bfloat16(),
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=recipe.save_steps,
        save_steps=recipe.save_steps,
        save_total_limit=2,
        report_to="none",
        dataloader_pin_memory=False,
        seed=recipe.seed,
    )


def backbone_optimizer(model: EvaByteForMTPC, recipe: Recipe) -> torch.optim.Optimizer:
    """Return Muon for the matrices of the layers and AdamW for the rest, both without weight decay."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    known = {id(parameter) for parameter in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return JointOptimizer(
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0),
    )


def has_fast_bfloat16() -> bool:
    """Return whether bfloat16 matrices are multiplied by the GPU, or else by the processor (AVX512-BF16, AMX)."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def last_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint that is whole: its trainer state is written last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(whole, key=lambda path: int(path.name.split("-")[1]))) if whole else None


def _log_line(stage: str, line: dict[str, Any], data: StepBatches) -> dict[str, Any]:
    """Return a line of the published log: figures of a step, or bits per byte on held-out text."""
    place = {"stage": stage, "step": line["step"], "bytes": data.num_bytes(line["step"])}
    if "eval_loss_head_1" in line:
        return place | {"held_out": {"bits_per_byte": line["eval_loss_head_1"] / math.log(2)}}
    return place | {name: value for name, value in line.items() if name in ("loss", "learning_rate", "grad_norm")}


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory of text, checkpoints, logs and models")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch")
    parser.add_argument("--until", choices=("text", "backbone", "heads"), default="heads", help="stop after this part")
    parser.add_argument("--recipe", type=json.loads, default={}, help="fields of Recipe to change, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.output, Recipe(**arguments.recipe), arguments.until)


if __name__ == "__main__":
    main()
