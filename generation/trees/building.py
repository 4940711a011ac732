"""Draft trees and how they grow: from likely tokens, from draws, or in a fixed shape. Knows no model.

Trees grow level by level through one callback, `expand(tokens [B, k], parents [B, k])`, which gets the tokens of the
nodes whose children come next, the frontier, and the indices of their parents in the frontier before (-1 at first), and
returns scores of their next tokens, [B, k, V].
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..call.costs import BlockCosts
from ..contract import DraftTree, taken
from ..tensors.masks import cached_arange, made_once
from ..tensors.sampling import race_order

_RANKS = 1 << 31  # more than any vocabulary has
Expand = Callable[[Tensor, Tensor], Tensor]


def joined_chains(deterministic: DraftTree, drawn: DraftTree) -> DraftTree:
    """Return a tree of a chain of deterministic tokens [B, k] and of a chain of draws [B, m], which are independent.

    The drawn chain goes along the deterministic one as far as both agree, and branches off with its first token that
    differs. That token is a draw among all but the deterministic one, whatever came before: so the deterministic child
    comes first, and a draw that agrees with it is a node that is never accepted. (Several draws at an index would break
    this.)
    """
    tokens, device = torch.cat([deterministic.tokens, drawn.tokens], dim=1), drawn.tokens.device  # [B, k + m]
    (batch, size), length = deterministic.tokens.shape, drawn.tokens.shape[1]
    both = min(size, length)
    agrees = (deterministic.tokens[:, :both] == drawn.tokens[:, :both]).long().cumprod(1).bool()  # [B, min(k, m)]
    agrees = torch.nn.functional.pad(agrees, (0, length - both))[:, : length - 1]  # [B, m - 1]
    steps = cached_arange(length, device)[:-1]  # [m - 1]
    later = torch.where(agrees, steps, steps + size)  # the node of token i of the drawn chain, as a parent
    parents = torch.cat([deterministic.parents, torch.nn.functional.pad(later, (1, 0), value=-1)], dim=1)  # [B, k + m]
    if drawn.probs is None:
        return DraftTree(tokens, parents, depth=max(size, length))
    after_certain = torch.nn.functional.pad(drawn.probs, (0, 0, 0, size))[:, : size + 1]  # and after the bonus token
    probs = torch.cat([after_certain, torch.nn.functional.pad(drawn.probs[:, 1:], (0, 0, 0, 1))], dim=1)
    marks = (cached_arange(size + length, device) < size).expand(batch, -1)  # [B, k + m]
    return DraftTree(tokens, parents, probs, depth=max(size, length), deterministic=marks)


def of_real(tree: DraftTree, real: Tensor, is_cut: bool = True) -> DraftTree:
    """Return a tree of whose nodes the `real` [B, m] alone count; `is_cut`: what counts nowhere is left out."""
    counts, tokens, parents, probs = real.sum(1), tree.tokens, tree.parents, tree.probs
    if not tree.is_chain:
        order = (~real).sort(stable=True).indices  # [B, m]
        tokens, parents = _renumbered(tokens, parents, order)
        probs = None if probs is None else taken(probs, torch.nn.functional.pad(order + 1, (1, 0)))
    size = int(counts.max()) if is_cut else tokens.shape[1]
    if size < tokens.shape[1]:
        tokens, parents = tokens[:, :size], parents[:, :size]
        probs = None if probs is None else probs[:, : size + (not tree.is_chain and size > 0)]
    is_chain = tree.is_chain or not size
    return replace(tree, tokens=tokens, parents=parents, probs=probs, num_nodes=counts, is_chain=is_chain)


def up_to(tree: DraftTree, depths: Tensor) -> DraftTree:
    """Return a drawn tree whose nodes beyond a depth [B] are never accepted: a distribution of nothing draws none."""
    assert tree.probs is not None
    is_end, marks = tree.positions() >= depths[:, None], tree.deterministic  # [B, m + 1]
    if marks is not None:
        marks = marks & ~is_end.gather(1, tree.parents + 1)
    probs = tree.probs.masked_fill(is_end[:, : tree.probs.shape[1], None], 0)
    return replace(tree, probs=probs, deterministic=marks)


def dynamic_tree(
    log_probs: Tensor, expand: Expand, *, depth: int, top_k: int, total_tokens: int, prunes: bool = False
) -> DraftTree:
    """Return the most probable paths of a drafter (EAGLE-2, arXiv 2406.16858): deterministic tokens, so that ranking
    them is exact.

    Every frontier node offers its `top_k` most likely children; the `top_k` best of a level, by the log-probability of
    their path, are the next frontier, and the best of all are the tree. Of equal nodes the earlier is better, so that
    no child comes without its parent. With a `top_k` of `total_tokens` these are the most probable prefixes of all;
    a call that `prunes` expands none that cannot be one of them, for which the host waits.

    `log_probs` [B, V] are those of the first token; `expand` returns those of the next ones, [B, k, V] or, if all nodes
    have the same, [B, 1, V], and is called `depth` times: paths are one longer. The block has `total_tokens`, b
    included; a tree that cannot grow so big is smaller.
    """
    check_size(depth, top_k, total_tokens)
    width, children = top_k, min(top_k, log_probs.shape[-1])
    step, token = log_probs[:, None].float().topk(children)  # [B, 1, c]
    values, tokens, parents = [step[:, 0]], [token[:, 0]], [torch.full_like(token[:, 0], -1)]  # per level [B, n]
    start = 0
    for level in range(depth):
        if prunes:
            known = torch.cat(values, 1)  # [B, n]
            least = known.topk(min(total_tokens - 1, known.shape[1])).values[:, -1:]  # [B, 1]
            width = min(top_k, int((values[-1] >= least).sum(1).max()))
        if not width:
            break
        best = _best(values[-1], width)  # [B, k]
        index = best // children if level else torch.full_like(best, -1)  # [B, k], in the frontier before
        step, token = expand(tokens[-1].gather(1, best), index).float().topk(children)  # [B, k or 1, c]
        # rounding must not make a child better than its parent
        step = values[-1].gather(1, best)[..., None] + step.clamp(max=0)  # [B, k, c]
        values.append(step.flatten(1))
        parents.append((best + start)[..., None].expand(step.shape).flatten(1))  # [B, k c], numbers of candidates
        start += tokens[-1].shape[1]
        tokens.append(token.expand(step.shape).flatten(1))
    worth, parent = torch.cat(values, 1), torch.cat(parents, 1)  # [B, n] each
    return _prune(worth, torch.cat(tokens, 1), parent, depth + 1, total_tokens - 1)


def _prune(values: Tensor, tokens: Tensor, parents: Tensor, depth: int, size: int) -> DraftTree:
    """Return the tree of the candidates [B, n] of largest values, whose parents are numbers of candidates."""
    chosen = _best(values, size).sort(-1).values  # [B, m], in rising order, parents first
    return DraftTree(*_renumbered(tokens, parents, chosen), depth=depth)


def _renumbered(tokens: Tensor, parents: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and parents [B, m] of `chosen` candidates of [B, n], their parents among them, in that order."""
    index = torch.zeros_like(torch.nn.functional.pad(tokens, (1, 0)))  # [B, n + 1]
    # from a candidate to its node, both counted from 1; 0 is the bonus token
    index.scatter_(1, chosen + 1, (cached_arange(chosen.shape[1], tokens.device) + 1).expand_as(chosen))
    return tokens.gather(1, chosen), index.gather(1, parents.gather(1, chosen) + 1) - 1


def drawn_tree(
    distribution: Tensor,
    expand: Expand,
    *,
    depth: int,
    top_k: int,
    total_tokens: int,
    generator: torch.Generator | None = None,
    columns: Tensor | None = None,
) -> DraftTree:
    """Return a dynamic tree of draws without replacement, with their distributions.

    The number of a node's children may depend only on what precedes their draws: dropping some afterwards by their
    probability would bias the output. So the block's size is split over the levels beforehand, and on every level the
    draws that are worth most, by the chance that their path is accepted (`_chance_accepted`), decide how many each
    frontier node makes. The frontier, the nodes of the level that are worth most, may depend on all draws before.

    `distribution` [B, v] of the first token, and those [B, k, v] that `expand` returns, are as they are to be sampled;
    `columns` [v] int64 are the tokens that their columns stand for (None: column i is token i). A node has at most
    `top_k` children; `depth` and `total_tokens` are as for `dynamic_tree`.
    """
    check_size(depth, top_k, total_tokens)
    width = min(top_k, distribution.shape[-1])
    sizes = level_sizes(depth + 1, width, total_tokens - 1)
    rows = cached_arange(len(distribution), distribution.device)[:, None]  # [B, 1]
    probs = distribution.new_zeros(len(distribution), sum(sizes) + 1, distribution.shape[1])  # [B, m + 1, v]
    q, worth, index, start = distribution[:, None], torch.ones_like(distribution[:, :1]), torch.zeros_like(rows), 1
    tokens, parents = [], []
    for level, size in enumerate(sizes):
        probs[rows, index] = q  # rows of the frontier's indices in the block
        token, worth, parent = _draw_children(q, worth, width, size, generator)  # [B, size] each
        token = token if columns is None else columns[token]
        tokens.append(token)
        parents.append(index.gather(1, parent) - 1)  # node i has index i + 1
        if level + 1 < len(sizes):
            best = _best(worth, min(width, size))  # [B, k]
            q = expand(token.gather(1, best), parent.gather(1, best) if level else torch.full_like(best, -1))
            worth, index, start = worth.gather(1, best), best + start, start + size  # [B, k]
    nodes = torch.cat(tokens, dim=1), torch.cat(parents, dim=1)  # [B, m] each
    return DraftTree(*nodes, probs, depth=len(sizes), columns=columns)


def _draw_children(
    q: Tensor, worth: Tensor, width: int, size: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a level's columns of tokens, their paths' chances and parents in the frontier, all [B, size]."""
    drawn = race_order(q, width, generator)  # [B, k, width]
    # of what will be drawn only the distribution is known: the first draw has its own mean probability, the others next
    # to none
    mean = torch.nn.functional.pad(q.square().sum(-1, keepdim=True), (0, width - 1))  # [B, k, width]
    exists = (q > 0).sum(-1, keepdim=True) > cached_arange(width, q.device)  # [B, k, width]
    slots = _best((worth[..., None] * _chance_accepted(mean) * exists).flatten(1), size).sort(-1).values  # [B, size]
    own = q.gather(-1, drawn)  # [B, k, width]
    left = (1 - own.cumsum(-1) + own).clamp(min=torch.finfo(q.dtype).eps)  # what the draws before leave
    reached = (worth[..., None] * _chance_accepted((own / left).clamp(max=1)) * (own > 0)).flatten(1)  # [B, k * width]
    return drawn.flatten(1).gather(1, slots), reached.gather(1, slots), slots // width


def _chance_accepted(q: Tensor) -> Tensor:
    """Return about how likely each of a node's draws is the accepted one, [.., w], in the order of the draws.

    Measured, the r-th draw is accepted with about (1 + q) / 2 r (docs/trees.md), q [.., w] being its probability given
    the draws before: the first is worth a deep subtree. The output does not depend on it, only its speed.
    """
    accepted = (1 + q) / (2 * (cached_arange(q.shape[-1], q.device) + 1))  # [..., w]
    # the chance that all draws before are rejected, [..., w]
    refused = torch.nn.functional.pad((1 - accepted).cumprod(-1)[..., :-1], (1, 0), value=1.0)
    return accepted * refused


def level_sizes(levels: int, width: int, size: int) -> list[int]:
    """Return nodes per level: an even share of the rest, or as many as the level before can have."""
    sizes, most = [], width
    for level in range(levels):
        share = min(-(-(size - sum(sizes)) // (levels - level)), most)
        if share:
            sizes.append(share)
            most = min(width, share) * width
    return sizes


def _best(values: Tensor, count: int) -> Tensor:
    """Return the best `count` of [B, n], best first; of equal ones the first, which `topk` does not promise."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def check_size(depth: int, top_k: int, total_tokens: int) -> None:
    """Refuse sizes of a dynamic tree that leave nothing to draft, by name."""
    for name, value, least in (("depth", depth, 0), ("top_k", top_k, 1), ("total_tokens", total_tokens, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r} of draft_tree must be a whole number of at least {least}")


def ranked_tree(
    choices: Sequence[Sequence[int]],
    log_probs: Tensor,
    expand: Expand,
    best: Callable[[Tensor, int], Tensor] = lambda scores, count: scores.topk(count).indices,
) -> DraftTree:
    """Return a tree of fixed shape (EAGLE-1, Medusa): node (r_1, .., r_j) is the r_j-th token below its parent.

    `choices` are the paths of all nodes as ranks, counted from 0; `log_probs` [B, V] of the first token may be any
    scores that rank it, as those [B, k, V] of `expand` for the frontier, which is the nodes that have children. `best`
    goes from scores and a number to so many tokens [B, k, number], the best first.
    """
    parents, levels = _plan(tuple(tuple(path) for path in choices), log_probs.shape[-1], log_probs.device)
    batch, scores, tokens = len(log_probs), log_probs[:, None], []
    for number, level in enumerate(levels):
        tokens.append(best(scores, level.width).flatten(1)[:, level.slots])
        if number + 1 < len(levels):
            scores = expand(tokens[-1][:, level.inner], level.before.expand(batch, -1))  # [B, k, V]
    return DraftTree(torch.cat(tokens, dim=1), parents.expand(batch, -1), depth=len(levels))


class _Level(NamedTuple):
    """One level of a fixed shape, on a device."""

    width: int  # ranks in use
    slots: Tensor  # [n] the index of each node's token among the `width` most likely of every frontier node
    inner: Tensor  # [k] the nodes that have children, counted in the level: the next frontier
    before: Tensor  # [k] the indices of their parents in this level's own frontier, -1 for b


@made_once
def _plan(choices: tuple[tuple[int, ...], ...], size: int, device: torch.device) -> tuple[Tensor, list[_Level]]:
    """Return parents [m] and levels of a shape, made once: a tensor from a list is a copy that the device waits for."""
    if (most := max(path[-1] for path in choices)) >= size:
        raise ValueError(f"rank {most} of the draft tree is beyond {size} tokens")
    parents, _ = static_tree(choices)
    paths, levels = _sorted_paths(choices), list[_Level]()
    frontier: dict[tuple[int, ...], int] = {(): 0}
    inside = {path[:-1] for path in paths}
    for length in range(1, len(paths[-1]) + 1):
        nodes = [path for path in paths if len(path) == length]
        width = max(path[-1] for path in nodes) + 1
        slots = [frontier[path[:-1]] * width + path[-1] for path in nodes]
        inner = [i for i, path in enumerate(nodes) if path in inside]
        before = [frontier[nodes[i][:-1]] if length > 1 else -1 for i in inner]
        levels.append(_Level(width, *(torch.tensor(part, device=device) for part in (slots, inner, before))))
        frontier = {nodes[i]: index for index, i in enumerate(inner)}
    return parents.to(device), levels


def static_tree(choices: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return parents [m] int64, -1 for b, and ranks [m] int64 of rank paths, sorted by length and then by path."""
    paths = _sorted_paths(choices)
    number = {path: node for node, path in enumerate(paths)} | {(): -1}
    return torch.tensor([number[path[:-1]] for path in paths]), torch.tensor([path[-1] for path in paths])


def _sorted_paths(choices: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    paths = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
    known: set[tuple[int, ...]] = {()}
    for path in paths:
        if path in known or path[:-1] not in known or not 0 <= path[-1] < _RANKS:
            raise ValueError(f"the tree's path {path} must be there once, count ranks from 0, and so must its parent")
        known.add(path)
    return paths


def choices_from_accuracies(accuracies: Tensor, num_nodes: int) -> list[tuple[int, ...]]:
    """Return the `num_nodes` rank paths with most accepted drafts, if every head were right independently.

    `accuracies` [K, R] say how often the target's token is the rank-r proposal of head j; they fall in r.
    """
    paths: list[tuple[int, ...]] = []
    for _, parent, _, rank in best_prefixes(accuracies.double().log().tolist(), num_nodes):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


def best_prefixes(steps: Sequence[Sequence[float]], count: int) -> list[tuple[float, int, int, int]]:
    """Return the `count` likeliest prefixes of independent places, the best first (DDTree, arXiv 2604.12989).

    A place has the log-probabilities of its candidates, which fall. A prefix comes as minus its own, the number of its
    parent (-1: it has none), its place, and the rank of its last token. None is likelier than its parent or its elder
    sibling: the best of the rest is the first child or the next sibling of one that was taken, and a heap has those.
    """
    queue, found = [(-steps[0][0], -1, 0, 0)], list[tuple[float, int, int, int]]()
    while queue and len(found) < count:
        cost, parent, place, rank = heapq.heappop(queue)
        if rank + 1 < len(steps[place]):
            before = found[parent][0] if parent >= 0 else 0.0
            heapq.heappush(queue, (before - steps[place][rank + 1], parent, place, rank + 1))
        if place + 1 < len(steps):
            heapq.heappush(queue, (cost - steps[place + 1][0], len(found), place + 1, 0))
        found.append((cost, parent, place, rank))
    return found


def prefix_tree(steps: Tensor, tokens: Tensor, size: int, costs: BlockCosts | None = None) -> DraftTree:
    """Return the tree of the `size` likeliest prefixes (`best_prefixes`), or of as many of them as pay by `costs`.

    `steps` [B, m, R] are log-probabilities of the likeliest `tokens` [B, m, R] of every place. The host waits for them.
    """
    found = torch.tensor([best_prefixes(rows, size) for rows in steps.tolist()], dtype=torch.float64)  # [B, n, 4]
    if costs is not None:
        found = found[:, : max(costs.best((-found[..., 0]).exp().mean(0).tolist()), 1)]
    parents, places, ranks = found[..., 1:].long().to(tokens.device).unbind(-1)  # [B, n] each
    order = ((places * size + parents) * tokens.shape[-1] + ranks).argsort(1)  # level by level, as trees grow elsewhere
    nodes, parents = _renumbered(tokens.flatten(1).gather(1, places * tokens.shape[-1] + ranks), parents, order)
    is_chain = bool((places == cached_arange(places.shape[1], places.device)).all())
    return DraftTree.chain(nodes) if is_chain else DraftTree(nodes, parents, depth=int(places.max()) + 1)
