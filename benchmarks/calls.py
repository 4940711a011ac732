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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from corpus import load_corpus
from measuring import markdown, resumed
from studies import features_of, held_out_rows, train
from transformers import LlamaForCausalLM

from tokenahead import EagleHead
from tokenahead.training.box import Box, excerpt_windows
from tokenahead.training.evaluation import DraftMeasures
from tokenahead.training.evaluation.drafts import text_of
from tokenahead.training.evaluation.expected import ratio_of_sums
from tokenahead.training.strategy import TrainingStrategy

Drafters = dict[str, tuple[Any, Any]]
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
        head = EagleHead.from_backbone(backbone, version=1)
        kept = features_of(head, corpus, 600, arguments.eagle.with_suffix(".features"))
        train(head, TrainingStrategy(), kept, arguments.seconds, 2e-3)
        head.save_pretrained(arguments.eagle)
    return {"EAGLE-1": (backbone, head.eval())}, held_out_rows(corpus, arguments.texts)


def written(
    model: Any, prompts: torch.Tensor, temperature: float, arguments: argparse.Namespace, **options: Any
) -> Iterator[tuple[torch.Tensor, Any]]:
    """Texts of the backbone after prompts [N, P], a batch at a time, and what speculation did."""
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    for part in prompts.split(arguments.batch):
        out = model.generate(
            part, attention_mask=torch.ones_like(part), **how, **options, max_new_tokens=arguments.new_tokens,
            pad_token_id=0, return_dict_in_generate=True,
        )  # fmt: skip
        yield out.sequences[:, part.shape[1] :], getattr(out, "speculation", None)


def measure(name: str, temperature: float, drafters: Drafters, text: torch.Tensor, arguments: Any) -> dict[str, Any]:
    """What a drafter is expected to do along plain texts, and what it does with drafts, at one temperature."""
    model, drafter = drafters[name]
    first = next(iter(drafters.values()))[0]
    for each in (model, first):
        each.generation_config.eos_token_id = None
    prompts = text[: arguments.texts, : arguments.prefix]
    drafts = {"num_assistant_tokens": arguments.draft} | ({} if drafter is None else {"assistant_model": drafter})
    measures, calls = DraftMeasures(temperature, arguments.draft), []
    for number in range(arguments.rounds):
        seed = 100 * number + round(10 * temperature)
        if seed not in arguments.plain:  # the same for all drafters
            torch.manual_seed(seed)
            plain = {} if arguments.backbone else {"use_mtp": False}
            runs = written(first, prompts, temperature, arguments, **plain)
            arguments.plain[seed] = torch.cat([new for new, _ in runs])
        texts = arguments.plain[seed]
        for prompt, new in zip(prompts.split(8), texts.split(8)):
            measures.add(drafter or model, text_of(prompt, new))
        torch.manual_seed(seed + 1)
        runs = written(model, prompts, temperature, arguments, **drafts)
        calls += [len(row) for _, stats in runs for row in stats.rows_accepted]
    expected = measures.calls["block" if temperature else "greedy"]
    counted = torch.tensor(calls, dtype=torch.float64)
    return {
        "expected": (expected.tokens_per_call, expected.standard_error),
        "decoded": ratio_of_sums(torch.full_like(counted, arguments.new_tokens - 1), counted),
        "texts": len(calls),
        "equal": None if temperature else int((counted - expected.calls).abs().lt(1e-6).sum()),
    }


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
    arguments.plain = {}
    torch.set_num_threads(1)
    drafters, text = eagle(arguments) if arguments.backbone else drafters_of_box()
    names = [name for name in drafters if not arguments.only or name in arguments.only]
    asked = {f"{name}, T = {heat:g}": (name, heat) for heat in arguments.temperatures for name in names}
    table(resumed(arguments.output, asked, lambda row: measure(*asked[row], drafters, text, arguments)))


def table(results: dict[str, Any]) -> None:
    """The figures as a table in Markdown."""
    rows = []
    for name, row in results.items():
        (ahead, error), (found, spread) = row["expected"], row["decoded"]
        apart = f"{abs(ahead - found) / max((error**2 + spread**2) ** 0.5, 1e-12):.1f}"
        equal = apart if row["equal"] is None else f"equal in {row['equal']} texts"
        rows.append([name, f"{ahead:.3f} ± {error:.3f}", f"{found:.3f} ± {spread:.3f}", equal, f"{row['texts']}"])
    print(markdown(("drafter, temperature", "expected", "decoded", "apart, in standard errors", "texts"), rows), end="")


if __name__ == "__main__":
    main()
