r"""Verification of draft trees: which path is kept, and which token is added. Pure functions of tensors.

Where the tokens of a tree are certain given what is before them, the target draws (or greedily picks) a token at every
place, and `follow` walks along the picks: what it emits is ancestral sampling of the target, whatever the tree is.

Where they were drawn, every node is accepted with a probability that makes up for the distribution it was drawn from.
Both rules are one recursion. At a place with weight w, rest b (a distribution, at first the target's) and children
drawn from q in turn:

    offer a child c:     w_c = min(1, w b(c) / q(c))                        its weight
    without it:          b <- max(0, w b - q) / S,  w <- S / (S + 1 - w)    where S is the sum of max(0, w b - q)

`"token"`, recursive rejection, goes down from b: c is taken with probability w_c, and where it is, all starts anew at
c with weight 1. `"block"`, traversal verification (Weng et al., arXiv 2505.12398), comes up from the leaves: the weight
that is left of a node after its children is the probability to keep its whole path, tried where all that is below the
node and all that is before it were refused. On chains these are token and block verification.
"""

from __future__ import annotations

import torch

from ...modeling.masks import cached_arange
from ...modeling.sampling import draw
from ..trees.contract import DraftTree, VerificationResult, descend, elder_siblings, path_columns


def tree_acceptance(tree: DraftTree, p: torch.Tensor, rule: str = "token") -> tuple[torch.Tensor, torch.Tensor]:
    """The probabilities from which a tree is verified; certain tokens count as draws from distributions without a
    choice.

    Args:
        tree: Any tree.
        p: [B, m + 1, V] the target's distribution after every place; its dtype is that of all results.
        rule: `"token"` or `"block"`.

    Returns:
        accept [B, m]: `"token"`: the probability to take node i where its parent is taken and its elder siblings are
            refused. `"block"`: the probability to keep the path to node i where all before it in post-order are
            refused. 0 for a token that the target excludes, that cannot have been drawn, or that repeats a certain one.
        residual [B, m + 1, V]: distribution of the token that is added where the accepted path ends at place j.

    Raises:
        ValueError: An unknown rule.
    """
    check_rule(rule)
    rows, places, tiny = cached_arange(len(p), p.device), tree.parents + 1, torch.finfo(p.dtype).tiny
    accept, rest, probs = torch.ones_like(p[..., 0]), p.clone(), _own_probs(tree, p.dtype)
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
            accept[here] = (total / (total + 1 - weight)).nan_to_num(nan=1.0)[:, 0]
    return accept[:, 1:], torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def verify_drawn_tree(
    tree: DraftTree, p: torch.Tensor, rule: str = "block", generator: torch.Generator | None = None
) -> VerificationResult:
    """Draws from the probabilities of `tree_acceptance`.

    Args:
        tree: A tree with distributions.
        p: [B, m + 1, V] the target's distribution after every place.
        rule: `"token"` or `"block"`.
        generator: Source of randomness.

    Raises:
        ValueError: An unknown rule.
    """
    accept, residual = tree_acceptance(tree, p, rule)
    kept = torch.rand(accept.shape, dtype=p.dtype, device=p.device, generator=generator) < accept
    reached = kept_path(tree, kept, rule)
    accepted, columns = reached.sum(1) - 1, path_columns(reached, tree.depth)
    added = draw(residual[cached_arange(len(p), p.device), columns[:, -1]], generator)[:, None]
    drafts = torch.nn.functional.pad(tree.tokens, (1, 0)).gather(1, columns)[:, 1:]
    return VerificationResult(
        accepted, torch.cat([drafts, added], dim=1).scatter_(1, accepted[:, None], added), columns
    )


def kept_path(tree: DraftTree, kept: torch.Tensor, rule: str) -> torch.Tensor:
    """The path that a rule keeps, once every node was tried with its probability.

    Args:
        tree: Any tree.
        kept: [B, m] bool, independent events of the probabilities that `tree_acceptance` gives for the rule.
        rule: `"token"`: down to the first child that is kept, as long as there is one. `"block"`: to the first kept
            node in post-order.

    Returns:
        [B, m + 1] bool, the places on the path; place 0 always is.
    """
    return descend(tree, kept) if rule == "token" else _first_in_post_order(tree, kept)


def check_rule(rule: str) -> None:
    """Refuses an unknown name of a rule.

    Raises:
        ValueError: Neither `"token"` nor `"block"`.
    """
    if rule not in ("token", "block"):
        raise ValueError(f"verification={rule!r} is unknown; choose 'token' or 'block'")


def _own_probs(tree: DraftTree, dtype: torch.dtype) -> torch.Tensor | None:
    """The distributions in a dtype, as a copy where draws without replacement will change them."""
    return None if tree.probs is None else tree.probs.to(dtype, copy=not tree.replacement)


def _next_distribution(tree: DraftTree, probs: torch.Tensor | None, node: int, p: torch.Tensor) -> torch.Tensor:
    """The distribution [B, V] of a node given its elder siblings, 0 where the node is none; moves `probs` on to the
    next one."""
    here, token = (cached_arange(len(p), p.device), tree.parents[:, node] + 1), tree.tokens[:, node, None]
    if probs is None:
        q = torch.zeros_like(p[:, 0]).scatter_(1, token, 1)
    else:
        q = probs[here]
        if not tree.replacement:
            others = q.scatter(1, token, 0)
            probs[here] = others / others.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return q if tree.num_nodes is None else q * (node < tree.num_nodes)[:, None]


def _first_in_post_order(tree: DraftTree, wanted: torch.Tensor) -> torch.Tensor:
    """Takes the first wanted node in post-order, or b: which places [B, m + 1] are on the way to it."""
    unwanted = torch.nn.functional.pad(~wanted, (1, 0))
    place = _post_order(tree).masked_fill(unwanted, unwanted.shape[1]).argmin(1)
    return tree.mask()[cached_arange(len(place), place.device), place]


def _post_order(tree: DraftTree) -> torch.Tensor:
    """How many places come before each: all below it, and all at and below its and its ancestors' elder siblings."""
    mask = tree.mask()
    below = mask.sum(1)
    before = (elder_siblings(tree) * below[:, None, 1:]).sum(-1)
    return (mask[:, :, 1:] * before[:, None]).sum(-1) + below - 1
