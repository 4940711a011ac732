r"""Verification of trees: along picks of the target, and of drawn nodes by one recursion. Pure functions of tensors.

Every node is accepted with a probability that makes up for the distribution it was drawn from. At an index with weight
w, rest b (a distribution, at first the target's) and children drawn from q in turn:

    offer a child c:     w_c = min(1, w b(c) / q(c))                        its weight
    without it:          b <- max(0, w b - q) / S,  w <- S / (S + 1 - w)    where S is the sum of max(0, w b - q)

`"token"`, recursive rejection, goes down from b: c is taken with probability w_c, and where it is, the recursion goes
on at c with weight 1. `"block"`, traversal verification (Weng et al., arXiv 2505.12398), comes up from the leaves: the
weight that is left of a node after its children is the probability to keep its whole path, tried where all that is
below the node and all that is before it were refused. On chains these are token and block verification.

A child that was not drawn (`DraftTree.deterministic`) is one drawn from a distribution without a choice, q = 1 at its
token. It comes before the drawn ones, whose q is the drafter's without that token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..contract import DraftTree, VerificationResult, descend, elder_siblings, path_columns
from ..tensors.masks import cached_arange
from ..tensors.sampling import draw


def tree_acceptance(tree: DraftTree, p: Tensor, rule: str = "token") -> tuple[Tensor, Tensor]:
    """Return the probabilities from which a tree is verified; deterministic tokens count as draws without a choice.

    `p` [B, m + 1, V] is the target's distribution after every index; its dtype is that of all results.

    Returns:
        accept [B, m]: `"token"`: the probability to take node i where its parent is taken and its elder siblings are
            rejected. `"block"`: the probability to accept the path to node i where all before it in post-order are
            rejected. 0 for a token that the target excludes, that cannot have been drawn, or that repeats a
            deterministic one.
        residual [B, m + 1, V]: distribution of the token that is added where the accepted path ends at index j.
    """
    check_rule(rule)
    small, target = _over_columns(tree, p)
    accept, rest = _acceptance(small, target, rule)
    return accept, _or_target(_over_tokens(tree, rest, target, p), p)


def _over_columns(tree: DraftTree, p: Tensor) -> tuple[DraftTree, Tensor]:
    """Return a tree and its target over the tokens that were drafted and one more, which stands for all the others.

    Verification takes the same from all others, in proportion: none of them can have been drawn.
    """
    if tree.columns is None or tree.probs is None:
        return tree, p
    size, some = len(tree.columns), p.index_select(-1, tree.columns)
    # rounding may leave less than nothing, which no surplus keeps, and which their share does not depend on
    others = p.sum(-1, keepdim=True) - some.sum(-1, keepdim=True)
    numbers = torch.full_like(p[0, 0], size, dtype=torch.int64)
    numbers.index_copy_(0, tree.columns, cached_arange(size, p.device))
    probs = torch.nn.functional.pad(tree.probs, (0, 1))
    small = replace(tree, tokens=numbers[tree.tokens], probs=probs, columns=None)
    return small, torch.cat([some, others], dim=-1)


def _over_tokens(tree: DraftTree, rest: Tensor, target: Tensor, p: Tensor) -> Tensor:
    """Return residuals [..., V] of what `_over_columns` made: those of the target p [..., V]."""
    if tree.columns is None or tree.probs is None:
        return rest
    share = (rest[..., -1:] / target[..., -1:]).nan_to_num(nan=0.0)  # 0 / 0 where the others have nothing
    return (share * p).index_copy_(-1, tree.columns, rest[..., :-1])


def _acceptance(tree: DraftTree, p: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Return `accept` of `tree_acceptance`, and residuals that are 0 where rounding left none."""
    rows, places, tiny = cached_arange(len(p), p.device), tree.parents + 1, torch.finfo(p.dtype).tiny
    accept, rest = torch.ones_like(p[..., 0]), p.clone()
    is_changed = not tree.replacement or tree.deterministic is not None  # below, in a copy
    probs = None if tree.probs is None else tree.probs.to(p.dtype, copy=is_changed)
    for node in range(tree.tokens.shape[1]):
        here, token = (rows, places[:, node]), tree.tokens[:, node, None]
        weight = accept[here][:, None] if rule == "block" else torch.ones_like(accept[:, :1])
        scaled, q = weight * rest[here], _next_distribution(tree, probs, node, p)
        chance, drawn = scaled.gather(1, token), q.gather(1, token)
        surplus = (scaled - q).clamp_(min=0)
        total = surplus.sum(-1, keepdim=True)
        rest[here] = (surplus / total).masked_fill(total <= tiny, 0)
        accept[:, node + 1] = (chance / drawn).masked_fill(drawn == 0, 0).clamp(max=1)[:, 0]
        if rule == "block":
            accept[here] = (total / (total + (1 - weight))).nan_to_num(nan=1.0)[:, 0]
    return accept[:, 1:], rest


def _or_target(rest: Tensor, p: Tensor) -> Tensor:
    """Return residuals [..., V], or the target's distribution where none is left."""
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def verify_drawn_tree(
    tree: DraftTree, p: Tensor, rule: str = "block", generator: torch.Generator | None = None
) -> VerificationResult:
    """Draw from the probabilities of `tree_acceptance`; arguments and errors as there."""
    small, target = _over_columns(tree, p)
    accept, rest = _acceptance(small, target, rule)
    kept = torch.rand(accept.shape, dtype=p.dtype, device=p.device, generator=generator) < accept
    reached = accepted_path(tree, kept, rule)
    accepted, columns = reached.sum(1) - 1, path_columns(reached, tree.depth)
    end = cached_arange(len(p), p.device), columns[:, -1]
    left = _over_tokens(tree, rest[end], target[end], p[end])
    added = draw(_or_target(left, p[end]), generator)[:, None]
    drafts = torch.nn.functional.pad(tree.tokens, (1, 0)).gather(1, columns)[:, 1:]
    return VerificationResult(
        accepted, torch.cat([drafts, added], dim=1).scatter_(1, accepted[:, None], added), columns
    )


def accepted_path(tree: DraftTree, kept: Tensor, rule: str) -> Tensor:
    """Return the path that a rule accepts, [B, m + 1] bool, the indices on it; index 0 always is.

    `kept` [B, m] are independent events of the probabilities of `tree_acceptance`. `"token"` goes down to the first
    child with its event, as long as there is one; `"block"` to the first such node in post-order.
    """
    if rule == "token":
        return descend(tree, kept)
    unwanted = torch.nn.functional.pad(~kept, (1, 0))
    place = _post_order(tree).masked_fill(unwanted, unwanted.shape[1]).argmin(1)
    return tree.mask()[cached_arange(len(place), place.device), place]


def _post_order(tree: DraftTree) -> Tensor:
    """Return how many nodes precede each: all below it, and all at and below its and its ancestors' elder siblings."""
    mask = tree.mask()
    below = mask.sum(1)
    before = (elder_siblings(tree) * below[:, None, 1:]).sum(-1)
    return (mask[:, :, 1:] * before[:, None]).sum(-1) + below - 1


def check_rule(rule: str) -> None:
    """Refuse an unknown name of a rule."""
    if rule not in ("token", "block"):
        raise ValueError(f"verification={rule!r} is unknown; choose 'token' or 'block'")


def _next_distribution(tree: DraftTree, probs: Tensor | None, node: int, p: Tensor) -> Tensor:
    """Return a node's distribution [B, V] given its elder siblings, 0 where there is none; advance `probs` past it."""
    here, token = (cached_arange(len(p), p.device), tree.parents[:, node] + 1), tree.tokens[:, node, None]
    if probs is None:
        q = _one_hot(token, p)
    else:
        q, is_deterministic = probs[here], None if tree.deterministic is None else tree.deterministic[:, node, None]
        if is_deterministic is not None or not tree.replacement:
            others = q.scatter(1, token, 0)
            others = others / others.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
            probs[here] = (
                others if is_deterministic is None or not tree.replacement else torch.where(is_deterministic, others, q)
            )
        if is_deterministic is not None:  # a draw that a deterministic sibling has taken out is no node
            q = torch.where(is_deterministic, _one_hot(token, p), q * (q.gather(1, token) > 0))
    return q if tree.num_nodes is None else q * (node < tree.num_nodes)[:, None]


def _one_hot(token: Tensor, p: Tensor) -> Tensor:
    """Return the distributions [B, V] that have nothing but a token [B, 1]."""
    return torch.zeros_like(p[:, 0]).scatter_(1, token, 1)
