"""Drafts of an assistant with another tokenizer: its tokens, the backbone's, and the text between them.

An assistant reads the backbone's text in its own ids. Text that only grows is tokenised piece by piece: a piece
that begins with a space settles what is before it, and the rest is tokenised again as a whole.

    backbone     The | quick | br | own          ids of new tokens, a cycle after the other
    text         The   quick   brown             half a character waits for its other half
    assistant    Th e |  quick |  brown          " br" was " br" until "own" came: the assistant reads it again

Two ways to draft: tokens that both vocabularies have, with the distributions that they were drawn from (Timor et al.
2025, 2502.05202); or text, in all of the assistant's tokens, likeliest first, which is tokenised for the backbone:
deterministic tokens, in a number of its own for every sequence.

Sequences have different numbers of new ids, and text may be tokenised again: the assistant's columns end with the text
that is read, and every sequence reads as many of its last ids again as any sequence needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from ..backbone.target import RaggedBackbone
from ..call.constraints import DraftMasks
from ..call.options import DraftOptions
from ..call.sequences import NewTokens, Sequences
from ..contract import CacheView, DraftTree, TargetOutput, VerificationResult
from ..tensors.masks import cached_range
from .session import AssistantSession, SharedVocabulary

Tokenizers = tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]  # the backbone's, the assistant's
_MARK = "\x01"  # a token before texts that continue: some tokenizers write a space before the first word of all
_BEFORE = 8  # ids that are decoded with those after them: some tokenizers drop the first space of all
_LONGEST = 256  # the most characters that are tokenised again with every new one, where no space comes
_HALF = "\ufffd"  # decoded for a part of a character
_AGAIN = 64  # columns that layers with an attention window keep for ids that are read again


@dataclass
class AssistantText:
    """The text of one sequence, as an assistant reads it."""

    ids: list[int]  # the assistant's
    settled: int  # how many of them never change
    before: list[int]  # the backbone's ids between the last two ends of whole characters
    text: str = ""  # that of ids that may change
    unread: list[int] = field(default_factory=list)  # the backbone's ids after the last whole character
    emitted: int = 0  # how many characters of these are in the text


class TextCodec:
    """A tokenizer of a model of `size` ids, for texts that begin anywhere; special tokens that `other` lacks are
    dropped."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, other: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.size = tokenizer, size
        self.mark, known = self.ids([_MARK])[0], other.get_vocab()
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.silent = {number for number, token in special.items() if token not in known}

    def ids(self, texts: list[str]) -> list[list[int]]:
        return cast("list[list[int]]", self.tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []

    def opening(self) -> list[int]:
        first = self.tokenizer.bos_token_id
        return [first] if first is not None and first in cast("list[int]", self.tokenizer("")["input_ids"]) else []

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts that follow others."""
        mark, encoded = self.mark, list[list[int]]()
        for ids, text in zip(self.ids([_MARK + text for text in texts]), texts):
            has_mark = ids[: len(mark)] == mark and not (text and len(ids) == len(mark))
            encoded.append(ids[len(mark) :] if has_mark else self.ids([text])[0])
        return [list(takewhile(lambda number: number < self.size, ids)) for ids in encoded]

    def decode(self, sequences: list[list[int]]) -> list[str]:
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def added(self, before: list[list[int]], sequences: list[list[int]]) -> list[str]:
        """Return the texts that ids add to those of the ids before them, which end with a whole character."""
        wholes = self.decode([first + ids for first, ids in zip(before, sequences)])
        return [whole[len(start) :] for start, whole in zip(self.decode(before), wholes)]

    def readable(self, ids: Iterable[int]) -> list[int]:
        return [number for number in ids if number not in self.silent]


class Translation:
    """Two models' tokenizers, and the ids of each in the other; the backbone has `theirs` ids, the assistant `own`.

    Attributes:
        ids: [N] int64, the backbone's ids of tokens that both have, rising.
        own_ids: [N] int64, the assistant's ids of the same tokens.

    Raises:
        TypeError: One is missing, or is no tokenizer of transformers.
    """

    def __init__(self, tokenizers: Tokenizers, theirs: int, own: int) -> None:
        for name, value in zip(("tokenizer", "assistant_tokenizer"), tokenizers):
            if not isinstance(value, PreTrainedTokenizerBase):
                raise TypeError(f"{name}={value!r} must be a tokenizer: translation needs both")
        self.tokenizers = tokenizers
        first, second = cast("tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]", tokenizers)
        self.theirs, self.own = TextCodec(first, theirs, second), TextCodec(second, own, first)
        both = AssistantToTargetTranslator(first, second, theirs).target_to_assistant_input_ids
        pairs = sorted(pair for pair in both.items() if pair[0] < theirs and pair[1] < own)
        self.ids, self.own_ids = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)  # [N] each

    def open(self, prompts: list[list[int]]) -> list[AssistantText]:
        """Return the scripts of prompts: at least one id of each."""
        opening, scripts = self.own.opening(), []
        readable = [self.theirs.readable(ids) for ids in prompts]
        texts = [text.rstrip(_HALF) for text in self.theirs.decode(readable)]
        for prompt, ids in zip(readable, self.own.ids(texts)):
            ids = ids if ids[:1] == opening else opening + ids
            ids = [min(number, self.own.size - 1) for number in ids] or [0]
            scripts.append(AssistantText(ids, len(ids), prompt[-_BEFORE:]))
        return scripts

    def extend(self, scripts: list[AssistantText], sequences: list[list[int]]) -> None:
        """Append the backbone's new ids to every script."""
        for script, ids in zip(scripts, sequences):
            script.unread += self.theirs.readable(ids)
        pieces = self.theirs.added([script.before for script in scripts], [script.unread for script in scripts])
        for script, piece in zip(scripts, pieces):
            new = piece.rstrip(_HALF)[script.emitted :]
            if new[:1].isspace() or len(script.text) > _LONGEST:
                script.settled, script.text = len(script.ids), ""
            script.text, script.emitted = script.text + new, script.emitted + len(new)
            if script.unread and (not piece.endswith(_HALF) or len(script.unread) > _LONGEST):
                script.before, script.unread, script.emitted = script.unread, [], 0
        for script, ids in zip(scripts, self.own.encode([script.text for script in scripts])):
            script.ids[script.settled :] = ids

    def drafts(self, scripts: list[AssistantText], sequences: list[list[int]]) -> list[list[int]]:
        """Return the backbone's ids of the text that an assistant's ids add to every script."""
        sequences = [list(takewhile(lambda number: number not in self.own.silent, ids)) for ids in sequences]
        texts = self.own.added([script.ids[-_BEFORE:] for script in scripts], sequences)
        return self.theirs.encode([text.rstrip(_HALF) for text in texts])


class CommonVocabulary(SharedVocabulary):
    """The tokens that two vocabularies have in common (`Translation.ids`), to which drafts are restricted."""

    def __init__(self, own: int, theirs: int, own_ids: Tensor, ids: Tensor) -> None:
        super().__init__(own, theirs, len(ids))
        self.own_ids, self.ids = own_ids, ids
        self.own_id_of = own_ids.new_zeros(theirs).index_copy(0, ids, own_ids)  # [theirs]

    def readable(self, ids: Tensor) -> Tensor:
        return self.own_id_of[ids]

    def choose(
        self, logits: Tensor, options: DraftOptions, masks: DraftMasks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return options.choose(logits[..., self.own_ids], self.ids, self.theirs, masks)


class OwnVocabulary(SharedVocabulary):
    """All tokens of an assistant, which are translated as text: its most likely ones, by its own ids."""

    def choose(
        self, logits: Tensor, options: DraftOptions, masks: DraftMasks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        best = logits.max(-1)
        options.numbers.note(best.values)
        return best.indices, logits.float().softmax(-1) if options.threshold else None


class TranslatedSession(AssistantSession):
    """The drafts of one call, in either way.

    Attributes:
        scripts: The assistant's reading of every sequence.
        cached: Its ids that have columns in its cache, drafts after the text among them.
        ends: How many ids the scripts had when the assistant last read them.
        sure: How many of them had been settled.
        read: How many ids the backbone's sequences had.
    """

    target: RaggedBackbone
    translation: Translation

    def begin(self, outputs: object, view: CacheView) -> None:
        real = zip(*(part.tolist() for part in self._prompt(view)))
        prompts = [[number for number, is_token in zip(ids, is_real) if is_token] for ids, is_real in real]
        self.scripts = self.translation.open(prompts)
        self.cached, self.sure = [list(script.ids) for script in self.scripts], [0] * len(prompts)
        self.ends, self.read = [len(ids) for ids in self.cached], [self.options.prompt.shape[1]] * len(prompts)
        block = _padded(self.cached, max(self.ends), self.model.device)  # [B, L]
        is_id = _padded([[1] * count for count in self.ends], max(self.ends), block.device)  # [B, L]
        self._read(block, is_id, _AGAIN)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        pass  # the next draft begins with the text

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        self._follow(tokens)
        length = min(length, self.table + 1 - max(len(script.ids) for script in self.scripts))
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        return self._drafted(self._feed(), tokens, length)

    def _drafted(self, logits: Tensor, tokens: Sequences, length: int) -> DraftTree:
        """Return the draft, from the logits [B, V] after the text."""
        raise NotImplementedError

    def _follow(self, tokens: Sequences) -> list[list[int]]:
        counts = [length - read for length, read in zip(tokens.lengths, self.read)]
        new = tokens.newest_on_host
        if [len(ids) for ids in new] != counts:  # in transformers' own loop nobody has looked yet
            newest = tokens.newest(max(counts)).tolist()
            new = [ids[len(ids) - count :] for ids, count in zip(newest, counts)]
        self.read = list(tokens.lengths)
        self.translation.extend(self.scripts, new)
        return new

    def _feed(self) -> Tensor:
        """Bring the assistant's cache to the end of the text, and return the logits [B, V] of the next token."""
        texts, device = [script.ids for script in self.scripts], self.target.layout.ends.device
        same = map(_common, texts, self.cached, self.sure)
        count = max(len(ids) - min(count, len(ids) - 1) for ids, count in zip(texts, same))
        self.target.keep(NewTokens([len(ids) - end for ids, end in zip(texts, self.ends)], device))
        self.cached, self.ends = [list(ids) for ids in texts], [len(ids) for ids in texts]
        self.sure = [script.settled for script in self.scripts]
        self.target.layout.block_offset = -count
        positions = self.target.layout.counts[:, None] + cached_range(-count, count, device)  # [B, count]
        return self._extend(_padded(texts, count, device), position_ids=positions.clamp(min=0))


class CommonSession(TranslatedSession):
    """The drafts of one call, of tokens that both vocabularies have."""

    def __init__(self, model: PreTrainedModel, options: DraftOptions, translation: Translation) -> None:
        ids, own_ids = (part.to(options.prompt.device) for part in (translation.ids, translation.own_ids))
        sizes = translation.own.size, translation.theirs.size
        super().__init__(model, options, CommonVocabulary(*sizes, own_ids, ids))
        self.translation = translation
        self.own_of = dict(zip(translation.ids.tolist(), translation.own_ids.tolist()))
        self.drafted = 0  # tokens of the last draft that were fed

    def _follow(self, tokens: Sequences) -> list[list[int]]:
        new = super()._follow(tokens)
        is_alone = max(tokens.drafted_on_host) <= self.drafted + 1  # else others' tokens may have been accepted
        for cached, ids in zip(self.cached, new if is_alone else []):
            accepted = (self.own_of.get(number, -1) for number in ids[:-1][: self.drafted])
            cached += takewhile(lambda number: number >= 0, accepted)
        self.drafted = 0
        return new

    def _drafted(self, logits: Tensor, tokens: Sequences, length: int) -> DraftTree:
        tree = self._chain(logits, length, tokens)
        self.drafted = tree.tokens.shape[1] - 1
        return tree


class TextSession(TranslatedSession):
    """The drafts of one call, translated as text."""

    def __init__(self, model: PreTrainedModel, options: DraftOptions, translation: Translation) -> None:
        super().__init__(model, options, OwnVocabulary(*[translation.own.size] * 3))
        self.translation = translation

    def _drafted(self, logits: Tensor, tokens: Sequences, length: int) -> DraftTree:
        own = self._chain(logits, length, tokens).tokens.tolist()
        for cached, ids in zip(self.cached, own):
            cached += ids[:-1]
        drafts = [ids[:length] for ids in self.translation.drafts(self.scripts, own)]
        most = max(map(len, drafts))
        both = torch.tensor([[*ids, *[0] * (most - len(ids)), len(ids)] for ids in drafts], device=tokens.ids.device)
        return DraftTree.chain(both[:, :most], num_nodes=both[:, most])  # their last column counts


def _common(one: list[int], other: list[int], sure: int) -> int:
    """Return how many ids two texts share at their beginning; the first `sure` are known to be equal."""
    shorter = min(len(one), len(other))
    return next((index for index in range(min(sure, shorter), shorter) if one[index] != other[index]), shorter)


def _padded(scripts: list[list[int]], width: int, device: torch.device) -> Tensor:
    """Return the last `width` ids of every script, [B, width]; shorter ones begin with padding."""
    return torch.tensor([[0] * (width - len(ids)) + ids[-width:] for ids in scripts], device=device)
