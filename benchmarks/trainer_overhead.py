"""What MTPTrainer costs per step beside a plain Trainer, on the same model and rows, by turns in one process.

    python benchmarks/trainer_overhead.py --threads 1

Each turn trains the same number of steps with each trainer; what counts is the median over turns of the ratio of
processor times.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tokenahead import MTPHeads
from tokenahead.training import MTPTrainer


class Clock(TrainerCallback):
    """Processor seconds from the end of the first step, which sets things up, to the end of the last."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reads the clock."""
        if state.global_step == 1:
            self.started = time.process_time()
        self.seconds = time.process_time() - self.started


def seconds_of(kind: type[Trainer], heads: MTPHeads, rows: list[dict[str, torch.Tensor]], steps: int) -> float:
    """Processor seconds per step."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps + 1, per_device_train_batch_size=4, report_to="none", disable_tqdm=True,
            save_strategy="no", logging_steps=10, use_cpu=True, dataloader_pin_memory=False, learning_rate=0.0,
        )  # fmt: skip
        kind(heads, arguments, train_dataset=rows, callbacks=[clock]).train()
    return clock.seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    sizes = dict(hidden_size=arguments.width, intermediate_size=3 * arguments.width, num_attention_heads=8)
    backbone = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6, vocab_size=4096))
    heads = MTPHeads.from_backbone(backbone, window=4)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 4096, (64, 256))]
    ratios = []
    for turn in range(arguments.turns + 1):
        plain, ours = (seconds_of(kind, heads, rows, arguments.steps) for kind in (Trainer, MTPTrainer))
        if turn:  # the first turn warms everything up
            ratios.append(ours / plain)
    print(f"per step, MTPTrainer / Trainer: median {statistics.median(ratios):.4f}, {[round(r, 4) for r in ratios]}")


if __name__ == "__main__":
    main()
