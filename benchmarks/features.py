"""An epoch of head training on features that are kept on disk, against the same epoch with the backbone's forward.

    python benchmarks/features.py                                  # a random backbone of 8 layers, d = 512
    python benchmarks/features.py --hidden 128 --layers 6 --rows 64 --heads ff cp

Epochs go by turns in one process, and the least processor time of each kind counts: from the beginning of the epoch to
its end, without what `Trainer.train` does once (a collection of garbage above all). The losses of both are the same
(asserted). Memory is the resident peak of an epoch above the memory before it, each in a separate process.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import llama, markdown
from memory import Memory, in_own_process, mebibytes, peak_above
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from tokenahead import MTPHeads
from tokenahead.training.features import FeatureDataset, cache_features
from tokenahead.training.trainer import MTPTrainer

LENGTH, BATCH = 128, 4
HEADS: dict[str, dict[str, Any]] = {
    "ff": {"window": 4},
    "cp": {"window": 8, "head_type": "cp", "rank": 8},
    "layer": {"window": 4, "head_type": "layer"},
}
PEAKS = ("peak with the backbone, MiB", "peak kept, MiB")
COLUMNS = ("heads", "with the backbone, s", "kept, s", "ratio", "MB on disk", *PEAKS)


class Clock(TrainerCallback):
    """Processor seconds of an epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.started = time.process_time()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read it."""
        self.seconds = time.process_time() - self.started


def heads_of(kind: str, hidden: int, layers: int, vocab: int) -> MTPHeads:
    """New heads on a random backbone."""
    return MTPHeads.from_backbone(llama(hidden, layers, vocab, num_attention_heads=hidden // 64), **HEADS[kind])


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


def peak(kept: bool, folder: str, count: int, *sizes: Any) -> Memory:
    """The resident peak of an epoch."""
    heads = heads_of(*sizes)
    data = FeatureDataset(folder) if kept else rows_of(count, sizes[-1])
    epoch(heads, data)
    before = mebibytes("VmRSS")
    return Memory(sum(p.numel() for p in heads.parameters()), before, peak_above(before, partial(epoch, heads, data)))


def row(kind: str, arguments: argparse.Namespace) -> list[str]:
    """The figures of a kind of heads."""
    sizes = kind, arguments.hidden, arguments.layers, arguments.vocab
    rows = rows_of(arguments.rows, arguments.vocab)
    with tempfile.TemporaryDirectory() as folder:
        kept = cache_features(heads_of(*sizes), rows, folder)
        turns = [[epoch(heads_of(*sizes), data) for data in (rows, kept)] for _ in range(arguments.rounds)]
        assert all(abs(plain[1] - fast[1]) < 1e-4 * plain[1] for plain, fast in turns)
        plain, fast = (min(seconds for seconds, _ in way) for way in zip(*turns))
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
        peaks = ["-", "-"]
        if not arguments.no_memory:
            found = [in_own_process(peak, way, folder, arguments.rows, *sizes) for way in (False, True)]
            peaks = [f"{memory.above:.0f}" for memory in found]
    return [kind, f"{plain:.2f}", f"{fast:.2f}", f"{plain / fast:.1f}", f"{size:.1f}", *peaks]


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
    print(markdown(COLUMNS, [row(kind, arguments) for kind in arguments.heads]), end="")


if __name__ == "__main__":
    main()
