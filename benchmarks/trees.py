"""Chains against trees of drafts on one trained EAGLE-3 head: tokens per call, sampled and greedy.

    python benchmarks/byte_llama.py --minutes 5 --output demo-llama
    python benchmarks/trees.py demo-llama --seconds 240 --head demo-eagle3      # trains the head and keeps it
    python benchmarks/trees.py demo-llama --head demo-eagle3 --total 60 --depth 6 --top-k 10

The official rule of EAGLE-2 and 3 at a temperature drafts the likeliest tokens and verifies them as certain ones
(q = 1); a drawn tree of the same budget holds draws from the head's warped laws, verified by recursive rejection or by
traversal. Tokens per call are counted over the cycles of all rows, with their standard error. Traversal and recursion
are besides compared on the very same drawn trees, by the exact expectation of what each would keep: no noise of draws.
None of these figures depends on the machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from strategies import LENGTH, train
from transformers import LlamaForCausalLM, PreTrainedModel

from tokenahead import EagleHead, EvaByteTokenizer
from tokenahead.generation.contract import DraftTree
from tokenahead.generation.rules import SampledRule
from tokenahead.generation.tree_verification import tree_acceptance
from tokenahead.training.data import ByteWindows, Corpus, code_prompts, load_corpus
from tokenahead.training.features import cache_features
from tokenahead.training.files import replace_text
from tokenahead.training.strategy import TrainingStrategy


def expected(tree: DraftTree, p: torch.Tensor, rule: str) -> torch.Tensor:
    """The expected number of kept nodes [B] of a drawn tree, given the tree."""
    accept = tree_acceptance(tree, p, rule)[0].double()
    depth = tree.positions()[:, 1:]
    nodes = torch.arange(accept.shape[1])
    same = tree.parents[:, :, None] == tree.parents[:, None]
    elder = same & (nodes < nodes[:, None])
    refused = torch.where(elder, 1 - accept[:, None], 1.0).prod(-1)
    if rule == "token":  # reached: every node of the path is taken, and its elder siblings were refused
        on_path = tree.mask()[:, 1:, 1:]
        return torch.where(on_path, (accept * refused)[:, None], 1.0).prod(-1).sum(-1)
    below = tree.mask().sum(1)[:, 1:]
    before = (elder * below[:, None]).sum(-1)
    order = (tree.mask()[:, 1:, 1:] * before[:, None]).sum(-1) + below - 1
    earlier = order[:, None] < order[:, :, None]
    return (depth * accept * torch.where(earlier, 1 - accept[:, None], 1.0).prod(-1)).sum(-1)


class Paired(SampledRule):
    """A rule that also notes what both rules would keep of each drawn tree.

    Args:
        rule: The one that judges.
        rows: From lists by name, where it notes them.
    """

    def __init__(self, rule: str, rows: dict[str, list[torch.Tensor]]) -> None:
        super().__init__(rule)
        self.rows = rows

    def judge(self, tree: DraftTree, scores: torch.Tensor) -> Any:
        """See `Rule`."""
        if tree.tokens.shape[1]:
            for rule, known in self.rows.items():
                known.append(expected(tree, scores.softmax(-1).double(), rule))
        return super().judge(tree, scores)


@contextmanager
def certain(head: EagleHead) -> Iterator[None]:
    """Lets the head draft its likeliest tokens where text is sampled, as the official code does."""
    make = type(head).make_drafter
    head.make_drafter = lambda options: make(head, replace(options, do_sample=False))
    try:
        yield
    finally:
        del head.make_drafter


def trained(backbone: PreTrainedModel, corpus: Corpus, arguments: argparse.Namespace) -> EagleHead:
    """The head in its folder, or a new one after its time."""
    if (arguments.head / "config.json").exists():
        return EagleHead.from_pretrained(arguments.head).attach(backbone).eval()
    torch.manual_seed(0)
    layers = backbone.config.num_hidden_layers
    head = EagleHead.from_backbone(backbone, version=3, aux_layers=[1, layers // 2, layers - 1])
    head.loss_options.steps = 4
    windows = ByteWindows(corpus.train, LENGTH)
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))[: arguments.rows].tolist()
    kept = cache_features(head, [windows[index] for index in chosen], arguments.head.with_name("features"),
                          say=lambda said: None)  # fmt: skip
    train(head, TrainingStrategy(), kept, arguments.seconds, 2e-3)
    head.save_pretrained(arguments.head)
    return head


def counted(
    backbone: PreTrainedModel,
    prompts: dict[str, torch.Tensor],
    new: int,
    notes: dict[str, list[torch.Tensor]] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Tokens per call and its standard error, over all cycles of all rows; means of notes [B] of these cycles, too."""
    torch.manual_seed(0)
    out = backbone.generate(**prompts, max_new_tokens=new, pad_token_id=0, return_dict_in_generate=True, **options)
    kept = torch.tensor([count + 1.0 for row in out.speculation.rows_accepted for count in row])
    figures = {
        "tokens per call": float(kept.mean()),
        "error": float(kept.std() / len(kept) ** 0.5),
        "cycles": len(kept),
    }
    counts = [len(row) for row in out.speculation.rows_accepted]  # rows that have ended are judged, but do not count
    for rule, known in (notes or {}).items():
        found = [
            1 + note[row] for number, note in enumerate(known) for row, count in enumerate(counts) if number < count
        ]
        figures[f"expected, {rule}"] = float(torch.stack(found).mean())
    return figures


def measure(head: EagleHead, prompts: dict[str, torch.Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways to draft, at all temperatures."""
    backbone, new = head.backbone, arguments.new_tokens
    tree = {"depth": arguments.depth, "top_k": arguments.top_k, "total_tokens": arguments.total}
    common = {"assistant_model": head}
    chains = {
        f"chain of {length}": common | {"num_assistant_tokens": length}
        for length in (arguments.depth + 1, arguments.total - 1)
    }
    figures: dict[str, Any] = {}
    for heat in arguments.temperatures:
        how = dict(do_sample=False) if heat == 0 else dict(do_sample=True, temperature=heat, top_k=0)
        rows = {name: counted(backbone, prompts, new, **options, **how) for name, options in chains.items()}
        with certain(head):
            rows["likeliest tokens (official, q = 1)"] = counted(
                backbone, prompts, new, draft_tree=tree, **common, **how
            )
        if heat:
            for rule, name in {"token": "drawn tree, recursion", "block": "drawn tree, traversal"}.items():
                notes: dict[str, list[torch.Tensor]] = {"token": [], "block": []}
                head.make_rule = lambda options, drafter: Paired(rule, notes)  # noqa: B023
                rows[name] = counted(backbone, prompts, new, notes, draft_tree=tree, **common, **how)
                del head.make_rule
        figures[f"T = {heat:g}"] = rows
        print(json.dumps({f"T = {heat:g}": rows}), flush=True)
    return figures


def table(figures: dict[str, Any]) -> None:
    """The figures in Markdown."""
    names = list(dict.fromkeys(name for rows in figures.values() for name in rows))
    print("| drafts | " + " | ".join(figures) + " |")
    print("|---|" + "---|" * len(figures))
    for name in names:
        cells = (rows.get(name) for rows in figures.values())
        shown = ("-" if cell is None else f"{cell['tokens per call']:.3f} ± {cell['error']:.3f}" for cell in cells)
        print(f"| {name} | " + " | ".join(shown) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbone", type=Path)
    parser.add_argument(
        "--head", type=Path, default=Path("demo-eagle3"), help="its folder; trained where there is none"
    )
    parser.add_argument("--seconds", type=float, default=240, help="of processor time, to train the head")
    parser.add_argument("--rows", type=int, default=600, help="windows whose features are kept")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--total", type=int, default=16, help="tokens of the block, the last verified one included")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("trees.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus, tokenizer = load_corpus(seed=0), EvaByteTokenizer(padding_side="left")
    backbone = LlamaForCausalLM.from_pretrained(arguments.backbone).eval()
    backbone.generation_config.eos_token_id = None
    head = trained(backbone, corpus, arguments).eval()
    prompts = tokenizer(code_prompts(corpus.held_out, arguments.prompts), return_tensors="pt", padding=True)
    figures = measure(head, prompts, arguments)
    replace_text(arguments.output, json.dumps(figures, indent=1))
    table(figures)


if __name__ == "__main__":
    main()
