"""Parallel token prediction: one forward verifies the pending drafts and makes the next ones.

After b and the drafts ride auxiliary slots, one uniform each: a group of them for every number of drafts that may be
accepted. The uniform of an output position belongs to that position, so where the target picks with the uniforms that
the drafts were made from, the text is that of sequential inverse-CDF decoding, whatever the student drafts (PTP paper,
Theorem 1 and Algorithm 1; here all accepted drafts bring one more token).

Slots may be masks, too (masked prediction, arXiv 2507.11851): they read no uniforms, which then only pick the drafts.

Best-of-M: several vectors of uniforms are drafted from, and the most central one is kept.

Every cycle draws M fresh vectors for the output positions to come and drafts a branch from each; the forward that
verifies the branches makes the M drafts after each of their ends. The branch to keep is chosen by where its uniforms
lie in the intervals of the *target's* picks (`best_of`). On any prefix those places are uniform and independent of the
tokens, so the choice changes no distribution, as long as no uniform after the stop is used again; the paper's Eq. 18
has the opposite sign and measures against the student. Slots cost M^2 times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessorList

from ...modeling.heads.window_distribution import WindowDistribution
from ...modeling.masks import cached_arange, to_device
from ...modeling.ptp.embedding import GREEDY
from ...modeling.sampling import interval, pick
from ...modeling.uniforms import best_of
from ..call.constraints import DraftMasks
from ..call.options import DraftOptions
from ..call.processing import Processing
from ..call.schedule import AcceptanceRates
from ..call.sequences import Sequences
from ..protocols import CacheView, DraftSession
from ..target.target import TargetOutput
from ..trees.contract import DraftTree, VerificationResult
from ..verification.verifiers import CoupledVerifier, Uniforms, distribution_of
from .slots import SlotLayout, split_budget


@dataclass
class AuxiliaryPositions:
    """Rows that ride along in a forward after b and the nodes.

    Attributes:
        inputs: What the backbone takes beside ids: the slots' `uniforms`, or `masks`.
        positions: [F + A] int64, how far every row of the forward stands after b.
        mask: [F + A, F + A] bool, what the rows see of each other.
        last_position: Last entry of the backbone's table of positions; None where there is none.
        most: The most rows that a forward of this call has.
    """

    inputs: dict[str, Tensor]
    positions: Tensor
    mask: Tensor
    last_position: int | None = None
    most: int = 0

    def filled(self, fed: int, width: int) -> AuxiliaryPositions:
        """The same behind a block of `fed` tokens that is filled up to `width`, and filled up to `most` rows.

        What is filled in sees itself alone, and nobody sees it.
        """
        rows = len(self.positions) - fed
        places = cached_arange(width + self.most, self.positions.device)
        places = torch.cat([places[:fed], places[width : width + rows]])
        positions = self.positions.new_zeros(width + self.most).index_copy(0, places, self.positions)
        mask = torch.eye(width + self.most, dtype=torch.bool, device=self.mask.device)
        mask[places[:, None], places] = self.mask
        inputs = {name: pad(given, (0, self.most - rows)) for name, given in self.inputs.items()}
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = cached_arange(width, self.positions.device)
        return AuxiliaryPositions(inputs, positions, mask, self.last_position, self.most)


class ParallelSession(DraftSession):
    """Reads the next drafts off the auxiliary slots of the forward that verified the last ones.

    Args:
        config: A `PTPConfig`.
        options: Of the call; `extra["slot_budget"]` says how many slots ride in every forward.
        uniforms: Of the output positions.
        many: Vectors of uniforms to draft from.
        distribution: The distribution of a group of slots, from their states and the token before
            (`PTPForCausalLM.slot_distribution`); read where the config has a sampler head.

    Attributes:
        is_deterministic: Whether the text of a row may depend on its own seed and prompt alone: the rule verifies
            drafts by their length, so that neither room nor what other sequences accepted may change it.
    """

    lookahead = 1

    def __init__(
        self,
        config: Any,
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

    def begin(self, outputs: Any, view: CacheView) -> None:
        """Nothing is drafted by the prompt's own pass."""
        self.view = view

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """The drafts read last, at most `length` of them, and slots for as many next ones; none where 0 is asked."""
        draft, q = tokens.ids[:, :0], None
        if self.pending is not None and length:
            slots, uniforms, exists, before = self.pending
            cut = slots[:, :length], uniforms[:, :length], exists[:, :length]
            draft, q = self._drafts(*cut, before, self._masks(tokens))
        tree = DraftTree.chain(draft, q)
        tree.auxiliary = self._auxiliary(tokens, draft.shape[1], length)
        return tree

    def _masks(self, tokens: Sequences) -> DraftMasks | None:
        """What the call's constraints let drafts after every sequence hold."""
        return self.options.masks(tokens, self.options.do_sample and self.warps is self.options.processing)

    def _auxiliary(self, tokens: Sequences, drafted: int, length: int, branches: int = 1) -> AuxiliaryPositions | None:
        self._draw(tokens, drafted + 2 + self.longest_group)
        self.layout = None
        if not self.options.drafts or length < 1:  # nothing is asked for: a plain forward
            return None
        sizes = self._sizes(drafted, length)
        self.layout = layout = SlotLayout.of(sizes, tokens.ids.device, branches, self.many)
        fed = 1 + branches * drafted
        inputs = self._inputs(layout)
        if self.distribution is not None:  # nobody asks for the slots' logits
            inputs |= {"logits_to_keep": cached_arange(fed, tokens.ids.device)}
        positions = layout.order
        if not self.is_one_hot:
            positions = positions + (cached_arange(len(positions), positions.device) >= fed)
        table = self.config.learned_positions
        # what is drafted beyond a table of positions is beyond the text
        return AuxiliaryPositions(inputs, positions, layout.new, None if table is None else table - 1, self._most())

    def _most(self) -> int:
        """Return the most slots of a forward."""
        budget, groups = self.options.extra["slot_budget"], self.longest_group * (self.num_tokens + 1)
        return self.many**2 * (groups if isinstance(budget, str) else min(budget, groups))

    def _sizes(self, drafted: int, length: int) -> list[int]:
        """Slots per group 0..m: a budget is split by what is accepted; names say what the paper of masks does."""
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
        """What the slots read."""
        if not self.config.reads_uniforms:
            return {"masks": layout.index_in_group[None]}
        return {"uniforms": self.asked(self._of_slots(layout))}

    def asked(self, uniforms: Tensor) -> Tensor:
        """What slots read where these are the uniforms of their positions: greedy decoding has no use for them."""
        return uniforms if self.options.do_sample else torch.full_like(uniforms, GREEDY if self.config.greedy else 0.5)

    def _draw(self, tokens: Sequences, count: int) -> None:
        self.uniforms.draw(tokens, count)

    def _of_slots(self, layout: SlotLayout) -> Tensor:
        """Uniforms of the slots, [B, A]: those of their output positions."""
        return self.uniforms.current[:, layout.group + layout.index_in_group]

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Keeps the group of slots after the tokens that each sequence kept."""
        self.pending, layout = None, self.layout
        if layout is None or outputs.auxiliary is None:
            return
        self._learn(result)
        index, exists = layout.of_group(result.num_accepted)
        index, first = index[:, 0], int(self.is_one_hot)  # a one-hot slot 0 predicts what the target picks itself
        index, exists = index[:, first:], exists[:, first:]
        if index.shape[1] == 0 or not self._found_drafts(layout):
            return
        rows = cached_arange(len(index), index.device)[:, None]
        start = result.num_accepted[:, None] + 1  # the target picks the token before
        uniforms = self.uniforms.current.gather(1, start + cached_arange(index.shape[1], index.device))
        slots = outputs.auxiliary
        if self.distribution is not None:
            slots = to_device((outputs.auxiliary_states or ())[-1], index.device)
        self.pending = slots[rows, index], uniforms, exists, result.added

    def _found_drafts(self, layout: SlotLayout) -> bool:
        """Whether any open row stands at a group that has slots; notes whether some row does not.

        A run with a seed goes on as if some did: a draft is verified by its length, which other sequences must not
        tell.
        """
        sizes, kept = layout.sizes, self.view.new_tokens.counts
        found = [sizes[min(count, len(sizes)) - 1] > self.is_one_hot for count in kept if count]
        self.some_lack_drafts = self.is_deterministic or not all(found)
        return self.is_deterministic or any(found)

    def _learn(self, result: VerificationResult) -> None:
        if self.is_deterministic:
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
        """Tokens, and their distributions where a rule asks for them; a place that a row lacks holds token 0, for
        certain.

        Args:
            slots: [..., L, v] logits of the slots; or [..., L, D] their states, which a sampler head makes a
                distribution of.
            uniforms: [..., L], what picks.
            exists: [..., L] bool.
            before: [...] int64, the token before, for a sampler head.
            masks: What the call's constraints let drafts hold, one place after the other.
        """
        steps = iter(uniforms.unbind(-1))
        if self.distribution is not None:
            draft, probs = self.distribution(slots, before).draft(lambda probs: self._pick(probs, next(steps), masks))
        else:
            probs = slots.to(torch.promote_types(slots.dtype, torch.float32)).softmax(-1)
            if masks is None:
                draft, probs = self._pick(probs, uniforms)
            else:
                picked = [self._pick(place, next(steps), masks) for place in probs.unbind(-2)]
                draft, probs = (torch.stack(parts, dim) for parts, dim in zip(zip(*picked), (-1, -2)))
        draft = draft.masked_fill(~exists, 0)
        if not self.gives_probs:
            return draft, None
        certain = torch.nn.functional.one_hot(draft, probs.shape[-1]).to(probs)
        return draft, certain if self.config.predicts_tokens else torch.where(exists[..., None], probs, certain)

    def _pick(
        self, probs: Tensor, uniforms: Tensor, masks: DraftMasks | None = None, warps: Processing | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [...] from probabilities [..., v], and the distributions that they were picked from.

        `warps` are applied instead of those of slots.
        """
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
    """Reads M drafts off the slots after the branch that was kept.

    Attributes:
        branches: [B, J, m] int64, the drafts to verify: M of them, or one empty one.
        vectors: [B, J, m + 1 or more], the uniforms that they and the tokens after them are picked with.
        fresh: [B, M, n], the uniforms of the drafts to come.
        kept_branch: [B] int64.
    """

    vectors: Tensor
    fresh: Tensor
    kept_branch: Tensor

    def __init__(self, *args: Any, many: int) -> None:
        super().__init__(*args, many=many)
        self.branches: Tensor | None = None

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """All branches, one after the other, of at most `length` tokens each."""
        asked = length
        if self.branches is not None:
            self.branches = self.branches[..., :length]
        count, length = (1, 0) if self.branches is None else self.branches.shape[1:]
        auxiliary = self._auxiliary(tokens, length, asked, count if length else 1)
        if length == 0:
            return DraftTree.chain(tokens.ids[:, :0], auxiliary=auxiliary)
        order = cached_arange(count * length, tokens.ids.device)
        parents = torch.where(order % length == 0, -1, order - 1).expand(len(tokens.ids), -1)
        return DraftTree(self.branches.flatten(1), parents, depth=length, auxiliary=auxiliary)

    def _draw(self, tokens: Sequences, count: int) -> None:
        """Draws uniforms for the drafts of the next forward, and for its only pick if it verifies none."""
        drawn = self.uniforms.fresh(self.many * (self.longest_group + 2)).unflatten(1, (self.many, -1))
        self.fresh = drawn[..., 1:]
        if self.branches is None or self.branches.shape[-1] == 0:
            self.branches, self.vectors = None, drawn[:, :1, :1]

    def _of_slots(self, layout: SlotLayout) -> Tensor:
        """The shared slots read the uniform of the target's pick, the others those of their vectors."""
        picks = self.vectors[:, layout.branch, layout.group]
        own = self.fresh[:, layout.vector, (layout.index_in_group - 1).clamp(min=0)]
        return torch.where(layout.index_in_group == 0, picks, own)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Drafts from the groups after the tokens that each sequence kept."""
        self.branches, layout = None, self.layout
        if layout is None or outputs.auxiliary is None:
            return
        self._learn(result)
        index, exists = layout.of_group(result.num_accepted, self.kept_branch)
        first = int(self.is_one_hot)  # a one-hot slot 0 predicts what the target picks itself
        index, exists = index[..., first:], exists[:, None, first:]
        if index.shape[-1] > 0:
            rows = cached_arange(len(index), index.device)[:, None, None]
            self.branches, _ = self._drafts(outputs.auxiliary[rows, index], self.fresh[..., : index.shape[-1]], exists)
            self.vectors = self.fresh


class CentralVerifier(CoupledVerifier):
    """Coupled verification of all branches, of which the most central one is kept.

    Args:
        drafter: Holds the branches and their uniforms, and is told which one was kept.
    """

    def __init__(self, drafter: BestOfSession) -> None:
        super().__init__(drafter.uniforms)
        self.drafter = drafter

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        """See `Verifier`."""
        self.distribution, vectors = distribution_of(scores), self.drafter.vectors
        drafts = tree.tokens[:, None] if tree.is_chain else self.drafter.branches
        count, length = drafts.shape[1:]
        columns = torch.nn.functional.pad(1 + cached_arange(count * length, scores.device).view(count, length), (1, 0))
        probs, uniforms = self.distribution[:, columns], vectors[..., : length + 1]
        picked = pick(uniforms, probs)
        accepted = (drafts == picked[..., :-1]).long().cumprod(2).sum(2)
        low, high = interval(picked, probs)
        kept = best_of(((uniforms - low) / (high - low))[..., :-1], accepted)
        rows, self.drafter.kept_branch = cached_arange(len(kept), kept.device), kept
        accepted = accepted[rows, kept]
        places = columns[kept].gather(1, torch.minimum(cached_arange(length + 1, kept.device), accepted[:, None]))
        return VerificationResult(accepted, picked[rows, kept], places)
