"""Drafts of an assistant with another tokenizer, which reads the backbone's text in ids of its own (`translation`).

Two ways to draft; either leaves the backbone's text and its distribution as they are:

    common tokens    the assistant drafts tokens that both vocabularies have; they come with the distributions that they
                     were drawn from (Timor et al. 2025, 2502.05202)
    text             it goes on in all of its tokens, likeliest first, and their text is tokenised for the backbone:
                     certain tokens, in a number of its own for every sequence

Sequences have different numbers of new ids, and text may be tokenised anew: the assistant's columns end with the text
that is read, and every sequence is fed as many of its last ids as any sequence needs.
"""

from __future__ import annotations

from itertools import takewhile

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...modeling.masks import cached_range
from ..call.options import DraftOptions
from ..call.sequences import NewTokens, Sequences
from ..protocols import CacheView
from ..target.target import RowTarget, TargetOutput
from ..trees.contract import DraftTree, VerificationResult
from .assistant_session import AssistantSession
from .translation import Translation
from .vocabulary import CommonVocabulary, OwnVocabulary, SharedVocabulary

_AGAIN = 64
"""Columns that layers with an attention window keep for ids that are fed again."""


class TranslatedSession(AssistantSession):
    """What both ways share.

    Args:
        model: The assistant.
        options: Of the call.
        vocabulary: What it drafts.
        translation: Between the two models' ids.

    Attributes:
        scripts: What the assistant reads of every sequence.
        cached: Its ids that have columns in its cache, drafts after the text among them.
        ends: How many ids the texts had when they were last fed.
        sure: How many of them had been settled.
        read: How many ids the backbone's sequences had.
    """

    target: RowTarget

    def __init__(
        self, model: PreTrainedModel, options: DraftOptions, vocabulary: SharedVocabulary, translation: Translation
    ) -> None:
        super().__init__(model, options, vocabulary)
        self.translation = translation

    def begin(self, outputs: object, view: CacheView) -> None:
        """Reads the prompt."""
        prompt = self.options.prompt
        mask = torch.ones_like(prompt) if view.mask is None else view.mask[:, -prompt.shape[1] :]
        prompt = prompt[:, prompt.shape[1] - mask.shape[1] :]
        real = zip(prompt.tolist(), mask.tolist())
        rows = [[number for number, is_token in zip(ids, is_real) if is_token] for ids, is_real in real]
        self.scripts = self.translation.open(rows)
        self.cached, self.sure = [list(script.ids) for script in self.scripts], [0] * len(rows)
        self.ends, self.read = [len(ids) for ids in self.cached], [self.options.prompt.shape[1]] * len(rows)
        block = _padded(self.cached, max(self.ends), self.model.device)
        is_id = _padded([[1] * count for count in self.ends], max(self.ends), block.device)
        self._read(block, is_id, _AGAIN)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Nothing: the next draft begins with the text."""

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """A chain of up to `length` tokens after every sequence; it ends with a token of which no sequence was sure."""
        self._follow(tokens)
        length = min(length, self.table + 1 - max(len(script.ids) for script in self.scripts))
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        return self._drafted(self._feed(), tokens, length)

    def _drafted(self, logits: Tensor, tokens: Sequences, length: int) -> DraftTree:
        """The draft, from the logits [B, V] after the text."""
        raise NotImplementedError

    def _follow(self, tokens: Sequences) -> list[list[int]]:
        """Reads what the backbone has written, and returns it."""
        counts = [length - read for length, read in zip(tokens.lengths, self.read)]
        new = tokens.newest_on_host
        if [len(ids) for ids in new] != counts:  # in transformers' own loop nobody has looked yet
            rows = tokens.newest(max(counts)).tolist()
            new = [ids[len(ids) - count :] for ids, count in zip(rows, counts)]
        self.read = list(tokens.lengths)
        self.translation.extend(self.scripts, new)
        return new

    def _feed(self) -> Tensor:
        """Brings the assistant's cache to the end of the text, and returns logits [B, V] of what follows."""
        texts, device = [script.ids for script in self.scripts], self.target.rows.ends.device
        same = map(_common, texts, self.cached, self.sure)
        fed = max(len(ids) - min(count, len(ids) - 1) for ids, count in zip(texts, same))
        self.target.keep(NewTokens([len(ids) - end for ids, end in zip(texts, self.ends)], device))
        self.cached, self.ends = [list(ids) for ids in texts], [len(ids) for ids in texts]
        self.sure = [script.settled for script in self.scripts]
        self.target.rows.ahead = -fed
        positions = self.target.rows.counts[:, None] + cached_range(-fed, fed, device)
        return self._extend(_padded(texts, fed, device), position_ids=positions.clamp(min=0))


class CommonSession(TranslatedSession):
    """The drafts of one call, of tokens that both vocabularies have.

    Args:
        model: The assistant.
        options: Of the call.
        translation: Between the two models' ids.
    """

    def __init__(self, model: PreTrainedModel, options: DraftOptions, translation: Translation) -> None:
        ids, own_ids = (part.to(options.prompt.device) for part in (translation.ids, translation.own_ids))
        sizes = translation.own.size, translation.theirs.size
        super().__init__(model, options, CommonVocabulary(*sizes, own_ids, ids), translation)
        self.own_of = dict(zip(translation.ids.tolist(), translation.own_ids.tolist()))
        self.drafted = 0  # tokens of the last draft that were fed

    def _follow(self, tokens: Sequences) -> list[list[int]]:
        """See `TranslatedSession`; what was accepted stands in the cache."""
        new = super()._follow(tokens)
        is_alone = max(tokens.drafted_on_host) <= self.drafted + 1  # else others' tokens may have been accepted
        for cached, ids in zip(self.cached, new if is_alone else []):
            accepted = (self.own_of.get(number, -1) for number in ids[:-1][: self.drafted])
            cached += takewhile(lambda number: number >= 0, accepted)
        self.drafted = 0
        return new

    def _drafted(self, logits: Tensor, tokens: Sequences, length: int) -> DraftTree:
        """See `TranslatedSession`."""
        tree = self._chain(logits, length, tokens)
        self.drafted = tree.tokens.shape[1] - 1
        return tree


class TextSession(TranslatedSession):
    """The drafts of one call, translated as text.

    Args:
        model: The assistant.
        options: Of the call.
        translation: Between the two models' ids.
    """

    def __init__(self, model: PreTrainedModel, options: DraftOptions, translation: Translation) -> None:
        super().__init__(model, options, OwnVocabulary(translation.own.size), translation)

    def _drafted(self, logits: Tensor, tokens: Sequences, length: int) -> DraftTree:
        """See `TranslatedSession`; no more than `length` tokens of the backbone."""
        own = self._chain(logits, length, tokens).tokens.tolist()
        for cached, ids in zip(self.cached, own):
            cached += ids[:-1]
        rows = [ids[:length] for ids in self.translation.drafts(self.scripts, own)]
        most = max(map(len, rows))
        both = torch.tensor([[*ids, *[0] * (most - len(ids)), len(ids)] for ids in rows], device=tokens.ids.device)
        return DraftTree.chain(both[:, :most], num_nodes=both[:, most])


def _common(one: list[int], other: list[int], sure: int) -> int:
    """Return with how many equal ids two texts begin, of which some are known to be equal."""
    shorter = min(len(one), len(other))
    return next((index for index in range(min(sure, shorter), shorter) if one[index] != other[index]), shorter)


def _padded(rows: list[list[int]], width: int, device: torch.device) -> Tensor:
    """Return the last `width` ids of every text, [B, width]; shorter ones begin with padding."""
    return torch.tensor([[0] * (width - len(ids)) + ids[-width:] for ids in rows], device=device)
