"""Chains against trees of drafts, of a trained EAGLE-3 head and of the heads in the box: tokens per call.

    python benchmarks/byte_llama.py --minutes 5 --output demo-llama
    python benchmarks/trees.py demo-llama --seconds 240 --head demo-eagle3      # trains the head and keeps it
    python benchmarks/trees.py demo-llama --head demo-eagle3 --total 60 --depth 6 --top-k 10
    python benchmarks/trees.py box --depth 5 --temperatures 1                   # the heads of the EvaByte in the box

The official rule of EAGLE-2 and 3 at a temperature drafts the most likely tokens and verifies them as deterministic
(q = 1); a drawn tree of the same budget holds draws from the head's warped distributions, verified by recursive
rejection or by traversal. Tokens per call are counted over the cycles of all rows, with their standard error. Of the
box, every prompt is a separate call, and bytes per second, which depend on the machine, are written, too.
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
from corpus import load_corpus
from measuring import accepted_of, markdown
from studies import beginnings, features_of, train
from transformers import LlamaForCausalLM

from tokenahead import EagleHead, EvaByteTokenizer
from tokenahead.generation.trees import choices_from_accuracies
from tokenahead.training.box import box_directory, heads_in, load_box
from tokenahead.training.demo import box_model
from tokenahead.training.evaluation import rank_accuracies
from tokenahead.training.strategy import TrainingStrategy
from tokenahead.training.utils import replace_file


@contextmanager
def deterministic(head: EagleHead) -> Iterator[None]:
    """Lets the head draft its most likely tokens where text is sampled, as the official code does."""
    make = type(head).start
    head.start = lambda options: make(head, replace(options, do_sample=False))
    try:
        yield
    finally:
        del head.start


def trained(backbone: Any, arguments: argparse.Namespace) -> EagleHead:
    """The head in its directory, or a new one after its time."""
    if (arguments.head / "config.json").exists():
        return EagleHead.from_pretrained(arguments.head).attach(backbone).eval()
    torch.manual_seed(0)
    layers = backbone.config.num_hidden_layers
    head = EagleHead.from_backbone(backbone, version=3, aux_layers=[1, layers // 2, layers - 1])
    head.loss_options.steps = 4
    kept = features_of(head, load_corpus(), arguments.rows, arguments.head.with_name("features"))
    train(head, TrainingStrategy(), kept, arguments.seconds, 2e-3)
    head.save_pretrained(arguments.head)
    return head.eval()


def counted(backbone: Any, prompts: dict[str, torch.Tensor], new: int, **options: Any) -> dict[str, float]:
    """Tokens per call and its standard error, over all cycles of all rows."""
    torch.manual_seed(0)
    begun = time.perf_counter()
    out = backbone.generate(**prompts, max_new_tokens=new, pad_token_id=0, return_dict_in_generate=True, **options)
    kept, seconds = torch.tensor(accepted_of(out)) + 1.0, time.perf_counter() - begun
    error = float(kept.std() / len(kept) ** 0.5)
    return {"tokens per call": float(kept.mean()), "error": error, "cycles": len(kept), "seconds": seconds}


def shapes(asked: argparse.Namespace, longest: int | None = None) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    """The tree, and chains as deep and as large as it, as far as there are so long ones, by name."""
    lengths = (asked.depth + 1, min(asked.total - 1, longest or asked.total))
    tree = {"depth": asked.depth, "top_k": asked.top_k, "total_tokens": asked.total}
    return tree, {f"chain of {length}": {"num_assistant_tokens": length} for length in lengths}


def sampling(heat: float) -> dict[str, Any]:
    """Options of `generate` for a temperature."""
    return {"do_sample": False} if heat == 0 else {"do_sample": True, "temperature": heat, "top_k": 0}


def measure(head: EagleHead, prompts: dict[str, torch.Tensor], arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways to draft, at all temperatures."""
    (tree, chains), figures, common = (
        shapes(arguments),
        dict[str, Any](),
        (head.backbone, prompts, arguments.new_tokens),
    )
    for heat in arguments.temperatures:
        how = {"assistant_model": head} | sampling(heat)
        rows = {name: counted(*common, **options, **how) for name, options in chains.items()}
        with deterministic(head):
            rows["most likely tokens (official, q = 1)"] = counted(*common, draft_tree=tree, **how)
        for rule, name in {"token": "drawn tree, recursion", "block": "drawn tree, traversal"}.items() if heat else ():
            rows[name] = counted(*common, draft_tree=tree, verification=rule, **how)
        figures[f"T = {heat:g}"] = rows
    return figures


def measure_box(arguments: argparse.Namespace) -> dict[str, Any]:
    """Chains and trees of every head in the box, prompt by prompt, after the same prompts of held-out code."""
    texts = [prompt.turns[0] for prompt in box_model(prompts=arguments.prompts + 4).prompts]
    figures: dict[str, Any] = {}
    for name in heads_in(box_directory()):
        model, tokenizer = load_box(name)
        model.generation_config.eos_token_id = None
        tree, chains = shapes(arguments, model.longest_draft())
        prompts = [tokenizer(text, return_tensors="pt") for text in texts]
        for heat in arguments.temperatures:
            how, rows = sampling(heat), figures.setdefault(f"{name}, T = {heat:g}", {})
            shape = fixed_shape(model, prompts[-4:], arguments, heat, how)
            for kind, options in (chains | {"tree": {"draft_tree": tree}, "fixed tree": {"draft_tree": shape}}).items():
                found = [counted(model, prompt, arguments.new_tokens, **options, **how) for prompt in prompts[:-4]]
                cycles = torch.tensor([each["cycles"] for each in found])
                kept = torch.tensor([each["tokens per call"] for each in found]) * cycles
                rows[kind] = {
                    "tokens per call": float(kept.sum() / cycles.sum()),
                    "error": float((kept - cycles * kept.sum() / cycles.sum()).norm() / cycles.sum()),
                    "bytes per second": len(found) * arguments.new_tokens / sum(each["seconds"] for each in found),
                }
    return figures


def fixed_shape(model: Any, prompts: list[Any], arguments: argparse.Namespace, heat: float, how: Any) -> Any:
    """The shape of the trees' size that keeps most where every depth has its accuracies along plain outputs."""
    torch.manual_seed(1)
    batches = []
    for prompt in prompts:
        ids = model.generate(**prompt, **how, max_new_tokens=arguments.new_tokens, use_mtp=False)
        labels = ids.clone()
        labels[:, : prompt["input_ids"].shape[1]] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return choices_from_accuracies(rank_accuracies(model, batches, temperature=heat), arguments.total - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbone", type=Path, help="its directory, or `box`")
    parser.add_argument("--head", type=Path, default=Path("demo-eagle3"), help="a directory; trained where it is none")
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
    if arguments.backbone == Path("box"):
        figures = measure_box(arguments)
    else:
        backbone = LlamaForCausalLM.from_pretrained(arguments.backbone).eval()
        backbone.generation_config.eos_token_id = None
        texts = beginnings(load_corpus(), arguments.prompts, arguments.new_tokens)
        prompts = EvaByteTokenizer(padding_side="left")(texts, return_tensors="pt", padding=True)
        figures = measure(trained(backbone, arguments), prompts, arguments)
    replace_file(arguments.output, json.dumps(figures, indent=1))
    shown = []
    for name in dict.fromkeys(name for rows in figures.values() for name in rows):
        cells = [rows.get(name) for rows in figures.values()]
        pairs = ("-" if each is None else f"{each['tokens per call']:.3f} ± {each['error']:.3f}" for each in cells)
        shown.append([name, *pairs])
    print(markdown(("drafts", *figures), shown), end="")


if __name__ == "__main__":
    main()
