"""What MTPTrainer costs per step compared with a plain Trainer, on the same model and rows, step by step in turns.

    python benchmarks/trainer_overhead.py                      # a step of a quarter of a second
    python benchmarks/trainer_overhead.py --width 32 --layers 1 --vocab 64    # next to no model: the trainers alone

Both train in one process, each in its own thread, and hand over after every step, so that a load that comes and
goes meets both. Of every pair of steps the processor time of their threads is compared, and the median of the ratios
counts; the first of a pair is each of them as often. The spread is that of halves of the pairs. Freed memory stays with
the process, because the system's share of a step would be the larger part of what differs.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import threading
import time
from typing import Any

import torch
from measuring import llama
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tokenahead import MTPHeads
from tokenahead.training import MTPTrainer

WARM_UP = 3  # steps that set things up
MALLOPT = {-8: 1, -3: 2**25, -1: 2**31 - 1}  # one arena, no separate mapping below 32 MiB, nothing given back


class Baton:
    """Lets one of two threads run at a time."""

    def __init__(self) -> None:
        self.condition, self.turn = threading.Condition(), 0

    def take(self, who: int) -> None:
        """Waits for one's turn."""
        with self.condition:
            self.condition.wait_for(lambda: self.turn == who)

    def give(self, who: int) -> None:
        """Makes it the other's turn."""
        with self.condition:
            self.turn = 1 - who
            self.condition.notify_all()


class Clock(TrainerCallback):
    """Processor seconds of every step, each in its turn."""

    def __init__(self, baton: Baton, who: int) -> None:
        self.baton, self.who, self.steps = baton, who, []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Waits for the first turn."""
        self._wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes the step, and waits until the other has made its own."""
        self.steps.append(time.thread_time() - self.started)
        self.baton.give(self.who)
        self._wait()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leaves the rest to the other."""
        self.baton.give(self.who)

    def _wait(self) -> None:
        self.baton.take(self.who)
        self.started = time.thread_time()


def pairs(kinds: list[type[Trainer]], heads: MTPHeads, rows: list[Any], steps: int) -> list[tuple[float, float]]:
    """Processor seconds of steps of two trainers that take turns."""
    baton, threads, clocks = Baton(), [], []
    with tempfile.TemporaryDirectory() as folder:
        for who, kind in enumerate(kinds):
            arguments = TrainingArguments(
                f"{folder}/{who}", max_steps=steps + WARM_UP, per_device_train_batch_size=4, report_to="none",
                disable_tqdm=True, save_strategy="no", logging_steps=10, use_cpu=True, dataloader_pin_memory=False,
                learning_rate=0.0,
            )  # fmt: skip
            clocks.append(Clock(baton, who))
            trainer = kind(heads, arguments, train_dataset=rows, callbacks=clocks[-1:])
            trainer.remove_callback(PrinterCallback)
            threads.append(threading.Thread(target=trainer.train))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return list(zip(*(clock.steps[WARM_UP:] for clock in clocks)))


def model_and_rows(arguments: argparse.Namespace) -> tuple[MTPHeads, list[dict[str, torch.Tensor]]]:
    """Heads on a random backbone, and random text."""
    sizes = {"intermediate_size": 3 * arguments.width, "num_attention_heads": 8}
    backbone = llama(arguments.width, arguments.layers, arguments.vocab, **sizes)
    ids = torch.randint(0, arguments.vocab, (arguments.rows, arguments.length))
    heads = MTPHeads.from_backbone(backbone, window=4)
    return heads, [{"input_ids": row, "labels": row} for row in ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60, help="of each trainer in each order")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=64)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for what, value in MALLOPT.items():
            mallopt(what, value)
    heads, rows = model_and_rows(arguments)
    found = pairs([Trainer, MTPTrainer], heads, rows, arguments.steps)
    found += [pair[::-1] for pair in pairs([MTPTrainer, Trainer], heads, rows, arguments.steps)]
    ratios = [ours / plain for plain, ours in found]
    plain = 1e3 * statistics.median(plain for plain, _ in found)
    extra = 1e3 * statistics.median(ours - plain for plain, ours in found)
    halves = sorted(statistics.median(ratios[start::2]) for start in (0, 1))
    print(
        f"Trainer {plain:.2f} ms per step; MTPTrainer {statistics.median(ratios):.4f} times that, {extra:+.2f} ms "
        f"(halves of the pairs: {halves[0]:.4f}, {halves[1]:.4f}); {len(found)} steps of each"
    )


if __name__ == "__main__":
    main()
