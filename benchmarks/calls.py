"""Tokens per call, expected along regenerated text and decoded: the same figure twice, where drafts are chains.

    python benchmarks/calls.py --temperatures 0 --texts 32 --batch 32               # the four heads of the box
    python benchmarks/calls.py --temperatures 0.7 --rounds 2
    python benchmarks/calls.py --temperatures 1
    python benchmarks/calls.py --backbone demo-llama --prefix 64 --new-tokens 160 --texts 256 --batch 32    # EAGLE-1

The backbone goes on with held-out beginnings, plainly, at every temperature; along what it wrote the verifications are
expected (`tokenahead.training.evaluation.expected`). Then it goes on with the same beginnings with drafts, from another
seed, and the verifications are counted. Both are ratios of sums over texts, with their standard error over texts, and a
text counts behind its first token: (new tokens - 1) / verifications. Greedy texts must agree one by one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from corpus import ByteWindows, load_corpus
from strategies import LENGTH, train
from transformers import LlamaForCausalLM, PreTrainedModel

from tokenahead import EagleHead
from tokenahead.training.box import Box, excerpt_windows
from tokenahead.training.evaluation import DraftMeasures, ExpectedCalls
from tokenahead.training.evaluation.drafts import text_of
from tokenahead.training.evaluation.expected import ratio_of_sums
from tokenahead.training.features import cache_features
from tokenahead.training.strategy import TrainingStrategy
from tokenahead.training.utils import replace_file

Drafters = dict[str, tuple[PreTrainedModel, Any]]
"""By name: the model that generates, and the drafter if it is another one."""


def drafters_of_box() -> tuple[Drafters, torch.Tensor]:
    """The heads of the box, and its held-out text."""
    box = Box.load()
    return {name: (model, None) for name, model in box.models.items()}, excerpt_windows(box.excerpts)


def eagle(arguments: argparse.Namespace) -> tuple[Drafters, torch.Tensor]:
    """An EAGLE-1 head on a byte Llama, trained where there is none yet, and held-out source."""
    corpus, backbone = load_corpus(seed=0), LlamaForCausalLM.from_pretrained(arguments.backbone).eval()
    if (arguments.eagle / "config.json").exists():
        head = EagleHead.from_pretrained(arguments.eagle).attach(backbone)
    else:
        torch.manual_seed(0)
        head, windows = EagleHead.from_backbone(backbone, version=1), ByteWindows(corpus.train, LENGTH)
        chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))[:600].tolist()
        rows = [windows[index] for index in chosen]
        kept = cache_features(head, rows, arguments.eagle.with_suffix(".features"))
        train(head, TrainingStrategy(), kept, arguments.seconds, 2e-3)
        head.save_pretrained(arguments.eagle)
    held_out = ByteWindows(corpus.held_out, LENGTH)
    chosen = torch.linspace(0, len(held_out) - 1, arguments.texts).long().tolist()
    return {"EAGLE-1": (backbone, head.eval())}, torch.stack([held_out[index]["input_ids"] for index in chosen])


def written(
    model: PreTrainedModel, prompts: torch.Tensor, temperature: float, arguments: argparse.Namespace, **options: Any
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Texts of the backbone after prompts [N, P], a batch at a time, and what speculation did."""
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    for part in prompts.split(arguments.batch):
        out = model.generate(
            part, attention_mask=torch.ones_like(part), **how, **options, max_new_tokens=arguments.new_tokens,
            pad_token_id=0, return_dict_in_generate=True,
        )  # fmt: skip
        yield out.sequences[:, part.shape[1] :], getattr(out, "speculation", None)


def compare(
    name: str,
    drafters: Drafters,
    texts: torch.Tensor,
    prompts: torch.Tensor,
    temperature: float,
    seed: int,
    arguments: Any,
) -> tuple[ExpectedCalls, torch.Tensor]:
    """Calls that are expected along plain texts [N, T + 1], and verifications [N] that others take with drafts."""
    model, drafter = drafters[name]
    model.generation_config.eos_token_id = None
    measures = DraftMeasures(temperature, arguments.draft)
    for prompt, new in zip(prompts.split(8), texts.split(8)):
        measures.add(drafter or model, text_of(prompt, new))
    torch.manual_seed(seed + 1)
    options = {"num_assistant_tokens": arguments.draft} | ({} if drafter is None else {"assistant_model": drafter})
    runs = written(model, prompts, temperature, arguments, **options)
    calls = [len(row) for _, speculation in runs for row in speculation.rows_accepted]
    return measures.calls["block" if temperature else "greedy"], torch.tensor(calls, dtype=torch.float64)


def measure(
    temperature: float, drafters: Drafters, text: torch.Tensor, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The figures of all drafters at one temperature."""
    names = [name for name in drafters if not arguments.only or name in arguments.only]
    prompts, backbone = text[: arguments.texts, : arguments.prefix], next(iter(drafters.values()))[0]
    backbone.generation_config.eos_token_id = None
    plain = {} if arguments.backbone else {"use_mtp": False}
    found: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        seed = 100 * number + round(10 * temperature)
        torch.manual_seed(seed)
        texts = torch.cat([new for new, _ in written(backbone, prompts, temperature, arguments, **plain)])
        for name in names:
            found[name].append(compare(name, drafters, texts, prompts, temperature, seed, arguments))
    results = {}
    for name, rounds in found.items():
        expected, calls = (
            sum((ahead for ahead, _ in rounds[1:]), rounds[0][0]),
            torch.cat([calls for _, calls in rounds]),
        )
        results[f"{name}, T = {temperature:g}"] = {
            "expected": (expected.tokens_per_call, expected.standard_error),
            "decoded": ratio_of_sums(torch.full_like(calls, arguments.new_tokens - 1), calls),
            "texts": len(calls),
            "equal": None if temperature else int((calls - expected.calls).abs().lt(1e-6).sum()),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", type=Path, help="a byte Llama; none: the box")
    parser.add_argument("--eagle", type=Path, default=Path("demo-eagle1"), help="an EAGLE-1 head on it")
    parser.add_argument("--seconds", type=float, default=45, help="of processor time, to train a new EAGLE head")
    parser.add_argument("--only", nargs="+", help="heads of the box")
    parser.add_argument("--draft", type=int, default=5, help="tokens per draft")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1, help="times that every beginning is gone on with")
    parser.add_argument("--prefix", type=int, default=128, help="ids of the beginnings")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--output", type=Path, default=Path("calls.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    drafters, text = eagle(arguments) if arguments.backbone else drafters_of_box()
    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    for temperature in arguments.temperatures:
        results |= measure(temperature, drafters, text, arguments)
        replace_file(arguments.output, json.dumps(results, indent=1))
    table(results)


def table(results: dict[str, Any]) -> None:
    """The figures as a table in Markdown."""
    print("| drafter, temperature | expected | decoded | apart, in standard errors | texts |\n|---|---|---|---|---|")
    for name, row in results.items():
        (ahead, error), (found, spread) = row["expected"], row["decoded"]
        apart = f"{abs(ahead - found) / max((error**2 + spread**2) ** 0.5, 1e-12):.1f}"
        equal = apart if row["equal"] is None else f"equal in {row['equal']} texts"
        print(f"| {name} | {ahead:.3f} ± {error:.3f} | {found:.3f} ± {spread:.3f} | {equal} | {row['texts']} |")


if __name__ == "__main__":
    main()
