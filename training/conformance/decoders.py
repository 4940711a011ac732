"""Decoding functions to verify: plain decoding, transformers' own loops with drafts, and this library's drafters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ...generation.assistant.drafter import AssistantDrafter
from ...generation.attach import AttachableDrafter
from ...generation.lookups.lookahead import LookaheadDrafter
from ...generation.lookups.ngram import NgramDrafter
from ...generation.lookups.recycling import RecyclingDrafter
from ...generation.lookups.suffix import SuffixDrafter
from ...generation.tensors.wrapped_models import untyped
from ...modeling import BlockDrafter, EagleHead, MTPHeads
from .checkpoints import block_folder, model_with_modules


class Decoder(Protocol):
    """A decoding function: what it is given is what `generate` of a plain model would be given."""

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
        """Return the prompts [B, L] and what was written after them, [B, L + T] int64.

        Args:
            model: A small causal language model in float64.
            input_ids: [B, L] int64, padded on the left with 0.
            **options: Of `generate`: `attention_mask`, `max_new_tokens`, `do_sample`, `temperature`, `top_k`,
                `eos_token_id`, `stop_strings` with `tokenizer`, `repetition_penalty`, `logits_processor`.
        """
        ...


MakesModel = Callable[[int, int], PreTrainedModel]
"""Makes a small model in float64 from a seed and the size of its vocabulary."""


def small_model(seed: int = 0, vocab_size: int = 6, width: int = 16) -> PreTrainedModel:
    """Return a random Llama in float64 whose distributions are neither flat nor sharp."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=128, initializer_range=2 * width**-0.5, **sizes, **ids
    )
    return untyped(LlamaForCausalLM(config)).double().eval()


@torch.no_grad()
def disturbed(model: PreTrainedModel, by: float = 0.15) -> PreTrainedModel:
    """Return a copy whose weights are a little off, to draft for the model: some of its drafts are right."""
    twin, draws = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for each in twin.parameters():
        each.add_(torch.randn(each.shape, generator=draws, dtype=each.dtype) * by)
    return twin


@cache
def _assistant(model: PreTrainedModel) -> PreTrainedModel:
    return disturbed(model)


def plain(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    """Decode one token at a time, in transformers' own loop."""
    return untyped(GenerationMixin).generate(model, input_ids, **options)


def assisted(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    """Decode in transformers' own loop, with a disturbed copy as the assistant."""
    return plain(model, input_ids, assistant_model=_assistant(model), **options)


def prompt_lookup(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    """Decode in transformers' own loop, with n-grams of the prompt."""
    return plain(model, input_ids, prompt_lookup_num_tokens=3, **options)


def own_modules(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    """Decode with the model's own modules in transformers' own loop (`use_mtp`)."""
    return plain(model, input_ids, use_mtp=True, **options)


@dataclass(frozen=True)
class OnModels:
    """A decoding function on models that the kit takes in place of its own.

    Attributes:
        decode: The function.
        small_model: Makes such a model.
    """

    decode: Decoder
    small_model: MakesModel

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
        """Decode."""
        return self.decode(model, input_ids, **options)


def drafted_by(made: Callable[[PreTrainedModel], AttachableDrafter], **own: Any) -> Decoder:
    """Return decoding with a drafter of this library; `own` are further options of `generate`."""

    def decode(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
        drafter = made(model).attach(model)
        try:
            return untyped(model).generate(input_ids, assistant_model=drafter, **own, **options)
        finally:
            drafter.detach()

    return decode


def _shaken(drafter: Any) -> Any:
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for each in drafter.parameters():
            each.add_(torch.randn(each.shape, generator=draws).to(each) * 0.1)
    return drafter.eval()


def _eagle(model: PreTrainedModel) -> Any:
    return _shaken(EagleHead.from_backbone(model, aux_layers=[0, 1, 2]))


DECODERS: dict[str, Decoder] = {
    "transformers: plain": plain,
    "transformers: assistant": assisted,
    "transformers: prompt lookup": prompt_lookup,
    "transformers: use_mtp": OnModels(own_modules, model_with_modules),
    "ngram": drafted_by(lambda model: NgramDrafter(num_tokens=6)),
    "suffix": drafted_by(lambda model: SuffixDrafter(num_tokens=6)),
    "recycling": drafted_by(lambda model: RecyclingDrafter()),
    "lookahead": drafted_by(lambda model: LookaheadDrafter(5, 4, 4)),
    "assistant": drafted_by(lambda model: AssistantDrafter(_assistant(model))),
    "assistant, by token": drafted_by(lambda model: AssistantDrafter(_assistant(model)), verification="token"),
    "heads": drafted_by(lambda model: _shaken(MTPHeads.from_backbone(model, unembedding="own"))),
    "hmm heads": drafted_by(
        lambda model: _shaken(MTPHeads.from_backbone(model, head_type="hmm", rank=2, unembedding="own"))
    ),
    "EAGLE": drafted_by(_eagle),
    "dflash": drafted_by(lambda model: BlockDrafter.from_pretrained(block_folder(model)).to(model.dtype).eval()),
    "EAGLE, as a tree": drafted_by(_eagle, draft_tree={"depth": 3, "top_k": 2, "total_tokens": 6}),
}
"""What `tokenahead verify` looks at, by name."""
