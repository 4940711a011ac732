"""The questions of the PTP paper's tables, asked on a chain whose distribution is known: one student per answer.

    python benchmarks/ptp_tables.py --minutes 2 --output tables.json          # all of them: about 25 students
    python benchmarks/ptp_tables.py --minutes 0.5 --tables losses features    # a part, quickly
    python benchmarks/ptp_tables.py --minutes 10 --tables variants best_of --seeds 0 1 --concentration 0.3

Every student trains for so many minutes of *processor* time (one thread); answers are written after each student, and a
run that was cut off goes on where it stopped. The chain is of order one with 25 states; a figure is the mean number of
drafted tokens that are right before the first wrong one (Eq. 16), of N.

- `variants`: O-PTP, C-PTP and independent prediction, N = 2, 4, 8; coupled, greedy, and speculative rules
- `proposals`: who writes the texts that slots learn from: arbitrary data, the teacher, the student
- `losses`: how a slot is compared with its target, for O-PTP and C-PTP
- `features`: how a uniform is embedded
- `concentration`: where in its interval a uniform is trained: Beta(b, b)
- `best_of`: drafts from M vectors of uniforms, of which the most central is kept
- `inverse`: training without a teacher (Algorithm 3): perplexity of the slots' distributions against the chain's own
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from markov import MarkovChain, ceilings
from ptp_students import ALPHA, CONTEXT, LENGTH, STATES, Texts, best_of_many, measure, student
from rich.console import Console
from rich.table import Table
from transformers import TrainingArguments

from tokenahead.configuration.ptp import FEATURE_DIMS
from tokenahead.training.ptp.losses import LOSSES, PTPOptions
from tokenahead.training.ptp.trainer import PTPTrainer

TABLES = ("variants", "proposals", "losses", "features", "concentration", "best_of", "inverse")
Answer = dict[str, float]


class ArbitraryTexts(Texts):
    """Sequences that the chain would not write: states drawn evenly."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield {"input_ids": torch.randint(0, STATES, (LENGTH,), generator=generator)}


class Tables:
    """Questions and how they are answered.

    Args:
        minutes: Of processor time per student.
        slots: N, where a table does not vary it.
        seed: Of chain and student.
        contexts: That figures are means over.
        concentration: b of Beta(b, b), where uniforms are trained.
    """

    def __init__(self, minutes: float, slots: int, seed: int, contexts: int, concentration: float) -> None:
        self.minutes, self.slots, self.seed, self.concentration = minutes, slots, seed, concentration
        self.chain = MarkovChain(STATES, ALPHA, seed)
        self.contexts = self.chain.texts(contexts, CONTEXT, seed=10_000 + seed)

    def questions(self, table: str) -> dict[str, Callable[[], Answer]]:
        """Names of a table's rows, and what answers them."""
        return getattr(self, f"_{table}")()

    def _train(self, kind: str, slots: int, features: str = "arithmetic", **options: Any) -> Any:
        trained = max(slots - (kind == "categorical"), 1)
        options = {"concentration": self.concentration} | options
        return student(kind, trained, features, self.chain, self.seed, self.minutes, **options)

    def _answer(self, kind: str, slots: int | None = None, **options: Any) -> Answer:
        slots = slots or self.slots
        model = self._train(kind, slots, **options)
        torch.manual_seed(self.seed)
        return measure(kind, model, self.chain, self.contexts, slots)

    def _variants(self) -> dict[str, Callable[[], Answer]]:
        rows: dict[str, Callable[[], Answer]] = {}
        for slots in (2, 4, 8):
            rows[f"ceilings without dependence, N={slots}"] = lambda n=slots: ceilings(self.chain, n)
            for kind in ("one_hot", "categorical", "independent"):
                rows[f"{kind}, N={slots}"] = lambda k=kind, n=slots: self._answer(k, n)
        return rows

    def _proposals(self) -> dict[str, Callable[[], Answer]]:
        arbitrary = ArbitraryTexts(self.chain, self.seed)
        return {
            "arbitrary data": lambda: self._answer("one_hot", texts=arbitrary),
            "teacher": lambda: self._answer("one_hot"),
            "student": lambda: self._answer("one_hot", texts=arbitrary, sequences="student"),
        }

    def _losses(self) -> dict[str, Callable[[], Answer]]:
        pairs = [(kind, loss) for kind in ("one_hot", "categorical") for loss in LOSSES]
        return {f"{kind}, {loss}": lambda k=kind, how=loss: self._answer(k, loss=how) for kind, loss in pairs}

    def _features(self) -> dict[str, Callable[[], Answer]]:
        return {name: lambda f=name: self._answer("one_hot", features=f) for name in FEATURE_DIMS}

    def _concentration(self) -> dict[str, Callable[[], Answer]]:
        return {f"b={b:g}": lambda b=b: self._answer("one_hot", concentration=b) for b in (2.0, 1.0, 0.5, 0.3)}

    def _best_of(self) -> dict[str, Callable[[], Answer]]:
        return {kind: lambda k=kind: self._most_central(k) for kind in ("one_hot", "categorical")}

    def _most_central(self, kind: str) -> Answer:
        model = self._train(kind, self.slots)
        torch.manual_seed(self.seed)
        many = (1, 2, 4, 8, 16)
        return {f"M={m}": best_of_many(kind, model, self.chain, self.contexts, self.slots, m) for m in many}

    def _inverse(self) -> dict[str, Callable[[], Answer]]:
        return {"categorical": self._perplexity}

    def _perplexity(self) -> Answer:
        """exp of the slots' mean loss on held-out texts, under uniforms that pick these texts from the student."""
        chain, how = self.chain, {"method": "inverse", "loss": "ce", "base_weight": 1.0}
        model = self._train("categorical", self.slots, **how)
        held_out = [{"input_ids": ids} for ids in chain.texts(512, LENGTH, seed=77 + self.seed)]
        arguments = TrainingArguments("unused", use_cpu=True, report_to=[], disable_tqdm=True)
        trainer = PTPTrainer(model, arguments, options=PTPOptions(**how | {"base_weight": 0.0}), train_dataset=held_out)
        slots = trainer.evaluate(held_out)["eval_loss"]
        entropy = -(chain.stationary[:, None] * torch.special.xlogy(chain.rows, chain.rows)).sum()
        tokens = torch.stack([row["input_ids"] for row in held_out])
        with torch.no_grad():
            own = float(model(tokens, labels=tokens).loss)
        names = ("slots", "backbone, token by token", "chain")
        return dict(zip(names, torch.tensor([slots, own, float(entropy)]).exp().tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="of processor time per student")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--rows", nargs="+", help="only rows whose names contain one of these")
    parser.add_argument("--slots", type=int, default=8, help="N")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="chains, and students on each")
    parser.add_argument("--concentration", type=float, default=1.0, help="b of Beta(b, b), where uniforms are trained")
    parser.add_argument("--contexts", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=Path("ptp-tables.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.is_file() else {}
    console, suffix = Console(width=120), f", {arguments.minutes:g} minutes"
    if arguments.concentration != 1:
        suffix += f", b={arguments.concentration:g}"
    for seed, table in product(arguments.seeds, arguments.tables):
        tables = Tables(arguments.minutes, arguments.slots, seed, arguments.contexts, arguments.concentration)
        shown = Table("", title=f"{table}, seed {seed}: {arguments.minutes:g} processor minutes a student")
        for row, answer in tables.questions(table).items():
            if arguments.rows and not any(part in row for part in arguments.rows):
                continue
            name = f"{table}: {row}, N={arguments.slots}, seed {seed}{suffix}"
            if name not in found:
                found[name] = answer()
                arguments.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            shown.add_row(row, *(f"{key} {value:.2f}" for key, value in found[name].items()))
        console.print(shown)


if __name__ == "__main__":
    main()
