"""Drafts from text that was written before: by the sequence itself, by others of its batch, in earlier calls.

A trie of all runs of at most `depth` tokens that were read: the node of a run counts how often it was read, and its
children are the tokens that came next.

    read a b a c       root -- a (2) -- b (1) -- a (1)
                            |        '- c (1)
                            |- b (1) -- a (1) -- c (1)
                            '- c (1)

It forgets a generation at a time: when the young trie has half of the nodes that are allowed, it becomes the old one,
and the old one goes. Look-ups add the counts of both.
"""

from __future__ import annotations

import heapq
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
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

_FILE = "suffixes.safetensors"
_LEAST = {"depth": 2, "num_tokens": 1, "max_nodes": 1000}


class SuffixDrafter(LookUpDrafter):
    """Drafts the likeliest continuations of the last tokens by all text that it has read, for any backbone and batch.

    It counts the continuations of every run of tokens of the prompts, of all sequences of a batch while they are
    written, of earlier calls, and of texts that are added (`add`). Groups of answers to one prompt, agents that
    repeat themselves and traffic of one kind have long runs in common. The counts decide how long the draft is and
    where it branches (SuffixDecoding, Oliaro et al. 2024). Drafts are certain tokens, so that sampling stays exact.
    Calls in several threads may share one drafter.

    Args:
        depth: Tokens of the longest run that is counted.
        num_tokens: The longest draft, unless `num_assistant_tokens` says otherwise.
        factor: Tokens that are drafted for each token of the matched run: long runs are sure.
        least: The smallest probability of a draft's paths, by the counts.
        max_nodes: Runs that are remembered, at about 300 bytes; the oldest are forgotten first.

    Raises:
        ValueError: A value out of range.

    Example:
        >>> drafter = SuffixDrafter().attach(model, default=True)
        >>> out = model.generate(**inputs, num_return_sequences=8, do_sample=True)
        >>> drafter.save_pretrained("suffixes")
    """

    def __init__(
        self, depth: int = 24, num_tokens: int = 16, factor: float = 1.0, least: float = 0.1, max_nodes: int = 1 << 18
    ) -> None:
        for name, value in {"depth": depth, "num_tokens": num_tokens, "max_nodes": max_nodes}.items():
            if not isinstance(value, int) or value < _LEAST[name]:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {_LEAST[name]}")
        if not factor > 0:
            raise ValueError(f"factor={factor!r} must be positive")
        if not 0 <= least <= 1:
            raise ValueError(f"least={least!r} must be a probability")
        self.depth, self.num_tokens, self.max_nodes = depth, num_tokens, max_nodes
        self.factor, self.least, self.counts = factor, least, SuffixCounts(depth, max_nodes)

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Validate `draft_tree={"top_k": children, "total_tokens": size}`; the size is that of the block, b included.

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
        """Return the session of one call."""
        return SuffixSession(self, options)

    def add(self, ids: Any) -> None:
        """Read a text [L], or texts, of token ids, which later calls may continue.

        Raises:
            ValueError: Texts of anything but whole numbers.
        """
        texts = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        texts = texts if texts and isinstance(texts[0], (list, tuple)) else [texts]
        if not all(type(token) is int for text in texts for token in text):
            raise ValueError("ids: must be a text of token ids, or a list of such texts")
        for text in texts:
            self.counts.read(Reader(), text)

    def forget(self) -> None:
        """Forget all text."""
        self.counts.load([], [], [])

    def restore_point(self) -> Callable[[], None]:
        """Return a function by which the drafter forgets the text that it has read since."""
        return partial(self.counts.load, *self.counts.flat())

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write the counts to a directory, in one file that appears when it is whole."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        tensors = dict(zip(("tokens", "parents", "counts"), map(torch.tensor, self.counts.flat())))
        options = json.dumps({name: getattr(self, name) for name in (*_LEAST, "factor", "least")})
        save_file({name: each.long() for name, each in tensors.items()}, target / f"{_FILE}.tmp", {"options": options})
        (target / f"{_FILE}.tmp").replace(target / _FILE)

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str]) -> SuffixDrafter:
        """Read the file of `save_pretrained`.

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
    """The drafts of one call; see `SuffixDrafter`. The prompt is copied to the host once."""

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
        """Note which tokens of the prompt are padding."""
        self.mask = view.mask if view.has_columns and view.is_padded else None

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Read the new tokens."""
        if self.tokens is not None:
            for reader, ids in zip(self.readers, self.tokens.newest_on_host):
                self.counts.read(reader, ids)

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """See `DraftSession`; sequences that have ended get no draft."""
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
        """Return which tokens drafts may begin with under the call's constraints; the host waits for it."""
        masks = self.options.masks(tokens, is_warped=False)
        if masks is None:
            return [None] * len(self.readers)
        size = self.options.backbone.config.get_text_config().vocab_size
        return [each.numpy().__getitem__ for each in masks.allowed((len(self.readers), size), tokens.ids.device).cpu()]

    def _read_prompts(self, tokens: Sequences) -> None:
        prompt = tokens.prompt_length
        real = None if self.mask is None or not prompt else self.mask[:, -prompt:].tolist()
        for index, (reader, ids) in enumerate(zip(self.readers, tokens.ids[:, : max(tokens.lengths)].tolist())):
            columns = range(tokens.lengths[index])
            self.counts.read(reader, [ids[c] for c in columns if real is None or c >= prompt or real[index][c]])


def _tree(drafts: list[list[tuple[int, int]]], device: torch.device, is_chain: bool) -> DraftTree:
    """Return the drafts of all sequences, which go to the device in one copy."""
    most = max(map(len, drafts))
    padded = [[*draft, *[(0, -1)] * (most - len(draft)), (len(draft), 0)] for draft in drafts]
    both = torch.tensor(padded, device=device)
    tokens, parents, counts = both[:, :most, 0], both[:, :most, 1], both[:, most, 0]
    if is_chain or not most:
        return DraftTree.chain(tokens, num_nodes=counts)
    deepest = 0
    for draft in drafts:
        depths: list[int] = []
        for _, parent in draft:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        deepest = max([deepest, *depths])
    return DraftTree(tokens, parents, depth=deepest, num_nodes=counts)


class _Node:
    """A run of tokens: how often it was read, and what came next."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count, self.children = 0, dict[int, _Node]()


class Reader:
    """The position of one sequence: its last tokens, and the nodes of the runs that end with the newest of them."""

    def __init__(self) -> None:
        self.tail: list[int] = []
        self.generation, self.nodes = 0, list[_Node]()


class SuffixCounts:
    """Continuations of the last tokens of a sequence, by how often they came next.

    Several threads may read and look up at once.

    Args:
        depth: Tokens of the longest run.
        max_nodes: Nodes of both generations; one takes about 300 bytes.
    """

    def __init__(self, depth: int, max_nodes: int) -> None:
        self.depth, self.max_nodes = depth, max_nodes
        self._young, self._old, self._size, self._generation = _Node(), _Node(), 0, 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def read(self, reader: Reader, tokens: Sequence[int]) -> None:
        """Count the runs that end with each of the next tokens of a sequence."""
        with self._lock:
            for token in tokens:
                self._read(reader, token)

    def _read(self, reader: Reader, token: int) -> None:
        if self._size + self.depth > self.max_nodes // 2:
            self._old, self._young, self._size = self._young, _Node(), 0
            self._generation += 1
        if reader.generation != self._generation:
            reader.generation, reader.nodes = self._generation, []
        longer = []
        for node in [self._young, *reader.nodes]:
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = _Node()
                self._size += 1
            child.count += 1
            longer.append(child)
        reader.nodes = longer[: self.depth - 1]
        reader.tail = [*reader.tail[-(self.depth - 2) :], token] if self.depth > 2 else [token]

    def draft(
        self,
        tail: Sequence[int],
        length: int,
        nodes: int,
        width: int,
        factor: float,
        least: float,
        allowed: Callable[[int], bool] | None = None,
    ) -> tuple[list[tuple[int, int]], float]:
        """Return a likely continuation, and how many tokens of it the counts expect to be accepted.

        A draft is tokens, and the numbers of their parents (-1: the last token of `tail`). Of the runs that end the
        sequence, the one whose draft is expected to be accepted furthest is followed; long runs may draft more than
        short ones (SuffixDecoding, Oliaro et al. 2024, section 4).

        Args:
            tail: The last tokens of a sequence.
            length: The longest path.
            nodes: The most tokens.
            width: The most children of a token; 1 drafts a chain.
            factor: See `SuffixDrafter`.
            least: See `SuffixDrafter`.
            allowed: Whether a draft may begin with a token; None: with any.
        """
        best, expected = list[tuple[int, int]](), 0.0
        with self._lock:
            for matched, ends in self._matches(tail):
                size = min(nodes, int(factor * matched))
                if size <= expected:  # a token adds at most 1
                    break
                draft, score = _grown(ends, length, size, width, least, allowed)
                if score > expected:
                    best, expected = draft, score
        return best, expected

    def _matches(self, tail: Sequence[int]) -> Iterator[tuple[int, list[_Node]]]:
        """Yield the runs that end the sequence and have continuations: lengths, long ones first, and nodes."""
        for matched in range(min(len(tail), self.depth - 1), 0, -1):
            nodes = [node for root in (self._young, self._old) if (node := _walk(root, tail[-matched:])) is not None]
            if any(node.children for node in nodes):
                yield matched, nodes

    def flat(self) -> tuple[list[int], list[int], list[int]]:
        """Return tokens, numbers of parents (-1: the root), and counts of all nodes, parents first."""
        tokens, parents, counts = list[int](), list[int](), list[int]()
        with self._lock:
            waiting = [(-1, [self._old, self._young])]
            for parent, nodes in waiting:
                for token in sorted(set(chain.from_iterable(node.children for node in nodes))):
                    below = [node.children[token] for node in nodes if token in node.children]
                    tokens.append(token)
                    parents.append(parent)
                    counts.append(sum(node.count for node in below))
                    waiting.append((len(tokens) - 1, below))
        return tokens, parents, counts

    def load(self, tokens: list[int], parents: list[int], counts: list[int]) -> None:
        """Replace all counts by those that `flat` returned."""
        nodes = [_Node() for _ in tokens]
        with self._lock:
            self._young, self._old, self._size, self._generation = _Node(), _Node(), 0, self._generation + 1
            for node, token, parent, count in zip(nodes, tokens, parents, counts):
                node.count = count
                (nodes[parent] if parent >= 0 else self._old).children[token] = node


def _walk(root: _Node, run: Sequence[int]) -> _Node | None:
    """Return the node of a run."""
    node: _Node | None = root
    for token in run:
        node = node and node.children.get(token)
    return node


def _grown(
    nodes: list[_Node], length: int, size: int, width: int, least: float, allowed: Callable[[int], bool] | None
) -> tuple[list[tuple[int, int]], float]:
    """Return the likeliest tokens below the nodes of a run, best first, and how many are expected to be accepted."""
    draft, score = list[tuple[int, int]](), 0.0
    waiting = _children(nodes, 1.0, -1, 1, width, allowed)
    heapq.heapify(waiting)
    while waiting and len(draft) < size:
        chance, _, _, token, parent, depth, nodes = heapq.heappop(waiting)
        if -chance < least:
            break
        draft.append((token, parent))
        score -= chance
        if depth < length:
            for child in _children(nodes, -chance, len(draft) - 1, depth + 1, width):
                heapq.heappush(waiting, child)
    return draft, score


def _children(
    nodes: list[_Node], chance: float, parent: int, depth: int, width: int, allowed: Callable[[int], bool] | None = None
) -> list[tuple[float, int, int, int, int, int, list[_Node]]]:
    """Return the likeliest continuations of a run, in the order of a heap; of equal ones smaller tokens are first."""
    counts: dict[int, int] = {}
    for node in nodes:
        for token, child in node.children.items():
            if allowed is None or allowed(token):
                counts[token] = counts.get(token, 0) + child.count
    total = sum(counts.values())
    likeliest = heapq.nsmallest(width, counts, key=lambda token: (-counts[token], token))
    return [
        (-chance * counts[token] / total, parent, rank, token, parent, depth,
         [node.children[token] for node in nodes if token in node.children])
        for rank, token in enumerate(likeliest)
    ]  # fmt: skip
