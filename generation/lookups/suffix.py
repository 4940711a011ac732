"""Drafts from text that was written before: by the sequence itself, by others of its batch, in earlier calls."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ...configuration.fields import check_values
from ..call.options import CallOptions, DraftOptions
from ..call.sequences import Sequences, Speculation
from ..contract import CacheView, DraftSession, DraftTree, TargetOutput, VerificationResult
from ..tensors.saving import whole_file
from ..tensors.tensor_files import naming
from .base import LookUpDrafter
from .suffix_table import Reader, SuffixTable

_FILE = "suffixes.safetensors"
_ANY = 1 << 31
"""More than any vocabulary has ids."""
_RANGES = {
    "depth": "",
    "num_tokens": "[1, inf)",
    "max_tokens": f"[1000, {_ANY})",
    "factor": "(0, inf)",
    "least": "[0, 1]",
}
_CALLS = count()
_PRIORS = (0.15, 0.45), (0.4, 0.6), (0.65, 0.8), (0.85, 0.9)
"""Which shares of first and of later tokens are accepted of drafts of 1, of 2 and 3, of 4 to 7, and of more tokens."""
Scope = str | int
Found = list[tuple[list[tuple[int, int]], float]]
"""Per sequence, tokens of a draft with the numbers of their parents, and how many should be accepted."""


class SuffixDrafter(LookUpDrafter):
    """Drafts the most likely continuations of the last tokens by all text that it has read, for any backbone and batch.

    It counts the continuations of the newest places of a run of tokens: in the prompts, in all sequences of a batch
    while they are written, in earlier calls, and in texts that are added (`add`). Groups of answers to one prompt,
    agents that repeat themselves and traffic of one kind have long runs in common. The counts decide how long the draft
    is and where it branches (SuffixDecoding, Oliaro et al. 2024). Drafts are deterministic tokens, so that sampling
    stays exact. Calls in several threads may share one drafter.

    Its drafts, and how many calls of the backbone a text takes, tell a user what others have sent. Where they must not,
    give each call a `scope` (`generate(..., scope="user 7")`, or a list of one per prompt): it drafts from the text of
    this scope alone, and adds to no other. Or let calls add nothing (`read_only`).

    Args:
        depth: Tokens of the longest run that is looked for.
        num_tokens: The longest draft, unless `num_assistant_tokens` says otherwise.
        factor: Tokens that are drafted for each token of the matched run: long runs are sure.
        least: The smallest probability of a draft's paths, by the counts.
        max_tokens: Tokens of text that are remembered, at 28 to 56 bytes; the oldest are forgotten first. Of all scopes
            together as many again: those that were used least recently go first.
        read_only: Calls without a scope draft from the text that was added (`add`), and add none.

    Example:
        >>> drafter = SuffixDrafter().attach(model, default=True)
        >>> out = model.generate(**inputs, num_return_sequences=8, do_sample=True)
        >>> drafter.save_pretrained("suffixes")
    """

    own_options = frozenset({"scope"})

    def __init__(
        self,
        depth: int = 24,
        num_tokens: int = 16,
        factor: float = 1.0,
        least: float = 0.1,
        max_tokens: int = 1 << 20,
        read_only: bool = False,
    ) -> None:
        self.depth, self.num_tokens, self.max_tokens = depth, num_tokens, max_tokens
        self.factor, self.least, self.read_only = factor, least, read_only
        check_values(self, {}, _RANGES | {"depth": f"[2, {max_tokens // 2}]"})
        self.table, self.scopes = SuffixTable(depth, max_tokens), dict[Scope, SuffixTable]()

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuse a vocabulary that lacks tokens of the text that was read."""
        _check_ids(*self.table.bounds, backbone)

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Validate `draft_tree={"top_k": children, "total_tokens": size}`, whose size is that of the whole block."""
        tree, known = options.draft_tree, {"top_k", "total_tokens"}
        if not isinstance(tree, dict) or not tree or not tree.keys() <= known or min(tree.values()) < 2:
            raise ValueError(f"draft_tree={tree!r} of suffixes must be a dict of {known}, at least 2 each")
        return options

    def start(self, options: DraftOptions) -> SuffixSession:
        return SuffixSession(self, options)

    def store(self, scope: Scope | None) -> SuffixTable:
        """Return the text of a scope; None: that of calls without one.

        Of all other scopes, those that were used least recently are forgotten while there are too many tokens.
        """
        if scope is None:
            return self.table
        store = self.scopes.setdefault(scope, SuffixTable(self.depth, self.max_tokens))
        store.used = next(_CALLS)
        known = dict(self.scopes)  # several threads may add some
        total = sum(each.size for each in known.values())
        for oldest in sorted(known, key=lambda key: known[key].used):
            if total > self.max_tokens and oldest != scope:
                total -= known[oldest].size
                self.scopes.pop(oldest, None)
        return store

    def add(self, ids: Any, scope: Scope | None = None) -> None:
        """Read a text [L], or texts, of token ids, which later calls (of a scope) may continue.

        Raises:
            ValueError: Texts of anything but whole numbers, or of tokens that the backbone lacks; nothing is read then.
        """
        texts = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        texts = texts if texts and isinstance(texts[0], (list, tuple)) else [texts]
        if not all(type(token) is int for text in texts for token in text):
            raise ValueError("ids: must be a text of token ids, or a list of such texts")
        known = [token for text in texts for token in text] or [0]
        _check_ids(min(known), max(known), self.backbone if self.is_attached else None)
        store = self.store(scope)
        for text in texts:
            store.read([Reader()], [text])

    def forget(self, scope: Scope | None = None) -> None:
        """Forget the text of a scope, or all text."""
        if scope is not None:
            self.scopes.pop(scope, None)
            return
        self.scopes.clear()
        self.table.clear()

    def restore_point(self) -> Callable[[], None]:
        known = copy.deepcopy((self.table, self.scopes))

        def restore() -> None:
            self.table, self.scopes = copy.deepcopy(known)

        return restore

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write the text, but for that of scopes, to a directory; whoever reads the file reads the text."""
        texts = self.table.texts()
        tensors = {
            "tokens": torch.tensor([token for text in texts for token in text], dtype=torch.int32),
            "lengths": torch.tensor([len(text) for text in texts], dtype=torch.long),
        }
        options = json.dumps({name: getattr(self, name) for name in (*_RANGES, "read_only")})
        with whole_file(Path(folder) / _FILE) as file:
            save_file(tensors, file, {"options": options})

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str]) -> SuffixDrafter:
        """Read the file of `save_pretrained`.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is damaged, or holds something else.
        """
        if not (file := Path(folder) / _FILE).is_file():
            raise FileNotFoundError(f"{folder} holds no {_FILE}")
        with naming(file), safe_open(file, "pt") as saved:
            try:
                drafter = cls(**json.loads(saved.metadata()["options"]))
                texts = _read_texts(saved)
            except (LookupError, TypeError, ValueError) as error:
                raise ValueError(f"{file} holds no text of a SuffixDrafter: {error!r}") from error
        for text in texts:
            drafter.table.read([Reader()], [text])
        return drafter


def _check_ids(low: int, high: int, backbone: PreTrainedModel | None) -> None:
    """Refuse ids outside of a backbone's vocabulary; without a backbone, negative ones and those of no vocabulary."""
    size = _ANY if backbone is None else backbone.config.get_text_config().vocab_size
    if low < 0 or high >= size:
        valid = f"0 to {size - 1}" + (f", as the vocabulary of {type(backbone).__name__}" if backbone else "")
        raise ValueError(f"ids: the text of this SuffixDrafter has token {low if low < 0 else high}; ids are {valid}")


def _read_texts(saved: safe_open) -> list[list[int]]:
    """Return the texts of a file; a ValueError where lengths do not fit, or ids are negative."""
    tokens, lengths = saved.get_tensor("tokens"), saved.get_tensor("lengths")
    kinds = tokens.dtype, lengths.dtype, tokens.dim(), lengths.dim()
    if kinds != (torch.int32, torch.long, 1, 1) or bool((tokens < 0).any()) or bool((lengths < 1).any()):
        raise ValueError(f"tokens and lengths of {kinds}")
    if sum(lengths.tolist()) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens in texts of {sum(lengths.tolist())}")
    return [text.tolist() for text in tokens.split(lengths.tolist())]


class SuffixSession(DraftSession):
    """The drafts of one call; the prompt is copied to the host once.

    Where shapes are fixed, new tokens are read when the next draft is requested, or the call ends: `advance` may be
    replayed without the host.
    """

    expected: float = 0.0
    takes_fixed = reads_host = True
    priors = _PRIORS
    found: Found | None = None  # the longest drafts, where `kinds` has looked

    def __init__(self, drafter: SuffixDrafter, options: DraftOptions) -> None:
        self.drafter, self.num_tokens, self.options = drafter, options.num_tokens, options
        self.stores = _stores_of(drafter, options)
        tree = options.draft_tree or {"top_k": 1}
        self.width = tree.get("top_k", 4)
        self.nodes = options.num_tokens if self.width == 1 else tree.get("total_tokens", 2 * options.num_tokens) - 1
        self.readers = [Reader() for _ in options.prompt]
        self.tokens: Sequences | None = None
        self.num_read: list[int] = []  # tokens of every sequence, padding of the prompt included

    def begin(self, outputs: object, view: CacheView) -> None:
        self.is_fixed = view.is_fixed
        self.mask = view.mask if view.has_columns and view.is_padded else None

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        if not self.is_fixed:
            self._read_newest()

    def finish(self, statistics: Speculation) -> None:
        if self.is_fixed:
            self._read_newest()

    def _read_newest(self) -> None:
        if self.tokens is None:
            return
        texts = list[list[int]]()
        for row, (ids, length) in enumerate(zip(self.tokens.newest_on_host, self.tokens.lengths)):
            is_new = self.num_read[row] + len(ids) == length
            texts.append(ids if is_new else [])
            self.num_read[row] = length if is_new else self.num_read[row]
        self._read(texts)

    def _read(self, texts: list[list[int]]) -> None:
        """Read the next tokens of every sequence [B]."""
        for store in dict.fromkeys(self.stores):
            parts = [(reader, text) for own, reader, text in zip(self.stores, self.readers, texts) if own is store]
            if not (self.drafter.read_only and store is self.drafter.table):
                store.read(*zip(*parts))
                continue
            for reader, text in parts:
                reader.follow(text, store.depth)

    def kinds(self, tokens: Sequences) -> list[int]:
        """See `DraftSession`: by the length of a draft, which that of the matched run decides."""
        self.found = self._look_up(tokens, self.num_tokens)
        return [min(len(draft).bit_length(), len(self.priors)) - 1 for draft, _ in self.found]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        found, self.found = self.found, None
        if length < 1:
            self._read_all(tokens)
            return DraftTree.chain(tokens.ids[:, :0])
        if found is None or length < self.num_tokens:
            found = self._look_up(tokens, length)
        fixed = (length, self._nodes(length)) if self.is_fixed else ()
        return _tree([draft for draft, _ in found], tokens.ids.device, self.width == 1, *fixed)

    def _read_all(self, tokens: Sequences) -> None:
        if self.tokens is None:
            self.tokens, self.num_read = tokens, list(tokens.lengths)
            self._read_prompts(tokens)
        elif self.is_fixed:
            self._read_newest()

    def _nodes(self, length: int) -> int:
        return min(self.nodes, length) if self.width == 1 else self.nodes

    def _look_up(self, tokens: Sequences, length: int) -> Found:
        """Return the draft of every sequence [B], and how many of its tokens should be accepted."""
        self._read_all(tokens)
        how, of_drafter = (length, self._nodes(length), self.width), (self.drafter.factor, self.drafter.least)
        rows = zip(self.stores, self.readers, tokens.newest_on_host, self._allowed(tokens))
        found = [  # nothing new: it has ended
            store.draft(reader.tail, *how, *of_drafter, allowed) if newest else ([], 0.0)
            for store, reader, newest, allowed in rows
        ]
        self.expected = sum(expected for _, expected in found) / max(sum(map(bool, tokens.newest_on_host)), 1)
        return found

    def _allowed(self, tokens: Sequences) -> list[Callable[[int], bool] | None]:
        """Return which tokens drafts may begin with under the call's constraints; the host waits for it."""
        masks = self.options.masks(tokens, is_warped=False)
        if masks is None:
            return [None] * len(self.readers)
        size = self.options.backbone.config.get_text_config().vocab_size
        return [each.numpy().__getitem__ for each in masks.allowed((len(self.readers), size), tokens.ids.device).cpu()]

    def _read_prompts(self, tokens: Sequences) -> None:
        prompt, texts = tokens.prompt_length, list[list[int]]()
        real = None if self.mask is None or not prompt else self.mask[:, -prompt:].tolist()
        for index, ids in enumerate(tokens.ids[:, : max(tokens.lengths)].tolist()):
            columns = range(tokens.lengths[index])
            texts.append([ids[c] for c in columns if real is None or c >= prompt or real[index][c]])
        self._read(texts)


def _stores_of(drafter: SuffixDrafter, options: DraftOptions) -> list[SuffixTable]:
    """Return the text that every sequence of a call [B] is drafted from, and adds to."""
    scope, rows = options.extra.get("scope"), len(options.prompt)
    scopes = list(scope) if isinstance(scope, (list, tuple)) else [scope]
    if rows % max(len(scopes), 1) or not scopes or (None in scopes and scope is not None):
        raise ValueError(f"scope={scope!r} has {len(scopes)} scopes for {rows} sequences: give one for each prompt")
    stores = [drafter.store(each) for each in scopes]
    for store in stores if scope is not None else ():
        _check_ids(*store.bounds, options.backbone)
    return [store for store in stores for _ in range(rows // len(stores))]  # as `generate` repeats prompts


def _tree(
    drafts: list[list[tuple[int, int]]], device: torch.device, is_chain: bool, depth: int = 0, size: int = 0
) -> DraftTree:
    """Return the drafts of all sequences, which go to the device in one copy; `depth` and `size` are the least."""
    most = max(size, *map(len, drafts))
    padded = [[*draft, *[(0, -1)] * (most - len(draft)), (len(draft), 0)] for draft in drafts]
    both = torch.tensor(padded, device=device)  # [B, m + 1, 2]
    tokens, parents, counts = both[:, :most, 0], both[:, :most, 1], both[:, most, 0]
    if is_chain or not most:
        return DraftTree.chain(tokens, num_nodes=counts)
    deepest = depth
    for draft in drafts:
        depths: list[int] = []
        for _, parent in draft:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        deepest = max([deepest, *depths])
    return DraftTree(tokens, parents, depth=deepest, num_nodes=counts)
