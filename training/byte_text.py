"""Prompts and completions as bytes, exactly: what is no UTF-8 goes in and comes out of a byte-level model unchanged."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import TextIO, TypeGuard

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer
from transformers.generation.streamers import BaseStreamer

from ..modeling.evabyte.tokenizer import EvaByteTokenizer

# Python's "surrogateescape" writes a byte that is no UTF-8 as the character U+DC00 + byte
_ESCAPED = re.compile("([\udc80-\udcff])")


def is_byte_level(tokenizer: PreTrainedTokenizerBase) -> TypeGuard[EvaByteTokenizer]:
    """Return whether a token is a byte."""
    return isinstance(tokenizer, EvaByteTokenizer)


def escaped(data: bytes) -> str:
    """Return text of bytes, in which bytes that are no UTF-8 survive as lone surrogates (PEP 383)."""
    return data.decode("utf-8", "surrogateescape")


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return ids of `escaped` text.

    Args:
        tokenizer: Any tokenizer; only a byte-level one takes bytes that are no UTF-8.
        text: The text, as `escaped` gives it.
        add_special_tokens: Add what begins a text, such as `<bos>`; a rendered chat has it already.

    Raises:
        ValueError: Bytes that are no UTF-8, for a tokenizer that is not byte-level.
    """
    if is_byte_level(tokenizer):
        ids = tokenizer.convert_tokens_to_ids(_byte_tokens(tokenizer, text))
        return tokenizer.build_inputs_with_special_tokens(ids) if add_special_tokens else ids
    if wrong := _ESCAPED.search(text):
        raise ValueError(
            f"the prompt holds the byte 0x{ord(wrong[0]) - 0xDC00:02x} at character {wrong.start()}, which is no "
            "UTF-8; only a byte-level model can read it"
        )
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> bytes:
    """Return what ids stand for, without special tokens; exact bytes for a byte-level tokenizer, else UTF-8."""
    if not is_byte_level(tokenizer):
        return tokenizer.decode(ids, skip_special_tokens=True).encode("utf-8", "replace")
    tokens = tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True)
    return b"".join(token.encode("latin-1" if len(token) == 1 else "utf-8") for token in tokens)


def visible(text: str) -> str:
    """Return text in which characters that would move the cursor are U+FFFD; line ends and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


class RawWriter:
    """Writes bytes as they are, for files and pipes.

    Args:
        stream: A text stream over bytes, such as `sys.stdout`.
    """

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._buffer = stream.buffer

    def write(self, data: bytes) -> None:
        """Write and flush."""
        self._buffer.write(data)
        self._buffer.flush()

    def close(self) -> None:
        """Add nothing: a file holds the completion and no more."""


class TerminalWriter:
    """Writes text as soon as its characters are whole, and shows what is no text as U+FFFD.

    Args:
        stream: A terminal, or any text stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> None:
        """Write the characters that `data` completes."""
        self._stream.write(visible(self._decoder.decode(data)))
        self._stream.flush()

    def close(self) -> None:
        """Show what was left of an unfinished character, and ends the line."""
        self._stream.write(visible(self._decoder.decode(b"", final=True)) + "\n")
        self._stream.flush()


def writer_for(stream: TextIO) -> RawWriter | TerminalWriter:
    """Return a writer: readable text for a terminal, exact bytes for everything else."""
    return TerminalWriter(stream) if stream.isatty() or not hasattr(stream, "buffer") else RawWriter(stream)


def streamer_for(tokenizer: PreTrainedTokenizerBase, write: Callable[[bytes], None]) -> BaseStreamer:
    """Return a streamer for `generate` that hands every new piece to `write`, and not the prompt."""
    return _ByteStreamer(tokenizer, write) if is_byte_level(tokenizer) else _WordStreamer(tokenizer, write)


class _ByteStreamer(BaseStreamer):
    """Every token as soon as it is there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[bytes], None]) -> None:
        self.tokenizer, self.write, self.is_prompt = tokenizer, write, True

    def put(self, value: torch.Tensor) -> None:
        if not self.is_prompt:
            self.write(decode(self.tokenizer, value.flatten().tolist()))
        self.is_prompt = False

    def end(self) -> None:
        self.is_prompt = True


class _WordStreamer(TextStreamer):
    """Every word as soon as it is whole."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[bytes], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text.encode("utf-8", "replace"))


def _byte_tokens(tokenizer: EvaByteTokenizer, text: str) -> list[str]:
    tokens: list[str] = []
    for index, piece in enumerate(_ESCAPED.split(text)):
        tokens += [chr(ord(piece) - 0xDC00)] if index % 2 else tokenizer.tokenize(piece)  # odd pieces are single bytes
    return tokens
