"""Drafts of a smaller language model, which has its own cache and reads the same tokens as the backbone.

Models of one tokenizer may pad their vocabularies to different sizes (Qwen2.5: 151,936 and 152,064 ids).
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

from ...configuration.cache_names import CACHE
from ...configuration.fields import learned_positions
from ..backbone.backbones import keep_all_columns, keep_window_columns, target_of
from ..call.constraints import DraftMasks
from ..call.options import DraftOptions, grow_chain
from ..call.sequences import NewTokens, Sequences
from ..contract import CacheView, DraftSession, DraftTree, PrefillOutput, TargetOutput, VerificationResult
from ..tensors.masks import cached_arange

_NO_TABLE = 2**31  # positions of models that look none up
_LEAST = 1e-30  # probability of tokens that an assistant lacks: logits processors may leave no others


class SharedVocabulary:
    """The ids by which an assistant (of `own` ids) and its backbone (of `theirs`) mean the same: 0 .. `shared` - 1."""

    def __init__(self, own: int, theirs: int, shared: int) -> None:
        self.own, self.theirs, self.shared = own, theirs, shared
        self.is_whole = own == theirs == shared

    def readable(self, ids: Tensor) -> Tensor:
        """Return ids that the assistant can embed: its last one where it lacks an id."""
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
        return probs / probs.sum(-1, keepdim=True)  # [..., theirs]


class AssistantSession(DraftSession):
    """The drafts of one call.

    Between cycles the assistant's cache holds all tokens but the last two of every sequence: a fully accepted draft
    ends with a token that the assistant never read, and so all sequences read as many tokens. It holds fewer where
    another session drafted (`DrafterCascade`), or none: the next draft begins with what is missing.

    Attributes:
        missing: How many tokens of every sequence before its last two have no columns.
        lag: Missing tokens that were read right before the last draft.
        draft: The draft of this cycle, [B, m]; None: there is none.
    """

    supports_confidence_threshold = True

    def __init__(self, model: PreTrainedModel, options: DraftOptions, vocabulary: SharedVocabulary) -> None:
        self.model, self.options, self.num_tokens = model, options, options.num_tokens
        self.vocabulary = vocabulary
        self.missing, self.lag = [0] * len(options.prompt), 0
        self.draft: Tensor | None = None
        self.table = learned_positions(model.config.get_text_config()) or _NO_TABLE  # beyond it nothing is drafted

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        self.view = view
        prompt, mask = self._prompt(view)
        self._read(self.vocabulary.readable(prompt[:, :-1]), mask[:, :-1])

    def _prompt(self, view: CacheView) -> tuple[Tensor, Tensor]:
        """Return the prompt and its mask [B, L]; of a call that continues a cache, what the cache has columns of."""
        prompt = self.options.prompt
        mask = torch.ones_like(prompt) if view.mask is None else view.mask[:, -prompt.shape[1] :]  # [B, L]
        return prompt[:, prompt.shape[1] - mask.shape[1] :], mask

    def _read(self, prompt: Tensor, mask: Tensor, span: int = 0) -> None:
        """Read ids [B, L] of the assistant, some of them padding; `span` columns may be read again."""
        cache, device = DynamicCache(config=self.model.config), self.model.device
        if span:  # layers with a window keep what may be fed again
            keep_all_columns(cache)
        if 0 < prompt.shape[1] <= self.table:
            positions = (mask.cumsum(1) - 1).clamp(min=0)  # [B, L]
            self.model(
                prompt.to(device),
                attention_mask=mask.long().to(device),
                position_ids=positions.to(device),
                **{CACHE: cache},
                use_cache=True,
            )
        if span:
            keep_window_columns(cache, span)
        room = self.options.max_length, self.num_tokens + 2 + span
        self.target = target_of(self.model, cache, mask.new_empty(len(mask), device=device), mask, None, *room)
        if self.table < _NO_TABLE:
            self.target.last_position = self.table - 1

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        length = min(length, self.table + 1 - max(tokens.lengths))
        self.tokens, self.draft = tokens, None
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        self._catch_up(tokens)
        logits = self._extend(self.vocabulary.readable(tokens.newest(2 + self.lag)))
        tree = self._chain(logits, length, tokens)
        self.draft = tree.tokens
        return tree

    def _catch_up(self, tokens: Sequences) -> None:
        """Read what is missing where sequences differ in its length; else the next block begins with it."""
        most = max(self.missing)
        self.lag = most if min(self.missing) == most else 0
        if self.lag < most:
            missing = NewTokens(self.missing, tokens.ids.device)
            first = tokens.ends[:, None] - 2 - missing.on_device[:, None]  # [B, 1]
            block = tokens.at(first + cached_arange(most, first.device))  # fewer are missing where one has ended
            self._extend(self.vocabulary.readable(block))
            self.target.keep(missing)
        self.missing = [0] * len(self.missing)

    def _extend(self, block: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Read ids [B, F] after the last ones, and return logits [B, V] of the next token."""
        options = {} if position_ids is None else {"position_ids": position_ids}
        return self.target.extend(block.to(self.model.device), logits_to_keep=1, **options).logits[:, -1]  # [B, V]

    def _chain(self, logits: Tensor, length: int, tokens: Sequences) -> DraftTree:
        """Return a chain after every sequence, whose next token has the logits [B, V]."""
        masks = self.options.masks(tokens)

        def step(token: Tensor | None) -> tuple[Tensor, Tensor | None]:
            following = logits if token is None else self._extend(self.vocabulary.readable(token)[:, None])  # [B, V]
            return self.vocabulary.choose(following.to(tokens.ids.device), self.options, masks)

        return grow_chain(step, self.options, length)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Leave in the assistant's cache its columns of the accepted tokens, but for the last two."""
        new = self.view.new_tokens
        if self.draft is None:
            self.missing = [old + count for old, count in zip(self.missing, new.counts)]
            return
        if max(self.tokens.drafted_on_host) > self.draft.shape[1]:  # other drafts were verified along with it
            width = min(self.draft.shape[1], result.tokens.shape[1])
            same = (self.draft[:, :width] == result.tokens[:, :width]).long().cumprod(1).sum(1).tolist()
            read = [min(count, 2 + right) for count, right in zip(new.counts, same)]
            self.missing = [count - known for count, known in zip(new.counts, read)]
            new = NewTokens(read, new.device)
        if self.lag:
            new = NewTokens([count + self.lag if count else 0 for count in new.counts], new.device)
        self.target.keep(new)


def shared_vocabulary(assistant: PreTrainedModel, backbone: PreTrainedModel, shared: int | None) -> SharedVocabulary:
    """Return the vocabulary of `shared` ids that two models share; None: tokenizers decide where their sizes differ.

    Raises:
        ValueError: No common ids, or more than there are.
    """
    own, theirs = (model.config.get_text_config().vocab_size for model in (assistant, backbone))
    count: int = own if shared is None and own == theirs else shared or 0
    if shared is None and own != theirs:
        count = _of_tokenizers(assistant, backbone)
    if not 1 <= count <= min(own, theirs):
        sizes = f"{type(assistant).__name__} has {own} ids, and {type(backbone).__name__} {theirs}"
        raise ValueError(
            f"vocab_size={count!r} must be from 1 to {min(own, theirs)}: {sizes}. Set it to len(tokenizer) where both "
            "share one; tokenizer= and assistant_tokenizer= let an assistant with another one draft"
        )
    return SharedVocabulary(own, theirs, count)


def _of_tokenizers(*both: PreTrainedModel) -> int:
    """Return how many ids the tokenizers of two models share, where one knows all tokens of the other; else 0."""
    fewer, more = sorted((_tokens(model) for model in both), key=len)
    is_part = all(more.get(token) == index for token, index in fewer.items())
    return max(fewer.values()) + 1 if fewer and is_part else 0


def _tokens(model: PreTrainedModel) -> dict[str, int]:
    """Return the tokens of the tokenizer that lies where a model was loaded from; none where there is no tokenizer."""
    name = model.config.name_or_path
    try:
        return AutoTokenizer.from_pretrained(name).get_vocab() if name else {}
    except (OSError, ValueError, KeyError):
        return {}
