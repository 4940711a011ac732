"""Texts between two tokenizers: what a backbone's ids are to an assistant with another vocabulary, and back.

An assistant reads the backbone's text in ids of its own. Text that only grows is tokenised piece by piece: a piece
that begins with a space settles what stands before it, and what is not settled yet is tokenised anew as a whole.

    backbone     The | quick | br | own          ids of new tokens, a cycle after the other
    text         The   quick   brown             half a character waits for its other half
    assistant    Th e |  quick |  brown          " br" was " br" until "own" came: the assistant reads it again
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

Tokenizers = tuple[PreTrainedTokenizerBase | None, PreTrainedTokenizerBase | None]
"""The backbone's and the assistant's."""
_MARK = "\x01"
"""Stands before texts that go on, in a token of its own: some tokenizers write a space before the first word of all."""
_BEFORE = 8
"""Ids that are decoded with those after them: some tokenizers drop the first space of all."""
_LONGEST = 256
"""Characters that are tokenised anew with every new one, where no space comes."""
_HALF = "\ufffd"
"""Decoded in the place of a part of a character."""


@dataclass
class Script:
    """The text of one sequence, as an assistant reads it.

    Attributes:
        ids: The assistant's.
        settled: How many of them stay, whatever follows.
        text: What the others write.
        before: The backbone's ids between the last two ends of characters that were seen.
        unread: Those after the last one.
        said: How much of what these write is in the text.
    """

    ids: list[int]
    settled: int
    before: list[int]
    text: str = ""
    unread: list[int] = field(default_factory=list)
    said: int = 0


class TextCodec:
    """A tokenizer for texts that begin anywhere.

    Args:
        tokenizer: Of a model.
        size: How many ids that model has.
        other: The tokenizer of the other model; special tokens that it lacks are not handed on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, other: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.size = tokenizer, size
        self.mark, known = self._ids([_MARK])[0], other.get_vocab()
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.silent = {number for number, token in special.items() if token not in known}

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return cast("list[list[int]]", self.tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []

    def opening(self) -> list[int]:
        """Return what every text begins with."""
        first = self.tokenizer.bos_token_id
        return [first] if first is not None and first in cast("list[int]", self.tokenizer("")["input_ids"]) else []

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of texts that stand after others."""
        rows, mark = self._ids([_MARK + text for text in texts]), self.mark
        missed = [
            row
            for row, (ids, text) in enumerate(zip(rows, texts))
            if ids[: len(mark)] != mark or (text and len(ids) == len(mark))
        ]
        rows = [ids[len(mark) :] for ids in rows]
        for row, ids in zip(missed, self._ids([texts[row] for row in missed])):
            rows[row] = ids
        return [list(takewhile(lambda number: number < self.size, ids)) for ids in rows]

    def decode(self, rows: list[list[int]]) -> list[str]:
        """Return the texts of ids."""
        return self.tokenizer.batch_decode(rows, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def added(self, before: list[list[int]], rows: list[list[int]]) -> list[str]:
        """Return what ids add to the texts of those before them, which end with a whole character."""
        wholes = self.decode([first + ids for first, ids in zip(before, rows)])
        return [whole[len(start) :] for start, whole in zip(self.decode(before), wholes)]

    def spoken(self, ids: Iterable[int]) -> list[int]:
        """Return ids without those that are not handed on."""
        return [number for number in ids if number not in self.silent]


class Translation:
    """Two models' tokenizers, and what the ids of one are in the other.

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
        for name, given in {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer}.items():
            if not isinstance(given, PreTrainedTokenizerBase):
                whose = "backbone" if name == "tokenizer" else "assistant"
                raise TypeError(f"{name}={given!r} must be the {whose}'s tokenizer: to translate takes both")
        self.tokenizers = cast("tuple[PreTrainedTokenizerBase, ...]", (tokenizer, assistant_tokenizer))
        first, second = self.tokenizers
        self.theirs, self.own = TextCodec(first, theirs, second), TextCodec(second, own, first)
        theirs_of, own_of = spellings(first), spellings(second)
        both = sorted((number, own_of[spelt]) for spelt, number in theirs_of.items() if spelt in own_of)
        both = [pair for pair in both if pair[0] < theirs and pair[1] < own]
        self.ids, self.own_ids = torch.tensor(both, dtype=torch.long).view(-1, 2).unbind(1)

    def open(self, prompts: list[list[int]]) -> list[Script]:
        """Return what an assistant reads of prompts: at least one id of each."""
        opening, scripts = self.own.opening(), []
        spoken = [self.theirs.spoken(ids) for ids in prompts]
        texts = [text.rstrip(_HALF) for text in self.theirs.decode(spoken)]
        for prompt, ids in zip(spoken, self.own._ids(texts)):
            ids = ids if ids[:1] == opening else opening + ids
            ids = [min(number, self.own.size - 1) for number in ids] or [0]
            scripts.append(Script(ids, len(ids), prompt[-_BEFORE:]))
        return scripts

    def extend(self, scripts: list[Script], rows: list[list[int]]) -> None:
        """Go on with the backbone's new ids of every sequence."""
        for script, ids in zip(scripts, rows):
            script.unread += self.theirs.spoken(ids)
        pieces = self.theirs.added([script.before for script in scripts], [script.unread for script in scripts])
        for script, piece in zip(scripts, pieces):
            new = piece.rstrip(_HALF)[script.said :]
            if new[:1].isspace() or len(script.text) > _LONGEST:
                script.settled, script.text = len(script.ids), ""
            script.text, script.said = script.text + new, script.said + len(new)
            if script.unread and (not piece.endswith(_HALF) or len(script.unread) > _LONGEST):
                script.before, script.unread, script.said = script.unread, [], 0
        for script, ids in zip(scripts, self.own.encode([script.text for script in scripts])):
            script.ids[script.settled :] = ids

    def drafts(self, scripts: list[Script], rows: list[list[int]]) -> list[list[int]]:
        """Return the backbone's ids of what an assistant's ids write after every sequence."""
        rows = [list(takewhile(lambda number: number not in self.own.silent, ids)) for ids in rows]
        texts = self.own.added([script.ids[-_BEFORE:] for script in scripts], rows)
        return self.theirs.encode([text.rstrip(_HALF) for text in texts])


def spellings(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of a vocabulary by what its tokens write, where tokenizers write spaces and bytes differently.

    No text depends on it, and every id has one spelling: which tokens are taken for the same decides over drafts alone.
    """
    first = cast("list[int]", tokenizer(" ", add_special_tokens=False)["input_ids"])[:1]
    sign = "".join(cast("list[str]", tokenizer.convert_ids_to_tokens(first)))[:1]
    vocabulary, found = tokenizer.get_vocab().items(), dict[str, int]()
    for token, number in sorted(vocabulary, key=lambda item: (_byte(item[0]) is not None, item[1])):
        found.setdefault(_spelt(token, sign), number)
    return found


def _spelt(token: str, sign: str) -> str:
    """Return what a token writes, a part of a character as one surrogate per byte; `sign` stands for a space."""
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
