"""Kernels, syncs and copies per cycle of every way of drafting, beside plain decoding of the same model.

    python benchmarks/cycles.py
    python benchmarks/cycles.py --only trees n-gram

Small random models: what is counted depends on the code and hardly on the weights. An EAGLE head of random weights has
nearly every draft rejected, so that its rows stay even; the n-gram drafter finds drafts in prompts that repeat
themselves, and a copy of the backbone, a little noisier, drafts as a smaller model would: with them rows accept
differently, and batches are repacked.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from counting import per_cycle
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers import logging as transformers_logging

from tokenahead import (
    AssistantDrafter,
    DeepSeekMTP,
    EagleHead,
    EvaByteConfig,
    EvaByteForMTPC,
    MTPHeads,
    NgramDrafter,
    PTPForCausalLM,
)

SHAPE = dict(vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
TREE = {"depth": 3, "top_k": 3, "total_tokens": 10}
MODES: dict[str, dict[str, Any]] = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}
Ways = Iterator[tuple[str, PreTrainedModel, dict[str, Any]]]


def llama() -> LlamaForCausalLM:
    """A small backbone."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=None, pad_token_id=0)).eval()


def evabyte() -> Ways:
    """EvaByte with every head family."""
    for kind in ("ff", "cp", "hmm", "btree"):
        head = {"head_type": kind, "rank": 1 if kind == "ff" else 4, "window": 8}
        config = EvaByteConfig(**SHAPE, chunk_size=16, window_size=512, num_pred_heads=8, mtp_head=head)
        yield f"EvaByte, {kind}", EvaByteForMTPC(config).eval(), {}


def heads() -> Ways:
    """Heads that live apart."""
    for kind in ("ff", "btree", "medusa", "hydra"):
        backbone = llama()
        yield f"heads, {kind}", backbone, {"assistant_model": MTPHeads.from_backbone(backbone, 4, head_type=kind)}


def trees() -> Ways:
    """An EAGLE head, as chains and as trees."""
    backbone = llama()
    head = EagleHead.from_backbone(backbone, version=3, aux_layers=[0, 1, 2])
    yield "EAGLE-3, chain", backbone, {"assistant_model": head, "num_assistant_tokens": 3}
    yield "EAGLE-3, tree", backbone, {"assistant_model": head, "draft_tree": TREE}


def ngrams() -> Ways:
    """Look-ups in the text, as chains and as trees."""
    for branches in (1, 3):
        backbone = llama()
        drafter = NgramDrafter(branches=branches).attach(backbone)
        yield f"n-gram, {branches} branches", backbone, {"assistant_model": drafter}


def assistants() -> Ways:
    """A second model."""
    backbone = llama()
    noisy = copy.deepcopy(backbone)
    with torch.no_grad():
        for weight in noisy.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight)) if weight.dim() > 1 else None
    yield "assistant, 3 tokens", backbone, {
        "assistant_model": AssistantDrafter(noisy).attach(backbone), "num_assistant_tokens": 3,
    }  # fmt: skip


def modules() -> Ways:
    """Two sequential modules."""
    yield "modules, 2 tokens", DeepSeekMTP.from_backbone(llama(), num_modules=2).eval(), {"num_assistant_tokens": 2}


def slots() -> Ways:
    """Parallel token prediction."""
    for variant in ("one_hot", "categorical"):
        yield f"PTP, {variant}", PTPForCausalLM.from_backbone(llama(), num_slots=4, variant=variant).eval(), {}


WAYS: dict[str, Callable[[], Ways]] = {
    "evabyte": evabyte, "heads": heads, "trees": trees, "n-gram": ngrams, "assistant": assistants, "modules": modules,
    "ptp": slots,
}  # fmt: skip


def decode(model: PreTrainedModel, inputs: dict[str, torch.Tensor], options: dict[str, Any], new_tokens: int) -> Any:
    """One `generate` that always samples the same."""
    torch.manual_seed(0)
    return model.generate(
        **inputs, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, **options
    )


def prompts(batch: int) -> dict[str, torch.Tensor]:
    """Texts that repeat themselves, the first of which is padded on the left where there are several."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, 320, (batch, 10), generator=generator).repeat(1, 3)
    mask = torch.ones_like(ids)
    mask[0, :7] = batch == 1
    return {"input_ids": ids, "attention_mask": mask}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 3])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    table = Table("drafts", "batch", "mode", "tokens per call", "kernels over plain", "syncs", "copies")
    for kind in arguments.only:
        for name, model, options in WAYS[kind]():
            for batch in arguments.batch:
                for mode, how in MODES.items():
                    inputs = prompts(batch)
                    plain = {} if "assistant_model" in options else {"use_mtp": False}
                    bare = per_cycle(partial(decode, model, inputs, how | plain))
                    mine = per_cycle(partial(decode, model, inputs, how | options))
                    stats = decode(model, inputs, how | options, 64).speculation
                    over = f"{mine['kernels'] - bare['kernels']:.0f} of {bare['kernels']:.0f}"
                    rate, syncs, copies = (
                        f"{stats.tokens_per_call:.2f}",
                        f"{mine['syncs']:.2f}",
                        f"{mine['copies']:.2f}",
                    )
                    table.add_row(name, str(batch), mode, rate, over, syncs, copies)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
