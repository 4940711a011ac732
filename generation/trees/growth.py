"""How drafters grow trees of drafts, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..backbone.wrapped_models import Kwargs
from ..call.constraints import DraftMasks
from ..call.costs import POSITIONS
from ..call.options import DraftOptions, draft_probs
from ..contract import DraftTree, taken
from .building import check_size, drawn_tree, dynamic_tree, prefix_tree, ranked_tree, static_tree

# a tree where `draft_tree` leaves something open (EAGLE-2's evaluation)
_DEFAULTS: Kwargs = {"depth": 5, "top_k": 10, "total_tokens": 60}
_PAYING: Kwargs = {"depth": POSITIONS[-1], "top_k": POSITIONS[-1], "total_tokens": POSITIONS[-1]}  # at most
DEEPEST = 8  # tokens of the longest path that is tried


class Growth(Protocol):
    """The drafter's distributions of next tokens while one tree grows, level by level.

    Attributes:
        draft_ids: [v] int64, the token ids of the columns of logits; None: every token, in order.
        vocab_size: V; not read where every token has a column.

    One whose tokens are independent may have `rows` [B, m, v], the logits of all of them (`WindowGrowth`).
    """

    draft_ids: Tensor | None
    vocab_size: int

    def first(self) -> Tensor:
        """Return logits [B, v] of the token after the bonus token."""
        ...

    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return logits [B, k, v] of the tokens after the nodes of the next frontier.

        Args:
            tokens: [B, k] int64 token ids of the nodes.
            parents: [B, k] int64, the indices of their parents in the frontier before; -1 at first.
        """
        ...


def grow(growth: Growth, options: DraftOptions, length: int, masks: DraftMasks | None = None) -> DraftTree:
    """Return a tree whose paths have at most `length` tokens: of draws where the call samples, else of likely tokens.

    A tree of fixed shape has likely tokens in any case. `options.draft_tree` is complete (`tree_options`), or None for
    as many nodes as pay (`options.block`), and `masks` say which tokens the tree may hold (`DraftOptions.masks`).
    """
    tree, logits = dict(options.draft_tree or _PAYING), growth.first()
    vocabulary = growth.draft_ids, growth.vocab_size, masks

    def after(tokens: Tensor, parents: Tensor) -> Tensor:
        if masks is not None:
            masks.extend(tokens, parents)
        return growth.after(tokens, parents)

    def ranked_after(columns: Tensor, parents: Tensor) -> Tensor:
        return ranking(after(_ids(growth, columns), parents))

    def ranking(logits: Tensor) -> Tensor:
        if "choices" in tree and masks is None:  # ranks alone are read, and logits have them
            options.numbers.note(logits.amax(-1))
            return logits
        ranked = _log_distribution(logits, growth, masks)
        options.numbers.note(ranked[..., 0])
        return ranked

    if "choices" in tree:
        choices = [path for path in tree["choices"] if len(path) <= length]
        likely = ranked_tree(choices, ranking(logits), ranked_after)
    else:
        tree["depth"] = min(tree["depth"], length - 1)
        if options.do_sample and not options.has_likely_tree:
            # masks may leave tokens without a column alone, and processors of ids count all of them
            by_column = growth.draft_ids if masks is None and not options.processing.reads_ids else None
            own: tuple[Any, ...] = () if by_column is not None else vocabulary
            return drawn_tree(
                draft_probs(logits, options, *own),
                lambda tokens, parents: draft_probs(after(tokens, parents), options, *own),
                columns=by_column,
                **tree,
            )
        is_on_host = logits.device.type == "cpu" and options.cache != "static"  # which waits for nothing
        rows: Tensor | None = getattr(growth, "rows", None)
        costs = None if options.draft_tree else options.block
        if rows is None or masks is not None:
            prunes = is_on_host and tree["top_k"] >= tree["total_tokens"]
            likely = dynamic_tree(ranking(logits), ranked_after, **tree, prunes=prunes)
        elif is_on_host:
            steps, columns = ranking(rows[:, : tree["depth"] + 1]).topk(min(tree["top_k"], rows.shape[-1]))
            likely = prefix_tree(steps, columns, tree["total_tokens"] - 1, costs)
        else:
            steps = iter(ranking(rows)[:, :, None].unbind(1))  # m of [B, 1, v]
            likely = dynamic_tree(next(steps)[:, 0], lambda tokens, parents: next(steps), **tree)
    likely.tokens = _ids(growth, likely.tokens)
    return likely


def tree_options(tree: object, longest: int | None = None) -> tuple[Kwargs | None, int]:
    """Return the complete options of a tree of drafts, and the length of its longest path, which has a bound.

    `draft_tree` is any of `depth`, `top_k` and `total_tokens` (b included), where paths are one longer than `depth`
    (`dynamic_tree`); or the rank paths of a tree of fixed shape, as a list or as `{"choices": list}`. A
    tree of one child per node is a chain, which is drawn and verified faster than a tree: it has no options.
    """
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        tree = {"choices": tree}
    if not isinstance(tree, dict) or not (tree.keys() <= _DEFAULTS.keys() or tree.keys() == {"choices"}):
        known = ", ".join(_DEFAULTS)
        raise ValueError(f"draft_tree={tree!r} must be a dict of {known}, or of choices alone, or be 'auto'")
    options, length = _fixed(tree) if "choices" in tree else _dynamic(tree, longest)
    is_chain = options.get("top_k") == 1
    if longest is not None and length > longest:
        instead = "shorter paths" if "choices" in tree else f"depth={longest - 1} or less"
        raise ValueError(f"draft_tree={tree!r} has paths of {length} tokens, more than {longest}: choose {instead}")
    return (None, min(length, options["total_tokens"] - 1)) if is_chain else (options, length)


def _fixed(tree: Kwargs) -> tuple[Kwargs, int]:
    choices = tree["choices"]
    is_list = isinstance(choices, (list, tuple)) and all(isinstance(path, (list, tuple)) and path for path in choices)
    if not is_list or not choices or not all(type(rank) is int for path in choices for rank in path):
        raise ValueError(f"draft_tree: {choices!r} must be a list of paths of ranks, such as [(0,), (0, 0)]")
    choices = [tuple(path) for path in choices]
    static_tree(choices)  # refuses what is no tree
    return {"choices": choices}, max(map(len, choices))


def _dynamic(tree: Kwargs, longest: int | None) -> tuple[Kwargs, int]:
    fitting = {} if longest is None else {"depth": max(min(_DEFAULTS["depth"], longest - 1), 0)}
    options = _DEFAULTS | fitting | tree
    check_size(**options)
    return options, options["depth"] + 1


def most_nodes(options: DraftOptions) -> int:
    """Return how many tokens a drafter evaluates, as far as is known: b, and those that a tree leaves out, too."""
    tree: Kwargs = options.draft_tree or {}
    grown = len(tree.get("choices", ()))
    if tree and not grown:
        depth, top_k, total = (_DEFAULTS | tree).values()
        grown = (depth + 1) * top_k + total
    return 1 + max(options.num_tokens, grown)


class Ancestry:
    """The ancestors of the newest frontier among all nodes so far: `mask` [B, k, n] bool, themselves included."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None

    def extend(self, parents: Tensor) -> Tensor:
        """Return the mask [B, k, n + k] of the next frontier, whose parents [B, k] are indices in the one before."""
        size = parents.shape[1]
        itself = torch.eye(size, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)  # [B, k, k]
        # the parents' ancestors among the nodes before, and itself
        self.mask = itself if self.mask is None else torch.cat([taken(self.mask, parents), itself], dim=-1)
        return self.mask


def _ids(growth: Growth, columns: Tensor) -> Tensor:
    return columns if growth.draft_ids is None else growth.draft_ids[columns]


def _log_distribution(logits: Tensor, growth: Growth, masks: DraftMasks | None) -> Tensor:
    """Return log-probabilities in float32 at least, over the tokens that masks allow; -inf elsewhere."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if masks is None:
        return logits.log_softmax(-1)
    ids = growth.draft_ids
    mask = masks.allowed((*logits.shape[:-1], logits.shape[-1] if ids is None else growth.vocab_size), logits.device)
    mask = mask if ids is None else mask[..., ids]  # [..., v]
    least = torch.finfo(logits.dtype).min / 4  # -inf alone has no softmax
    return logits.masked_fill(~mask, least).log_softmax(-1).masked_fill(~mask, -torch.inf)
