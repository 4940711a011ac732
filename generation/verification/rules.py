r"""Verification: which drafted tokens are accepted, and which token is added. Pure functions of tensors.

Chains: a draft has m tokens d_1..d_m; row i - 1 of `p` and `q` is the target's and the drafter's distribution of token
i given the tokens before it in the draft; row m of `p` is the target's distribution after the whole draft. Every rule
emits s accepted drafts and one added token, and the emitted tokens follow the target's distribution exactly, whatever
`q` is, as long as `q` is the distribution that the draft was really drawn from.

Trees: where the tokens of a tree are deterministic given what is before them, the target draws (or greedily picks) a
token at every place, and `follow` walks along the picks: what it emits is ancestral sampling of the target, whatever
the tree is.

Where they were drawn, every node is accepted with a probability that makes up for the distribution it was drawn from.
Both rules are one recursion. At a place with weight w, rest b (a distribution, at first the target's) and children
drawn from q in turn:

    offer a child c:     w_c = min(1, w b(c) / q(c))                        its weight
    without it:          b <- max(0, w b - q) / S,  w <- S / (S + 1 - w)    where S is the sum of max(0, w b - q)

`"token"`, recursive rejection, goes down from b: c is taken with probability w_c, and where it is, all starts anew at
c with weight 1. `"block"`, traversal verification (Weng et al., arXiv 2505.12398), comes up from the leaves: the weight
that is left of a node after its children is the probability to keep its whole path, tried where all that is below the
node and all that is before it were refused. On chains these are token and block verification.

A child that was not drawn (`DraftTree.deterministic`) is one drawn from a distribution without a choice, q = 1 at its
token. It comes before the drawn ones, whose q is the drafter's without that token.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..contract import (
    DraftTree,
    VerificationResult,
    descend,
    elder_siblings,
    follow,
    path_columns,
)
from ..tensors.masks import cached_arange
from ..tensors.sampling import draw, draw_checked, pick

TRACE = 1e-30
"""Share of the target that decides where rounding left no residual; far below the precision of what it is added to."""


def token_acceptance(draft: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Token verification (Leviathan et al. 2023, Algorithm 1).

    Args:
        draft: [B, m] int64.
        q: [B, m, v] probabilities.
        p: [B, m + 1, v] probabilities.

    Returns:
        accept [B, m]: probability min(1, p / q) of keeping each draft if those before it were kept.
        residual [B, m + 1, v]: distribution of the added token when s drafts are accepted.
    """
    return _ratios(draft, q, p).clamp(max=1), _residuals(q, p, torch.ones_like(p[..., :1]))


def block_acceptance(draft: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Block verification (Sun et al. 2024, arXiv 2403.10444): never fewer accepted tokens than `token_acceptance`.

    With P_i = min(1, P_{i-1} p_i / q_i) and Z_i = sum_x max(0, P_i p_{i+1}(x) - q_{i+1}(x)), prefix i is kept with
    probability h_i = Z_i / (Z_i + 1 - P_i), and h_m = P_m; the longest kept prefix wins.

    Args:
        draft: [B, m] int64.
        q: [B, m, v] probabilities.
        p: [B, m + 1, v] probabilities.

    Returns:
        accept [B, m]: h_i, each tested by an independent uniform.
        residual [B, m + 1, v]: distribution of the added token when s drafts are accepted.
    """
    weight = _block_weights(_ratios(draft, q, p))
    scaled = (weight[:, :-1, None] * p[:, :-1] - q).clamp(min=0)
    mass = scaled.sum(-1)[:, 1:]
    # summed in this order, a tiny mass at P_i = 1 gives 1
    middle = (mass / (mass + (1 - weight[:, 1:-1]))).nan_to_num(nan=1.0)
    return torch.cat([middle, weight[:, -1:]], dim=1), _residuals(q, p, weight[..., None])


def coupled_acceptance(draft: Tensor, u: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Verification with the uniforms that the draft was made from (PTP paper, Algorithm 1).

    The target picks y_i = Pick(u_i, p_i) along the draft. As long as drafts equal picks, the drafted prefix is the
    sequential one, so by induction the picks up to the first mismatch are sequential inverse-CDF decoding, whatever the
    draft is; the pick at the mismatch (or after the whole draft) is one of them.

    Args:
        draft: [B, m] int64.
        u: [B, m + 1] in [0, 1).
        p: [B, m + 1, v] probabilities.

    Returns:
        num_correct [B]: drafts that equal the picks, up to the first that does not.
        picked [B, m + 1] int64: the picks, whose first num_correct + 1 are the tokens to emit.
    """
    picked = pick(u, p)
    return (draft == picked[:, :-1]).long().cumprod(1).sum(1), picked


def verify(
    draft: Tensor,
    q: Tensor | None,
    p: Tensor,
    rule: str = "block",
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
    tests: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw from the distributions of `token_acceptance` or `block_acceptance`.

    Args:
        draft: [B, m] int64, drawn from `q`.
        q: [B, m, v] probabilities; None will do for an empty draft.
        p: [B, m + 1, v] probabilities.
        rule: `"token"` or `"block"`.
        generator: Source of randomness.
        uniforms: [B, m + 1]; where s drafts are accepted, the token is added by inverse CDF of `uniforms[:, s]`, which
            the draft must not have used.
        tests: [B, m] uniforms that accept drafts, used for nothing else; None: drawn here.

    Returns:
        num_accepted [B] and next_token [B], int64; and the check of `draw_checked` of the added token's distribution,
        [B] (NaN: it was none); None with `uniforms`.

    Raises:
        ValueError: An unknown rule.
    """
    # every operation counts here: on an accelerator each is a launch
    check_rule(rule)
    if draft.shape[1] == 0:
        return draft.new_zeros(len(draft)), *_add(p[:, 0], None if uniforms is None else uniforms[:, 0], generator)
    if tests is None:
        tests = torch.rand(draft.shape, dtype=p.dtype, device=p.device, generator=generator)
    assert q is not None
    batch = cached_arange(len(draft), p.device)
    if rule == "token":
        accepted = (tests < _ratios(draft, q, p)).long().cumprod(1).sum(1)
        surplus = (p - torch.nn.functional.pad(q, (0, 0, 0, 1))).clamp_(min=0)
    else:
        accepted, surplus = _block_accepted(draft, q, p, tests)
    mass = surplus.add_(p, alpha=TRACE)[batch, accepted]
    return accepted, *_add(mass, None if uniforms is None else uniforms.gather(1, accepted[:, None])[:, 0], generator)


def _block_accepted(draft: Tensor, q: Tensor, p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted drafts [B] of block verification for uniforms [B, m], and their surplus, see `block_surplus`.

    Prefix i is kept where its uniform is at least 1 - h_i, which needs no division, so that P_i = 1 and Z_i = 0 (the
    distributions are equal) are no special case.
    """
    weight, surplus = block_surplus(draft, q, p)
    gap = 1 - weight[:, 1:]
    kept = gap <= uniform * (surplus.sum(-1)[:, 1:] + gap)
    return (kept * cached_arange(draft.shape[1] + 1, p.device)[1:]).amax(1), surplus


def block_surplus(draft: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """P_0..P_m [B, m + 1], and max(0, P_i p_{i+1} - q_{i+1}) with q_{m+1} = 0, [B, m + 1, v], whose sums are Z.

    With this q, h_i = Z_i / (Z_i + 1 - P_i) holds for i = m, too. NaN from the first draft on that neither can have
    been drawn nor be kept; such a prefix loses every comparison.
    """
    weight = _block_weights(_raw_ratios(draft, q, p))
    surplus = weight[..., None] * p
    surplus[:, :-1].sub_(q)
    return weight, surplus.clamp_(min=0)


def verify_sampled(
    tree: DraftTree,
    p: Tensor,
    rule: str = "block",
    generator: torch.Generator | None = None,
    uniforms: Tensor | None = None,
    tests: Tensor | None = None,
) -> VerificationResult:
    """Verify any tree against a sampled target: the emitted tokens have the target's distribution.

    Args:
        tree: Any tree; where it has no distributions, the target draws a token at every index, and both rules `follow`
            them.
        p: [B, m + 1, V] the target's distribution after every index, with all its logits processors.
        rule: `"token"` or `"block"`.
        generator: Source of randomness.
        uniforms: Of chains, see `verify`.
        tests: Of chains, see `verify`.

    Raises:
        ValueError: An unknown rule.
    """
    check_rule(rule)
    if tree.probs is None and uniforms is None:
        return follow(tree, draw(p, generator))
    if not tree.is_chain or tree.num_nodes is not None:
        return verify_drawn_tree(tree, p, rule, generator)
    accepted, added, check = verify(tree.tokens, tree.probs, p, rule, generator, uniforms, tests)
    tokens = torch.nn.functional.pad(tree.tokens, (0, 1)).scatter_(1, accepted[:, None], added[:, None])
    return VerificationResult(accepted, tokens, check=check)


def verify_tree(
    tree: DraftTree, p: Tensor, generator: torch.Generator | None = None, rule: str = "block"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `verify_sampled` as plain tensors.

    Returns:
        nodes [B, depth] int64, the accepted nodes in the order of their path and -1 after them; num_accepted [B]; and
        next_token [B].
    """
    result = verify_sampled(tree, p, rule, generator)
    return result.nodes, result.num_accepted, result.added


def verify_tree_greedy(tree: DraftTree, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accept the path of the target's argmaxes from scores [B, m + 1, V]; the result is that of `verify_tree`."""
    result = follow(tree, scores.argmax(-1))
    return result.nodes, result.num_accepted, result.added


def _add(mass: Tensor, uniforms: Tensor | None, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
    """Return a token [B] from unnormalised distributions [B, v], and the check of `draw_checked`."""
    if uniforms is None:
        return draw_checked(mass, generator)
    return pick(uniforms.double(), mass.double() / mass.double().sum(-1, keepdim=True)), None


def _ratios(draft: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """`_raw_ratios`; 0 where the target excludes the token, 1 where it cannot have been drawn."""
    return _raw_ratios(draft, q, p).nan_to_num(nan=0.0, posinf=1.0)


def _raw_ratios(draft: Tensor, q: Tensor, p: Tensor) -> Tensor:
    """p / q at the drafted tokens [B, m]."""
    chosen = draft[..., None]
    return (p[:, :-1].gather(-1, chosen) / q.gather(-1, chosen))[..., 0]


def _block_weights(ratios: Tensor) -> Tensor:
    """P_0..P_m, [B, m + 1], from `ratios` r_1..r_m.

    P_i = min(1, P_{i-1} r_i) is a walk reflected at 1: with R_i the product of r_1..r_i,
    P_i = R_i / max_{j<=i} R_j from R_0 = 1 on. R is a martingale under q, and so it reaches float32's largest number in
    one of 1e38 drafts.
    """
    walk = torch.nn.functional.pad(ratios, (1, 0), value=1.0).cumprod(1)
    return walk / walk.cummax(1).values


def _residuals(q: Tensor, p: Tensor, weight: Tensor) -> Tensor:
    """Return normalised max(0, weight p - q) for all rows, [B, m + 1, v]; the last row is p's."""
    rows = _normalised((weight[:, :-1] * p[:, :-1] - q).clamp(min=0), p[:, :-1])
    return torch.cat([rows, p[:, -1:]], dim=1)


def _normalised(mass: Tensor, fallback: Tensor) -> Tensor:
    """Return `mass` divided by its sum, or `fallback` where rounding left no mass."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, fallback)


def tree_acceptance(tree: DraftTree, p: Tensor, rule: str = "token") -> tuple[Tensor, Tensor]:
    """Return the probabilities from which a tree is verified; deterministic tokens count as draws without a choice.

    Args:
        tree: Any tree.
        p: [B, m + 1, V] the target's distribution after every index; its dtype is that of all results.
        rule: `"token"` or `"block"`.

    Returns:
        accept [B, m]: `"token"`: the probability to take node i where its parent is taken and its elder siblings are
            rejected. `"block"`: the probability to accept the path to node i where all before it in post-order are
            rejected. 0 for a token that the target excludes, that cannot have been drawn, or that repeats a
            deterministic one.
        residual [B, m + 1, V]: distribution of the token that is added where the accepted path ends at index j.

    Raises:
        ValueError: An unknown rule.
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
    others = (p.sum(-1, keepdim=True) - some.sum(-1, keepdim=True)).clamp(min=0)
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

    Args:
        tree: Any tree.
        kept: [B, m] bool, independent events of the probabilities that `tree_acceptance` gives for the rule.
        rule: `"token"`: down to the first child with its event, as long as there is one. `"block"`: to the first such
            node in post-order.
    """
    return descend(tree, kept) if rule == "token" else _first_in_post_order(tree, kept)


def check_rule(rule: str) -> None:
    """Refuse an unknown name of a rule.

    Raises:
        ValueError: Neither `"token"` nor `"block"`.
    """
    if rule not in ("token", "block"):
        raise ValueError(f"verification={rule!r} is unknown; choose 'token' or 'block'")


def _own_probs(tree: DraftTree, dtype: torch.dtype) -> Tensor | None:
    """Return the distributions in a dtype, as a copy where verification changes them."""
    is_changed = not tree.replacement or tree.deterministic is not None
    return None if tree.probs is None else tree.probs.to(dtype, copy=is_changed)


def _next_distribution(tree: DraftTree, probs: Tensor | None, node: int, p: Tensor) -> Tensor:
    """Return the distribution [B, V] of a node given its elder siblings, 0 where there is no node; advance `probs` past
    it."""
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


def _first_in_post_order(tree: DraftTree, wanted: Tensor) -> Tensor:
    """Return the indices [B, m + 1] bool on the way to the first wanted node in post-order, or b."""
    unwanted = torch.nn.functional.pad(~wanted, (1, 0))
    place = _post_order(tree).masked_fill(unwanted, unwanted.shape[1]).argmin(1)
    return tree.mask()[cached_arange(len(place), place.device), place]


def _post_order(tree: DraftTree) -> Tensor:
    """Return how many nodes precede each: all below it, and all at and below its and its ancestors' elder siblings."""
    mask = tree.mask()
    below = mask.sum(1)
    before = (elder_siblings(tree) * below[:, None, 1:]).sum(-1)
    return (mask[:, :, 1:] * before[:, None]).sum(-1) + below - 1
