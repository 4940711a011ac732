"""Parallel token prediction: one forward verifies the pending drafts and makes the next ones.

One forward reads [bonus token | drafts | groups of slots]. Group d follows the bonus token and the first d drafts, for
the case that exactly those are accepted; its slots have one uniform each. The uniform of an output position belongs to
that position, so where the target picks with the uniforms that the drafts were made from, the output is that of
sequential inverse-CDF decoding, for any drafts of the student (PTP paper, Theorem 1 and Algorithm 1; here all accepted
drafts bring one more token). Masks (masked prediction, arXiv 2507.11851) read no uniforms, which only pick the drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessorList, PreTrainedModel

from ...configuration.cache_names import CACHE
from ...configuration.fields import learned_positions
from ...configuration.ptp import SAMPLING, PTPConfig
from ...generation.assistant.session import AssistantSession, SharedVocabulary
from ...generation.backbone.cache import block_mask
from ...generation.backbone.target import RaggedBackbone
from ...generation.call.constraints import DraftMasks
from ...generation.call.options import DraftOptions
from ...generation.call.processing import Processing
from ...generation.call.schedule import AcceptanceRates
from ...generation.call.sequences import Sequences
from ...generation.contract import (
    CacheView,
    DraftSession,
    DraftTree,
    PrefillOutput,
    TargetOutput,
    VerificationResult,
    requested_states,
)
from ...generation.tensors.masks import cached_arange, cached_range, made_once, to_device
from ...generation.tensors.sampling import pick
from ...generation.verification.verifiers import Uniforms
from ..heads.window_distribution import WindowDistribution
from .inputs import GREEDY


@dataclass(frozen=True)
class SlotLayout:
    """Slots of one forward, the same for all sequences of a batch.

    Attributes:
        sizes: Slots per group 0..m, for one vector; on the device, `counts` [m + 1].
        branch: [A] int64, the branch that each slot follows; its `group` and `index_in_group`.
        vector: [A] int64, its vector of uniforms; 0 for the slots that all vectors share.
        order: [F + A] int64, how far each position of the forward is after the bonus token; F = 1 + branches m.
        new: [F + A, F + A] bool, the mask of these positions.
        index: [branches, m + 1, vectors, longest] int64, the slots of every vector; arbitrary where there is none.
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
        return _layout(tuple(sizes), torch.device(device), branches, vectors)

    def of_group(self, chosen: Tensor, branch: Tensor | int = 0) -> tuple[Tensor, Tensor]:
        """Return the slots [B, vectors, longest] after `chosen[b]` drafts, and which exist, [B, longest]."""
        steps = cached_arange(max(self.sizes), self.group.device)
        return self.index[branch, chosen], steps < self.counts[chosen][:, None]


@made_once
def _layout(sizes: tuple[int, ...], device: torch.device, branches: int, vectors: int) -> SlotLayout:
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
    parts = (*slots, order, new, index, torch.tensor(sizes))
    pieces = torch.cat([part.flatten().long() for part in parts]).to(device).split([part.numel() for part in parts])
    return SlotLayout(sizes, *(piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts)))


@lru_cache(maxsize=256)
def split_budget(
    budget: int, drafted: int, longest: int, survival: tuple[float, ...], repeats_pick: bool = False
) -> list[int]:
    """Return slots per group 0..m that maximise sum_d A_d H(B_d) under sum_d B_d <= budget; the list is cached.

    A_d is the probability that d of the m drafts (`drafted`) are accepted, H(k) = S_1 + ... + S_k the expected accepted
    tokens of a draft of k, with `survival` S_j; the last one applies to all after it. A group whose first slot repeats
    the target's pick is worth H(k - 1). H is concave: opened groups are those of the greatest A_d, and slots go where
    they gain most, at most `longest` to a group.
    """
    price = int(repeats_pick)
    reach = [1.0, *(survival[min(d, len(survival) - 1)] for d in range(drafted)), 0.0]
    ends = [reach[d] - reach[d + 1] for d in range(drafted + 1)]
    order = sorted(range(drafted + 1), key=lambda d: -ends[d])
    best, best_value = [0] * (drafted + 1), -1.0
    for opened in range(1, min(drafted + 1, budget) + 1) if repeats_pick else (drafted + 1,):
        worth = [survival[min(k, len(survival) - 1)] for k in range(longest - price)]
        gains = nlargest(budget - price * opened, ((ends[d] * share, d) for d in order[:opened] for share in worth))
        value, groups = sum(gain for gain, _ in gains), [d for _, d in gains]
        if value > best_value + 1e-12:
            counts = [groups.count(d) for d in range(drafted + 1)]
            best, best_value = [count and count + price for count in counts], value
    return best


@dataclass
class AuxiliaryPositions:
    """Positions of a forward after the bonus token and the nodes, which only their drafter reads.

    Attributes:
        inputs: Inputs of the backbone beside ids: the slots' `uniforms`, or `masks`.
        positions: [F + A] int64, how far every position is after the bonus token; `mask` is theirs.
        last_position: Last entry of the backbone's table of positions; None where there is none.
        most: The most slots of a forward of this call.
    """

    inputs: dict[str, Tensor]
    positions: Tensor
    mask: Tensor
    last_position: int | None = None
    most: int = 0

    def filled(self, count: int, width: int) -> AuxiliaryPositions:
        """Return the same after a block of `count` tokens filled up to `width`, with `most` slots; nobody sees more."""
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

    A run with a seed `is_deterministic` where drafts are verified by their length, which neither the length limit nor
    other sequences may change. Where shapes are fixed (`is_fixed`), slots are split by the acceptance that is expected
    at first, and a draft is made in every cycle, whoever has slots for one. Drafts have `many` vectors of uniforms.
    """

    lookahead = 1
    first_differs = True  # it has no slots to be read off
    many = 1

    def __init__(
        self,
        config: PTPConfig,
        options: DraftOptions,
        uniforms: Uniforms,
        distribution: Callable[[Tensor, Tensor], WindowDistribution] | None = None,
    ) -> None:
        self.distribution = distribution if config.has_sampler else None
        self.config, self.options, self.uniforms = config, options, uniforms
        self.is_one_hot, self.num_tokens = config.is_one_hot, options.num_tokens
        # a one-hot slot 0 predicts what the target picks itself
        self.longest_group = min(config.num_slots, self.num_tokens + self.is_one_hot)
        # drafts that were learned for a warped target need no warping
        warps = options.processing.is_pointwise and config.sampling == SAMPLING
        self.warps = options.processing if warps else Processing(LogitsProcessorList())
        self.gives_probs = options.do_sample and not uniforms.stay
        self.rates = AcceptanceRates(self.num_tokens)
        self.is_deterministic = options.do_sample and "seed" in options.extra and not uniforms.stay
        self.some_lack_drafts = self.is_deterministic
        table = learned_positions(config.backbone_config)
        self.last_position = None if table is None else table - 1  # drafts beyond a table are beyond the end
        self.layout: SlotLayout | None = None
        self.pending: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self.hidden_layers = None if self.distribution is None else -1
        self.takes_fixed, self.is_fixed = uniforms.stay or not options.do_sample, False

    def begin(self, outputs: Any, view: CacheView) -> None:
        self.view, self.is_fixed = view, view.is_fixed
        self.some_lack_drafts |= view.is_fixed

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        draft, q = tokens.ids[:, :0], None
        if self.pending is not None and length:
            slots, uniforms, exists, before = self.pending
            cut = slots[:, :length], uniforms[:, :length], exists[:, :length]
            draft, q = self._drafts(*cut, before, self._masks(tokens))
        tree = DraftTree.chain(draft, q)
        tree.auxiliary = self._auxiliary(tokens, draft.shape[1], length)
        return tree

    def positions(self, length: int) -> int:
        return 1 + length + sum(self._sizes(length, length))

    def _masks(self, tokens: Sequences) -> DraftMasks | None:
        return self.options.masks(tokens, self.options.do_sample and self.warps is self.options.processing)

    def _auxiliary(self, tokens: Sequences, drafted: int, length: int, branches: int = 1) -> AuxiliaryPositions | None:
        self._draw(tokens, drafted + 2 + self.longest_group)
        self.layout = None
        if not self.options.speculates or length < 1:  # nothing is asked for: a plain forward
            return None
        sizes = self._sizes(drafted, length)
        self.layout = layout = SlotLayout.of(sizes, tokens.ids.device, branches, self.many)
        count = 1 + branches * drafted
        inputs = {"masks": layout.index_in_group[None]}
        if self.config.reads_uniforms:
            inputs = {"uniforms": self.slot_uniforms(self._of_slots(layout))}
        if self.distribution is not None:  # the slots' logits are not read
            inputs |= {"logits_to_keep": cached_arange(count, tokens.ids.device)}
        positions = layout.order
        if not self.is_one_hot:
            positions = positions + (cached_arange(len(positions), positions.device) >= count)
        budget, groups = self.options.extra["slot_budget"], self.longest_group * (self.num_tokens + 1)
        most = self.many**2 * (groups if isinstance(budget, str) else min(budget, groups))
        return AuxiliaryPositions(inputs, positions, layout.new, self.last_position, most)

    def _sizes(self, drafted: int, length: int) -> list[int]:
        """Return slots per group 0..m: a budget is split by acceptance; names are layouts of the paper of masks."""
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

    def slot_uniforms(self, uniforms: Tensor) -> Tensor:
        return uniforms if self.options.do_sample else torch.full_like(uniforms, GREEDY if self.config.greedy else 0.5)

    def _draw(self, tokens: Sequences, count: int) -> None:
        table = self.uniforms.positions.table  # where shapes are fixed the verifier holds it
        if not self.is_fixed:
            self.uniforms.draw(tokens, count)
        elif self.uniforms.stay:
            columns = tokens.ends[:, None] - tokens.prompt_length + cached_arange(count, table.device)  # [B, count]
            self.uniforms.current = table.gather(1, columns.clamp(max=table.shape[1] - 1))
        else:
            self.uniforms.current = table.new_zeros(len(table), count)

    def _of_slots(self, layout: SlotLayout) -> Tensor:
        return self.uniforms.current[:, layout.group + layout.index_in_group]

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        self.pending, layout = None, self.layout
        if layout is None or outputs.auxiliary is None:
            return
        self._learn(result)
        index, exists = layout.of_group(result.num_accepted)
        index, first = index[:, 0], int(self.is_one_hot)  # a one-hot slot 0 predicts what the target picks itself
        index, exists = index[:, first:], exists[:, first:]
        if index.shape[1] == 0:
            return
        if not self.is_fixed:
            sizes, counts = layout.sizes, self.view.new_tokens.counts
            have_drafts = [sizes[min(count, len(sizes)) - 1] > self.is_one_hot for count in counts if count]
            self.some_lack_drafts = self.is_deterministic or not all(have_drafts)
            if not (self.is_deterministic or any(have_drafts)):
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
        """Return tokens, and their distributions where a rule needs them.

        Slots are logits [..., L, v], or states [..., L, D] for a sampler head, which reads the token `before` [...],
        too. A draft that does not exist [..., L] is token 0, with probability 1.
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
        return draft, one_hot if self.is_one_hot else torch.where(exists[..., None], probs, one_hot)

    def _pick(
        self, probs: Tensor, uniforms: Tensor, masks: DraftMasks | None = None, warps: Processing | None = None
    ) -> tuple[Tensor, Tensor]:
        self.options.numbers.note(probs[..., 0])
        allowed = None if masks is None else masks.allowed(probs.shape, probs.device)
        if self.is_one_hot or not self.options.do_sample:
            token = (probs if allowed is None else probs.masked_fill(~allowed, -1)).argmax(-1)
        else:
            probs = (warps or self.warps).warp(probs, allowed)
            token = pick(uniforms, probs)
        if masks is not None:
            masks.extend(token)
        return token, probs


class SeparateSession(ParallelSession):
    """The drafts of one call of `ParallelAssistant`, whose model has its own cache, of accepted tokens.

    `unread` tokens of every sequence are to be read; sequences with fewer than others read some again.
    """

    lookahead = 0

    def __init__(
        self, model: PreTrainedModel, options: DraftOptions, uniforms: Uniforms, vocabulary: SharedVocabulary
    ) -> None:
        super().__init__(model.config, options, uniforms, cast(Any, model).slot_distribution)
        self.takes_fixed, self.hidden_layers = False, None  # a sampler head reads states of its own model
        self.chain, self.vocabulary = AssistantSession(model, options, vocabulary), vocabulary
        self.unread = [2] * len(options.prompt)

    def positions(self, length: int) -> int:
        return 1 + length

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        self.view = view
        if self.options.speculates:
            self.chain.begin(outputs, view)

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if length < 1 or not self.options.speculates:
            self.uniforms.draw(tokens, 1)
            return DraftTree.chain(tokens.ids[:, :0])
        if self.uniforms.stay:
            drawn = self.uniforms.draw(tokens, length + 1)[:, :length]
        else:  # the rule must not use again what the draft has used
            drawn = self.uniforms.fresh(length)
            self.uniforms.draw(tokens, length + 1)
        first, slots = (part.to(tokens.ids.device) for part in self._read(tokens, drawn, length))
        masks, exists = self._masks(tokens), torch.ones_like(drawn, dtype=torch.bool)  # [B, length]
        if self.is_one_hot:
            return DraftTree.chain(*self._drafts(slots, drawn, exists, masks=masks))
        distribution = first.to(torch.promote_types(first.dtype, torch.float32)).softmax(-1)  # [B, v]
        token, distribution = self._pick(distribution, drawn[:, 0], masks, self.options.processing)
        draft, probs = token[:, None], distribution[:, None] if self.gives_probs else None  # [B, 1], [B, 1, V]
        if slots.shape[1]:
            others, after = self._drafts(slots, drawn[:, 1:], exists[:, 1:], token, masks)
            draft = torch.cat([draft, others], dim=1)
            probs = None if probs is None or after is None else torch.cat([probs.to(after.dtype), after], dim=1)
        return DraftTree.chain(draft, probs)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        new = self.view.new_tokens
        self.unread = [unread + (count or new.longest) for unread, count in zip(self.unread, new.counts)]
        if self.options.speculates:
            cast(RaggedBackbone, self.chain.target).layout.keep(new)

    def _pick(
        self, probs: Tensor, uniforms: Tensor, masks: DraftMasks | None = None, warps: Processing | None = None
    ) -> tuple[Tensor, Tensor]:
        return super()._pick(self.vocabulary.fitted(probs), uniforms, masks, warps)

    def _read(self, tokens: Sequences, drawn: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Read new tokens and slots; return logits [B, v] of the last token, and logits or states of the slots."""
        model, layout = self.chain.model, cast(RaggedBackbone, self.chain.target).layout
        count, slots, device = max(self.unread), length if self.is_one_hot else length - 1, model.device
        layout.block_offset = 2 - count  # the prompt was read up to its last token
        depths = layout.counts[:, None] + cached_range(layout.block_offset, count + slots, device)  # [B, count + slots]
        is_slot = (cached_arange(count + slots, device) >= count).long()  # [count + slots]
        # a one-hot slot 0 stands where b does
        positions = (depths - is_slot * self.is_one_hot).clamp(min=0, max=self.last_position)
        inputs: dict[str, Tensor] = {}
        if slots and self.config.reads_uniforms:
            inputs["uniforms"] = self.slot_uniforms(drawn[:, :slots]).to(device)
        elif slots:
            inputs["masks"] = cached_arange(slots, device)[None]
        outputs = model(
            self.vocabulary.readable(tokens.newest(count)).to(device),
            attention_mask=block_mask(layout, count + slots, model.config.get_text_config(), model.dtype),
            position_ids=positions,
            **{CACHE: self.chain.target.cache},
            use_cache=True,
            logits_to_keep=slots + 1,
            output_hidden_states=requested_states(None if self.distribution is None else -1),
            **inputs,
        )
        self.unread = [0] * len(self.unread)
        of_slots = outputs.logits[:, 1:] if self.distribution is None else outputs.hidden_states[-1][:, count:]
        return outputs.logits[:, 0], of_slots  # [B, v]
