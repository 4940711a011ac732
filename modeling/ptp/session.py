"""Parallel token prediction: one forward verifies the pending drafts and makes the next ones.

Auxiliary slots follow the bonus token and the drafts, one uniform each: a group of them for every number of drafts that
may be accepted. The uniform of an output position belongs to that position, so where the target picks with the uniforms
that the drafts were made from, the output is that of sequential inverse-CDF decoding, for any drafts of the student
(PTP paper, Theorem 1 and Algorithm 1; here all accepted drafts bring one more token).

Slots may be masks, too (masked prediction, arXiv 2507.11851): they read no uniforms, which then only pick the drafts.

Best-of-M: several vectors of uniforms are drafted from, and the most central one is chosen. Every cycle draws M fresh
vectors for the next output positions and drafts a branch from each; the forward that verifies the branches makes the M
drafts after each of their ends. The choice depends on the positions of a branch's uniforms in the intervals of the
*target's* picks (`best_of`). On any prefix these are uniform and independent of the tokens, so the choice changes no
distribution, as long as no uniform after the stop is used again; the paper's Eq. 18 has the opposite sign and measures
against the student. Slots cost M^2 times as much.

One forward reads [bonus token | drafts | groups of slots]. Group d follows the bonus token and the first d drafts, for
the case that exactly those are accepted; it has its own slots, one uniform each. Of best-of-M every branch of drafts
has its own groups, and in every group several vectors of uniforms share the group's first slot: that one reads the
uniform of the target's pick.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessorList

from ...configuration.ptp import PTPConfig
from ...generation.call.constraints import DraftMasks
from ...generation.call.options import DraftOptions
from ...generation.call.processing import Processing
from ...generation.call.schedule import AcceptanceRates
from ...generation.call.sequences import Sequences
from ...generation.contract import CacheView, DraftSession, DraftTree, TargetOutput, VerificationResult
from ...generation.tensors.masks import cached_arange, made_once, to_device
from ...generation.tensors.sampling import interval, pick
from ...generation.tensors.uniforms import best_of
from ...generation.verification.verifiers import CoupledVerifier, Uniforms, distribution_of
from ..heads.window_distribution import WindowDistribution
from .inputs import GREEDY


@dataclass(frozen=True)
class SlotLayout:
    """Slots of one forward, the same for all sequences of a batch.

    Attributes:
        sizes: Slots per group 0..m, for one vector.
        branch: [A] int64, the branch that each slot follows.
        group: [A] int64, its group.
        vector: [A] int64, its vector of uniforms; 0 for the slots that all vectors share.
        index_in_group: [A] int64.
        order: [F + A] int64, how far each position of the forward is after the bonus token; F = 1 + branches m.
        new: [F + A, F + A] bool, the mask of these positions.
        index: [branches, m + 1, vectors, longest] int64, the slots of every vector; arbitrary where there is none.
        counts: [m + 1] int64, slots per group, for one vector.
    """

    sizes: tuple[int, ...]
    branch: Tensor
    group: Tensor
    vector: Tensor
    index_in_group: Tensor
    order: Tensor
    new: Tensor
    index: Tensor
    counts: Tensor

    @classmethod
    def of(cls, sizes: list[int], device: torch.device, branches: int = 1, vectors: int = 1) -> SlotLayout:
        """Return the layout of groups of these sizes."""
        return _layout(tuple(sizes), torch.device(device), branches, vectors)

    def of_group(self, chosen: Tensor, branch: Tensor | int = 0) -> tuple[Tensor, Tensor]:
        """Return the slots after `chosen[b]` drafts of a branch (one, or one per sequence): [B, vectors, longest].

        And which of them exist, [B, longest].
        """
        steps = cached_arange(max(self.sizes), self.group.device)
        return self.index[branch, chosen], steps < self.counts[chosen][:, None]


@made_once
def _layout(sizes: tuple[int, ...], device: torch.device, branches: int, vectors: int) -> SlotLayout:
    """See `SlotLayout.of`; lengths repeat from cycle to cycle."""
    grid = torch.cartesian_prod(*map(torch.arange, (branches, len(sizes), vectors, max(sizes))))  # [N, 4]
    _, group, vector, step = grid.unbind(1)
    exists = (step < torch.tensor(sizes)[group]) & ((step > 0) | (vector == 0))  # slot 0 once for all vectors
    index = (exists.cumsum(0) - 1).clamp(min=0).view(branches, len(sizes), vectors, -1)
    index[..., 0] = index[:, :, :1, 0].clone()  # all vectors have slot 0
    slots = branch, group, vector, step = grid[exists].unbind(1)
    drafts = torch.cartesian_prod(torch.arange(branches), torch.arange(1, len(sizes)))  # [branches m, 2]
    read_branch, read_order = torch.cat([drafts.new_zeros(1, 2), drafts]).unbind(1)  # [F] each
    after = torch.cat([read_branch, branch]), torch.cat([read_order, group])  # [F + A] each
    tokens = (after[0][:, None] == read_branch) & (after[1][:, None] >= read_order) | (read_order == 0)  # [F + A, F]
    same = (branch[:, None] == branch) & (group[:, None] == group) & (step[:, None] >= step)  # [A, A]
    same &= (vector[:, None] == vector) | (step == 0)
    new = torch.cat([tokens, torch.nn.functional.pad(same, (0, 0, len(read_order), 0), value=False)], dim=1)
    order = torch.cat([read_order, group + step])  # [F + A]
    return SlotLayout(sizes, *_moved((*slots, order, new, index, torch.tensor(sizes)), device))


def _moved(parts: tuple[Tensor, ...], device: torch.device) -> list[Tensor]:
    """Return tensors of whole numbers or truth values on a device, in one copy."""
    flat = torch.cat([part.flatten().long() for part in parts]).to(device)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts)]


@lru_cache(maxsize=256)
def split_budget(
    budget: int, drafted: int, longest: int, survival: tuple[float, ...], repeats_pick: bool = False
) -> list[int]:
    """Return slots per group 0..m that maximise sum_d A_d H(B_d) under sum_d B_d <= budget; the list is cached.

    A_d is the probability that d of the m drafts are accepted, H(k) = S_1 + ... + S_k the expected accepted tokens of a
    draft of k, with S_j the probability of accepting j. Where a group's first slot repeats the target's pick
    (one-hot), it drafts nothing, and a group of k slots is worth H(k - 1). All groups share H, which is concave: if k
    groups are opened, they are those of the k greatest A_d, and the rest goes slot by slot to where it gains most.

    Args:
        budget: Slots in all.
        drafted: m.
        longest: Most slots per group.
        survival: S_1, S_2, ...; the last one applies to all after it.
        repeats_pick: Whether a group's first slot drafts nothing.
    """
    reach = [1.0, *(survival[min(d, len(survival) - 1)] for d in range(drafted)), 0.0]
    ends = [reach[d] - reach[d + 1] for d in range(drafted + 1)]
    order = sorted(range(drafted + 1), key=lambda d: -ends[d])
    best, best_value = [0] * (drafted + 1), -1.0
    for opened in range(1, min(drafted + 1, budget) + 1) if repeats_pick else (drafted + 1,):
        sizes, value = _fill(budget, longest, survival, ends, order[:opened], int(repeats_pick))
        if value > best_value + 1e-12:
            best, best_value = sizes, value
    return best


def _fill(
    budget: int, longest: int, survival: tuple[float, ...], ends: list[float], opened: list[int], price: int
) -> tuple[list[int], float]:
    """Return sizes, and their value, if the `opened` groups cost `price` slots each before the first that drafts."""
    sizes, value = [0] * len(ends), 0.0
    heap = [(-ends[d] * survival[0], d) for d in opened]
    heapq.heapify(heap)
    for _ in range(min(budget, longest * len(opened)) - price * len(opened)):
        gain, d = heapq.heappop(heap)
        sizes[d], value = (sizes[d] or price) + 1, value - gain
        if sizes[d] < longest:
            heapq.heappush(heap, (-ends[d] * survival[min(sizes[d] - price, len(survival) - 1)], d))
        if not heap:
            break
    return sizes, value


@dataclass
class AuxiliaryPositions:
    """Positions of a forward after the bonus token and the nodes, which only their drafter reads.

    Attributes:
        inputs: Inputs of the backbone beside ids: the slots' `uniforms`, or `masks`.
        positions: [F + A] int64, how far every position of the forward is after the bonus token.
        mask: [F + A, F + A] bool, their mask.
        last_position: Last entry of the backbone's table of positions; None where there is none.
        most: The most slots of a forward of this call.
    """

    inputs: dict[str, Tensor]
    positions: Tensor
    mask: Tensor
    last_position: int | None = None
    most: int = 0

    def filled(self, count: int, width: int) -> AuxiliaryPositions:
        """Return the same after a block of `count` tokens that is filled up to `width`, and filled up to `most` slots.

        Positions that are filled in see themselves alone, and nobody sees them.
        """
        slots = len(self.positions) - count
        index = cached_arange(width + self.most, self.positions.device)
        index = torch.cat([index[:count], index[width : width + slots]])
        positions = self.positions.new_zeros(width + self.most).index_copy(0, index, self.positions)
        mask = torch.eye(width + self.most, dtype=torch.bool, device=self.mask.device)
        mask[index[:, None], index] = self.mask
        inputs = {name: pad(value, (0, self.most - slots)) for name, value in self.inputs.items()}
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = cached_arange(width, self.positions.device)
        return AuxiliaryPositions(inputs, positions, mask, self.last_position, self.most)


class ParallelSession(DraftSession):
    """Reads the next drafts off the auxiliary slots of the forward that verified the last ones.

    Args:
        config: Of the student.
        options: Of the call; `extra["slot_budget"]` is the number of slots in every forward.
        uniforms: Of the output positions.
        many: Vectors of uniforms to draft from.
        distribution: The distribution of a group of slots, from their states and the token before
            (`PTPForCausalLM.slot_distribution`); read where the config has a sampler head.

    Attributes:
        is_deterministic: Whether the output of a sequence depends on its own seed and prompt alone: the rule verifies
            drafts by their length, so that neither the length limit nor other sequences may change it.
        is_fixed: Whether shapes are fixed: then slots are split by the acceptance that is expected at first, and a
            draft is made in every cycle, whoever has slots for one.
    """

    lookahead = 1

    def __init__(
        self,
        config: PTPConfig,
        options: DraftOptions,
        uniforms: Uniforms,
        many: int = 1,
        distribution: Callable[[Tensor, Tensor], WindowDistribution] | None = None,
    ) -> None:
        self.many, self.distribution = many, distribution if config.has_sampler else None
        self.config, self.options, self.uniforms = config, options, uniforms
        self.is_one_hot = config.variant == "one_hot"
        self.num_tokens = options.num_tokens
        # a one-hot slot 0 predicts what the target picks itself
        self.longest_group = min(config.num_slots, self.num_tokens + self.is_one_hot)
        warps = options.processing.is_pointwise and not config.learns_warped_distribution
        self.warps = options.processing if warps else Processing(LogitsProcessorList())
        self.gives_probs = options.do_sample and not uniforms.stay
        self.rates = AcceptanceRates(self.num_tokens)
        self.is_deterministic = options.do_sample and "seed" in options.extra and (many > 1 or not uniforms.stay)
        self.some_lack_drafts = self.is_deterministic or many > 1
        self.layout: SlotLayout | None = None
        self.pending: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self.hidden_layers = None if self.distribution is None else -1
        self.takes_fixed, self.is_fixed = many == 1 and (uniforms.stay or not options.do_sample), False

    def begin(self, outputs: Any, view: CacheView) -> None:
        """Take the view; the prefill makes no draft."""
        self.view, self.is_fixed = view, view.is_fixed
        self.some_lack_drafts |= view.is_fixed

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Return at most `length` of the drafts read last, and slots for as many next ones; none where 0 is
        requested."""
        draft, q = tokens.ids[:, :0], None
        if self.pending is not None and length:
            slots, uniforms, exists, before = self.pending
            cut = slots[:, :length], uniforms[:, :length], exists[:, :length]
            draft, q = self._drafts(*cut, before, self._masks(tokens))
        tree = DraftTree.chain(draft, q)
        tree.auxiliary = self._auxiliary(tokens, draft.shape[1], length)
        return tree

    def _masks(self, tokens: Sequences) -> DraftMasks | None:
        """Return the tokens that drafts may hold under the call's constraints."""
        return self.options.masks(tokens, self.options.do_sample and self.warps is self.options.processing)

    def _auxiliary(self, tokens: Sequences, drafted: int, length: int, branches: int = 1) -> AuxiliaryPositions | None:
        self._draw(tokens, drafted + 2 + self.longest_group)
        self.layout = None
        if not self.options.speculates or length < 1:  # nothing is asked for: a plain forward
            return None
        sizes = self._sizes(drafted, length)
        self.layout = layout = SlotLayout.of(sizes, tokens.ids.device, branches, self.many)
        count = 1 + branches * drafted
        inputs = self._inputs(layout)
        if self.distribution is not None:  # the slots' logits are not read
            inputs |= {"logits_to_keep": cached_arange(count, tokens.ids.device)}
        positions = layout.order
        if not self.is_one_hot:
            positions = positions + (cached_arange(len(positions), positions.device) >= count)
        table = self.config.learned_positions
        # drafts beyond a table of positions are beyond the end
        return AuxiliaryPositions(inputs, positions, layout.new, None if table is None else table - 1, self._most())

    def _most(self) -> int:
        """Return the most slots of a forward."""
        budget, groups = self.options.extra["slot_budget"], self.longest_group * (self.num_tokens + 1)
        return self.many**2 * (groups if isinstance(budget, str) else min(budget, groups))

    def _sizes(self, drafted: int, length: int) -> list[int]:
        """Return slots per group 0..m: a budget is split by acceptance; names select the layouts of the paper of
        masks."""
        longest = min(self.longest_group, length + self.is_one_hot)
        budget = self.options.extra["slot_budget"]
        if budget == "quadratic":
            return [longest] * (drafted + 1)
        if budget == "linear":
            return [longest * self.some_lack_drafts] * min(drafted, 1) + [0] * (drafted - 1) + [longest]
        budget = max(budget * length // self.num_tokens, 1 + self.is_one_hot)
        # rounded, so that layouts repeat from cycle to cycle
        survival = tuple(max(round(share, 1), 0.05) for share in self.rates.survival())
        return split_budget(budget, drafted, longest, survival, self.is_one_hot)

    def _inputs(self, layout: SlotLayout) -> dict[str, Tensor]:
        """Return the inputs of the slots."""
        if not self.config.reads_uniforms:
            return {"masks": layout.index_in_group[None]}
        return {"uniforms": self.slot_uniforms(self._of_slots(layout))}

    def slot_uniforms(self, uniforms: Tensor) -> Tensor:
        """Return the slots' inputs for the uniforms of their positions: greedy decoding has no use for them."""
        return uniforms if self.options.do_sample else torch.full_like(uniforms, GREEDY if self.config.greedy else 0.5)

    def _draw(self, tokens: Sequences, count: int) -> None:
        """Draw the uniforms of the next positions; those beyond the end are never read, nor any in greedy decoding."""
        table = self.uniforms.positions.table  # where shapes are fixed the verifier holds it
        if not self.is_fixed:
            self.uniforms.draw(tokens, count)
        elif self.uniforms.stay:
            columns = tokens.ends[:, None] - tokens.prompt_length + cached_arange(count, table.device)  # [B, count]
            self.uniforms.current = table.gather(1, columns.clamp(max=table.shape[1] - 1))
        else:
            self.uniforms.current = table.new_zeros(len(table), count)

    def _of_slots(self, layout: SlotLayout) -> Tensor:
        """Return the uniforms of the slots, [B, A]: those of their output positions."""
        return self.uniforms.current[:, layout.group + layout.index_in_group]

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Read the group of slots after the accepted drafts of each sequence."""
        self.pending, layout = None, self.layout
        if layout is None or outputs.auxiliary is None:
            return
        self._learn(result)
        index, exists = layout.of_group(result.num_accepted)
        index, first = index[:, 0], int(self.is_one_hot)  # a one-hot slot 0 predicts what the target picks itself
        index, exists = index[:, first:], exists[:, first:]
        if index.shape[1] == 0 or not (self.is_fixed or self._any_drafts(layout)):
            return
        sequence = cached_arange(len(index), index.device)[:, None]
        start = result.num_accepted[:, None] + 1  # the target picks the token before
        uniforms = self.uniforms.current.gather(1, start + cached_arange(index.shape[1], index.device))
        slots = outputs.auxiliary
        if self.distribution is not None:
            slots = to_device((outputs.auxiliary_states or ())[-1], index.device)
        pending = slots[sequence, index], uniforms, exists, result.added
        slots, uniforms, exists, before = (self.view.held(f"slots.{n}", each) for n, each in enumerate(pending))
        self.pending = slots, uniforms, exists, before

    def _any_drafts(self, layout: SlotLayout) -> bool:
        """Return whether the group of any open sequence has slots; note whether that of some sequence has none.

        A run with a seed acts as if some had none: a draft is verified by its length, which must not depend on other
        sequences.
        """
        sizes, counts = layout.sizes, self.view.new_tokens.counts
        have_drafts = [sizes[min(count, len(sizes)) - 1] > self.is_one_hot for count in counts if count]
        self.some_lack_drafts = self.is_deterministic or not all(have_drafts)
        return self.is_deterministic or any(have_drafts)

    def _learn(self, result: VerificationResult) -> None:
        if self.is_deterministic or self.is_fixed:
            return
        drafted = result.tokens.shape[1] - 1
        self.rates.update(drafted, [count - 1 for count in self.view.new_tokens.counts if count])

    def _drafts(
        self,
        slots: Tensor,
        uniforms: Tensor,
        exists: Tensor,
        before: Tensor | None = None,
        masks: DraftMasks | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens, and their distributions where a rule needs them; a missing draft is token 0, with probability
        1.

        Args:
            slots: [..., L, v] logits of the slots; or [..., L, D] their states, for a sampler head.
            uniforms: [..., L], which pick.
            exists: [..., L] bool.
            before: [...] int64, the token before, for a sampler head.
            masks: The tokens that drafts may hold, one position after the other.
        """
        steps = iter(uniforms.unbind(-1))
        if self.distribution is not None:
            draft, probs = self.distribution(slots, before).draft(lambda probs: self._pick(probs, next(steps), masks))
        else:
            probs = slots.to(torch.promote_types(slots.dtype, torch.float32)).softmax(-1)
            if masks is None:
                draft, probs = self._pick(probs, uniforms)
            else:
                picked = [self._pick(of_slot, next(steps), masks) for of_slot in probs.unbind(-2)]
                draft, probs = (torch.stack(parts, dim) for parts, dim in zip(zip(*picked), (-1, -2)))
        draft = draft.masked_fill(~exists, 0)
        if not self.gives_probs:
            return draft, None
        one_hot = torch.nn.functional.one_hot(draft, probs.shape[-1]).to(probs)
        return draft, one_hot if self.config.predicts_tokens else torch.where(exists[..., None], probs, one_hot)

    def _pick(
        self, probs: Tensor, uniforms: Tensor, masks: DraftMasks | None = None, warps: Processing | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return tokens [...] from probabilities [..., v], and the distributions that they were picked from.

        `warps` replace those of slots.
        """
        self.options.numbers.note(probs[..., 0])
        allowed = None if masks is None else masks.allowed(probs.shape, probs.device)
        if self.config.predicts_tokens or not self.options.do_sample:
            token = (probs if allowed is None else probs.masked_fill(~allowed, -1)).argmax(-1)
        else:
            probs = (warps or self.warps).warp(probs, allowed)
            token = pick(uniforms, probs)
        if masks is not None:
            masks.extend(token)
        return token, probs


class BestOfSession(ParallelSession):
    """Reads M drafts off the slots after the chosen branch.

    Attributes:
        branches: [B, J, m] int64, the drafts to verify: M of them, or one empty one.
        vectors: [B, J, m + 1 or more], the uniforms that pick them and the tokens after them.
        fresh: [B, M, n], the uniforms of the next drafts.
        chosen_branch: [B] int64.
    """

    vectors: Tensor
    fresh: Tensor
    chosen_branch: Tensor

    def __init__(self, *args: Any, many: int) -> None:
        super().__init__(*args, many=many)
        self.branches: Tensor | None = None

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Return all branches, one after the other, of at most `length` tokens each."""
        if self.branches is not None:
            self.branches = self.branches[..., :length]
        count, depth = (1, 0) if self.branches is None else self.branches.shape[1:]
        auxiliary = self._auxiliary(tokens, depth, length, count if depth else 1)
        if depth == 0:
            return DraftTree.chain(tokens.ids[:, :0], auxiliary=auxiliary)
        order = cached_arange(count * depth, tokens.ids.device)
        parents = torch.where(order % depth == 0, -1, order - 1).expand(len(tokens.ids), -1)
        return DraftTree(self.branches.flatten(1), parents, depth=depth, auxiliary=auxiliary)

    def _draw(self, tokens: Sequences, count: int) -> None:
        """Draw uniforms for the drafts of the next forward, and for its only pick if it verifies none."""
        drawn = self.uniforms.fresh(self.many * (self.longest_group + 2)).unflatten(1, (self.many, -1))
        self.fresh = drawn[..., 1:]
        if self.branches is None or self.branches.shape[-1] == 0:
            self.branches, self.vectors = None, drawn[:, :1, :1]

    def _of_slots(self, layout: SlotLayout) -> Tensor:
        """Return the target's uniform for the shared slots, and those of their vectors for the others."""
        picks = self.vectors[:, layout.branch, layout.group]
        own = self.fresh[:, layout.vector, (layout.index_in_group - 1).clamp(min=0)]
        return torch.where(layout.index_in_group == 0, picks, own)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Draft from the groups after the accepted drafts of each sequence."""
        self.branches, layout = None, self.layout
        if layout is None or outputs.auxiliary is None:
            return
        self._learn(result)
        index, exists = layout.of_group(result.num_accepted, self.chosen_branch)
        first = int(self.is_one_hot)  # a one-hot slot 0 predicts what the target picks itself
        index, exists = index[..., first:], exists[:, None, first:]
        if index.shape[-1] > 0:
            sequence = cached_arange(len(index), index.device)[:, None, None]
            slots, self.vectors = outputs.auxiliary[sequence, index], self.fresh
            self.branches, _ = self._drafts(slots, self.fresh[..., : index.shape[-1]], exists)


class CentralVerifier(CoupledVerifier):
    """Coupled verification of all branches of a session, of which the most central one is chosen."""

    def __init__(self, drafter: BestOfSession) -> None:
        super().__init__(drafter.uniforms)
        self.drafter = drafter

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        """See `Verifier`."""
        distribution, vectors = distribution_of(scores), self.drafter.vectors
        self.rows = distribution[..., 0]
        drafts = tree.tokens[:, None] if tree.is_chain else self.drafter.branches
        count, length = drafts.shape[1:]
        columns = torch.nn.functional.pad(1 + cached_arange(count * length, scores.device).view(count, length), (1, 0))
        probs, uniforms = distribution[:, columns], vectors[..., : length + 1]
        picked = pick(uniforms, probs)
        accepted = (drafts == picked[..., :-1]).long().cumprod(2).sum(2)
        low, high = interval(picked, probs)
        best = best_of(((uniforms - low) / (high - low))[..., :-1], accepted)
        sequence, self.drafter.chosen_branch = cached_arange(len(best), best.device), best
        accepted = accepted[sequence, best]
        path = columns[best].gather(1, torch.minimum(cached_arange(length + 1, best.device), accepted[:, None]))
        return VerificationResult(accepted, picked[sequence, best], path)
