"""What drafts gain along long answers: acceptance by hundreds of tokens, of sampled texts that no end cuts short.

    python benchmarks/long_answers.py SmolLM2-135M-Instruct --prompts spec_bench.jsonl --texts 2 \\
        --methods "EAGLE-1=eagle:model_cards/smollm2/eagle1" "n-grams=ngram" "suffixes=suffix"
    python benchmarks/long_answers.py model_cards/box --raw --prompts code.jsonl --new-tokens 3900 --methods own ngram

The file of results holds `Speculation.by_hundreds` of every text, by model and method, and is continued. The texts of a
method are one batch, drawn at T = 1. An error is that of a ratio of sums over hundreds of tokens, which are taken as
independent.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import markdown, resumed

from tokenahead.training.evaluation import PromptEncoder, repeated_share, sampled
from tokenahead.training.evaluation.decoding import Method, methods_of
from tokenahead.training.evaluation.drafts import Batch, ratio_of_sums
from tokenahead.training.evaluation.prompts import read_prompts
from tokenahead.training.loading import load_model

BORDERS = (0, 100, 500, 1000, 1500, 2000, 3000, 4000)
"""Where the spans of the table begin, in tokens of an answer."""


def measure(method: Method, batch: Batch, new_tokens: int) -> dict[str, Any]:
    """Let a method write a text after every prompt of a batch; return what its verifications drafted and accepted."""
    torch.manual_seed(0)
    began = time.perf_counter()
    options = sampled(1.0).options | {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
    out = method.generate(**batch, **options)
    seconds, stats = round(time.perf_counter() - began, 1), out.speculation
    rows = [
        replace(stats, rows_accepted=[accepted], rows_drafts=[drafts], rows_depths=[depths])
        for accepted, drafts, depths in zip(stats.rows_accepted, stats.rows_drafts, stats.rows_depths)
    ]
    return {
        "new_tokens": new_tokens,
        "draft_length": method.options.get("num_assistant_tokens"),
        "seconds": seconds,
        "repeated": [round(repeated_share(ids), 3) for ids in out.sequences[:, batch["input_ids"].shape[1] :].tolist()],
        "texts": [row.by_hundreds for row in rows],
    }


def cell(texts: list[list[dict[str, int]]], start: int, stop: int) -> str:
    """Return tokens per verification with their error, and the share of the drafts that was accepted."""
    hundreds = [each for text in texts for each in text[start // 100 : stop // 100] if each]
    if not hundreds:
        return ""
    accepted, verifications, drafted = (
        torch.tensor([float(each[name]) for each in hundreds], dtype=torch.float64)
        for name in ("accepted", "verifications", "drafted")
    )
    rate, error = ratio_of_sums(accepted + verifications, verifications)
    return f"{rate:.2f} ± {error:.2f}, {float(accepted.sum() / drafted.sum()):.0%}".replace("%", " %")


def summary(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head of the table, and a row for every model and method."""
    spans = list(zip(BORDERS, BORDERS[1:]))
    head = ["backbone, drafter", "texts", *(f"{start} to {stop - 1}" for start, stop in spans)]
    rows = [
        [name, str(len(found["texts"])), *(cell(found["texts"], *span) for span in spans)]
        for name, found in results.items()
    ]
    return head, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True, help="file of prompts, as of `tokenahead bench`")
    parser.add_argument("--methods", nargs="+", required=True, help="as of `tokenahead bench`")
    parser.add_argument("--raw", action="store_true", help="prompts are no chats")
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=2000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, default=Path("long_answers.json"))
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model, arguments.dtype, "cpu")
    encoder = PromptEncoder(tokenizer, chats=not arguments.raw)
    prompts, _ = read_prompts(arguments.prompts)
    batch = encoder.batch(chosen := prompts[: arguments.texts], [[] for _ in chosen], "cpu")
    methods, refused = methods_of(arguments.methods, model)
    if refused:
        raise SystemExit(json.dumps(refused))
    ways = {
        f"{Path(arguments.model).name}, {each.name}": partial(measure, each, batch, arguments.new_tokens)
        for each in methods[1:]
    }
    print(markdown(*summary(resumed(arguments.output, ways, lambda name: ways[name]()))))


if __name__ == "__main__":
    main()
