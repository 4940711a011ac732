"""Which tree of drafts pays on this backbone, for this drafter and on this machine: `draft_tree="auto"`.

Measured once, on the prompts of the first call that asks for it: short trials say how many seconds a token takes with
chains of several lengths, and then with wider trees of the best length. The drafter remembers the fastest. It is not
chosen anew: a clock that decided in every call would make seeded texts unrepeatable.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..call.options import CallOptions

if TYPE_CHECKING:
    from ..drafter import BaseDrafter

DEEPEST = 8
"""The longest path that is tried, in tokens."""
_LENGTHS, _SIZES = (2, 4, DEEPEST), ((4, 16), (8, 48))
"""Lengths of chains; and children per node and nodes of wider trees, b included."""
_TOKENS, _FEWEST = 24, 4
"""Tokens of a trial, and the fewest that tell anything."""
_GAIN = 0.97
"""A larger tree must be faster by this factor, beyond what clocks vary."""
_LEAST_ROOM = 8
"""Tokens that must fit after the prompt: less text teaches nothing, and a tree of the usual size is drafted."""
Tree = dict[str, int]
Pace = Callable[[Tree], float | None]
"""From a tree to the seconds that a token takes with it; None where the text ends too soon to tell."""


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
    room, do_sample = (positions or 1 << 30) - prompt.shape[1], bool(config.do_sample)
    longest = min(drafter.longest_draft() or DEEPEST, options.num_assistant_tokens or DEEPEST, DEEPEST)
    common = common | options.extra | {"verification": options.verification, "use_mtp": options.use_mtp}

    def pace(tree: Tree) -> float | None:
        begun, trial = time.perf_counter(), _trial_config(config, min(_TOKENS, room))
        out = generate(drafter, prompt, common | {"generation_config": trial, "draft_tree": tree})
        seconds, counts = time.perf_counter() - begun, out.speculation.rows_accepted if out.speculation else []
        tokens = sum(1 + count for row in counts for count in row)
        return seconds / tokens if tokens >= _FEWEST else None

    # peers that call together have prompts of other lengths, and would disagree on whether there is room for trials
    is_possible = may_try and room >= _LEAST_ROOM and not common.get("synced_gpus")
    with torch.random.fork_rng([prompt.device] if prompt.is_cuda else []):
        chosen = fastest_tree(pace, longest) if is_possible else None
    if chosen is not None:
        drafter.tree_choices[do_sample] = chosen
    return drafter.prepare_tree(replace(options, draft_tree=chosen or {}), config)


def fastest_tree(pace: Pace, longest: int) -> Tree | None:
    """Return the fastest of the trees that are tried; None where the text ends too soon to tell.

    Args:
        pace: Runs a trial.
        longest: The most tokens of a path.
    """
    depths = sorted({min(length, longest) - 1 for length in _LENGTHS})
    chains = [{"depth": depth, "top_k": 1, "total_tokens": depth + 2} for depth in depths]
    pace(chains[0])  # what a first call sets up, later ones do not
    best = _best_of(pace, chains, None)
    if best is None:
        return None
    wider = [{"depth": best[1]["depth"], "top_k": top_k, "total_tokens": total} for top_k, total in _SIZES]
    found = _best_of(pace, wider, best)
    return None if found is None else found[1]


def _best_of(pace: Pace, trees: list[Tree], best: tuple[float, Tree] | None) -> tuple[float, Tree] | None:
    """Return the pace and the fastest of some trees and the `best` so far; None where a trial told nothing."""
    for tree in trees:
        if (found := pace(tree)) is None:
            return None
        if best is None or found < _GAIN * best[0]:
            best = found, tree
    return best


def _trial_config(config: GenerationConfig, tokens: int) -> GenerationConfig:
    """Return the call's own config for so many tokens of one text per prompt."""
    config = copy.deepcopy(config)
    config.update(
        max_new_tokens=tokens, max_length=None, min_length=0, min_new_tokens=None,
        num_return_sequences=1, num_assistant_tokens_schedule="constant", num_assistant_tokens=None,
        assistant_confidence_threshold=0.0, cache_implementation="dynamic", compile_config=None,
        return_dict_in_generate=True, output_scores=False, output_logits=False, output_hidden_states=False,
    )  # fmt: skip
    return config
