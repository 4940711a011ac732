"""Tokens that modules may draft: a part of the vocabulary, whose rows of the head are all that drafting multiplies.

A draft distribution q over a part U of the vocabulary, 0 elsewhere, changes no output: verification divides by q at
drafted tokens alone, and what it adds comes from the residual over the whole vocabulary. FastMTP (2509.18362) calls it
vocabulary compression.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from ...generation.call.options import CallOptions
from .readout import Readout

FILE = "draft_vocabulary.json"
"""Beside the weights: a list of token ids. Engines and transformers do not look at it."""


class DraftVocabulary:
    """The part U of the vocabulary.

    Args:
        ids: [U] distinct token ids, in any order.
        vocab_size: V.

    Raises:
        ValueError: No ids, ids out of range, or one that stands there twice.
    """

    def __init__(self, ids: Any, vocab_size: int) -> None:
        self.ids = torch.as_tensor(ids).detach().to("cpu", torch.long).flatten().sort().values
        if not len(self.ids):
            raise ValueError("draft_vocabulary is empty: name at least one token id, or leave it out")
        if self.ids[0] < 0 or self.ids[-1] >= vocab_size:
            wrong = self.ids[0] if self.ids[0] < 0 else self.ids[-1]
            raise ValueError(f"draft_vocabulary holds {int(wrong)}, and token ids are 0 to {vocab_size - 1}")
        if (self.ids[1:] == self.ids[:-1]).any():
            raise ValueError("draft_vocabulary holds a token id more than once")
        self._rows: tuple[tuple[Any, ...], torch.Tensor] | None = None
        self._places: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is gathered from a head: copies gather their own."""
        return self.__dict__ | {"_rows": None, "_places": {}}

    def on(self, device: torch.device) -> torch.Tensor:
        """The ids [U], copied to a device once."""
        if device not in self._places:
            self._places[device] = self.ids.to(device)
        return self._places[device]

    def logits(self, readout: Readout, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., U] of states [..., H].

        Rows of a plain linear head are gathered once (and again where it was trained on); of any other head, whose
        weights cannot be read outside of its own forward, the logits of all tokens are.
        """
        head = readout.main.get_output_embeddings()
        if type(head) is not nn.Linear or head.weight.is_meta or hasattr(head, "_hf_hook"):
            return readout(states).index_select(-1, self.on(states.device))
        rows = self._gathered(head)
        bias = None if head.bias is None else head.bias[self.on(head.bias.device)]
        return readout.finish(nn.functional.linear(states.to(rows.device), rows, bias))

    def _gathered(self, head: nn.Linear) -> torch.Tensor:
        weight = head.weight
        key = (weight.data_ptr(), weight._version, weight.device, weight.dtype)
        if self._rows is None or self._rows[0] != key:
            self._rows = (key, weight.detach()[self.on(weight.device)])
        return self._rows[1]

    def coverage(self, tokens: torch.Tensor) -> float:
        """The share of some tokens [N] that U holds; NaN of none."""
        return torch.isin(tokens, self.on(tokens.device)).double().mean().item()

    def save(self, folder: str | PathLike) -> None:
        """Writes the ids beside the weights."""
        (Path(folder) / FILE).write_text(json.dumps(self.ids.tolist()) + "\n", encoding="utf-8")


class DraftVocabularyMixin:
    """`draft_vocabulary` of a model with modules, and of one call of its `generate`."""

    draft_vocabulary: DraftVocabulary | None = None

    def set_draft_vocabulary(self, ids: Any) -> None:
        """Lets the modules draft only some tokens, whose rows of the head are all that they then multiply with.

        Output stays what it is, for the main model keeps its whole vocabulary; saved beside the weights.

        Args:
            ids: [U] distinct token ids, see `frequent_tokens`; None: all tokens again.

        Raises:
            ValueError: No ids, ids out of range, or one that stands there twice.
        """
        self.draft_vocabulary = None if ids is None else DraftVocabulary(ids, self.config.vocab_size)

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> None:
        """Reads `draft_vocabulary` of a call; refuses options of other kinds of drafters."""
        ids = options.extra.pop("draft_vocabulary", None)
        super().prepare_call(options, config)
        if ids is not None:
            is_read = isinstance(ids, DraftVocabulary)
            options.extra["draft_vocabulary"] = ids if is_read else DraftVocabulary(ids, self.config.vocab_size)


def stored_ids(name: Any, **hub: Any) -> list[int] | None:
    """The ids in a directory or a Hub repository; None where there are none.

    Args:
        name: Directory or Hub repository.
        hub: `revision`, `token`, ...
    """
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(name, FILE, **hub, **options)
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))


def frequent_tokens(
    texts: Iterable[Iterable[int]], size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> torch.Tensor:
    """The most frequent tokens of some texts, for `draft_vocabulary`: of answers of the model itself, best of all.

    Args:
        texts: Token ids.
        size: How many tokens; fewer are returned where the texts and the tokenizer name no more.
        tokenizer: All its special tokens, digits and white space are kept in any case.

    Returns:
        [size] int64, ascending.

    Raises:
        ValueError: `size` leaves no room for those tokens.
    """
    counts = Counter(token for text in texts for token in text)
    kept: set[int] = set()
    if tokenizer is not None:
        pieces = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
        kept = {token for token, piece in pieces.items() if piece and (piece.isspace() or piece.strip().isdigit())}
        kept |= set(tokenizer.all_special_ids)
    if size < max(len(kept), 1):
        raise ValueError(f"size={size} must be at least {max(len(kept), 1)}: so many tokens are kept in any case")
    frequent = [token for token, _ in counts.most_common() if token not in kept]
    return torch.tensor(sorted(kept | set(frequent[: size - len(kept)])))
