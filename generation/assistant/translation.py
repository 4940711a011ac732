"""Drafts of an assistant with another tokenizer: its tokens, the backbone's, and the text between them.

An assistant reads the backbone's text in its own ids. Text that only grows is tokenised piece by piece: a piece
that begins with a space settles what is before it, and the rest is tokenised again as a whole.

    backbone     The | quick | br | own          ids of new tokens, a cycle after the other
    text         The   quick   brown             half a character waits for its other half
    assistant    Th e |  quick |  brown          " br" was " br" until "own" came: the assistant reads it again

Two ways to draft; both leave the backbone's output and its distribution unchanged:

    common tokens    the assistant drafts tokens that both vocabularies have, with the distributions that they were
                     drawn from (Timor et al. 2025, 2502.05202)
    text             it goes on in all of its tokens, likeliest first, and their text is tokenised for the backbone:
                     deterministic tokens, in a number of its own for every sequence

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

from ..backbone.target import RaggedBackbone
from ..call.constraints import DraftMasks
from ..call.options import DraftOptions
from ..call.sequences import NewTokens, Sequences
from ..contract import CacheView, DraftTree, TargetOutput, VerificationResult
from ..tensors.masks import cached_range
from .session import AssistantSession, SharedVocabulary

Tokenizers = tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]
"""The backbone's and the assistant's."""
_MARK = "\x01"
"""Precedes texts that continue, as a separate token: some tokenizers write a space before the first word of all."""
_BEFORE = 8
"""Ids that are decoded with those after them: some tokenizers drop the first space of all."""
_LONGEST = 256
"""The most characters that are tokenised again with every new one, where no space comes."""
_HALF = "\ufffd"
"""Decoded for a part of a character."""
_AGAIN = 64
"""Columns that layers with an attention window keep for ids that are read again."""


@dataclass
class AssistantText:
    """The text of one sequence, as an assistant reads it.

    Attributes:
        ids: The assistant's.
        settled: How many of them never change.
        text: The text of the others.
        before: The backbone's ids between the last two ends of whole characters.
        unread: Those after the last one.
        emitted: How many characters of these are in the text.
    """

    ids: list[int]
    settled: int
    before: list[int]
    text: str = ""
    unread: list[int] = field(default_factory=list)
    emitted: int = 0


class TextCodec:
    """A tokenizer of a model of `size` ids, for texts that begin anywhere; special tokens that `other` lacks are
    dropped."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, other: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.size = tokenizer, size
        self.mark, known = self._ids([_MARK])[0], other.get_vocab()
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.silent = {number for number, token in special.items() if token not in known}

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return cast("list[list[int]]", self.tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []

    def opening(self) -> list[int]:
        """Return the ids that every text begins with."""
        first = self.tokenizer.bos_token_id
        return [first] if first is not None and first in cast("list[int]", self.tokenizer("")["input_ids"]) else []

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts that follow others."""
        mark, encoded = self.mark, list[list[int]]()
        for ids, text in zip(self._ids([_MARK + text for text in texts]), texts):
            has_mark = ids[: len(mark)] == mark and not (text and len(ids) == len(mark))
            encoded.append(ids[len(mark) :] if has_mark else self._ids([text])[0])
        return [list(takewhile(lambda number: number < self.size, ids)) for ids in encoded]

    def decode(self, sequences: list[list[int]]) -> list[str]:
        """Return the texts of ids."""
        return self.tokenizer.batch_decode(sequences, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def added(self, before: list[list[int]], sequences: list[list[int]]) -> list[str]:
        """Return the texts that ids add to those of the ids before them, which end with a whole character."""
        wholes = self.decode([first + ids for first, ids in zip(before, sequences)])
        return [whole[len(start) :] for start, whole in zip(self.decode(before), wholes)]

    def readable(self, ids: Iterable[int]) -> list[int]:
        """Return ids without those that are dropped."""
        return [number for number in ids if number not in self.silent]


class Translation:
    """Two models' tokenizers, and the ids of each in the other.

    Args:
        tokenizer: The backbone's.
        assistant_tokenizer: The assistant's.
        theirs: How many ids the backbone has.
        own: How many ids the assistant has.

    Attributes:
        ids: [N] int64, the backbone's ids of tokens that both have, rising.
        own_ids: [N] int64, the assistant's ids of the same tokens.

    Raises:
        TypeError: One is missing, or is no tokenizer of transformers.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        assistant_tokenizer: PreTrainedTokenizerBase | None,
        theirs: int,
        own: int,
    ) -> None:
        for name, value in {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}.items():
            if not isinstance(value, PreTrainedTokenizerBase):
                whose = "backbone" if name == "tokenizer" else "assistant"
                raise TypeError(f"{name}={value!r} must be the {whose}'s tokenizer: translation needs both")
        self.tokenizers = cast("tuple[PreTrainedTokenizerBase, ...]", (tokenizer, assistant_tokenizer))
        first, second = self.tokenizers
        self.theirs, self.own = TextCodec(first, theirs, second), TextCodec(second, own, first)
        theirs_of, own_of = token_texts(first), token_texts(second)
        both = sorted((number, own_of[text]) for text, number in theirs_of.items() if text in own_of)
        both = [pair for pair in both if pair[0] < theirs and pair[1] < own]
        self.ids, self.own_ids = torch.tensor(both, dtype=torch.long).view(-1, 2).unbind(1)  # [N] each

    def open(self, prompts: list[list[int]]) -> list[AssistantText]:
        """Return the scripts of prompts: at least one id of each."""
        opening, scripts = self.own.opening(), []
        readable = [self.theirs.readable(ids) for ids in prompts]
        texts = [text.rstrip(_HALF) for text in self.theirs.decode(readable)]
        for prompt, ids in zip(readable, self.own._ids(texts)):
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


def token_texts(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of a vocabulary by the texts of its tokens, where tokenizers write spaces and bytes differently.

    The output does not depend on it: which tokens count as equal decides about drafts alone.
    """
    first = cast("list[int]", tokenizer(" ", add_special_tokens=False)["input_ids"])[:1]
    sign = "".join(cast("list[str]", tokenizer.convert_ids_to_tokens(first)))[:1]
    vocabulary, found = tokenizer.get_vocab().items(), dict[str, int]()
    for token, number in sorted(vocabulary, key=lambda item: (_byte(item[0]) is not None, item[1])):
        found.setdefault(_token_text(token, sign), number)
    return found


def _token_text(token: str, sign: str) -> str:
    """Return the text of a token, a part of a character as one surrogate per byte; `sign` stands for a space."""
    if sign == "Ġ" and all(letter in _BYTES for letter in token):
        return bytes(_BYTES[letter] for letter in token).decode("utf-8", "surrogateescape")
    if sign == "▁":
        byte = _byte(token)
        return token.replace(sign, " ") if byte is None else bytes([byte]).decode("utf-8", "surrogateescape")
    return token


def _byte(token: str) -> int | None:
    """Return the byte that a token like <0x0A> stands for."""
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return int(token[3:5], 16) if is_byte else None


_PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTES = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + index): byte for index, byte in enumerate(byte for byte in range(256) if byte not in _PRINTED)
}
"""The letters by which byte-level vocabularies write bytes: themselves where they print, others from 256 on."""


class CommonVocabulary(SharedVocabulary):
    """The tokens that two vocabularies have in common, which alone are drafted; the distribution is restricted to them.

    `own_ids` [N] are the assistant's ids of them, and `ids` [N] the backbone's, rising.
    """

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

    def __init__(self, own: int) -> None:
        super().__init__(own, own, own)

    def choose(
        self, logits: Tensor, options: DraftOptions, masks: DraftMasks | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See `SharedVocabulary`; distributions are for the threshold alone."""
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

    def __init__(
        self, model: PreTrainedModel, options: DraftOptions, vocabulary: SharedVocabulary, translation: Translation
    ) -> None:
        super().__init__(model, options, vocabulary)
        self.translation = translation

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
        """Do nothing: the next draft begins with the text."""

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
        """Read the backbone's new ids of every sequence, and return them."""
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
        super().__init__(model, options, CommonVocabulary(*sizes, own_ids, ids), translation)
        self.own_of = dict(zip(translation.ids.tolist(), translation.own_ids.tolist()))
        self.drafted = 0  # tokens of the last draft that were fed

    def _follow(self, tokens: Sequences) -> list[list[int]]:
        """See `TranslatedSession`; accepted tokens are in the cache already."""
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
        super().__init__(model, options, OwnVocabulary(translation.own.size), translation)

    def _drafted(self, logits: Tensor, tokens: Sequences, length: int) -> DraftTree:
        """See `TranslatedSession`; no more than `length` tokens of the backbone."""
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
