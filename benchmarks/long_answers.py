"""What drafts gain along long answers: acceptance by hundreds of tokens, of sampled texts that no end cuts short.

    python benchmarks/long_answers.py SmolLM2-135M-Instruct --prompts spec_bench.jsonl --texts 2 \\
        --methods "EAGLE-1=eagle:model_cards/smollm2/eagle1" "n-grams=ngram" "suffixes=suffix"
    python benchmarks/long_answers.py model_cards/box --raw --prompts code.jsonl --new-tokens 3900 --methods own ngram
    python benchmarks/long_answers.py model_cards/box --raw --prompts code.jsonl --new-tokens 3900 --methods own \\
        --texts 8 --learn-every 500 --learning '{"learning_rate": 1e-3, "updates": 8}' --output within.json

The file of results holds `Speculation.by_hundreds` of every text, by model and method, and is continued. The texts of a
method are one batch, drawn at T = 1. An error is that of a ratio of sums over hundreds of tokens, which are taken as
independent.

With `--learn-every`, texts are written in calls that go on with them, and the first method's drafter learns between
these from what they verified. That leaves the texts' distribution as it is, so that it is compared with the drafter
that does not learn ("null") along the same texts, by expected verifications. An error is then that over texts.
"""

from __future__ import annotations

import argparse
import json
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from measuring import markdown, resumed
from torch import Tensor

from tokenahead.modeling.common.online import OnlineLearner, Row
from tokenahead.training.evaluation import PromptEncoder, repeated_share, sampled
from tokenahead.training.evaluation.decoding import Method, methods_of
from tokenahead.training.evaluation.drafts import Batch, DraftMeasures, ratio_of_sums, text_of
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


def write_in_parts(method: Method, batch: Batch, new_tokens: int, every: int) -> tuple[list[Tensor], list[list[Row]]]:
    """Return texts [1, L] written in calls of `every` tokens that go on with them, and these parts with states."""
    recorder = OnlineLearner(method.drafter, capacity=2**24)
    torch.manual_seed(1)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    for start in range(0, new_tokens, every):
        count = min(every, new_tokens - start)
        options = sampled(1.0).options | {"max_new_tokens": count, "min_new_tokens": count}
        ids = method.generate(input_ids=ids, attention_mask=mask, **options).sequences
        mask = torch.nn.functional.pad(mask, (0, count), value=1)
    recorder.freeze()
    rows = recorder.buffer.rows
    return [own[real.bool()][None] for own, real in zip(ids, mask)], [rows[at :: len(ids)] for at in range(len(ids))]


def expected_along(
    method: Method, text: Tensor, parts: list[Row], learning: dict[str, Any] | None
) -> list[list[float]]:
    """Return by part of a text its tokens and the verifications that they are expected to take.

    With `learning`, options of `OnlineLearner`, the drafter has learned from the parts before; it forgets at the end.
    """
    drafting, calls = method.drafter.drafting_part, list[list[float]]()
    before, learner = deepcopy(drafting.state_dict()), OnlineLearner(method.drafter, **learning or {})
    sizes = [int(row["labels"].ge(0).sum()) for row in parts]  # a row may hold the text before its part, too
    for row, size, start in zip(parts, sizes, accumulate(sizes, initial=text.shape[1] - sum(sizes))):
        measures = DraftMeasures(1.0, method.options.get("num_assistant_tokens"))
        found = measures.add(method.drafter, text_of(text[:, :start], text[:, start : start + size])).calls["block"]
        calls.append([int(found.tokens.sum()), float(found.calls.sum())])
        if learning is not None and row is not parts[-1]:
            learner.buffer.add([row])
            learner.update()
    learner.freeze()
    drafting.load_state_dict(before)
    return calls


def learning_summary(results: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return a table of expected tokens per verification by quarters of the texts, and what the last one gains."""
    rows, first = list[list[str]](), torch.empty(0)
    for name, calls in results.items():
        rates = torch.stack([q[..., 0].sum(1) / q[..., 1].sum(1) for q in torch.tensor(calls).chunk(4, 1)], 1)  # [N, 4]
        first = first if rows else rates[:, -1]
        gains = (rates[:, -1] - first) / first.mean()
        gain = f"{100 * gains.mean():+.1f} % ± {100 * gains.std() / len(gains) ** 0.5:.1f} %" if rows else ""
        rows.append([name, str(len(rates)), *(f"{rate:.2f}" for rate in rates.mean(0)), gain])
    return ["learning within a text", "texts", "first quarter", "second", "third", "last", "gain in the last"], rows


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
    parser.add_argument("--learn-every", type=int, help="learn after so many tokens of a text; expected verifications")
    parser.add_argument("--learning", nargs="+", default=["{}"], help="options of `OnlineLearner`, as JSON")
    arguments = parser.parse_args()
    model, tokenizer = load_model(arguments.model, arguments.dtype, "cpu")
    encoder = PromptEncoder(tokenizer, chats=not arguments.raw)
    prompts, _ = read_prompts(arguments.prompts)
    batch = encoder.batch(chosen := prompts[: arguments.texts], [[] for _ in chosen], "cpu")
    methods, refused = methods_of(arguments.methods, model)
    if refused:
        raise SystemExit(json.dumps(refused))
    call = batch, arguments.new_tokens
    if arguments.learn_every:
        texts = list(zip(*write_in_parts(methods[1], *call, arguments.learn_every)))

        def along(name: str) -> Any:
            return [expected_along(methods[1], *text, json.loads(name)) for text in texts]

        table = learning_summary(resumed(arguments.output, ("null", *arguments.learning), along))
    else:
        ways = {f"{Path(arguments.model).name}, {each.name}": partial(measure, each, *call) for each in methods[1:]}
        table = summary(resumed(arguments.output, ways, lambda name: ways[name]()))
    print(markdown(*table))


if __name__ == "__main__":
    main()
