"""An epoch of head training on features that are kept on disk, against the same epoch with the backbone's forward.

    python benchmarks/features.py                                  # a random backbone of 8 layers, d = 512
    python benchmarks/features.py --hidden 128 --layers 6 --rows 64 --heads ff cp

Epochs go by turns in one process, and the least processor time of each kind counts: from the beginning of the epoch to
its end, without what `Trainer.train` does once (a collection of garbage above all). The losses of both are the same
(asserted). Memory is the resident peak of an epoch above what there was before it, each in a process of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peak_memory import RESET, Memory, in_own_process, mebibytes
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback, TrainingArguments

from tokenahead import MTPHeads
from tokenahead.training.features import FeatureDataset, cache_features
from tokenahead.training.trainer import MTPTrainer

LENGTH, BATCH = 128, 4
HEADS = {"ff": dict(window=4), "cp": dict(window=8, head_type="cp", rank=8), "layer": dict(window=4, head_type="layer")}


class Clock(TrainerCallback):
    """Processor seconds of an epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self.started = time.process_time()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reads it."""
        self.seconds = time.process_time() - self.started


def heads_of(kind: str, hidden: int, layers: int, vocab: int) -> MTPHeads:
    """New heads on a random backbone."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=hidden, intermediate_size=11 * hidden // 4, num_hidden_layers=layers, vocab_size=vocab)
    backbone = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=hidden // 64)).eval()
    return MTPHeads.from_backbone(backbone, **HEADS[kind])


def rows_of(count: int, vocab: int) -> list[dict[str, torch.Tensor]]:
    """Random text."""
    ids = torch.randint(vocab, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def epoch(heads: MTPHeads, data: Any) -> tuple[float, float]:
    """Processor seconds of one epoch, and its loss."""
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, num_train_epochs=1, per_device_train_batch_size=BATCH, use_cpu=True, report_to="none",
            save_strategy="no", disable_tqdm=True, learning_rate=1e-4,
        )  # fmt: skip
        clock = Clock()
        trainer = MTPTrainer(heads, arguments, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        if isinstance(data, FeatureDataset):
            trainer.data_collator = data.collate
        loss = trainer.train().training_loss
        return clock.seconds, loss


def peak(kept: bool, folder: str, kind: str, hidden: int, layers: int, vocab: int, count: int) -> Memory:
    """The resident peak of an epoch."""
    heads = heads_of(kind, hidden, layers, vocab)
    data = FeatureDataset(folder) if kept else rows_of(count, vocab)
    epoch(heads, data)
    RESET.write_text("5")
    before = mebibytes("VmRSS")
    epoch(heads, data)
    return Memory(sum(p.numel() for p in heads.parameters()), before, mebibytes("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=320)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=["ff"])
    parser.add_argument("--no-memory", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| heads | with the backbone, s | kept, s | ratio | MB on disk | peak with the backbone, MiB | peak kept, MiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in arguments.heads:
        sizes = kind, arguments.hidden, arguments.layers, arguments.vocab
        rows = rows_of(arguments.rows, arguments.vocab)
        with tempfile.TemporaryDirectory() as folder:
            kept = cache_features(heads_of(*sizes), rows, folder)
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(arguments.rounds):
                found = [(way, epoch(heads_of(*sizes), kept if way else rows)) for way in times]
                for way, (seconds, _) in found:
                    times[way].append(seconds)
                assert abs(found[0][1][1] - found[1][1][1]) < 1e-4 * found[0][1][1]
            plain, fast = min(times[False]), min(times[True])
            size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
            memory = [
                0.0 if arguments.no_memory else in_own_process(peak, way, folder, *sizes, arguments.rows).above
                for way in (False, True)
            ]
        figures = f"{plain:.2f} | {fast:.2f} | {plain / fast:.1f} | {size:.1f}"
        print(f"| {kind} | {figures} | {memory[0]:.0f} | {memory[1]:.0f} |")


if __name__ == "__main__":
    main()
