"""Drafts from text that was written before: by the sequence itself, by others of its batch, in earlier calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from ..attach import LookUpDrafter
from ..call.options import CallOptions, DraftOptions
from ..call.sequences import Sequences
from ..protocols import CacheView, DraftSession
from ..target.target import TargetOutput
from ..trees.contract import DraftTree, VerificationResult
from .suffix_counts import Reader, SuffixCounts

_FILE = "suffixes.safetensors"
_LEAST = {"depth": 2, "num_tokens": 1, "max_nodes": 1000}


class SuffixDrafter(LookUpDrafter):
    """Drafts what followed the last tokens most often in all text that it has seen, for any backbone and batch.

    It counts the continuations of every run of tokens of the prompts, of all sequences of a batch while they are
    written, of earlier calls, and of texts that it is given (`add`). Groups of answers to one prompt, agents that
    repeat themselves and traffic of one kind have long runs in common. How often a continuation came next says how
    long the draft is and where it branches (SuffixDecoding, Oliaro et al. 2024). Drafts are certain tokens, so that
    sampling stays exact. Calls in several threads may share one drafter.

    Args:
        depth: Tokens of the longest run that is counted.
        num_tokens: The longest draft, unless `num_assistant_tokens` says otherwise.
        factor: Tokens that are drafted for each token of the run that was found: long runs are sure.
        least: The smallest probability of a draft's paths, by the counts.
        max_nodes: Runs that are remembered, at about 300 bytes; what was read long ago is forgotten first.

    Raises:
        ValueError: A value out of range.

    Example:
        >>> drafter = SuffixDrafter().attach(model, default=True)
        >>> out = model.generate(**inputs, num_return_sequences=8, do_sample=True)
        >>> drafter.save_pretrained("suffixes")
    """

    def __init__(
        self,
        depth: int = 24,
        num_tokens: int = 16,
        factor: float = 1.0,
        least: float = 0.1,
        max_nodes: int = 1 << 18,
    ) -> None:
        for name, value in {"depth": depth, "num_tokens": num_tokens, "max_nodes": max_nodes}.items():
            if not isinstance(value, int) or value < _LEAST[name]:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {_LEAST[name]}")
        if not factor > 0:
            raise ValueError(f"factor={factor!r} must be positive")
        if not 0 <= least <= 1:
            raise ValueError(f"least={least!r} must be a probability")
        self._backbones = []
        self.depth, self.num_tokens, self.factor, self.least, self.max_nodes = (
            depth,
            num_tokens,
            factor,
            least,
            max_nodes,
        )
        self.counts = SuffixCounts(depth, max_nodes)

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Checks `draft_tree={"top_k": children, "total_tokens": size}`; the size is that of the block, b included.

        Raises:
            ValueError: Another tree.
        """
        tree = options.draft_tree
        sizes = tree if isinstance(tree, dict) else {}
        is_right = bool(sizes) and sizes.keys() <= {"top_k", "total_tokens"}
        if not is_right or any(type(value) is not int or value < 2 for value in sizes.values()):
            raise ValueError(
                f"draft_tree={tree!r} of suffixes must be {{'top_k': children, 'total_tokens': size}}, at least 2 each"
            )
        return options

    def start(self, options: DraftOptions) -> SuffixSession:
        """One call's look-ups."""
        return SuffixSession(self, options)

    def add(self, ids: Any) -> None:
        """Read a text [L], or texts, of token ids, which later calls may continue.

        Raises:
            ValueError: Texts that are no rows of whole numbers.
        """
        rows = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        rows = rows if rows and isinstance(rows[0], (list, tuple)) else [rows]
        if not all(type(token) is int for row in rows for token in row):
            raise ValueError("ids: must be a text of token ids, or a list of such texts")
        for row in rows:
            self.counts.read(Reader(), row)

    def forget(self) -> None:
        """Forget all text."""
        self.counts.load([], [], [])

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write what was read to a folder, in one file that appears when it is whole."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        tensors = dict(zip(("tokens", "parents", "counts"), map(torch.tensor, self.counts.flat())))
        names = ("depth", "num_tokens", "factor", "least", "max_nodes")
        options = json.dumps({name: getattr(self, name) for name in names})
        save_file({name: each.long() for name, each in tensors.items()}, target / f"{_FILE}.tmp", {"options": options})
        (target / f"{_FILE}.tmp").replace(target / _FILE)

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str]) -> SuffixDrafter:
        """Read what `save_pretrained` wrote.

        Raises:
            FileNotFoundError: There is none.
        """
        if not (file := Path(folder) / _FILE).is_file():
            raise FileNotFoundError(f"{folder} holds no {_FILE}")
        with safe_open(file, "pt") as saved:
            drafter = cls(**json.loads(saved.metadata()["options"]))
            drafter.counts.load(*(saved.get_tensor(name).tolist() for name in ("tokens", "parents", "counts")))
        return drafter


class SuffixSession(DraftSession):
    """The drafts of one call; see `SuffixDrafter`. The prompt is copied to the host once, and every draft from it."""

    expected: float = 0.0

    def __init__(self, drafter: SuffixDrafter, options: DraftOptions) -> None:
        self.drafter, self.counts, self.num_tokens = drafter, drafter.counts, options.num_tokens
        self.options = options
        tree = options.draft_tree or {"top_k": 1}
        self.width = tree.get("top_k", 4)
        self.nodes = options.num_tokens if self.width == 1 else tree.get("total_tokens", 2 * options.num_tokens) - 1
        self.readers = [Reader() for _ in options.prompt]
        self.tokens: Sequences | None = None

    def begin(self, outputs: Any, view: CacheView) -> None:
        """Takes which tokens of the prompt are padding."""
        self.mask = view.mask if view.has_columns and view.is_padded else None

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Reads what the cycle wrote."""
        if self.tokens is not None:
            for reader, ids in zip(self.readers, self.tokens.newest_on_host):
                self.counts.read(reader, ids)

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """The likeliest continuations of every sequence that is open."""
        if self.tokens is None:
            self.tokens = tokens
            self._read_prompts(tokens)
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        drafter, drafts, total = self.drafter, list[list[tuple[int, int]]](), 0.0
        for reader, newest, allowed in zip(self.readers, tokens.newest_on_host, self._allowed(tokens)):
            nodes = min(self.nodes, length) if self.width == 1 else self.nodes
            options = (reader.tail, length, nodes, self.width, drafter.factor, drafter.least, allowed)
            draft, expected = self.counts.draft(*options) if newest else ([], 0.0)  # nothing new: it has ended
            drafts.append(draft)
            total += expected
        self.expected = total / max(sum(map(bool, tokens.newest_on_host)), 1)
        return _tree(drafts, tokens.ids.device, self.width == 1)

    def _allowed(self, tokens: Sequences) -> list[Callable[[int], bool] | None]:
        """Which tokens drafts may begin with under the call's constraints; the host waits for it."""
        masks = self.options.masks(tokens, is_warped=False)
        if masks is None:
            return [None] * len(self.readers)
        size = self.options.backbone.config.get_text_config().vocab_size
        return [row.numpy().__getitem__ for row in masks.allowed((len(self.readers), size), tokens.ids.device).cpu()]

    def _read_prompts(self, tokens: Sequences) -> None:
        prompt = tokens.prompt_length
        real = None if self.mask is None or not prompt else self.mask[:, -prompt:].tolist()
        for row, (reader, ids) in enumerate(zip(self.readers, tokens.ids[:, : max(tokens.lengths)].tolist())):
            kept = range(tokens.lengths[row])
            self.counts.read(
                reader, [ids[place] for place in kept if real is None or place >= prompt or real[row][place]]
            )


def _tree(drafts: list[list[tuple[int, int]]], device: torch.device, is_chain: bool) -> DraftTree:
    """Return the drafts of all sequences, which go to the device in one copy."""
    most = max(map(len, drafts))
    rows = [[*draft, *[(0, -1)] * (most - len(draft)), (len(draft), 0)] for draft in drafts]
    both = torch.tensor(rows, device=device)
    tokens, parents, counts = both[:, :most, 0], both[:, :most, 1], both[:, most, 0]
    if is_chain or not most:
        return DraftTree.chain(tokens, num_nodes=counts)
    return DraftTree(tokens, parents, depth=_deepest(drafts), num_nodes=counts)


def _deepest(drafts: list[list[tuple[int, int]]]) -> int:
    """Return the tokens of the longest path."""
    deepest = 0
    for draft in drafts:
        depths: list[int] = []
        for _, parent in draft:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        deepest = max([deepest, *depths])
    return deepest
