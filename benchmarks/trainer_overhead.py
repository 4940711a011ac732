"""What MTPTrainer costs per step beside a plain Trainer, on the same model and rows, by turns in one process.

    python benchmarks/trainer_overhead.py                      # a step of a quarter of a second
    python benchmarks/trainer_overhead.py --width 32 --length 32 --rows 1    # next to no model: the trainers alone

Short turns of both, in the order A B B A, so that a load that comes and goes meets both. The processor time of every
step is noted, and compared are first deciles over steps: a crowded machine makes steps longer, never shorter. The
spread is that of halves of the turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tokenahead import MTPHeads
from tokenahead.training import MTPTrainer

WARM_UP = 2  # steps of a turn that set things up


class Clock(TrainerCallback):
    """Processor seconds of every step, from the end of the one before."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reads the clock."""
        self.ends.append(time.process_time())

    @property
    def steps(self) -> list[float]:
        """Without the first ones."""
        return [end - start for start, end in zip(self.ends[WARM_UP - 1 :], self.ends[WARM_UP:])]


def turn(kind: type[Trainer], heads: MTPHeads, rows: list[dict[str, torch.Tensor]], steps: int) -> list[float]:
    """Processor seconds of the steps of one turn."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps + WARM_UP, per_device_train_batch_size=4, report_to="none", disable_tqdm=True,
            save_strategy="no", logging_steps=10, use_cpu=True, dataloader_pin_memory=False, learning_rate=0.0,
        )  # fmt: skip
        trainer = kind(heads, arguments, train_dataset=rows, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.steps


def ratio(turns: list[tuple[list[float], list[float]]]) -> tuple[float, float]:
    """A step of a plain Trainer in seconds (first decile), and how many times longer ours is."""
    plain, ours = (statistics.quantiles([step for pair in turns for step in pair[side]], n=10)[0] for side in (0, 1))
    return plain, ours / plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    sizes = dict(hidden_size=arguments.width, intermediate_size=3 * arguments.width, num_attention_heads=8)
    backbone = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6, vocab_size=4096))
    heads = MTPHeads.from_backbone(backbone, window=4)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 4096, (arguments.rows, arguments.length))]
    turns = []
    for number in range(arguments.turns + 1):
        order = (Trainer, MTPTrainer) if number % 2 else (MTPTrainer, Trainer)
        found = {kind: turn(kind, heads, rows, arguments.steps) for kind in order}
        if number:  # the first turns warm everything up
            turns.append((found[Trainer], found[MTPTrainer]))
    plain, times = ratio(turns)
    halves = sorted(ratio(turns[start::2])[1] for start in (0, 1))
    print(
        f"Trainer {1e3 * plain:.2f} ms per step; MTPTrainer {times:.4f} times that, {1e3 * plain * (times - 1):+.2f} ms "
        f"(halves of the turns: {halves[0]:.4f}, {halves[1]:.4f}); {len(turns) * arguments.steps} steps of each"
    )


if __name__ == "__main__":
    main()
