"""What trainers cost per token, beside the least that they can cost.

    python benchmarks/training.py --json docs/results/training_cpu.json      # every trainer, a small Llama, one core
    python benchmarks/training.py --only EAGLE-3 modules
    python benchmarks/training.py --table docs/results/training_cpu.json     # the tables of docs/training.md
    python benchmarks/training.py --device cuda --shape 1B --only EAGLE-3    # stored states, bfloat16
    python benchmarks/training.py --only EAGLE-3 "joint FF" --joined         # rows of many lengths, beside padded ones

Trainers of this library take steps of their `train`, AdamW included, in turns with their floor, in one process.
Drafters on a frozen backbone learn from stored states (`cache_features`), and their floor are the products of their
logits: forward and backward, and the teacher's. Whatever trains the backbone has `Trainer` with the backbone's own loss
as its floor, and MTPTrainer on stored states also transformers' `Trainer` on the same drafter. The backbone's share is
that of a step which runs it instead of reading stored states; of joint training the floor's share. Computed tokens per
useful one are those of a trainer's own batches of rows of log-normal lengths. Memory is the peak above what was there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu import SHAPES, made_on
from measuring import by_turns, now
from memory import peak_above, resident
from training_tables import costs, measured
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tokenahead import DeepSeekMTP, EagleHead, MTPHeads, PTPForCausalLM
from tokenahead.training import MTPTrainer, PTPTrainer, TrainingStrategy
from tokenahead.training.batches import Collator
from tokenahead.training.features import cache_features

WINDOW, RANK, STEPS, SLOTS = 4, 2, 3, 8
SMALL = {
    "vocab_size": 16384, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256,
    "intermediate_size": 704, "num_hidden_layers": 4, "tie_word_embeddings": True,
}  # fmt: skip
"""For a processor: 64 tokens for every dimension, as in models of many tokens."""
LENGTHS = torch.distributions.LogNormal(math.log(400), 0.8)
"""Of rows whose batches are counted: a median of 400 tokens, 550 on average."""


@dataclass(frozen=True)
class Case:
    """A trainer: how its model is made, and how many products with [d, V] a row's logits cannot do without."""

    make: Callable[[Any], Any]
    products: float = 0.0
    drafted: float = 1.0
    trainer: type[Trainer] = MTPTrainer
    options: dict[str, Any] | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether the backbone learns nothing."""
        return self.products > 0


def _heads(kind: str, depths: int, **options: Any) -> Case:
    return Case(lambda model: MTPHeads.from_backbone(model, head_type=kind, window=WINDOW, **options), 2 * depths)


def _eagle3(model: Any) -> Any:
    size = model.config.vocab_size // 6
    kept = torch.arange(model.config.vocab_size).view(-1)[:: model.config.vocab_size // size][:size]
    return EagleHead.from_backbone(model, version=3, draft_ids=kept, loss_options={"steps": STEPS, "divergence": "kl"})


def _modules(model: Any) -> Any:
    whole = DeepSeekMTP.from_backbone(model, num_modules=1)
    whole.train_only("all")
    return whole


_SHARED = {"unembedding": "shared"}
CASES = {
    "FF": _heads("ff", WINDOW, **_SHARED),
    "CP": _heads("cp", WINDOW * RANK, rank=RANK, **_SHARED),
    "HMM": _heads("hmm", WINDOW * RANK, rank=RANK, **_SHARED),
    "BTree": _heads("btree", WINDOW * RANK, rank=RANK, **_SHARED),
    "Medusa": _heads("medusa", WINDOW - 1),
    "Hydra": _heads("hydra", WINDOW - 1),
    "EAGLE-1": Case(lambda model: EagleHead.from_backbone(model, version=1), 3),
    "EAGLE-3": Case(_eagle3, 1 + 3 * STEPS, 1 / 6),
    "modules": Case(_modules),
    "PTP": Case(lambda model: PTPForCausalLM.from_backbone(model, num_slots=SLOTS), trainer=PTPTrainer),
    "joint FF": Case(
        lambda model: MTPHeads.from_backbone(model, window=WINDOW, **_SHARED),
        options={"strategy": TrainingStrategy(train="all")},
    ),
}
"""Heads of four tokens and rank 2, EAGLE-3 with three steps and a sixth of the vocabulary, one module, eight slots."""


@dataclass
class Row:
    """Figures of a trainer; `floor` is in milliseconds per token, too."""

    trainer: str
    ms_per_token: float
    floor: float
    floor_is: str
    peak_mib: float
    computed_per_useful: float
    backbone_share: float
    plain_trainer: float | None = None


def wait(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Clock(TrainerCallback):
    """Seconds from the end of a step to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the device, and note the time."""
        wait(args.device)
        self.ends.append(now())


class Bench:
    """A backbone's shape, and rows to learn from."""

    def __init__(self, arguments: argparse.Namespace, folder: str) -> None:
        self.asked, self.folder, self.device = arguments, Path(folder), torch.device(arguments.device)
        self.config = LlamaConfig(**(SMALL if arguments.shape == "small" else SHAPES[arguments.shape]))
        self.tokens = arguments.rows * arguments.length
        generator = torch.Generator().manual_seed(0)
        shape = (arguments.steps + 1) * arguments.rows, arguments.length
        ids = torch.randint(self.config.vocab_size, shape, generator=generator)
        self.rows = [{"input_ids": row, "labels": row} for row in ids]

    def backbone(self) -> Any:
        """Random weights, always the same."""
        torch.manual_seed(0)
        if self.device.type == "cuda":
            with made_on(self.device):
                return LlamaForCausalLM(self.config).eval()
        return LlamaForCausalLM(self.config).eval()

    def trainer(
        self, kind: type[Trainer], model: Any, data: Any, rows: int = 8, steps: int | None = None, **options: Any
    ) -> Trainer:
        """A silent trainer of all rows; transformers' 8 rows leave batches to the trainer, 0 steps are an epoch."""
        steps = self.asked.steps + 1 if steps is None else steps or -1
        asked = TrainingArguments(
            str(self.folder / "out"), max_steps=steps, num_train_epochs=1, per_device_train_batch_size=rows,
            report_to="none", save_strategy="no", disable_tqdm=True, learning_rate=1e-5, max_grad_norm=0.0,
            use_cpu=self.device.type == "cpu", bf16=self.device.type == "cuda", dataloader_pin_memory=False,
        )  # fmt: skip
        collate = getattr(data, "collate", Collator() if kind is Trainer else None)
        trainer = kind(model, asked, train_dataset=data, data_collator=collate, **options)
        trainer.remove_callback(PrinterCallback)
        return trainer

    def seconds(self, trainer: Trainer) -> float:
        """Median seconds of its steps."""
        clock = Clock()
        trainer.add_callback(clock)
        trainer.train()
        trainer.remove_callback(clock)
        return statistics.median(after - before for before, after in zip(clock.ends, clock.ends[1:]))

    def peak(self, run: Callable[[], Any]) -> float:
        """MiB that a call adds at its peak."""
        if self.device.type != "cuda":
            return peak_above(resident(), run)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def products(self, case: Case) -> float:
        """Seconds that the products of a batch's logits take alone."""
        rows = torch.randn(128, self.config.hidden_size, device=self.device)
        size = int(self.config.vocab_size * case.drafted)
        weight = torch.randn(size, self.config.hidden_size, device=self.device)
        if self.device.type == "cuda":
            rows, weight = rows.bfloat16(), weight.bfloat16()

        def multiply() -> None:
            for _ in range(4):
                torch.mm(rows, weight.T)
            wait(self.device)

        return by_turns({"": multiply}, 3)[""] / 4 * case.products * self.tokens / 128

    def share_of_padding(self, case: Case, model: Any) -> float:
        """Computed tokens per useful one, in the batches that the trainer makes of rows of log-normal lengths."""
        torch.manual_seed(0)
        sizes = LENGTHS.sample((64,)).clamp(8, 4096).long().tolist()
        rows = [{"input_ids": torch.ones(size).long(), "labels": torch.ones(size).long()} for size in sizes]
        trainer = self.trainer(case.trainer, model, rows, **(case.options or {}))
        batches = list(trainer.get_train_dataloader())
        useful = sum(int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()) for batch in batches)
        return sum(batch["input_ids"].numel() for batch in batches) / useful

    def row(self, name: str) -> Row:
        """Measure a trainer, its floor, and what else there is of its kind, by turns."""
        case, backbone = CASES[name], self.backbone()
        model = case.make(backbone)
        data = cache_features(model, self.rows, self.folder / name) if case.is_frozen else self.rows
        count = self.asked.rows
        own = self.trainer(case.trainer, model, data, count, **(case.options or {}))
        ways: dict[str, Callable[[], float]] = {"own": lambda: self.seconds(own)}
        if case.is_frozen:
            plain = self.trainer(Trainer, case.make(self.backbone()), data, count)
            ways |= {"floor": lambda: self.products(case), "plain": lambda: self.seconds(plain)}
        else:
            plain = self.trainer(Trainer, self.backbone(), self.rows, count)
            ways["floor"] = lambda: self.seconds(plain)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(self.asked.rounds + 1):
            for way, run in ways.items():
                found[way].append(1e3 * run() / self.tokens)
        ms = {way: statistics.median(each[1:]) for way, each in found.items()}
        of_backbone = self.forward(backbone) if case.is_frozen else ms["floor"]
        whole = of_backbone + ms["own"] if case.is_frozen else ms["own"]
        return Row(
            name, ms["own"], ms["floor"], "products" if case.is_frozen else "fine-tuning", self.peak(ways["own"]),
            self.share_of_padding(case, model), min(1.0, of_backbone / whole), ms.get("plain"),
        )  # fmt: skip

    def joined(self, name: str) -> dict[str, float]:
        """Milliseconds per useful token of rows of log-normal lengths: as the trainer joins them, and padded."""
        case, backbone = CASES[name], self.backbone()
        torch.manual_seed(0)
        sizes = (LENGTHS.sample((8 * (self.asked.steps + 1),)) * self.asked.length / 400).clamp(8, 4096).long().tolist()
        rows = [
            {"input_ids": ids, "labels": ids} for ids in (torch.randint(self.config.vocab_size, (n,)) for n in sizes)
        ]
        model = case.make(backbone)
        data = cache_features(model, rows, self.folder / "lengths") if case.is_frozen else rows
        padded = type("Padded", (case.trainer,), {"joins_rows": False})
        epoch = {"rows": 8, "steps": 0} | (case.options or {})
        ways = {"joined": self.trainer(case.trainer, model, data, **epoch)}
        ways["padded"] = self.trainer(padded, case.make(self.backbone()), data, **epoch)

        def train(trainer: Trainer) -> None:
            trainer.train()
            wait(self.device)

        seconds = by_turns({way: partial(train, trainer) for way, trainer in ways.items()}, self.asked.rounds)
        return {way: 1e3 * each / sum(sizes) for way, each in seconds.items()}

    def forward(self, backbone: Any) -> float:
        """Milliseconds per token of the backbone's forward without logits."""
        ids = torch.stack([row["input_ids"] for row in self.rows[: self.asked.rows]]).to(self.device)

        @torch.no_grad()
        def run() -> None:
            backbone(ids, use_cache=False, logits_to_keep=1)
            wait(self.device)

        return 1e3 * by_turns({"": run}, 2)[""] / self.tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="TRAINER")
    parser.add_argument("--shape", choices=["small", *SHAPES], default="small")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=2, help="of a batch")
    parser.add_argument("--steps", type=int, default=2, help="that are timed in every turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every trainer, after one to warm up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--joined", action="store_true", help="joined and padded rows of many lengths, instead")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--table", type=Path, help="print the tables of such a file, and measure nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(measured(json.loads(arguments.table.read_text(encoding="utf-8"))), costs(), sep="\n", end="")
        return
    torch.set_num_threads(arguments.threads)
    names = ("shape", "device", "length", "rows", "steps", "rounds", "threads")
    facts = {"torch": torch.__version__, "load": round(os.getloadavg()[0], 1)}
    results: dict[str, Any] = {"facts": facts | {name: vars(arguments)[name] for name in names}, "rows": []}
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(arguments, folder)
            results["rows"].append(
                {"trainer": name} | bench.joined(name) if arguments.joined else asdict(bench.row(name))
            )
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results["rows"], indent=1) if arguments.joined else measured(results) + "\n" + costs(), end="")


if __name__ == "__main__":
    main()
