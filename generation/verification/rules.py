r"""Verification: which drafted tokens are accepted, and which token is added. Pure functions of tensors.

Chains: a draft has m tokens d_1..d_m; row i - 1 of `p` and `q` is the target's and the drafter's distribution of token
i given the tokens before it in the draft; row m of `p` is the target's distribution after the whole draft. Every rule
emits s accepted drafts and one added token, and the emitted tokens follow the target's distribution exactly, whatever
`q` is, as long as `q` is the distribution that the draft was really drawn from.

Trees: where the tokens of a tree are deterministic given what is before them, the target draws (or greedily picks) a
token at every index, and `follow` walks along the picks: what it emits is ancestral sampling of the target, whatever
the tree is. Drawn trees: `tree_rules`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import DraftTree, VerificationResult, follow
from ..tensors.masks import cached_arange
from ..tensors.sampling import draw, draw_checked, pick
from .tree_rules import check_rule, verify_drawn_tree

# share of the target that decides where rounding left no residual; far below the precision of what it is added to
TRACE = 1e-30


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
    probability h_i = Z_i / (Z_i + 1 - P_i), and h_m = P_m; the longest kept prefix wins. Arguments and results are
    those of `token_acceptance`; every h_i is tested by an independent uniform.
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
    """Draw from the distributions of `token_acceptance` or `block_acceptance`, whose arguments these are.

    Where s drafts are accepted, the token is added by inverse CDF of `uniforms[:, s]` [B, m + 1], which the draft must
    not have used; `tests` [B, m] are uniforms that accept drafts, used for nothing else. None: both are drawn here. An
    empty draft needs no `q`.

    Return num_accepted [B] and next_token [B], int64; and the check of `draw_checked` of the added token's
    distribution, [B] (NaN: it was none); None with `uniforms`.
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

    That is `p` [B, m + 1, V] after every index, with all its logits processors. Where a tree has no distributions, the
    target draws a token at every index, and both rules `follow` them. `uniforms` and `tests` are for chains (`verify`).
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
    """Return `nodes`, `num_accepted` and `added` of the result of `verify_sampled`."""
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
    """`_raw_ratios`; 0 where the target excludes the token, or where it cannot have been drawn."""
    return _raw_ratios(draft, q, p).nan_to_num(nan=0.0, posinf=0.0)


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
    mass = (weight[:, :-1] * p[:, :-1] - q).clamp(min=0)  # [B, m, v]
    total = mass.sum(-1, keepdim=True)
    rows = torch.where(total > 0, mass / total, p[:, :-1])  # p's where rounding left no mass
    return torch.cat([rows, p[:, -1:]], dim=1)
