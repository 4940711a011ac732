"""Which tree of drafts pays on this backbone, for this drafter and on this machine: `draft_tree="auto"`.

Measured once, on the prompts of the first call that asks for it: a few cycles with a wide tree say how often the r-th
child at a depth is kept, and cycles of four sizes what they take. Of all trees the one with the most expected tokens
per second is remembered by the drafter. It is not chosen anew: a clock that decided in every call would make seeded
texts unrepeatable.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..call.options import CallOptions
from ..verification.verifiers import Verifier
from .building import level_sizes
from .contract import DraftTree, VerificationResult

if TYPE_CHECKING:
    from ..drafter import BaseDrafter

DEEPEST = 8
"""The longest path that is tried, in tokens."""


_RANKS, _WIDEST = 8, 60


_TOP_K, _TOTALS = (1, 2, 3, 4, 6, 8), (3, 4, 6, 8, 12, 16, 24, 32, 48, 60)


_SHARED_TRIALS = 4.0


_TOKENS, _FEW_TOKENS, _FEWEST = 40, 12, 2


_LEAST_ROOM = 8
"""Tokens that must fit after the prompt: less text teaches nothing, and a tree of the usual size is drafted."""


Rates = Sequence[Sequence[float]]
"""[depth][rank], how often the child of that rank is kept below a accepted path."""


Decode = Callable[[dict[str, int], int], "Trial"]
"""From a tree and a number of tokens to what decoding them with it showed."""


def choose_tree(
    generate: Callable[[Any, Tensor, dict[str, Any]], Any],
    drafter: BaseDrafter,
    options: CallOptions,
    config: GenerationConfig,
    prompt: Tensor,
    positions: int | None,
    common: dict[str, Any],
    may_try: bool = True,
) -> CallOptions:
    """Return options whose `draft_tree="auto"` is settled by trials on this prompt.

    Args:
        generate: From a drafter, a prompt and keyword arguments to what the backbone generates with its drafts.
        drafter: Makes the drafts, and remembers the tree.
        options: Of the call.
        config: Of the call.
        prompt: [B, L] int64.
        positions: The most tokens that the backbone reads; None: any number.
        common: Further keyword arguments of trials.
        may_try: False: a tree of the usual size is drafted, without trials.
    """
    room = (positions or 1 << 30) - prompt.shape[1]
    do_sample, longest = bool(config.do_sample), drafter.longest_draft() or DEEPEST
    longest = min(longest, options.num_assistant_tokens or longest)
    common = common | options.extra | {"verification": options.verification, "use_mtp": options.use_mtp}

    def decode(tree: dict[str, int], tokens: int) -> Trial:
        watched, trial = Watched(drafter), _trial_config(config, min(tokens, room))
        out = generate(watched, prompt, common | {"generation_config": trial, "draft_tree": tree})
        if watched.verifier is None:  # something in the model's own config made it decode plainly
            return Trial()
        return watched.verifier.trial(out.speculation.rows_accepted)

    # peers that call together have prompts of other lengths, and would disagree on whether there is room for trials
    is_possible = may_try and room >= _LEAST_ROOM and not common.get("synced_gpus")
    with torch.random.fork_rng([prompt.device] if prompt.is_cuda else []):
        chosen = measured_tree(decode, longest, do_sample) if is_possible else None
    if chosen is not None:
        drafter.tree_choices[do_sample] = chosen
    return drafter.prepare_tree(replace(options, draft_tree=chosen or {}), config)


def _trial_config(config: GenerationConfig, tokens: int) -> GenerationConfig:
    """The call's own config for so many tokens of one text per prompt."""
    config = copy.deepcopy(config)
    config.update(
        max_new_tokens=tokens, max_length=None, min_length=0, min_new_tokens=None,
        num_return_sequences=1, num_assistant_tokens_schedule="constant", num_assistant_tokens=None,
        assistant_confidence_threshold=0.0, cache_implementation="dynamic", compile_config=None,
        return_dict_in_generate=True, output_scores=False, output_logits=False, output_hidden_states=False,
    )  # fmt: skip
    return config


@dataclass
class Trial:
    """What cycles with one tree showed.

    Attributes:
        kept: Of every verification and row, the ranks of the accepted path's nodes, and whether its end had children.
        seconds: Of every cycle but the first.
        size: Tokens of the largest block, which a small vocabulary or a short window may keep below what was asked for.
    """

    kept: list[tuple[list[int], bool]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    size: int | None = None

    @property
    def cycle(self) -> float:
        """What a cycle takes, in seconds."""
        return statistics.median(self.seconds) if self.seconds else 0.0


def measured_tree(decode: Decode, longest: int, is_drawn: bool) -> dict[str, int] | None:
    """The best tree by trials; None where the text ends too soon to tell.

    Args:
        decode: Runs a trial.
        longest: The most tokens of a path.
        is_drawn: Whether trees are of draws.
    """
    depth = min(longest, DEEPEST) - 1
    wide = decode({"depth": depth, "top_k": _RANKS, "total_tokens": _WIDEST}, _TOKENS)
    if len(wide.seconds) < _FEWEST:
        return None
    medium = decode({"depth": depth, "top_k": 4, "total_tokens": 16}, _FEW_TOKENS)
    chain = decode({"depth": depth, "top_k": 1, "total_tokens": depth + 2}, _FEW_TOKENS)
    tried = {_WIDEST: wide, 16: medium, depth + 2: chain}
    cycles = {trial.size or total: trial.cycle for total, trial in tried.items()}
    flat = decode({"depth": 0, "top_k": 2, "total_tokens": 3}, _FEW_TOKENS).cycle
    level = max(chain.cycle - flat, 0.0) / max(depth, 1)
    return best_tree(rates_of(wide.kept, depth + 1), CycleSeconds(cycles, depth, level), depth, is_drawn)


def rates_of(kept: Sequence[tuple[list[int], bool]], depths: int) -> list[list[float]]:
    """Rates by depth and rank, each drawn towards that of all depths where it was seldom tried."""
    hits, trials = [[0.0] * _RANKS for _ in range(depths)], [0.0] * depths
    for ranks, has_children in kept:
        for depth, rank in enumerate(ranks):
            trials[depth] += 1
            hits[depth][min(rank, _RANKS - 1)] += 1
        if has_children and len(ranks) < depths:
            trials[len(ranks)] += 1
    tried = max(sum(trials), 1.0)
    overall = [sum(row[rank] for row in hits) / tried for rank in range(_RANKS)]
    return [
        [(hit + _SHARED_TRIALS * share) / (count + _SHARED_TRIALS) for hit, share in zip(row, overall)]
        for row, count in zip(hits, trials)
    ]


@dataclass
class CycleSeconds:
    """What a cycle takes, as a function of its tree: straight lines between the measured sizes of blocks.

    Attributes:
        cycles: By tokens of the block, at full depth.
        depth: That depth.
        level: What a level of drafting adds.
    """

    cycles: dict[int, float]
    depth: int
    level: float

    def __call__(self, depth: int, total: int) -> float:
        """Seconds; larger blocks never take less."""
        sizes = sorted(self.cycles)
        times = list(itertools.accumulate((self.cycles[size] for size in sizes), max))
        if len(sizes) == 1:  # every tree was as large as any other
            return max(times[0] - (self.depth - depth) * self.level, 1e-9)
        place = min(max(sum(size < total for size in sizes), 1), len(sizes) - 1)
        low, high = sizes[place - 1], sizes[place]
        slope = (times[place] - times[place - 1]) / (high - low)
        at_full_depth = max(times[place - 1] + slope * (total - low), 0.5 * times[0])
        return max(at_full_depth - (self.depth - depth) * self.level, 1e-9)


def best_tree(rates: Rates, seconds: Callable[[int, int], float], depth: int, is_drawn: bool) -> dict[str, int]:
    """The tree with the most expected tokens per second; of equal ones the smallest.

    Args:
        rates: See `rates_of`.
        seconds: Of a cycle, by the depth and the size of the block.
        depth: The largest.
        is_drawn: Whether trees are of draws, whose levels have sizes that are fixed before.
    """
    best, fastest = {}, 0.0
    for deep, top_k, total in itertools.product(range(depth + 1), _TOP_K, _TOTALS):
        if top_k == 1 and total != deep + 2:  # a chain, of which every block beyond its size is the same
            total = deep + 2
        speed = expected_tokens(rates, deep, top_k, total, is_drawn) / seconds(deep, total)
        if speed > fastest * (1 + 1e-9):
            best, fastest = {"depth": deep, "top_k": top_k, "total_tokens": total}, speed
    return best


def expected_tokens(rates: Rates, depth: int, top_k: int, total: int, is_drawn: bool) -> float:
    """What a verification yields on average, as if rates were the same after all paths of a length.

    A dynamic tree looks at every path, and yields more.
    """
    sizes = level_sizes(depth + 1, top_k, total - 1)
    frontier, nodes = [1.0], []
    for level in range(depth + 1):
        found = sorted((value * rate for value in frontier for rate in rates[level][:top_k]), reverse=True)
        if is_drawn:
            found = found[: sizes[level]] if level < len(sizes) else []
        nodes += found
        frontier = found[:top_k]
    return 1 + sum(sorted(nodes, reverse=True)[: total - 1])


class WatchedVerifier:
    """A verifier that notes when it was asked, and what it accepted.

    Args:
        verifier: Decides.
    """

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.times: list[float] = []
        self.size = 0
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.verifier, name)

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        """See `Verifier`."""
        result = self.verifier.verify(tree, scores)
        self.times.append(time.perf_counter())
        self.size = max(self.size, tree.tokens.shape[1] + 1)
        self.kept.append((tree.parents, result.nodes))
        return result

    def trial(self, rows_accepted: list[list[int]]) -> Trial:
        """What was seen of rows while they were open, for so many verifications as they have entries."""
        seconds = [later - earlier for earlier, later in itertools.pairwise(self.times)]
        trial = Trial(seconds=seconds, size=self.size or None)
        for number, (parents, nodes) in enumerate(self.kept):
            for row, (above, path) in enumerate(zip(parents.tolist(), nodes.tolist())):
                if number < len(rows_accepted[row]):
                    kept = [node for node in path if node >= 0]
                    ranks = [above[:node].count(above[node]) for node in kept]
                    trial.kept.append((ranks, (kept[-1] if kept else -1) in above))
        return trial


class Watched:
    """A drafter whose verifiers are watched; all else is the drafter's.

    Args:
        drafter: Makes the drafts.
    """

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.verifier: WatchedVerifier | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def make_verifier(self, options: Any, session: Any) -> WatchedVerifier:
        """See `DraftSession`."""
        self.verifier = WatchedVerifier(self.drafter.make_verifier(options, session))
        return self.verifier
