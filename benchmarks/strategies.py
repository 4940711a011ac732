"""Strategies of training on one small backbone, after equal processor time each: what is drafted, kept, and paid.

    python benchmarks/byte_llama.py --minutes 6 --output demo-llama
    python benchmarks/strategies.py demo-llama --seconds 20 --output strategies.json
    python benchmarks/strategies.py demo-llama --only "nll" "kl" --seed 0      # some of them; the file takes more
    python benchmarks/strategies.py demo-llama --only layer "layer, lora" "layer, weighted" --output layers.json

Losses against each other on kept features (likelihood, KL, TV, LK); heads alone against joint training; MtPC's two
stages with draft LoRA on the last k layers (Table 3 of the paper in small); and layer heads on a frozen backbone, with
LoRA, and on weighted states (Mehra et al. in small; benchmarks/marginal.py has their baseline). A seed decides how
heads start and the order of the data; seeds go by turns.

Tokens per call at T = 1 are expected ones under block verification, for drafts of window - 1 tokens, along texts that
the backbone itself has drawn (`tokenahead.training.evaluation.expected`). Those of greedy text are counted. Accuracies
are those on held-out text. Speed-ups are ratios of processor time to plain decoding by turns.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from corpus import ByteWindows, load_corpus
from measuring import markdown, resumed
from studies import LENGTH, beginnings, benched, drawn_texts, features_of, held_out_rows, measured, train
from transformers import LlamaForCausalLM

from tokenahead import MTPHeads
from tokenahead.training.evaluation import GREEDY, sampled
from tokenahead.training.evaluation.summary import results_of
from tokenahead.training.strategy import TrainingStrategy

STRATEGIES: dict[str, dict[str, Any]] = {
    "nll": dict(kept=True),
    "kl": dict(kept=True, loss=dict(target="teacher", divergence="kl")),
    "kl + nll": dict(kept=True, loss=dict(target="teacher", divergence="kl", label_weight=0.5)),
    "reverse kl": dict(kept=True, loss=dict(target="teacher", divergence="reverse_kl")),
    "tv": dict(kept=True, loss=dict(target="teacher", divergence="tv")),
    "lk": dict(kept=True, loss=dict(target="teacher", divergence="lk")),
    "heads only": dict(),
    "joint": dict(train="all", drafter_lr_multiplier=4.0),
    "joint with lora": dict(train="lora", drafter_lr_multiplier=4.0),
    "stage 2, k = 0": dict(first="heads only"),
    "stage 2, k = 1": dict(first="heads only", draft_layers=1),
    "stage 2, k = 2": dict(first="heads only", draft_layers=2),
}
LAYERS: dict[str, dict[str, Any]] = {
    "layer": dict(),
    "layer, lora": dict(train="lora", drafter_lr_multiplier=4.0),
    "layer, weighted": dict(mix="weighted", mix_init="uniform"),
    "layer, weighted from the last": dict(mix="weighted", mix_init="last"),
    "layer, lora, weighted": dict(train="lora", drafter_lr_multiplier=4.0, mix="weighted", mix_init="uniform"),
}
"""With heads that are decoder layers, for depths 2 and 3."""


def decode(backbone: Any, heads: MTPHeads, prompts: list[str], new_tokens: int) -> dict[str, float]:
    """Tokens per call and processor time against plain decoding, prompt by prompt in turns."""
    figures = {}
    bench = benched(backbone, heads, prompts, (GREEDY, sampled(1.0)), new_tokens)
    for row in (row for row in results_of(bench) if row.method == "drafts"):
        mode = "sampled" if row.do_sample else "greedy"
        figures[f"tokens per call, {mode}"] = row.tokens_per_call
        figures[f"speed-up, {mode}"] = row.processor_speed_up or math.nan
    return figures


@torch.no_grad()
def bits(backbone: Any, ids: torch.Tensor) -> float:
    """Bits per byte of the backbone's own distribution."""
    return float(backbone(ids, labels=ids).loss) / 0.693147


def folder_of(arguments: argparse.Namespace, name: str, seed: int) -> Path:
    """Where trained heads lie."""
    return arguments.scratch / f"{name.replace(' ', '-')}-{seed}"


def new_heads(backbone: Any, name: str, arguments: argparse.Namespace, **options: Any) -> MTPHeads:
    """Heads as a strategy begins with them."""
    if name in LAYERS:
        return MTPHeads.from_backbone(backbone, 3, head_type="layer", **options)
    return MTPHeads.from_backbone(backbone, arguments.window, head_type=arguments.head, rank=arguments.rank)


def run(arguments: argparse.Namespace, name: str, seed: int, text: dict[str, Any]) -> dict[str, Any]:
    """Trains and measures one strategy."""
    fields = dict((STRATEGIES | LAYERS)[name])
    kept, first = fields.pop("kept", False), fields.pop("first", None)
    options = {option: fields.pop(option) for option in ("mix", "mix_init") if option in fields}
    backbone = LlamaForCausalLM.from_pretrained(arguments.backbone).eval()
    torch.manual_seed(seed)
    if first is None:
        heads = new_heads(backbone, name, arguments, **options)
    else:
        heads = MTPHeads.from_pretrained(folder_of(arguments, first, seed)).attach(backbone)
    strategy, data = TrainingStrategy(**fields), text["train"]
    if kept:
        data = features_of(heads, text["corpus"], arguments.rows, arguments.scratch / "features")
    joint = strategy.train != "drafter"
    started = time.process_time()
    trainer = train(heads, strategy, data, arguments.seconds, 2e-3 / (4 if joint else 1), seed)
    spent = time.process_time() - started
    if not joint:
        heads.save_pretrained(folder_of(arguments, name, seed))
    steps = trainer.state.global_step
    figures = {"steps": steps, "seconds": spent, "ms per step": 1000 * spent / steps}
    drawn = drawn_texts(backbone, text["held_out"]) if joint else text["drawn"]
    calls = measured(heads, drawn).calls["block"]
    figures |= {"accepted": calls.by_position, "expected tokens per call": calls.tokens_per_call}
    figures |= {"standard error": calls.standard_error, "right": measured(heads, text["held_out"]).means()["top_1"]}
    figures["bits per byte of the backbone"] = bits(backbone, text["held_out"])
    return figures | decode(backbone, heads, text["prompts"], arguments.new_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbone", type=Path)
    parser.add_argument("--seconds", type=float, default=20, help="of processor time, for each strategy")
    parser.add_argument("--only", nargs="+", choices=[*STRATEGIES, *LAYERS], default=list(STRATEGIES))
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--head", default="ff")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--window", type=int, default=6)
    parser.add_argument("--rows", type=int, default=400, help="windows whose features are kept")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("strategies.json"))
    arguments = parser.parse_args()
    arguments.scratch = arguments.output.with_suffix("")
    torch.set_num_threads(1)
    corpus = load_corpus(seed=0)
    held_out = held_out_rows(corpus)
    text = {
        "corpus": corpus,
        "train": ByteWindows(corpus.train, LENGTH),
        "held_out": held_out,
        "drawn": drawn_texts(LlamaForCausalLM.from_pretrained(arguments.backbone).eval(), held_out),
        "prompts": beginnings(corpus, arguments.prompts, arguments.new_tokens),
    }
    asked = {f"{name}, seed {seed}": (name, seed) for seed, name in product(arguments.seed, arguments.only)}
    table(resumed(arguments.output, asked, lambda row: run(arguments, *asked[row], text)))


def table(results: dict[str, Any]) -> None:
    """The figures as a table in Markdown: means over seeds, and the largest less the smallest in brackets."""
    columns = {
        "steps": lambda row: (row["steps"],),
        "accepted 1, 3, 5": lambda row: row["accepted"][::2],
        "right at depths 2, 3": lambda row: row["right"][:2],
        "tokens per call, T = 1": lambda row: (row["expected tokens per call"],),
        "greedy": lambda row: (row["tokens per call, greedy"],),
        "speed-up, T = 1 / greedy": lambda row: (row["speed-up, sampled"], row["speed-up, greedy"]),
        "bits per byte": lambda row: (row["bits per byte of the backbone"],),
    }
    by_name: dict[str, list[dict[str, Any]]] = {}
    for name, row in results.items():
        by_name.setdefault(name.rsplit(", seed ", 1)[0], []).append(row)
    cells = [[name, str(len(rows)), *(mean_and_spread(map(read, rows)) for read in columns.values())]
             for name, rows in by_name.items()]  # fmt: skip
    print(markdown(("strategy", "seeds", *columns), cells), end="")


def mean_and_spread(rows: Iterable[Iterable[float]]) -> str:
    """Means of columns, each with its spread in brackets."""
    cells = []
    for column in zip(*rows):
        digits = 0 if all(isinstance(value, int) for value in column) else 2 if max(column) > 9 else 3
        cells.append(f"{sum(column) / len(column):.{digits}f} ({max(column) - min(column):.{digits}f})")
    return ", ".join(cells)


if __name__ == "__main__":
    main()
