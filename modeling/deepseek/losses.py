"""Training of a chain of modules: all depths with known tokens (teacher forcing), and the loss over them.

Up to depth D every module runs once over all positions. Beyond D the last module continues from its own output, and it
attends as in `generate`: position i of such a depth sees the last module's ordinary columns up to i and, of every
further depth, only its own column i.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

from ...configuration.cache_names import CACHE
from ...configuration.fields import chooses_blocks, has_short_convolutions, masks_padding_alone, rotates_anew
from ...configuration.loss_options import ModuleLossOptions
from ...generation.tensors.masks import additive_mask
from ..common.backbone_parts import BackboneParts, part_logits, text_positions
from ..common.chunks import LossSegment, chunked_sums, term_rows
from ..common.draft_vocabulary import DraftVocabulary
from ..common.outputs import MTPOutput
from ..common.teacher import ACCEPTANCES, ahead, block_slopes, sequence_log_probs, teacher_terms
from ..heads.losses import IGNORE, check_targets
from ..heads.window_distribution import exact
from .modules import LMHeadView, MTPModules


def depth_weights(counts: Tensor, options: ModuleLossOptions) -> Tensor:
    """Return the factor of each depth's summed cross-entropy from targets per depth, [D + 1] float each; 0 is as 1."""
    if options.normalization == "paper":
        counts = counts[:1].expand(len(counts))
    if options.target == "teacher" and options.divergence == "block":  # the mean over positions of what depths accept
        counts = torch.cat([counts[:1], counts[1:2].expand(len(counts) - 1)])
        options = replace(options, decay=1.0)
    shares = [options.decay**k for k in range(len(counts) - 1)]
    weights = [1.0] + [options.weight * share / sum(shares) for share in shares]
    return torch.tensor(weights, dtype=counts.dtype, device=counts.device) / counts.clamp(min=1)


def chain_loss(
    heads: LMHeadView | Sequence[LMHeadView],
    states: Sequence[Tensor],
    targets: Sequence[Tensor],
    vocab_size: int,
    options: ModuleLossOptions,
    counts: Tensor | None = None,
    vocabulary: DraftVocabulary | None = None,
) -> MTPOutput:
    """Return the weighted sum over depths of the summed cross-entropy (or distance from the teacher), in chunks.

    All chunks first leave their gradients on the h^k, and autograd then runs through the chain once. With
    `detach_head`, only depth 0 trains the head. Over a draft vocabulary a target outside it counts and adds nothing
    from depth 1 on, and the teacher's distribution is renormalised over it, but for what is accepted (`tv`, `lk`,
    `lk_kl`); depth 0 has all tokens.

    `heads` are the readout of the main model, or one for every depth; `states` per depth [B, R_k, H], as its head reads
    them (`LMHeadView.normed`); `targets` [B, R_k] int64, -100 where there is none; `counts` [D + 1] the targets of a
    whole update (None: of this batch); `vocabulary` what modules draft, with a head that learns nothing from them.
    """
    heads = [heads] * len(states) if isinstance(heads, LMHeadView) else heads
    head = heads[0]

    def drafted(own: LMHeadView, state: Tensor) -> Tensor:
        return own.logits(state) if vocabulary is None else own.finish(part_logits(vocabulary, own.head, state))

    def target_probs(state: Tensor) -> Tensor:
        if vocabulary is None or options.divergence not in ACCEPTANCES:
            return exact(drafted(head, state)).log_softmax(-1)
        return exact(head(state)).log_softmax(-1)[..., vocabulary.on(state.device)]

    def terms(state: Tensor, target: Tensor, teacher: Tensor | None, depth: int = 0) -> Tensor:
        logits, target = exact(drafted(heads[depth], state) if depth else head(state)), target[:, 0]
        losses = nn.functional.cross_entropy(logits, target.to(logits.device), ignore_index=IGNORE, reduction="none")
        accepted = torch.zeros_like(losses)
        if is_block and teacher is not None:
            value, slope, accepted = teacher.to(losses).unbind(-1)
            losses = value - slope * (losses - losses.detach())
        elif teacher is not None:
            scored, log_q = (target != IGNORE).to(losses.device), logits.log_softmax(-1)
            with torch.no_grad():
                log_p = target_probs(teacher)
            both = teacher_terms(options.divergence, options.label_weight, log_p, log_q, -losses)
            losses, accepted = (torch.where(scored, value, 0.0) for value in both)
        return torch.stack([losses, accepted], -1)

    def learns(reads: LMHeadView, depth: int) -> bool:
        is_held = depth and not reads.has_own_head and options.detach_head
        return not is_held and any(parameter.requires_grad for parameter in reads.head.parameters())

    own = torch.stack([(check_targets(part, vocab_size) != IGNORE).sum() for part in targets])
    dtype = torch.promote_types(states[0].dtype, torch.float32)
    weights = depth_weights((own if counts is None else counts).to(own.device, dtype), options)
    if vocabulary is not None:
        targets = [targets[0], *(vocabulary.columns(part, IGNORE) for part in targets[1:])]
    teaches = options.target == "teacher"
    is_block = teaches and options.divergence == "block"
    if is_block and len(states) > 1:
        teacher = _block_slopes(heads, drafted, states, targets, vocab_size, options)
    elif teaches:
        teacher = [states[0].detach()[:, depth : depth + state.shape[1]] for depth, state in enumerate(states)]
    parts = [
        LossSegment(
            state,
            (target[..., None], teacher[depth] if teaches and depth else None),
            nn.functional.pad(weight[None], (0, 1)),
            trains_module=learns(heads[depth], depth),
            terms=partial(terms, depth=depth),
            scored=target != IGNORE,
        )
        for depth, (state, target, weight) in enumerate(zip(states, targets, weights))
    ]
    learning = nn.ModuleList(dict.fromkeys(own.head for own in heads))
    loss, sums = chunked_sums(terms, learning, parts, vocab_size)
    means, accepted = (torch.stack([part.to(own.device) for part in sums]) / own[:, None]).unbind(1)
    output = MTPOutput(loss=loss, head_losses=means)
    if teaches and len(own) > 1:
        accepted[0] = torch.nan
        output.acceptances = accepted
    return output


def _block_slopes(
    heads: Sequence[LMHeadView],
    drafted: Callable[[LMHeadView, Tensor], Tensor],
    states: Sequence[Tensor],
    targets: Sequence[Tensor],
    vocab_size: int,
    options: ModuleLossOptions,
) -> list[Tensor]:
    """Return for every depth the `block_slopes` [B, R_k, 3]; `drafted` makes the logits of modules."""

    def likelihood(own: LMHeadView, state: Tensor, target: Tensor) -> Tensor:
        logits = exact(drafted(own, state))
        return -nn.functional.cross_entropy(logits, target[:, 0].clamp(min=0), reduction="none")[:, None]

    length = states[0].shape[1]

    def whole(values: Tensor) -> Tensor:
        return nn.functional.pad(values, (0, length - values.shape[1]))

    pairs = list(zip(states, targets))[1:]
    nothing = states[0].new_zeros(1)
    parts = [LossSegment(state, (target[..., None],), nothing) for state, target in pairs]
    rows = [term_rows(partial(likelihood, own), part, vocab_size) for own, part in zip(heads[1:], parts)]
    log_q = torch.stack([whole(part.view(target.shape)) for part, (_, target) in zip(rows, pairs)], -1)
    is_drafted = torch.stack([whole(target != IGNORE) for _, target in pairs], -1)
    first = targets[0]
    log_p = sequence_log_probs(BackboneParts(heads[0].main), states[0], first)
    starts = (first != IGNORE) & nn.functional.pad(first != IGNORE, (-1, 1))
    following = ahead(log_p[..., None], len(states))
    known = block_slopes(log_q, following, is_drafted, starts, options.position_weighting, options.label_weight)
    return [known[:, : state.shape[1], max(depth - 1, 0)] for depth, state in enumerate(states)]


def teacher_forced(
    modules: MTPModules,
    hidden_states: Tensor,
    inputs_embeds: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    depths: int,
) -> list[Tensor]:
    """Return h^1 to h^depths from h^0 [B, L, H] and embeddings of the same tokens; depth k has L - k positions.

    A sequence that is too short is padded on the right, so that every module has its gradient, if of zeros. Positions
    [B or 1, L] are as `rotary_positions` reads them; depths beyond D reuse the last module.
    """
    length, missing = hidden_states.shape[1], max(depths + 1 - hidden_states.shape[1], 0)
    if missing:
        hidden_states, inputs_embeds = (pad(each, (0, 0, 0, missing)) for each in (hidden_states, inputs_embeds))
        position_ids = torch.cat([position_ids, *[position_ids[..., -1:]] * missing], -1)
        attention_mask = None if attention_mask is None else pad(attention_mask, (0, missing), value=1)
        whole = teacher_forced(modules, hidden_states, inputs_embeds, position_ids, attention_mask, depths)
        return [state[:, : max(length - k, 0)] for k, state in enumerate(whole, 1)]
    states = [hidden_states]
    once = depths if depths <= modules.count else modules.count - 1
    for k in range(1, once + 1):
        rows = length - k
        mask = None if attention_mask is None else attention_mask[:, :rows]
        states.append(modules.step(k, states[-1][:, :rows], inputs_embeds[:, k:], position_ids[..., :rows], mask))
    if depths > modules.count:
        states += _unrolled(modules, states[-1], inputs_embeds, position_ids, attention_mask, depths)
    return states[1:]


def _unrolled(
    modules: MTPModules,
    state: Tensor,
    inputs_embeds: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    depths: int,
) -> list[Tensor]:
    """Return h^D to h^depths from h^{D-1}."""
    length, first = inputs_embeds.shape[1], modules.count
    columns = length - first
    causal = _causal_mask(modules, state[:, :columns], position_ids[..., :columns], attention_mask)
    states, earlier, rotated = [], (), []
    for k in range(first, depths + 1):
        rows = length - k
        sizes = range(columns, rows - 1, -1)  # columns of depth D, D + 1, ..., k
        positions = position_ids[..., :rows] + (k - first)
        rotated = [*rotated, positions] if rotates_anew(modules.config) else [positions]
        state, *new = modules.at(modules.count)(
            state[:, :rows],
            inputs_embeds[:, k:],
            earlier=earlier,
            attention_mask=_diagonals(causal, rows, sizes),
            position_ids=text_positions(positions),
            position_embeddings=modules.rotary(state[:, :rows], torch.cat(rotated, dim=-1)),
        )
        states.append(state)
        earlier = tuple(new)
    return states


def _causal_mask(modules: MTPModules, states: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the mask of depth D as a tensor [B, 1, R, R], whatever form the attention prefers."""
    if any(is_of(modules.config) for is_of in (masks_padding_alone, chooses_blocks, has_short_convolutions)):
        kind = modules.config.model_type
        raise ValueError(f"unroll_steps above the modules: layers of model_type={kind!r} take no mask for it")
    padding = None if attention_mask is None else attention_mask[:, : states.shape[1]]
    given = {"inputs_embeds": states, "attention_mask": padding, "position_ids": text_positions(position_ids)}
    mask = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[modules.at(modules.count).kind](
        config=modules.config, **given, **{CACHE: None}, layer_idx=modules.count - 1, allow_is_causal_skip=False
    )
    if not isinstance(mask, Tensor) or mask.dim() < 4:
        kind = modules.config._attn_implementation
        raise ValueError(f"attn_implementation={kind!r}: unroll_steps above the modules needs 'sdpa' or 'eager'")
    return mask


def _diagonals(causal: Tensor, rows: int, sizes: range) -> Tensor:
    """Return the mask of the first `rows` positions: depth D causally, and of each further depth their own column.

    A further depth comes after its position: it does not see what a window hides from there.
    """
    parts = [torch.minimum(causal[..., :rows, :], causal[..., causal.shape[-2] - rows :, :])]
    for size in list(sizes)[1:]:
        own = torch.eye(rows, size, dtype=torch.bool, device=causal.device)
        own = own if causal.dtype == torch.bool else additive_mask(own, causal.dtype)
        parts.append(own.expand(*causal.shape[:2], -1, -1))
    return torch.cat(parts, dim=-1)


def router_loss(main: PreTrainedModel, outputs: Any, attention_mask: Tensor | None) -> Tensor | None:
    """Return the load-balancing loss of the main model's experts, not yet times `router_aux_loss_coef`.

    None where the family has none, or no router was recorded; transformers does not record those of modules.
    """
    module = vars(sys.modules[type(main).__module__])
    balance: Callable[..., Tensor] | None = module.get("load_balancing_loss_func")
    logits, values = outputs.get("router_logits"), vars(main)
    if balance is None or logits is None or "router_aux_loss_coef" not in values:
        return None
    return balance(logits, values["num_experts"], values["num_experts_per_tok"], attention_mask)
