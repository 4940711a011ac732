"""Chains against trees of drafts on one trained EAGLE-3 head: tokens per call, sampled and greedy.

    python benchmarks/byte_llama.py --minutes 5 --output demo-llama
    python benchmarks/trees.py demo-llama --seconds 240 --head demo-eagle3      # trains the head and keeps it
    python benchmarks/trees.py demo-llama --head demo-eagle3 --total 60 --depth 6 --top-k 10
    python benchmarks/trees.py demo-llama --head demo-eagle3 --expected --temperatures 0.6 1     # far less noise
    python benchmarks/trees.py box --depth 5 --temperatures 0 1                 # the heads of the EvaByte in the box

The official rule of EAGLE-2 and 3 at a temperature drafts the most likely tokens and verifies them as deterministic
(q = 1); a drawn tree of the same budget holds draws from the head's warped distributions, verified by recursive
rejection or by traversal. Tokens per call are counted over the cycles of all rows, with their standard error. Traversal
and recursion are also compared on the very same drawn trees, by the exact expectation of what each would keep: no
noise of draws. With `--expected`, all drafts are: behind 512 texts that the backbone wrote, the same for all, two
drafts of each kind are drawn, and what both rules keep of them on average is calculated. None of these figures depends
on the machine. Of the box, every prompt is a separate call, and bytes per second, which do depend on it, are printed,
too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus, load_corpus
from measuring import accepted_of, markdown
from studies import beginnings, features_of, train
from transformers import LlamaForCausalLM, StoppingCriteriaList

from tokenahead import EagleHead, EvaByteTokenizer
from tokenahead.generation.contract import DraftTree
from tokenahead.generation.tensors.wrapped_models import untyped
from tokenahead.generation.trees import choices_from_accuracies
from tokenahead.generation.verification import tree_acceptance
from tokenahead.generation.verification.verifiers import SampledVerifier
from tokenahead.training.box import box_directory, code_prompts, excerpt_prompts, heads_in, load_box, load_excerpts
from tokenahead.training.evaluation import rank_accuracies
from tokenahead.training.strategy import TrainingStrategy
from tokenahead.training.utils import replace_file


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


class Paired(SampledVerifier):
    """A rule that also notes what both rules would keep of each drawn tree.

    Args:
        rule: The one that verifies.
        rows: From lists by name, where it notes them.
    """

    def __init__(self, rule: str, rows: dict[str, list[torch.Tensor]]) -> None:
        super().__init__(rule)
        self.kept = rows

    def verify(self, tree: DraftTree, scores: torch.Tensor) -> Any:
        """See `Verifier`."""
        if tree.tokens.shape[1]:
            for rule, known in self.kept.items():
                known.append(expected(tree, scores.softmax(-1).double(), rule))
        return super().verify(tree, scores)


@contextmanager
def deterministic(head: EagleHead) -> Iterator[None]:
    """Lets the head draft its most likely tokens where text is sampled, as the official code does."""
    make = type(head).start
    head.start = lambda options: make(head, replace(options, do_sample=False))
    try:
        yield
    finally:
        del head.start


def trained(backbone: Any, corpus: Corpus, arguments: argparse.Namespace) -> EagleHead:
    """The head in its directory, or a new one after its time."""
    if (arguments.head / "config.json").exists():
        return EagleHead.from_pretrained(arguments.head).attach(backbone).eval()
    torch.manual_seed(0)
    layers = backbone.config.num_hidden_layers
    head = EagleHead.from_backbone(backbone, version=3, aux_layers=[1, layers // 2, layers - 1])
    head.loss_options.steps = 4
    kept = features_of(head, corpus, arguments.rows, arguments.head.with_name("features"))
    train(head, TrainingStrategy(), kept, arguments.seconds, 2e-3)
    head.save_pretrained(arguments.head)
    return head


def counted(
    backbone: Any,
    prompts: dict[str, torch.Tensor],
    new: int,
    notes: dict[str, list[torch.Tensor]] | None = None,
    **options: Any,
) -> dict[str, float]:
    """Tokens per call and its standard error, over all cycles of all rows; means of notes [B] of these cycles, too."""
    torch.manual_seed(0)
    begun = time.perf_counter()
    out = backbone.generate(**prompts, max_new_tokens=new, pad_token_id=0, return_dict_in_generate=True, **options)
    kept = torch.tensor(accepted_of(out)) + 1.0
    figures = {
        "tokens per call": float(kept.mean()),
        "error": float(kept.std() / len(kept) ** 0.5),
        "cycles": len(kept),
        "seconds": time.perf_counter() - begun,
    }
    counts = [len(row) for row in out.speculation.rows_accepted]  # rows that have ended are verified, but do not count
    for rule, known in (notes or {}).items():
        found = [
            1 + note[row] for number, note in enumerate(known) for row, count in enumerate(counts) if number < count
        ]
        figures[f"expected, {rule}"] = float(torch.stack(found).mean())
    return figures


def shapes(
    arguments: argparse.Namespace, longest: int | None = None
) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """The tree, and chains as deep and as large as it, as far as there are so long ones, by name."""
    lengths = (arguments.depth + 1, min(arguments.total - 1, longest or arguments.total))
    tree = {"depth": arguments.depth, "top_k": arguments.top_k, "total_tokens": arguments.total}
    return tree, {f"chain of {length}": {"num_assistant_tokens": length} for length in lengths}


def first_drafts(head: EagleHead, texts: torch.Tensor, seed: int, **options: Any) -> dict[str, torch.Tensor]:
    """Expected tokens per call of the first draft behind every text [B, L], by rule: [B] each."""
    notes: dict[str, list[torch.Tensor]] = {"token": [], "block": []}
    over = StoppingCriteriaList([lambda ids, *_, **__: (ids >= 0).all(1) & (ids.shape[1] > texts.shape[1] + 1)])
    vars(head)["make_verifier"] = lambda options, drafter: Paired("block", notes)
    torch.manual_seed(seed)
    untyped(head.backbone).generate(texts, assistant_model=head, max_new_tokens=40, stopping_criteria=over, **options)
    del head.make_verifier
    return {rule: 1 + known[0] for rule, known in notes.items()}


def expectations(head: EagleHead, prompts: torch.Tensor, arguments: argparse.Namespace) -> None:
    """Prints what first drafts keep behind texts that the backbone wrote behind prompts [N, 64]."""
    tree, chains = shapes(arguments)
    for heat in arguments.temperatures:
        how = {"do_sample": True, "temperature": heat, "top_k": 0, "pad_token_id": 0}
        torch.manual_seed(1)
        written = untyped(head.backbone).generate(prompts, max_new_tokens=96, **how)
        texts = torch.cat([written[:, start : start + 96] for start in (0, 21, 42, 64)])
        for name, options in (chains | {f"drawn tree {tree}": {"draft_tree": tree}}).items():
            found = [first_drafts(head, texts, seed, **options, **how) for seed in (0, 1)]
            means = {rule: round(float(torch.cat([part[rule] for part in found]).mean()), 3) for rule in found[0]}
            print(json.dumps({"T": heat, "drafts": name} | means), flush=True)


def measure(head: EagleHead, prompts: dict[str, torch.Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways to draft, at all temperatures."""
    backbone, new = head.backbone, arguments.new_tokens
    common = {"assistant_model": head}
    tree, chains = shapes(arguments)
    figures: dict[str, Any] = {}
    for heat in arguments.temperatures:
        how = dict(do_sample=False) if heat == 0 else dict(do_sample=True, temperature=heat, top_k=0)
        rows = {name: counted(backbone, prompts, new, **options, **common, **how) for name, options in chains.items()}
        with deterministic(head):
            rows["most likely tokens (official, q = 1)"] = counted(
                backbone, prompts, new, draft_tree=tree, **common, **how
            )
        if heat:
            for rule, name in {"token": "drawn tree, recursion", "block": "drawn tree, traversal"}.items():
                notes: dict[str, list[torch.Tensor]] = {"token": [], "block": []}
                vars(head)["make_verifier"] = lambda options, drafter: Paired(rule, notes)  # noqa: B023
                rows[name] = counted(backbone, prompts, new, notes, draft_tree=tree, **common, **how)
                del head.make_verifier
        figures[f"T = {heat:g}"] = rows
        print(json.dumps({f"T = {heat:g}": rows}), flush=True)
    return figures


def measure_box(arguments: argparse.Namespace) -> dict[str, Any]:
    """Chains and trees of every head in the box, prompt by prompt, after the same prompts of held-out code."""
    texts = excerpt_prompts(load_excerpts(box_directory() / "held_out.json"), arguments.prompts + 4)
    figures: dict[str, Any] = {}
    for name in heads_in(box_directory()):
        model, tokenizer = load_box(name)
        model.generation_config.eos_token_id = None
        tree, chains = shapes(arguments, model.longest_draft())
        *prompts, a, b, c, d = (tokenizer(text, return_tensors="pt") for text in texts)
        for heat in arguments.temperatures:
            how = dict(do_sample=False) if heat == 0 else dict(do_sample=True, temperature=heat, top_k=0)
            shape = fixed_shape(model, [a, b, c, d], arguments, heat, how)
            rows = figures.setdefault(f"{name}, T = {heat:g}", {})
            for kind, options in (chains | {"tree": {"draft_tree": tree}, "fixed tree": {"draft_tree": shape}}).items():
                found = [counted(model, prompt, arguments.new_tokens, **options, **how) for prompt in prompts]
                cycles = torch.tensor([each["cycles"] for each in found])
                kept = torch.tensor([each["tokens per call"] for each in found]) * cycles
                rows[kind] = {
                    "tokens per call": float(kept.sum() / cycles.sum()),
                    "error": float((kept - cycles * kept.sum() / cycles.sum()).norm() / cycles.sum()),
                    "bytes per second": len(found) * arguments.new_tokens / sum(each["seconds"] for each in found),
                }
            print(json.dumps({f"{name}, T = {heat:g}": rows}), flush=True)
    return figures


def fixed_shape(
    model: Any, prompts: list[dict[str, torch.Tensor]], arguments: argparse.Namespace, heat: float, how: dict[str, Any]
) -> list[tuple[int, ...]]:
    """The shape of the trees' size that keeps most where every depth has its accuracies along plain outputs."""
    torch.manual_seed(1)
    batches = []
    for prompt in prompts:
        ids = model.generate(**prompt, **how, max_new_tokens=arguments.new_tokens, use_mtp=False)
        labels = ids.clone()
        labels[:, : prompt["input_ids"].shape[1]] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return choices_from_accuracies(rank_accuracies(model, batches, temperature=heat), arguments.total - 1)


def table(figures: dict[str, Any]) -> None:
    """The figures in Markdown."""
    names = list(dict.fromkeys(name for rows in figures.values() for name in rows))
    shown = []
    for name in names:
        cells = [rows.get(name) for rows in figures.values()]
        shown.append(
            [name, *("-" if each is None else f"{each['tokens per call']:.3f} ± {each['error']:.3f}" for each in cells)]
        )
    print(markdown(("drafts", *figures), shown), end="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbone", type=Path, help="its directory, or `box`")
    parser.add_argument(
        "--head", type=Path, default=Path("demo-eagle3"), help="its directory; trained where there is none"
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
    parser.add_argument("--expected", action="store_true", help="calculate what first drafts keep; count nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.backbone == Path("box"):
        figures = measure_box(arguments)
        replace_file(arguments.output, json.dumps(figures, indent=1))
        table(figures)
        return
    corpus, tokenizer = load_corpus(seed=0), EvaByteTokenizer(padding_side="left")
    backbone = LlamaForCausalLM.from_pretrained(arguments.backbone).eval()
    backbone.generation_config.eos_token_id = None
    head = trained(backbone, corpus, arguments).eval()
    if arguments.expected:
        texts = [
            tokenizer(text, return_tensors="pt")["input_ids"][0]
            for text in code_prompts(corpus.held_out.contents(), 384)
        ]
        expectations(head, torch.stack([text[-64:] for text in texts if len(text) >= 64][:128]), arguments)
        return
    prompts = tokenizer(beginnings(corpus, arguments.prompts, arguments.new_tokens), return_tensors="pt", padding=True)
    figures = measure(head, prompts, arguments)
    replace_file(arguments.output, json.dumps(figures, indent=1))
    table(figures)


if __name__ == "__main__":
    main()
