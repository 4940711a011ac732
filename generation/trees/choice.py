"""Which tree of drafts pays, for `draft_tree="auto"`.

Short trials on the prompts of the first call measure what cycles of chains of several lengths take and accept, and then
those of wider trees of the best length. The drafter remembers what promises most tokens per second. It is not chosen
again: a clock that decided in every call would make seeded outputs unrepeatable.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, groupby
from operator import itemgetter
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..backbone.wrapped_models import Kwargs
from ..call.options import CallOptions
from ..call.schedule import AcceptanceRates, CycleCosts
from ..call.sequences import Speculation
from ..drafter import BaseDrafter
from .growth import DEEPEST

_LENGTHS = 1, 2, 4, DEEPEST  # of chains
_SIZES = (4, 16), (8, 48)  # children per node and nodes of wider trees, b included
_TOKENS, _FEWEST = 12, 4  # tokens of a trial, and the fewest that tell anything
_GAIN = 0.97  # a wider tree must be faster by this factor, beyond what clocks vary
_LEAST = 8  # tokens that must fit after the prompt: shorter outputs tell nothing, and a usual tree is drafted
Tree = dict[str, int]
Trial = Callable[[Tree], Speculation | None]
"""From a tree to the statistics of a short output; None where it ends too soon to tell."""


def choose_tree(
    generate: Callable[[Any, Tensor, Kwargs], Any],
    drafter: BaseDrafter,
    options: CallOptions,
    config: GenerationConfig,
    prompt: Tensor,
    positions: int | None,
    common: Kwargs,
    may_try: bool = True,
) -> CallOptions:
    """Return options whose `draft_tree="auto"` is settled by trials on this prompt, or a tree of the usual size.

    `generate` takes a drafter, a prompt and keyword arguments, among them `common`; the backbone reads at most
    `positions`.
    """
    left, do_sample = (positions or 1 << 30) - prompt.shape[1], bool(config.do_sample)
    longest = min(drafter.longest_draft() or DEEPEST, options.num_assistant_tokens or DEEPEST, DEEPEST)
    common = common | options.extra | {"verification": options.verification}

    def trial(tree: Tree) -> Speculation | None:
        short = _trial_config(config, min(_TOKENS, left), options.use_mtp)
        stats = generate(drafter, prompt, common | {"generation_config": short, "draft_tree": tree}).speculation
        return stats if stats and sum(1 + count for count in _accepted(stats)) >= _FEWEST else None

    # peers that call together have prompts of other lengths, and would disagree on whether there is room for trials
    is_possible = may_try and left >= _LEAST and not common.get("synced_gpus")
    device = prompt.device
    generators = [torch.default_generator, *([torch.cuda.default_generators[device.index]] if prompt.is_cuda else [])]
    with torch.random.fork_rng([device] if prompt.is_cuda else []):
        for generator in generators:  # the call's text must not depend on what was chosen by its numbers
            generator.manual_seed((generator.initial_seed() + 1) % 2**63)
        chosen = fastest_tree(trial, longest, drafter.tree_budgets) if is_possible else None
    if chosen is not None:
        drafter.tree_choices[do_sample] = chosen
    return drafter.prepare_tree(replace(options, draft_tree=chosen or {}), config)


def fastest_tree(trial: Trial, longest: int, budgets: Sequence[int] = ()) -> Tree | None:
    """Return the tree that promises most tokens per second, of paths up to `longest`; None where a trial tells nothing.

    Wider trees are those of `budgets`, up to one that is slower, or where there are none as deep as the best chain.

    Chains share what they accept, position by position. First a length between two that were tried takes a time between
    theirs; then the best one and its neighbours are tried, for costs have steps. Wider trees must be faster by more.
    """
    lengths = sorted({min(length, longest) for length in _LENGTHS})
    trial(chain_options(lengths[0]))  # what a first call sets up, later ones do not
    rates = AcceptanceRates(lengths[-1])
    if (coarse := _best_chain(trial, lengths, rates)) is None:
        return None
    middle, _ = coarse
    near = [length for length in (middle - 1, middle, middle + 1) if 1 <= length <= lengths[-1]]
    if (fine := _best_chain(trial, near, rates)) is None:
        return None
    best, fastest = fine
    chosen = chain_options(best)
    of_size = [{"depth": best - 1, "top_k": top_k, "total_tokens": total} for top_k, total in _SIZES]
    for tree in [{"total_tokens": budget} for budget in budgets] or of_size:
        if (stats := trial(tree)) is None:
            return None
        if (pace := _careful_pace(stats)) < _GAIN * fastest:
            fastest, chosen = pace, tree
        elif budgets and pace > fastest:
            break
    return chosen


def _best_chain(trial: Trial, lengths: Sequence[int], rates: AcceptanceRates) -> tuple[int, float] | None:
    """Return the best length within those that are tried, and its seconds per token; None where a trial tells nothing.

    They are tried there and back, for a machine is slow for a while. `rates` learns what the trials accepted.
    """
    costs = CycleCosts()
    for length in (*lengths, *reversed(lengths)):
        if (stats := trial(chain_options(length))) is None:
            return None
        drafted = sorted(zip(map(len, chain.from_iterable(stats.rows_drafts)), _accepted(stats)))
        for size, verified in groupby(drafted, key=itemgetter(0)):  # the end of an output shortens drafts
            rates.update(size, [count for _, count in verified])
        costs.add(length, _seconds(stats))
    yields = list(accumulate(rates.survival(), initial=1.0))
    paces = {length: costs.seconds(length) / yields[length] for length in range(min(lengths), max(lengths) + 1)}
    best = min(paces, key=lambda length: paces[length])
    return best, paces[best]


def chain_options(length: int) -> Tree:
    """Return the options of one path."""
    return {"depth": length - 1, "top_k": 1, "total_tokens": length + 1}


def _accepted(stats: Speculation) -> list[int]:
    return list(chain.from_iterable(stats.rows_accepted))


def _seconds(stats: Speculation) -> float:
    """Return the mean seconds of a cycle; the sequence that ended last was in all of them."""
    return stats.cycle_seconds / max(map(len, stats.rows_accepted))


def _careful_pace(stats: Speculation) -> float:
    """Return the seconds of a token of each sequence if cycles yield a standard error less than they did."""
    accepted = _accepted(stats)
    error = stdev(accepted) / len(accepted) ** 0.5 if len(accepted) > 1 else 0.0
    return _seconds(stats) / (1 + mean(accepted) - error)


def _trial_config(config: GenerationConfig, tokens: int, use_mtp: bool | None) -> GenerationConfig:
    """Return the call's own config for so many tokens of one output per prompt."""
    config = copy.deepcopy(config)
    config.update(
        max_new_tokens=tokens, max_length=None, min_length=0, min_new_tokens=None, use_mtp=use_mtp,
        num_return_sequences=1, num_assistant_tokens_schedule="constant", num_assistant_tokens=None,
        assistant_confidence_threshold=0.0, cache_implementation="dynamic", compile_config=None,
        return_dict_in_generate=True, output_scores=False, output_logits=False, output_hidden_states=False,
    )  # fmt: skip
    return config
