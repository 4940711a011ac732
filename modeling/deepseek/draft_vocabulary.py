"""Tokens that modules may draft: a part of the vocabulary, so that drafting computes only its rows of the head.

A draft distribution q over a part U of the vocabulary, 0 elsewhere, changes no output: verification divides by q at
drafted tokens alone, and draws the added token from the residual over the whole vocabulary. FastMTP (2509.18362) calls
it vocabulary compression.
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
from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from .modules import Readout

FILE = "draft_vocabulary.json"
"""A file of the checkpoint with a list of token ids, which engines and transformers ignore."""


class DraftVocabulary:
    """The part U of the vocabulary.

    Args:
        ids: [U] distinct token ids, in any order.
        vocab_size: V.

    Raises:
        ValueError: No ids, ids out of range, or a repeated id.
    """

    def __init__(self, ids: Any, vocab_size: int) -> None:
        self.ids = torch.as_tensor(ids).detach().to("cpu", torch.long).flatten().sort().values
        if not len(self.ids):
            raise ValueError("draft_vocabulary is empty; give at least one token id, or None")
        if self.ids[0] < 0 or self.ids[-1] >= vocab_size:
            wrong = self.ids[0] if self.ids[0] < 0 else self.ids[-1]
            raise ValueError(f"draft_vocabulary holds {int(wrong)}; token ids are 0 to {vocab_size - 1}")
        if (self.ids[1:] == self.ids[:-1]).any():
            raise ValueError("draft_vocabulary holds a token id more than once; ids must be distinct")
        self._rows: tuple[tuple[Any, ...], torch.Tensor] | None = None
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without rows gathered from a head: copies gather their own."""
        return self.__dict__ | {"_rows": None, "_on_device": {}}

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the ids [U] on a device, copied once."""
        if device not in self._on_device:
            self._on_device[device] = self.ids.to(device)
        return self._on_device[device]

    def logits(self, readout: Readout, states: torch.Tensor) -> torch.Tensor:
        """Return logits [..., U] of states [..., H].

        Rows of a plain linear head are gathered once (and again after training). The weights of any other head cannot
        be read outside its forward, so that all its logits are computed.
        """
        head = readout.head
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
        """Return the share of tokens [N] that are in U; NaN for N = 0."""
        return torch.isin(tokens, self.on(tokens.device)).double().mean().item()

    def save(self, directory: str | PathLike) -> None:
        """Write the ids to a checkpoint."""
        (Path(directory) / FILE).write_text(json.dumps(self.ids.tolist()) + "\n", encoding="utf-8")


def stored_ids(name: Any, **hub: Any) -> list[int] | None:
    """Return the draft vocabulary of a directory or a Hub repository; None where there is none."""
    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    file = cached_file(name, FILE, **hub, **options)
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))


def frequent_tokens(
    texts: Iterable[Iterable[int]], size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> torch.Tensor:
    """Return the most frequent tokens of sequences, for `draft_vocabulary`; the model's own outputs serve best.

    Args:
        texts: Token ids of each sequence.
        size: Number of tokens; fewer are returned where the sequences and the tokenizer have fewer.
        tokenizer: All its special tokens, digits and white space are always included.

    Returns:
        [size] int64, ascending.

    Raises:
        ValueError: `size` is smaller than the number of those tokens.
    """
    counts = Counter(token for text in texts for token in text)
    included: set[int] = set()
    if tokenizer is not None:
        pieces = {token: str(tokenizer.decode([token])) for token in range(len(tokenizer))}
        included = {token for token, piece in pieces.items() if piece and (piece.isspace() or piece.strip().isdigit())}
        included |= set(tokenizer.all_special_ids)
    if size < max(len(included), 1):
        raise ValueError(f"size={size} must be at least {max(len(included), 1)}, the number of tokens always included")
    frequent = [token for token, _ in counts.most_common() if token not in included]
    return torch.tensor(sorted(included | set(frequent[: size - len(included)])))
