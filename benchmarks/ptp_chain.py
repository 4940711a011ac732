"""Parallel token prediction on chains whose distribution is known: the quick start, and the paper's questions.

    python benchmarks/ptp_chain.py                       # the quick start: about six minutes of one core
    python benchmarks/ptp_chain.py --layers 12 --width 256
    python benchmarks/ptp_chain.py --tables all --minutes 2 --output tables.json    # about 25 students
    python benchmarks/ptp_chain.py --tables losses features --minutes 0.5           # a part, quickly
    python benchmarks/ptp_chain.py --tables variants best_of --minutes 10 --seeds 0 1 --concentration 0.3

The quick start: a small Llama learns a Markov chain of order one (8 states); its student is what
`PTPForCausalLM.from_backbone` and `PTPTrainer` make by default. Printed is how many drafted tokens are right before the
first wrong one on held-out text, teacher-forced, and the best that drafters without dependence could do. Then texts are
written with drafts and without, by turns, in processor time.

Tables: a chain of 25 states, and students of 0.48 million parameters, each trained for so many minutes of processor
time: O-PTP (`one_hot`), C-PTP (`categorical`) and independent prediction, which is O-PTP whose uniforms say nothing. A
figure is the mean number of drafted tokens, of N, that are right before the first wrong one (Eq. 16). "coupled"
verifies a draft with the uniforms it was drafted from; "token" and "block" verify the same drafts as samples of known
distributions. C-PTP's first token is the backbone's, here the chain's own. A stopped run continues from its file.

- `variants`: the three kinds, N = 2, 4, 8; coupled, greedy, and speculative rules
- `proposals`: who writes the texts that slots learn from: arbitrary data, the teacher, the student
- `losses`: how a slot is compared with its target, for O-PTP and C-PTP
- `features`: how a uniform is embedded
- `concentration`: where in its interval a uniform is trained: Beta(b, b)
- `best_of`: drafts from M vectors of uniforms, the most central of which is kept
- `inverse`: training without a teacher (Algorithm 3): perplexity of the slots' distributions against the chain's own
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from markov import MarkovChain, ceilings
from measuring import llama, llama_config, resumed, show
from studies import train
from torch.utils.data import IterableDataset
from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from tokenahead import PTPForCausalLM
from tokenahead.configuration.ptp import FEATURE_DIMS
from tokenahead.generation.tensors.sampling import interval, pick
from tokenahead.generation.tensors.uniforms import best_of
from tokenahead.generation.verification import coupled_acceptance, token_acceptance, verify
from tokenahead.modeling.ptp.embedding import GREEDY
from tokenahead.training.ptp.losses import LOSSES, PTPOptions
from tokenahead.training.ptp.trainer import PTPTrainer

ALPHA = 0.3
STATES, CONTEXT, LENGTH, BATCH, COMPLETIONS = 25, 2, 12, 16, 4
"""Of the tables: states of the chain, tokens of a context and of a row, rows of a step, completions of a row."""
TABLES = ("variants", "proposals", "losses", "features", "concentration", "best_of", "inverse")
MODES: dict[str, dict[str, Any]] = {
    "sampled, coupled": {"do_sample": True, "top_k": 0, "seed": 7, "verification": "coupled"},
    "greedy": {"do_sample": False},
}
Answer = dict[str, float]


def learn(kind: type[Trainer], model: Any, chain: MarkovChain, steps: int, **options: Any) -> str:
    """Train for some steps, and return seconds of processor time and what an evaluation on held-out texts says."""
    rows, held_out = ([{"input_ids": i, "labels": i} for i in chain.texts(n, 64, s)] for n, s in ((4096, 17), (64, 18)))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, max_steps=steps, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
            logging_strategy="no", **options,
        )  # fmt: skip
        trainer, started = kind(model, arguments, train_dataset=rows), time.process_time()
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        seconds = time.process_time() - started
        found = trainer.evaluate(held_out)
    model.eval()
    names = ("eval_loss", "eval_num_correct", "eval_num_correct_greedy")
    return f"{seconds:.0f} seconds, " + ", ".join(f"{name[5:]} {found[name]:.2f}" for name in names if name in found)


def compared(model: Any, prompts: torch.Tensor, tokens: int, options: dict[str, Any]) -> list[str]:
    """Tokens per call, and seconds of plain decoding over those with drafts, by turns."""
    seconds, calls, equal = {False: 0.0, True: 0.0}, 0, True
    common = dict(max_new_tokens=tokens, return_dict_in_generate=True, pad_token_id=0)
    for prompt in prompts:
        texts = []
        for use_mtp in seconds:
            started = time.process_time()
            out = model.generate(prompt[None], **common, **options, use_mtp=use_mtp)
            seconds[use_mtp] += time.process_time() - started
            texts.append(out.sequences)
        calls += out.speculation.backbone_calls
        equal &= torch.equal(*texts)
    return [f"{len(prompts) * tokens / calls:.2f}", f"{seconds[False] / seconds[True]:.2f}", str(equal)]


def quick_start(arguments: argparse.Namespace) -> None:
    """Train a backbone and a student with the defaults, and decode."""
    chain = MarkovChain(8, ALPHA, 0)
    width, layers = arguments.width, arguments.layers
    shape = dict(intermediate_size=4 * width, num_attention_heads=4, initializer_range=0.1)
    backbone = llama(width, layers, 8, **shape)
    how = dict(learning_rate=2e-3, per_device_train_batch_size=16)
    print("backbone:", learn(Trainer, backbone, chain, arguments.backbone_steps, **how))
    slots = arguments.slots or 4
    model = PTPForCausalLM.from_backbone(backbone, num_slots=slots)
    print("student:", learn(PTPTrainer, model, chain, arguments.steps))
    print("without dependence:", {name: round(best, 2) for name, best in ceilings(chain, slots).items()})
    prompts = chain.texts(arguments.prompts, 16, seed=10_000)
    rows = [[name, *compared(model, prompts, arguments.new_tokens, options)] for name, options in MODES.items()]
    show(("decoding", "tokens per call", "tokens/s over plain", "the same text"), rows)


class Texts(IterableDataset):
    """Sequences of a chain without end; arbitrary ones where none is given."""

    def __init__(self, seed: int, chain: MarkovChain | None = None) -> None:
        self.seed, self.chain = seed, chain

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        seed = self.seed * 1000 + 17
        while True:
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(0, STATES, (4096, LENGTH), generator=generator)
            yield from ({"input_ids": row} for row in (self.chain.texts(4096, LENGTH, seed) if self.chain else ids))
            seed += 1


@dataclass
class Drafts:
    """Drafts with the uniforms and distributions that they come from, [B, N] and [B, N, V]; `p` has a row more."""

    tokens: torch.Tensor
    uniforms: torch.Tensor
    q: torch.Tensor | None
    p: torch.Tensor

    def correct(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how many tokens equal the backbone's picks before the first that differs [B]; the picks [B, N]."""
        uniforms = torch.nn.functional.pad(self.uniforms, (0, 1))
        correct, picked = coupled_acceptance(self.tokens, uniforms, self.p)
        return correct, picked[:, :-1]


@dataclass
class Student:
    """A student of a chain, and what measures it: drafts of `count` tokens after contexts [B, 2]."""

    kind: str
    model: Any
    chain: MarkovChain
    count: int

    @torch.no_grad()
    def draft(self, context: torch.Tensor) -> Drafts:
        """Return drafts after every context, from fresh uniforms."""
        uniforms, rows = torch.rand(len(context), self.count), self.chain.rows
        if self.kind == "categorical":
            q = rows[context[:, -1:]]
            if self.count > 1:
                behind = self.model(context, uniforms=uniforms[:, :-1]).logits[:, CONTEXT:].double().softmax(-1)
                q = torch.cat([q, behind], dim=1)
            tokens = pick(uniforms, q)
        else:
            logits = self.model(context, uniforms=uniforms).logits[:, CONTEXT:]
            q = None if self.kind == "one_hot" else logits.double().softmax(-1)
            tokens = logits.argmax(-1) if q is None else pick(uniforms, q)
        return Drafts(tokens, uniforms, q, rows[torch.cat([context[:, -1:], tokens], dim=1)])

    def measure(self, contexts: torch.Tensor) -> Answer:
        """Return the mean number of tokens that are right before the first wrong one, for every rule."""
        found = self.draft(contexts)
        result = {"coupled": float(found.correct()[0].float().mean())}
        if self.model.config.greedy:
            result["greedy"] = self.greedy(contexts)
        if found.q is not None:
            accept, _ = token_acceptance(found.tokens, found.q, found.p)
            result["token"] = float(accept.cumprod(1).sum(1).mean())
            result["block"] = float(verify(found.tokens, found.q, found.p, "block")[0].float().mean())
        return result

    @torch.no_grad()
    def greedy(self, contexts: torch.Tensor) -> float:
        """Return how many slots that are asked for the most likely tokens give them, before the first that does not."""
        rows = self.chain.rows
        first = rows[contexts[:, -1]].argmax(-1)[:, None]
        slots = self.count - (self.kind == "categorical")
        wish = torch.full((len(contexts), slots), GREEDY)
        tokens = self.model(contexts, uniforms=wish).logits[:, CONTEXT:].argmax(-1) if slots else first[:, :0]
        tokens = torch.cat([first, tokens], dim=1) if self.kind == "categorical" else tokens
        likely = rows[torch.cat([contexts[:, -1:], tokens[:, :-1]], dim=1)].argmax(-1)
        return float((tokens == likely).long().cumprod(1).sum(1).float().mean())

    def best_of(self, contexts: torch.Tensor, many: int) -> float:
        """Return how many tokens of the most central of `many` drafts are right before the first wrong one."""
        few = contexts[: max(16_384 // many, 1)]
        found = self.draft(few.repeat_interleave(many, 0))
        correct, picked = found.correct()
        low, high = interval(picked, found.p[:, :-1])
        positions = ((found.uniforms - low) / (high - low)).unflatten(0, (-1, many))
        correct = correct.unflatten(0, (-1, many))
        return float(correct.gather(1, best_of(positions, correct)[:, None]).float().mean())


class Tables:
    """The questions about one chain, and how they are answered."""

    def __init__(self, arguments: argparse.Namespace, seed: int) -> None:
        self.seed, self.seconds, self.slots = seed, 60 * arguments.minutes, arguments.slots or 8
        self.chain, self.concentration = MarkovChain(STATES, ALPHA, seed), arguments.concentration
        self.contexts = self.chain.texts(arguments.contexts, CONTEXT, seed=10_000 + seed)

    def student(self, kind: str, count: int = 0, features: str = "arithmetic", data: Any = None, **how: Any) -> Student:
        """Train one student, backbone and all, with the chain as its teacher (but for `method="inverse"`)."""
        count = count or self.slots
        torch.manual_seed(self.seed)
        config = llama_config(96, 4, STATES, intermediate_size=256, num_attention_heads=4, initializer_range=0.1)
        model = PTPForCausalLM.from_backbone(
            LlamaForCausalLM(config), "categorical" if kind == "categorical" else "one_hot", features=features,
            projection="mlp", lora_rank=4, num_slots=max(count - (kind == "categorical"), 1),
            informative=kind != "independent",
        )  # fmt: skip
        model.train_only("all")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
        defaults = {"loss": "kl" if kind == "categorical" else "ce", "completions": COMPLETIONS, "greedy_share": 0.25}
        options = PTPOptions(**defaults | {"concentration": self.concentration} | how)
        make = partial(PTPTrainer, options=options, teacher=None if options.method == "inverse" else self.chain)
        data = data or Texts(self.seed, self.chain)
        trainer = train(model, make, data, self.seconds, optimizer=optimizer, rows=BATCH, first=2.0)
        print(f"{kind}, N = {count}, seed {self.seed}: {trainer.state.global_step} steps", flush=True)
        torch.manual_seed(self.seed)
        return Student(kind, model, self.chain, count)

    def answer(self, kind: str, count: int = 0, **how: Any) -> Answer:
        """Return the figures of a new student."""
        return self.student(kind, count, **how).measure(self.contexts)

    def questions(self, table: str) -> dict[str, Callable[[], Answer]]:
        """Return the names of a table's rows, and what answers them."""
        if table == "variants":
            kinds = ("one_hot", "categorical", "independent")
            rows = {f"{k}, N={n}": partial(self.answer, k, n) for n, k in product((2, 4, 8), kinds)}
            best = {f"ceilings without dependence, N={n}": partial(ceilings, self.chain, n) for n in (2, 4, 8)}
            return best | rows
        if table == "proposals":
            arbitrary = partial(self.answer, "one_hot", data=Texts(self.seed))
            students = partial(arbitrary, sequences="student")
            return {"arbitrary data": arbitrary, "teacher": partial(self.answer, "one_hot"), "student": students}
        if table == "losses":
            pairs = product(("one_hot", "categorical"), LOSSES)
            return {f"{kind}, {loss}": partial(self.answer, kind, loss=loss) for kind, loss in pairs}
        if table == "features":
            return {name: partial(self.answer, "one_hot", features=name) for name in FEATURE_DIMS}
        if table == "concentration":
            return {f"b={b:g}": partial(self.answer, "one_hot", concentration=b) for b in (2.0, 1.0, 0.5, 0.3)}
        if table == "best_of":
            return {kind: partial(self.most_central, kind) for kind in ("one_hot", "categorical")}
        return {"categorical": self.perplexity}

    def most_central(self, kind: str) -> Answer:
        """Return the figures of the most central of M drafts."""
        student = self.student(kind)
        return {f"M={many}": student.best_of(self.contexts, many) for many in (1, 2, 4, 8, 16)}

    def perplexity(self) -> Answer:
        """Return exp of the slots' mean loss on held-out texts, under uniforms that pick them from the student."""
        chain, how = self.chain, {"method": "inverse", "loss": "ce", "base_weight": 1.0}
        model = self.student("categorical", **how).model
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


def answer_tables(arguments: argparse.Namespace) -> None:
    """Answer what the file does not hold, and print the tables."""
    wanted = TABLES if "all" in arguments.tables else arguments.tables
    for seed, table in product(arguments.seeds, wanted):
        rows = {
            f"{table}: {row}, N={arguments.slots or 8}, seed {seed}, {arguments.minutes:g} minutes, "
            f"b={arguments.concentration:g}": (row, answer)
            for row, answer in Tables(arguments, seed).questions(table).items()
            if not arguments.rows or any(part in row for part in arguments.rows)
        }
        found = resumed(arguments.output, rows, lambda name: rows[name][1]())  # noqa: B023
        figures = {name: [f"{key} {value:.2f}" for key, value in found[name].items()] for name in rows}
        shown = [[row, *figures[name]] for name, (row, _) in rows.items()]
        show([""] * max(map(len, shown), default=0), shown, f"{table}, seed {seed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, help="N: 4 in the quick start, 8 in tables")
    parser.add_argument("--steps", type=int, default=2000, help="of the student, 8 rows each")
    parser.add_argument("--backbone-steps", type=int, default=400, help="of the backbone, 16 rows each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--tables", nargs="+", choices=("all", *TABLES), help="answer the paper's questions")
    parser.add_argument("--minutes", type=float, default=2.0, help="of tables: processor time per student")
    parser.add_argument("--rows", nargs="+", help="of tables: only rows whose names contain one of these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of tables: chains, and students on each")
    parser.add_argument("--concentration", type=float, default=1.0, help="of tables: b of Beta(b, b)")
    parser.add_argument("--contexts", type=int, default=4096, help="of tables: that figures are means over")
    parser.add_argument("--output", type=Path, default=Path("ptp-tables.json"), help="of tables")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    answer_tables(arguments) if arguments.tables else quick_start(arguments)


if __name__ == "__main__":
    main()
