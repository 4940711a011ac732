"""Tokens that a drafter may draft: a part U of the vocabulary, so that it computes only their rows of the unembedding.

A draft distribution q over U, 0 elsewhere, changes no output: verification divides by q at drafted tokens alone, and
draws the added token from the residual over the whole vocabulary. FastMTP (2509.18362) calls it vocabulary compression.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...generation.tensors.tensor_files import optional_file

TokenIds = Sequence[int] | Tensor
FILE = "draft_vocabulary.json"
"""A file of the checkpoint with a list of token ids, which engines and transformers ignore."""


class DraftVocabulary:
    """The part U of the vocabulary: distinct token ids [U] of `vocab_size`, called `name` in messages."""

    def __init__(self, ids: TokenIds, vocab_size: int, name: str = "draft_vocabulary") -> None:
        self.ids = ids = torch.as_tensor(ids).detach().to("cpu", torch.long).flatten().sort().values  # [U]
        if not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size or (ids[1:] == ids[:-1]).any():
            held = f"{len(ids)} ids from {int(ids[0])} to {int(ids[-1])}" if len(ids) else "no id: it is empty"
            raise ValueError(f"{name} holds {held}; it must hold token ids of 0 to {vocab_size - 1}, each once")
        self.vocab_size = vocab_size
        self._rows: tuple[ReferenceType[Tensor], Hashable, Tensor] | None = None
        self._on_device: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def __getstate__(self) -> dict[str, object]:
        """Return the state without rows gathered from a head: copies gather their own."""
        return self.__dict__ | {"_rows": None, "_on_device": {}}

    def on(self, device: torch.device) -> Tensor:
        """Return the ids [U] on a device."""
        if device not in self._on_device:
            self._on_device[device] = self.ids.to(device)
        return self._on_device[device]

    def rows(self, weight: Tensor) -> Tensor:
        """Return the rows [U, H] of the weight [V, H] of an unembedding, gathered once (and again after training)."""
        key = (weight.data_ptr(), weight._version, weight.device, weight.dtype, torch.is_inference_mode_enabled())
        # another weight may have the address of one that is gone, as where a state dict is assigned
        if self._rows is None or self._rows[0]() is not weight or self._rows[1] != key:
            self._rows = (ref(weight), key, weight.detach()[self.on(weight.device)])
        return self._rows[2]

    def codes(self, tokens: Tensor) -> Tensor:
        """Return the columns 0 .. U - 1 of token ids [...]; of a token x outside U, U + x."""
        ids = self.on(tokens.device)
        columns = torch.searchsorted(ids, tokens.contiguous()).clamp(max=len(ids) - 1)
        return torch.where(ids[columns] == tokens, columns, tokens + len(ids))  # U + x outside of U

    def columns(self, tokens: Tensor, other: int) -> Tensor:
        """Return the columns of token ids [...], and `other` for those that are not in U."""
        codes = self.codes(tokens)
        return codes.masked_fill((codes >= len(self)) | (tokens < 0), other)

    def tokens(self, codes: Tensor) -> Tensor:
        """Return the token ids [...] of codes [...]."""
        ids = self.on(codes.device)
        return torch.where(codes < len(ids), ids[codes.clamp(max=len(ids) - 1)], codes - len(ids))

    def spread(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Return values [..., U] of the columns at their token ids, [..., V], and `fill` elsewhere."""
        whole = values.new_full((*values.shape[:-1], self.vocab_size), fill)  # [..., V]
        return whole.index_copy(-1, self.on(values.device), values)

    def coverage(self, tokens: Tensor) -> float:
        """Return the share of tokens [N] that are in U; NaN for N = 0."""
        return torch.isin(tokens, self.on(tokens.device)).double().mean().item()

    def save(self, directory: str | PathLike) -> None:
        """Write the ids to a checkpoint."""
        (Path(directory) / FILE).write_text(json.dumps(self.ids.tolist()) + "\n", encoding="utf-8")


def stored_ids(name: str | PathLike, **hub: Any) -> list[int] | None:
    """Return the draft vocabulary of a directory or a Hub repository; None where there is none."""
    file = optional_file(name, FILE, hub)
    return None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))


def check_offsets(name: object, state: dict[str, Tensor], size: int, vocab: int) -> None:
    """Refuse a `d2t` that does not hold offsets of `size` of `vocab` tokens or agree with `t2d`; remove one of all."""
    if "d2t" not in state:
        return
    offsets = state["d2t"]
    if offsets.shape != (size,) or offsets.is_floating_point():
        raise ValueError(f"{name}: d2t must hold draft_vocab_size={size} integers, token id - draft id")
    ids = DraftVocabulary(offsets + torch.arange(size), vocab, f"{name}: d2t").ids
    drafted = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)  # [V]
    if "t2d" in state and not torch.equal(state["t2d"].bool(), drafted):
        raise ValueError(f"{name}: t2d and d2t do not name the same tokens")
    if size == vocab:
        if bool(offsets.any()):
            raise ValueError(f"{name}: d2t permutes a draft vocabulary that is the whole one, {vocab} tokens")
        del state["d2t"]


def frequent_tokens(
    texts: Iterable[Iterable[int]], size: int, tokenizer: PreTrainedTokenizerBase | None = None
) -> Tensor:
    """Return the most frequent tokens of sequences, for `draft_vocabulary`; the model's own outputs serve best.

    Args:
        texts: Token ids of each sequence.
        size: Number of tokens; fewer are returned where the sequences and the tokenizer have fewer.
        tokenizer: All its special tokens, digits and white space are always included.

    Returns:
        [size] int64, ascending.
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


def drafted_tokens(config: Any) -> list[tuple[str, str]]:
    """Return the row of a card on the part of the vocabulary that is drafted; no row where all of it is."""
    size, whole = config.draft_vocab_size, config.vocab_size
    return [("Drafts", f"{size:,} of {whole:,} token ids")] if size is not None and size != whole else []
