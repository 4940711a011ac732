"""Vocabularies of two models: of one tokenizer, each padded to its own size (Qwen2.5: 151,936 and 152,064 ids), or of
two tokenizers that have some tokens in common.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from ...modeling.masks import cached_arange
from ..call.constraints import DraftMasks
from ..call.options import DraftOptions

_LEAST = 1e-30
"""Probability of tokens that an assistant lacks: logits processors may leave no others."""


class SharedVocabulary:
    """The ids by which an assistant and its backbone mean the same tokens: 0 .. `shared` - 1.

    Args:
        own: Ids of the assistant.
        theirs: Ids of the backbone.
        shared: How many of them are the same.
    """

    def __init__(self, own: int, theirs: int, shared: int) -> None:
        self.own, self.theirs, self.shared = own, theirs, shared
        self.is_whole = own == theirs == shared

    def readable(self, ids: Tensor) -> Tensor:
        """Return ids that the assistant can embed: for those that it lacks, its last one."""
        return ids if self.own >= self.theirs else ids.clamp(max=self.own - 1)

    def choose(
        self, logits: Tensor, options: DraftOptions, masks: DraftMasks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens [B], and the distributions that they were drawn from (`DraftOptions.choose`)."""
        if self.is_whole:
            return options.choose(logits, masks=masks)
        return options.choose(logits[..., : self.shared], cached_arange(self.shared, logits.device), self.theirs, masks)

    def fitted(self, probs: Tensor) -> Tensor:
        """Return the assistant's probabilities [..., own] over the ids of the backbone, [..., theirs]."""
        if self.is_whole:
            return probs
        probs = torch.nn.functional.pad(probs[..., : self.shared], (0, self.theirs - self.shared)).clamp(min=_LEAST)
        return probs / probs.sum(-1, keepdim=True)


class CommonVocabulary(SharedVocabulary):
    """The tokens that the vocabularies of two tokenizers have in common: an assistant drafts these alone.

    Its distribution is restricted to them, and normalised again.

    Args:
        own: Ids of the assistant.
        theirs: Ids of the backbone.
        own_ids: [N] int64, the assistant's ids of the common tokens.
        ids: [N] int64, the backbone's, rising.
    """

    def __init__(self, own: int, theirs: int, own_ids: Tensor, ids: Tensor) -> None:
        super().__init__(own, theirs, len(ids))
        self.own_ids, self.ids = own_ids, ids
        self.own_id_of = own_ids.new_zeros(theirs).index_copy(0, ids, own_ids)

    def readable(self, ids: Tensor) -> Tensor:
        """Return the assistant's ids of common tokens."""
        return self.own_id_of[ids]

    def choose(
        self, logits: Tensor, options: DraftOptions, masks: DraftMasks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens [B] of the backbone, and the distributions that they were drawn from."""
        return options.choose(logits[..., self.own_ids], self.ids, self.theirs, masks)


class OwnVocabulary(SharedVocabulary):
    """All that an assistant can write, which is translated as text: its likeliest tokens, in ids of its own."""

    def __init__(self, own: int) -> None:
        super().__init__(own, own, own)

    def choose(
        self, logits: Tensor, options: DraftOptions, masks: DraftMasks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens [B] of the assistant, and their distributions where a threshold asks for them."""
        return logits.argmax(-1), logits.float().softmax(-1) if options.threshold else None


def shared_vocabulary(assistant: PreTrainedModel, backbone: PreTrainedModel, shared: int | None) -> SharedVocabulary:
    """Return what two models share.

    Args:
        assistant: Drafts.
        backbone: Verifies.
        shared: How many ids mean the same token in both, as the user says; None: where the models have different
            numbers of ids, the tokenizers beside them say it.

    Raises:
        ValueError: Nothing, or more than there is.
    """
    own, theirs = (model.config.get_text_config().vocab_size for model in (assistant, backbone))
    if shared is None and own != theirs:
        shared = _of_tokenizers(assistant, backbone)
    if shared is None:
        shared = own
    if isinstance(shared, bool) or not isinstance(shared, int) or not 1 <= shared <= min(own, theirs):
        sizes = f"the assistant has {own} ids, the backbone {theirs}"
        raise ValueError(f"vocab_size={shared!r} must be a whole number from 1 to {min(own, theirs)}: {sizes}")
    return SharedVocabulary(own, theirs, shared)


def _of_tokenizers(assistant: PreTrainedModel, backbone: PreTrainedModel) -> int:
    """Return how many ids the tokenizers of two models share, where one knows all tokens of the other."""
    own, theirs = (
        f"{type(model).__name__} has {model.config.get_text_config().vocab_size} ids" for model in (assistant, backbone)
    )
    sizes = f"vocab_size: the assistant {own}, but {theirs}; they must share a tokenizer"
    others = "; tokenizer= and assistant_tokenizer= let an assistant with another one draft"
    first, second = (_tokens(model) for model in (assistant, backbone))
    if first is None or second is None:
        bare = "assistant" if first is None else "backbone"
        raise ValueError(
            f"{sizes}; beside the {bare} is none: AssistantDrafter(model, vocab_size=len(tokenizer)){others}"
        )
    fewer, more = sorted((first, second), key=len)
    other = next((token for token, index in fewer.items() if more.get(token) != index), None)
    if other is not None:
        ids = first.get(other), second.get(other)
        names = f"{other!r} is id {ids[0]} in the assistant's, {ids[1]} in the backbone's"
        raise ValueError(f"{sizes}, and {names}{others}")
    return max(fewer.values()) + 1


def _tokens(model: PreTrainedModel) -> dict[str, int] | None:
    """Return the tokens of the tokenizer that lies where a model was loaded from; None: there is none."""
    name: Any = model.config.name_or_path
    try:
        return AutoTokenizer.from_pretrained(name).get_vocab() if name else None
    except (OSError, ValueError, KeyError):
        return None
