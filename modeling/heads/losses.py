"""Losses of multi-token prediction: the targets of every depth, the weights of depths, the loss of a head."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ...configuration.heads import MTPHeadConfig
from ..common.backbone_parts import BackboneParts
from ..common.chunks import LossSegment, chunked_sums, term_rows
from ..common.draft_vocabulary import DraftVocabulary
from ..common.outputs import MTPOutput, TrainableDrafter
from ..common.teacher import BlockTarget, Teacher
from .family import distribution_after, window_distribution

IGNORE = -100


def depth_targets(
    labels: Tensor | None,
    window: int,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """Return the targets of every depth, [B, L, n] int64 and -100 where there is none; see `window_targets`.

    `labels` may be [B, L, n], with the target of every depth spelled out; `shift_labels` [B, L], the target of every
    position one token ahead, stand in place of labels.
    """
    if shift_labels is not None:
        if attention_mask is not None:  # of one column more: the last position may have a target
            attention_mask = nn.functional.pad(attention_mask[:, -shift_labels.shape[1] :], (0, 1), value=1)
        if position_ids is not None:
            position_ids = torch.cat([position_ids, position_ids[:, -1:] + 1], dim=1)
        labels = nn.functional.pad(shift_labels, (1, 0), value=IGNORE)
        return window_targets(labels, window, attention_mask, position_ids)[:, :-1]
    assert labels is not None
    if labels.dim() == 2:
        return window_targets(labels, window, attention_mask, position_ids)
    if labels.shape[2] != window:
        raise ValueError(f"labels have {labels.shape[2]} depths, but the window is {window}")
    return labels


def unshifted(labels: Tensor | None, shift_labels: Tensor | None) -> Tensor | None:
    """Return labels [B, L], made of the targets of every position [B, L] where these are given."""
    return labels if shift_labels is None else nn.functional.pad(shift_labels, (1, -1), value=IGNORE)


def check_targets(targets: Tensor, vocab_size: int, name: str = "labels") -> Tensor:
    """Return the targets [...] int64, if every one is a token id or -100; on accelerators, kernels assert that."""
    if targets.device.type == "cpu":
        ignored = (targets == IGNORE) & (name != "input_ids")
        wrong = targets[~ignored & ((targets < 0) | (targets >= vocab_size))]
        if len(wrong):
            allowed = f"0 to {vocab_size - 1}, or {IGNORE} in labels; another tokenizer?"
            raise ValueError(f"{name} hold {int(wrong[0])}, but the vocabulary has {vocab_size} tokens: {allowed}")
    return targets


def window_targets(
    labels: Tensor, window: int, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> Tensor:
    """Return the targets of overlapping windows, the label j tokens ahead for j = 1..n: [B, L, n] int64, -100 for none.

    `labels` [B, L] are not shifted, as everywhere in transformers. A position that `attention_mask` [B, L] leaves out
    predicts nothing and is no target; no window reaches beyond the end of a document, where `position_ids` restart.
    """
    real = None if attention_mask is None else attention_mask.bool()[:, -labels.shape[1] :]
    ahead = tokens_ahead(labels if real is None else labels.masked_fill(~real, IGNORE), window, IGNORE)
    if real is not None:
        ahead = ahead.masked_fill(~real[:, :, None], IGNORE)
    if position_ids is not None:
        depth = torch.arange(1, window + 1, device=labels.device)
        ahead = ahead.masked_fill(tokens_ahead(position_ids, window, 0) < depth, IGNORE)
    return ahead


def tokens_ahead(tokens: Tensor, window: int, fill: int) -> Tensor:
    """Return the next `window` entries after every position of tokens [B, L]: [B, L, n], `fill` beyond the end."""
    padded = torch.nn.functional.pad(tokens, (0, window), value=fill)
    return padded.unfold(1, tokens.shape[1], 1)[:, 1:].transpose(1, 2)


def discounted_mtp_loss(
    terms: Tensor, valid: Tensor, gamma: float = 0.9, normalization: str = "paper", counts: Tensor | int | None = None
) -> Tensor:
    """Return the composite likelihood of overlapping windows, discounted by depth (MtPC paper, section 3, Eq. 4).

    Terms [N, L, n] are -log q of each target given those before it in its window; where not `valid`, they may be NaN.
    With L_ij the sum of the valid terms of sequence i at depth j, c_ij their number, and N the sequences with a target:
    `"paper"`: sum_j gamma^(j-1) (1/N) sum_i L_ij / c_ij;
    `"tokens"`: [sum_j gamma^(j-1) (sum_i L_ij) / (sum_i c_ij)] / sum_j gamma^(j-1), whose divisors are `counts`, [n] or
    one number for all depths, where a whole update has more micro-batches than this one.
    """
    valid = valid.bool()
    terms = torch.where(valid, terms, torch.zeros_like(terms))
    if normalization == "paper":
        per_sequence = terms.sum(1) / valid.sum(1).clamp(min=1)
        return (per_sequence.sum(0) * _discounts(terms[0, 0], gamma)).sum() / valid.flatten(1).any(1).sum().clamp(min=1)
    if normalization != "tokens":
        raise ValueError(f"normalization={normalization!r} is unknown; choose 'paper' or 'tokens'")
    per_depth = valid.sum((0, 1)) if counts is None else torch.as_tensor(counts, device=terms.device)
    return (terms.sum((0, 1)) * discounted_weights(per_depth.expand(terms.shape[-1]).to(terms), gamma)).sum()


def discounted_weights(counts: Tensor, gamma: float) -> Tensor:
    """Return gamma^(j-1) / c_j, over the sum of all gamma^(j-1), for targets per depth c_j [n]; 0 counts as 1."""
    discounts = _discounts(counts, gamma)
    return discounts / discounts.sum() / counts.clamp(min=1)


def _discounts(like: Tensor, gamma: float) -> Tensor:
    """Return gamma^(j-1) for j = 1..n, for a vector of n."""
    return gamma ** torch.arange(len(like), device=like.device, dtype=like.dtype)


def counted(scored: Tensor, normalization: str = "tokens") -> Tensor:
    """Return the divisors of the summed terms of each depth, [n] int64: scored [B, L, n] targets, or sequences."""
    if normalization == "paper":
        return scored.flatten(1).any(1).sum().expand(scored.shape[-1])
    return scored.sum((0, 1))


def counts_of_update(
    drafter: TrainableDrafter,
    items: Tensor | int | None,
    labels: Tensor | None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    shift_labels: Tensor | None = None,
) -> Tensor | None:
    """Return the targets per depth of a whole update, [n]; None: it has no other micro-batch.

    `items` is `num_items_in_batch`: [n] from `MTPTrainer`; or one number from `Trainer`, which counts labels, but for a
    row's first. Then targets are taken to be as many per label as in this micro-batch.
    """
    if items is None or (labels is None and shift_labels is None):
        return None
    items, depths = torch.as_tensor(items), drafter.num_losses
    if items.dim() and items.numel() == depths:
        return items.flatten()
    own = drafter.loss_counts(labels, attention_mask, position_ids, shift_labels)
    counted = labels[:, 1:] if shift_labels is None and labels is not None else cast(Tensor, shift_labels)
    return own * items.flatten().to(own.device) / (counted != IGNORE).sum().clamp(min=1)


def head_loss(
    head: nn.Module,
    config: MTPHeadConfig,
    features: Tensor,
    targets: Tensor,
    input_ids: Tensor | None,
    counts: Tensor | None = None,
    backbone: BackboneParts | None = None,
    last_states: Tensor | None = None,
    scale: Tensor | float = 1.0,
    balance: Tensor | None = None,
    vocabulary: DraftVocabulary | None = None,
    summaries: Tensor | None = None,
) -> MTPOutput:
    """Return the loss of a head over all windows of a batch, in chunks.

    A term is -log q(x_{t+j} | x_{t+1..t+j-1}), where x is the label if that is scored, and else the token observed; or,
    from depth 2 on, how far that distribution is from the backbone's own (`target="teacher"`, see `divergence`),
    mixed with a share `label_weight` of the former. Over a draft vocabulary a target outside it counts and adds
    nothing, as in the losses of EAGLE-3.

    At features [B, L, F], `targets` are [B, L, n] int64, -100 where nothing is scored, and `input_ids` [B, L] the
    tokens observed there (None sums them out). `counts` [n] are divisors of a whole update, `balance` [n] factors for
    `balance="rms"` (None: those of this batch). A teacher reads `last_states` [B, L, d] and their `logit_summaries`
    [B, L, 2] (None: computed here). `scale`, also of every depth, [n], is no factor of the reported means.
    """
    num_columns = cast(int, head.vocab_size)
    vocab_size = num_columns if vocabulary is None else vocabulary.vocab_size
    options = config.loss_options
    window, scored = targets.shape[-1], check_targets(targets, vocab_size) != IGNORE
    own, tokens, unknown = counted(scored, options.normalization), targets.clamp(min=0), None
    dtype, shares = torch.promote_types(features.dtype, torch.float32), None
    if options.normalization == "paper":
        shares = scored.sum(1, keepdim=True).clamp(min=1).to(dtype).reciprocal().expand(scored.shape)
    if input_ids is not None and config.masked_tokens == "observe":
        tokens = torch.where(scored, targets, tokens_ahead(input_ids, window, 0))
    elif "masked_tokens" in config.family.options or config.context:  # which must not read a token that is not known
        unknown = ~scored
    ids = tokens
    if vocabulary is not None:
        tokens = vocabulary.codes(tokens)
        scored = scored & (tokens < num_columns)
    teacher: Teacher | BlockTarget | None = None
    if options.divergence == "block":
        teacher = BlockTarget.of(options.label_weight, backbone, last_states, ids, targets != IGNORE, scored)
    elif config.loss_target == "teacher":
        teacher = Teacher.of(options, backbone, last_states, scored, summaries)
    balanced = options.balance == "rms" and torch.is_grad_enabled()  # it moves while heads learn
    skips = unknown is None and not balanced and head.training and torch.is_grad_enabled() and skips_first(config)

    def terms(
        part: Tensor, tokens: Tensor, scored: Tensor, unknown: Tensor | None, shares: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        if skips:
            distribution = distribution_after(head, config, part, tokens[..., 0], window - 1, backbone)
        else:
            distribution = window_distribution(head, config, part, backbone)
        distribution.codes = vocabulary
        if teacher is None:
            values = [-distribution.token_log_probs(tokens[..., -distribution.window :], unknown)]
        else:
            values = list(teacher.terms(distribution, tokens, inputs))
        if balanced and balance is not None:
            values.append(values[0].detach().square())
        values = [nn.functional.pad(value, (window - value.shape[-1], 0)) for value in values]  # [N, n]
        values = [torch.where(scored, value, 0.0) for value in values]
        return torch.cat(values if shares is None else [value * shares for value in values], -1)

    weights = depth_weights(config, (own if counts is None else counts).to(own.device, dtype)) * scale
    arguments = (tokens, scored, unknown, shares, *(() if teacher is None else teacher.arguments))
    part = LossSegment(features, arguments, weights, scored=scored[..., int(skips) :].any(-1))
    rows = (window - skips) * config.rank  # of logits per position
    size, together = rows * num_columns * (1 if teacher is None else 2), 1 if config.unembedding == "own" else rows
    if isinstance(teacher, BlockTarget) and options.position_weighting == "expected_calls" and torch.is_grad_enabled():
        accepted = term_rows(terms, part, size).unflatten(0, scored.shape[:2])[..., window + 1 :]
        teacher.weigh_by_calls(accepted)
        part.arguments = (tokens, scored, unknown, shares, *teacher.arguments)
    if balanced:
        if (factors := balance) is None:  # which takes a pass
            with torch.no_grad():
                _, (squares,) = chunked_sums(lambda *each: terms(*each)[..., :window].square(), head, [part], size)
            factors = balance_factors(squares / own.clamp(min=1))
        weights = weights * factors.to(weights)
    reported = (teacher is not None) + (balanced and balance is not None)
    part.weights = nn.functional.pad(weights, (0, window * reported))  # reported values have the weight 0
    loss, (sums,) = chunked_sums(terms, head, [part], size, together)
    means = list(sums.unflatten(0, (-1, window)) / own)
    if skips:
        means[0][0] = torch.nan
    if teacher is not None:
        means[1][0] = torch.nan  # nothing is drafted at depth 1
    return MTPOutput(
        loss=loss,
        head_losses=means[0],
        acceptances=None if teacher is None else means[1],
        head_squares=means[-1] if balanced and balance is not None else None,
    )


def skips_first(config: MTPHeadConfig) -> bool:
    """Return whether training leaves depth 1 out: it weighs nothing, for it is the backbone's own."""
    options, recipe, window = config.loss_options, config.family.loss_weights, config.num_depths
    if window < 2 or recipe is None or recipe(window)[0] != 0:
        return False
    if options.divergence == "block":
        return options.label_weight == 0
    return options.weights is None or options.weights[0] == 0


def depth_weights(config: MTPHeadConfig, counts: Tensor) -> Tensor:
    """Return the factors of the summed terms of each depth, [n], from targets per depth [n]; 0 counts as 1.

    `weights`, or the family's own recipe with gamma for its discount, are divided by the counts; without either,
    weights of gamma sum to 1, but for `normalization="paper"`. The loss `"block"` is divided by the targets at depth 2,
    the positions where a cycle may begin, and no discount is read there.
    """
    options, recipe = config.loss_options, config.family.loss_weights
    weights = options.weights
    if options.divergence == "block":  # depth 1 has only its labels
        weights = [1.0] * len(counts) if weights is None else weights
        counts = torch.cat([counts[:1], counts[1:2].expand(len(counts) - 1)])
        weights = [options.label_weight * weights[0], *weights[1:]]
    if weights is None and recipe is not None:
        weights = recipe(len(counts))
        if config.gamma is not None:
            weights = [weights[0], *(config.gamma**k for k in range(1, len(counts)))]
    if weights is not None:
        return torch.tensor(weights, dtype=counts.dtype, device=counts.device) / counts.clamp(min=1)
    gamma = cast(float, config.gamma)
    if options.normalization == "paper":
        return _discounts(counts, gamma) / counts.clamp(min=1)
    return discounted_weights(counts, gamma)


def balance_factors(squares: Tensor) -> Tensor:
    """Return the roots of the mean squared term of depth 1 over that of each depth, [n]; 1 where one is 0 (Mehra)."""
    known = (squares > 0) & (squares[:1] > 0)
    return torch.where(known, squares[:1] / squares.where(known, torch.ones_like(squares)), 1.0).sqrt()
