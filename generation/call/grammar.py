"""Grammars as constraints: JSON schemas, regular expressions and Lark grammars, by llguidance (MIT)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from threading import Lock
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..tensors.masks import cached_arange
from .automata import AutomatonProcessor


@runtime_checkable
class ByteTokenizer(Protocol):
    """A tokenizer that says which bytes its tokens are, and that has a token for every byte."""

    eos_token_id: int | None
    bos_token_id: int | None
    all_special_ids: list[int]

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of every token, in the order of ids; those of the 256 bytes follow each other."""
        ...


class GrammarConstraint(AutomatonProcessor):
    """Keeps what is written after the prompt to a grammar, and ends it where the grammar does.

    A logits processor of any `generate`; where drafts are made, they keep to the grammar, too. What the grammar allows
    is computed on the host: drafting waits for the device once for every token, and verification once more.

    Args:
        tokenizer: A fast tokenizer of transformers, or a `ByteTokenizer` such as `EvaByteTokenizer`.
        json_schema: The text is JSON of this schema (a dict, or JSON itself).
        regex: The whole text matches this expression, in the syntax of Rust's `regex`.
        grammar: The text is of this grammar, in llguidance's dialect of Lark.

    Example:
        >>> constraint = GrammarConstraint(tokenizer, regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
        >>> out = model.generate(**inputs, logits_processor=[constraint], assistant_model=drafter)
    """

    start = ()

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        json_schema: Mapping[str, object] | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> None:
        given = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(f"give one of json_schema, regex and grammar, not {' and '.join(names) or 'none of them'}")
        try:
            from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ImportError("GrammarConstraint needs 'llguidance': pip install tokenahead[constraints]") from None
        if json_schema is not None and not isinstance(json_schema, str):
            json_schema = json.dumps(json_schema)
        read = {"json_schema": LLMatcher.grammar_from_json_schema, "regex": LLMatcher.grammar_from_regex}
        compiled = read.get(names[0], LLMatcher.grammar_from_lark)(json_schema or regex or grammar or "")
        self.size = len(tokenizer)
        if isinstance(tokenizer, ByteTokenizer):
            self.tokenizer = LLTokenizer(TokenizerWrapper(_Bytes(tokenizer)))
        else:
            self.tokenizer = from_tokenizer(cast(PreTrainedTokenizerFast, tokenizer))  # it refuses others
        self.read, self.lock = (), Lock()
        self.matcher = LLMatcher(self.tokenizer, compiled)
        if self.matcher.is_error():
            raise ValueError(f"{names[0]}={given[names[0]]!r} cannot be read: {self.matcher.get_error()}")

    def step(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)  # a state is the text so far

    def allowed(self, state: tuple[int, ...], /) -> Tensor:
        with self.lock:
            self._read(state)
            bits = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
        return (bits[:, None] >> cached_arange(8, bits.device) & 1).bool().flatten()[: self.size]

    def likely(self, state: tuple[int, ...]) -> int | None:
        """Return the usual first token of the text that must follow, where its bytes are known, and tokens are not."""
        with self.lock:
            self._read(state)
            tokens = self.tokenizer.tokenize_bytes(self.matcher.compute_ff_bytes())
        return tokens[0] if tokens else None

    def _read(self, state: tuple[int, ...]) -> None:
        """Go back to what the last text and this one begin with, and on from there."""
        common = min(len(state), len(self.read))
        while state[:common] != self.read[:common]:
            common -= 1
        self.matcher.rollback(len(self.read) - common)
        self.matcher.consume_tokens(list(state[common:]))
        self.read = state


class _Bytes:
    """What llguidance asks of a tokenizer of bytes."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.eos_token_id, self.bos_token_id = tokenizer.eos_token_id, tokenizer.bos_token_id
        self.tokens = tokenizer.token_bytes()
        self.special_token_ids = tokenizer.all_special_ids
        self.offset = self.tokens.index(b"\x00")

    def __call__(self, text: bytes) -> list[int]:
        return [byte + self.offset for byte in text]
