"""Decoding functions to verify, and a small model: plain decoding, transformers' drafts, this library's drafters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from ...generation.assistant.drafter import AssistantDrafter
from ...generation.attach import AttachableDrafter
from ...generation.lookups.lookahead import LookaheadDrafter
from ...generation.lookups.ngram import NgramDrafter
from ...generation.lookups.recycling import RecyclingDrafter
from ...generation.lookups.suffix import SuffixDrafter
from ...generation.tensors.wrapped_models import untyped
from ...modeling import BlockDrafter, EagleHead, MTPHeads


class Decoder(Protocol):
    """A decoding function: what it is given is what `generate` of a plain model would be given."""

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
        """Return the prompts [B, L], padded on the left with 0, and what was written after them, [B, L + T] int64.

        `options` are those of `generate`: `attention_mask`, `max_new_tokens`, `do_sample`, `temperature`, `top_k`,
        `eos_token_id`, `stop_strings` with `tokenizer`, `repetition_penalty`, `logits_processor`, ...
        """
        ...


def small_model(seed: int = 0, vocab_size: int = 6, width: int = 16) -> PreTrainedModel:
    """Return a random Llama in float64 whose distributions are neither flat nor sharp."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=128, initializer_range=2 * width**-0.5, **sizes, **ids
    )
    return untyped(LlamaForCausalLM(config)).double().eval()


def letters(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token i is the i-th letter."""
    known = {chr(97 + index if index < 26 else 0x100 + index): index for index in range(size)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@torch.no_grad()
def disturbed(model: PreTrainedModel, by: float = 0.15) -> PreTrainedModel:
    """Return a copy whose weights are a little off, to draft for the model: some of its drafts are right."""
    twin, draws = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for each in twin.parameters():
        each.add_(torch.randn(each.shape, generator=draws, dtype=each.dtype) * by)
    return twin


_assistant = cache(disturbed)


def plain(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    """Decode one token at a time, in transformers' own loop."""
    return untyped(GenerationMixin).generate(model, input_ids, **options)


def _assisted(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    return plain(model, input_ids, assistant_model=_assistant(model), **options)


def drafted_by(made: Callable[[PreTrainedModel], AttachableDrafter], **own: Any) -> Decoder:
    """Return decoding with a drafter of this library; `own` are further options of `generate`."""

    def decode(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
        drafter = made(model).attach(model)
        try:
            return untyped(model).generate(input_ids, assistant_model=drafter, **own, **options)
        finally:
            drafter.detach()

    return decode


block_drafter = partial(
    BlockDrafter.from_backbone, law="independent", sample_from_anchor=False, layers=1, block_size=4, feature_layers=[1],
    mask_token_id=1,
)  # fmt: skip
"""Makes a DFlash drafter of a model."""
_heads = partial(MTPHeads.from_backbone, unembedding="own")
_eagle = partial(EagleHead.from_backbone, aux_layers=[0, 1, 2])
DECODERS: dict[str, Decoder] = {
    "transformers: plain": plain,
    "transformers: assistant": _assisted,
    "transformers: prompt lookup": partial(plain, prompt_lookup_num_tokens=3),
    "ngram": drafted_by(lambda model: NgramDrafter(num_tokens=6)),
    "suffix": drafted_by(lambda model: SuffixDrafter(num_tokens=6)),
    "recycling": drafted_by(lambda model: RecyclingDrafter()),
    "lookahead": drafted_by(lambda model: LookaheadDrafter(5, 4, 4)),
    "assistant": drafted_by(lambda model: AssistantDrafter(_assistant(model))),
    "assistant, by token": drafted_by(lambda model: AssistantDrafter(_assistant(model)), verification="token"),
    "heads": drafted_by(_heads),
    "hmm heads": drafted_by(partial(_heads, head_type="hmm", rank=2)),
    "EAGLE": drafted_by(_eagle),
    "dflash": drafted_by(block_drafter),
    "EAGLE, as a tree": drafted_by(_eagle, draft_tree={"depth": 3, "top_k": 2, "total_tokens": 6}),
}
"""What `tokenahead verify` looks at, by name."""
