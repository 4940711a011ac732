"""Kernels, syncs and copies per cycle of every way of drafting, compared with plain decoding of the same model.

    python benchmarks/cycles.py
    python benchmarks/cycles.py --only trees n-gram

Small random models: what is counted depends on the code and hardly on the weights. An EAGLE head of random weights has
nearly every draft rejected, so that its rows stay even; the n-gram drafter finds drafts in prompts that repeat
themselves, and a copy of the backbone, a little noisier, drafts as a smaller model would: with them rows accept
differently, and batches are repacked.

The counts say what an accelerator would spend: there a small kernel costs its launch, and a wait of the host costs the
queue, and these bound a call while a model is small or a batch is short.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from measuring import llama, repeating_prompts, show
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import logging as transformers_logging

from tokenahead import (
    AssistantDrafter,
    BlockDrafter,
    DeepSeekMTP,
    EagleHead,
    EvaByteConfig,
    EvaByteForMTPC,
    LookaheadDrafter,
    MTPHeads,
    NgramDrafter,
    PTPForCausalLM,
    RecyclingDrafter,
)

TREE = {"depth": 3, "top_k": 3, "total_tokens": 10}
MODES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}
Ways = Iterator[tuple[str, Any, dict[str, Any]]]
"""Names, models that generate, and their options."""

_WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Counts(TorchDispatchMode):
    """Counts operators.

    Attributes:
        kernels: Operators that are no views.
        syncs: Reads of a value by the host: `.item()`, `.tolist()`, `bool()`, boolean indices, `nonzero`.
        copies: Tensors made of Python's numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.syncs = self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one and runs it."""
        name = func._schema.name.split("::")[-1]
        masks = name in _INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        self.kernels += not func.is_view
        self.syncs += name in _WAITS or masks
        self.copies += name == "lift_fresh"
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Sees `.tolist()`, which is no operator."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.syncs += func is torch.Tensor.tolist
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts what runs inside."""
    with Counts() as counts, _Lists(counts):
        yield counts


def per_cycle(generate: Callable[[int], Any], new_tokens: int = 64) -> dict[str, float]:
    """Kernels, syncs and copies per cycle of `generate`, beyond what the prompt's own pass counts.

    Args:
        generate: Decodes so many tokens, and returns the output with its statistics, or without any where it decoded
            plainly.
        new_tokens: Of the long call.

    Returns:
        The three counts.
    """
    with counted() as short:
        generate(1)
    with counted() as whole:
        out = generate(new_tokens)
    told = getattr(out, "speculation", None)
    cycles = max((new_tokens if told is None else told.backbone_calls) - 1, 1)
    return {name: (getattr(whole, name) - getattr(short, name)) / cycles for name in ("kernels", "syncs", "copies")}


def backbone() -> Any:
    """A small Llama."""
    return llama(32, 4, intermediate_size=64, num_attention_heads=2)


def evabyte() -> Ways:
    """EvaByte with every head family."""
    shape = dict(vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
    for kind in ("ff", "cp", "hmm", "btree"):
        head = {"head_type": kind, "rank": 1 if kind == "ff" else 4, "window": 8}
        config = EvaByteConfig(**shape, chunk_size=16, window_size=512, num_pred_heads=8, mtp_head=head)
        yield f"EvaByte, {kind}", EvaByteForMTPC(config).eval(), {}


def heads() -> Ways:
    """Heads apart from their backbone."""
    for kind in ("ff", "btree", "medusa", "hydra"):
        model = backbone()
        yield f"heads, {kind}", model, {"assistant_model": MTPHeads.from_backbone(model, 4, head_type=kind)}


def trees() -> Ways:
    """An EAGLE head, as chains and as trees."""
    model = backbone()
    head = EagleHead.from_backbone(model, version=3, aux_layers=[0, 1, 2])
    yield "EAGLE-3, chain", model, {"assistant_model": head, "num_assistant_tokens": 3}
    yield "EAGLE-3, tree", model, {"assistant_model": head, "draft_tree": TREE}


def blocks() -> Ways:
    """A block drafter, as chains and as trees."""
    model = backbone()
    drafter = BlockDrafter.from_backbone(model, law="markov", layers=1, block_size=3)
    yield "block, chain", model, {"assistant_model": drafter, "num_assistant_tokens": 3}
    yield "block, tree", model, {"assistant_model": drafter, "draft_tree": TREE | {"depth": 2}}


def ngrams() -> Ways:
    """Look-ups in the text, as chains and as trees, of recycled candidates, and lookahead."""
    for branches in (1, 3):
        model = backbone()
        yield f"n-gram, {branches} branches", model, {"assistant_model": NgramDrafter(branches=branches).attach(model)}
    model = backbone()
    yield "recycled candidates", model, {"assistant_model": RecyclingDrafter(total_tokens=16).attach(model)}
    model = backbone()
    yield "lookahead", model, {"assistant_model": LookaheadDrafter(3, 4, 2).attach(model)}


def assistants() -> Ways:
    """A second model."""
    model = backbone()
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for weight in noisy.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight)) if weight.dim() > 1 else None
    drafter = AssistantDrafter(noisy).attach(model)
    yield "assistant, 3 tokens", model, {"assistant_model": drafter, "num_assistant_tokens": 3}


def modules() -> Ways:
    """Two sequential modules."""
    yield "modules, 2 tokens", DeepSeekMTP.from_backbone(backbone(), num_modules=2).eval(), {"num_assistant_tokens": 2}


def slots() -> Ways:
    """Parallel token prediction."""
    for variant in ("one_hot", "categorical"):
        yield f"PTP, {variant}", PTPForCausalLM.from_backbone(backbone(), num_slots=4, variant=variant).eval(), {}


WAYS: dict[str, Callable[[], Ways]] = {
    "evabyte": evabyte, "heads": heads, "trees": trees, "blocks": blocks, "n-gram": ngrams, "assistant": assistants,
    "modules": modules, "ptp": slots,
}  # fmt: skip


def decode(model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any], new_tokens: int) -> Any:
    """One `generate` that always samples the same."""
    torch.manual_seed(0)
    return model.generate(
        **inputs, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, **options
    )


def prompts(batch: int) -> dict[str, torch.Tensor]:
    """Texts that repeat themselves; where there are several, the first is padded on the left."""
    ids = repeating_prompts(batch, 10, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = batch == 1
    return {"input_ids": ids, "attention_mask": mask}


def row(model: Any, batch: int, how: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Tokens per call, and the counts of a way to draft."""
    inputs = prompts(batch)
    plain = {} if "assistant_model" in options else {"use_mtp": False}
    bare = per_cycle(partial(decode, model, inputs, how | plain))
    mine = per_cycle(partial(decode, model, inputs, how | options))
    rate = decode(model, inputs, how | options, 64).speculation.tokens_per_call
    over = f"{mine['kernels'] - bare['kernels']:.0f} of {bare['kernels']:.0f}"
    return [f"{rate:.2f}", over, f"{mine['syncs']:.2f}", f"{mine['copies']:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 3])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    rows = [
        [name, str(batch), mode, *row(model, batch, how, options)]
        for kind in arguments.only
        for name, model, options in WAYS[kind]()
        for batch, (mode, how) in product(arguments.batch, MODES.items())
    ]
    show(("drafts", "batch", "mode", "tokens per call", "kernels over plain", "syncs", "copies"), rows, width=120)


if __name__ == "__main__":
    main()
