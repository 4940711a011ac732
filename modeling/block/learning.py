"""How block drafters learn: on a frozen backbone or on stored states of it, from blocks behind random tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from ...configuration.block import BlockDrafterConfig
from ...configuration.block_losses import BlockLossOptions, BlockRecipe
from ..common.backbone_parts import BackboneParts
from ..common.learning import States, run_backbone
from ..common.outputs import BlockOutput, DraftDistributions
from ..heads.losses import IGNORE, check_targets, unshifted
from .batch import BlockBatch, block_rows
from .losses import block_loss, method_of, pooled_loss
from .network import BlockNetwork


class BlockLearner(BlockNetwork):
    """A block drafter with a loss.

    Attributes:
        counts_sequences: Every sequence has its number of blocks, so that trainers do not join rows.
        recomputes: Whether training computes rows of blocks again in backward (activation checkpointing).
    """

    loss_unit, counts_sequences = "place", True
    recomputes = False

    def __init__(self, config: BlockDrafterConfig) -> None:
        super().__init__(config)
        config.loss_options = BlockLossOptions.of(config.loss_options)  # a dict where `from_pretrained` sets it

    def _set_gradient_checkpointing(self, enable: bool = True, *args: object, **kwargs: object) -> None:
        """Compute rows again in backward; layers alone would do it without the context in their cache."""
        self.recomputes = enable

    @property
    def loss_options(self) -> BlockLossOptions:
        """Options of the loss of `forward`."""
        return self.config.loss_options

    @property
    def learning_layers(self) -> list[int]:
        """Hidden states of the backbone that training reads, as indices of `output_hidden_states`."""
        return [*dict.fromkeys(self.feature_layers), -1]

    @property
    def hidden_layers(self) -> list[int]:
        """Hidden states of the backbone that drafting reads."""
        return self.feature_layers

    @property
    def num_losses(self) -> int:
        """m, places of a block."""
        return self.config.num_drafts

    @property
    def _recipe(self) -> BlockRecipe:
        return self.loss_options.recipe(method_of(self.config.law))

    def loss_counts(
        self,
        labels: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the number of places that count, [m] int64, as it is expected of random blocks.

        Arguments are those of `forward`.
        """
        labels = cast(Tensor, unshifted(labels, shift_labels))
        batch, options = BlockBatch.of(labels, labels != IGNORE, attention_mask, position_ids), self.loss_options
        may = batch.may_begin(self._recipe, self.config.block_size)  # [B, L]
        every = batch.at(batch.anchors, may).counted(self._recipe, self.config)  # [B, L, m]
        number = may.sum(1)
        share = number.clamp(max=options.anchors) / number.clamp(min=1)  # [B]
        return (every.sum(1) * share[:, None]).sum(0).round().long()

    def pooled_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the loss of data from sums per place, [m] each."""
        return pooled_loss(self.loss_options, self.config.law, sums, counts)

    def learn(
        self,
        states: States,
        logits: Tensor | None,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        labels: Tensor | None,
        counts: Tensor | None,
        shift_labels: Tensor | None = None,
        summaries: Tensor | None = None,
        loss_mask: Tensor | None = None,
        anchors: Tensor | None = None,
        keep: Tensor | None = None,
        **kwargs: object,
    ) -> BlockOutput:
        """Return the loss on the backbone's states that `learning_layers` names, [B, L, D] each; see `forward`.

        Args:
            states: The states.
            logits: Returned as they are.
            input_ids: [B, L] int64.
            attention_mask: [B, L].
            position_ids: [B or 1, L].
            labels: [B, L] int64, -100 where a token is no target.
            counts: Places that count over all micro-batches, [m].
            shift_labels: [B, L], in place of `labels`.
            summaries: [B, L, 2], the `logit_summaries` of the last states.
            loss_mask: [B, L], 0 where a token is no target; in place of `labels`, or the same.
            anchors: [B, A] int64, columns of the tokens before blocks; [A]: of all sequences side by side. None: random
                ones, in evaluation the same in every call.
            keep: Shaped as `anchors`, False for blocks that do not count.
            **kwargs: Not read.

        Raises:
            ValueError: Labels and a `loss_mask` that differ.
        """
        labels = unshifted(labels, shift_labels)
        if labels is None and loss_mask is None:
            return BlockOutput(logits=logits)
        if labels is not None:
            check_targets(labels, self.config.vocab_size)
        scored = cast(Tensor, labels) != IGNORE if loss_mask is None else loss_mask.bool()
        if labels is not None and not torch.equal(scored, labels != IGNORE):  # the counts of an update are of labels
            raise ValueError("labels and loss_mask differ in what is scored: pass one of them")
        batch, options = BlockBatch.of(input_ids, scored, attention_mask, position_ids), self.loss_options
        context, last = self.fuse(states), cast(Tensor, states[-1])
        if anchors is not None and anchors.dim() == 1:
            batch, last, context = batch.side_by_side(), last.flatten(0, 1)[None], context.flatten(0, 1)[None]
            summaries = None if summaries is None else summaries.flatten(0, 1)[None]
            anchors = anchors[None]
        if anchors is None:
            batch = batch.drawn(self._recipe, self.config.block_size, options.anchors, not self.training)
        else:
            batch = batch.at(anchors, keep)
        recomputes = self.recomputes and self.training
        hidden = block_rows(self, context, batch, options.layout == "speculators", recomputes)
        output = block_loss(self, hidden, batch, last, options, counts, summaries)
        output.logits = logits
        return output

    def distributions(self, batch: Mapping[str, Tensor], length: int) -> DraftDistributions:
        """Return the distributions of drafts of `length` tokens along `input_ids` of a batch."""
        ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
        states = run_backbone(self.backbone, ids, mask, positions, self.learning_layers).hidden_states
        whole, context = BlockBatch.of(ids, torch.ones_like(ids, dtype=torch.bool), mask, positions), self.fuse(states)
        first, vocabulary = self.config.first_row, self.draft_vocabulary

        def draft(rows: Tensor, columns: Tensor, tokens: Tensor) -> Tensor:
            # blocks of a sequence next to each other, as many as the sequence with most has
            order = (rows == torch.arange(len(ids), device=rows.device)[:, None]).long().cumsum(1)  # [B, N]
            place = order.gather(0, rows[None])[0] - 1  # [N]
            anchors = rows.new_zeros(len(ids), int(order.max())).index_put((rows, place), columns + 1)
            hidden = block_rows(self, context, whole.at(anchors.clamp(max=ids.shape[1] - 1)))[rows, place]  # [N, S, d]
            drafting, anchor = hidden[:, first:], hidden[:, 0] if first else None
            last, drafts = tokens[:, 0], tokens[:, 1:]
            drafts = nn.functional.pad(drafts, (0, self.config.num_drafts - drafts.shape[1]))
            codes = drafts if vocabulary is None else vocabulary.codes(drafts)
            law = self.joint_law.distribution(drafting, self.draft_logits(drafting), last, anchor, vocabulary)
            found = law.conditional_log_probs(codes)[:, :length].float()  # [N, length, v]
            return found if vocabulary is None else vocabulary.spread(found, -torch.inf)

        return DraftDistributions(draft, BackboneParts(self.backbone).unembed, states[-1])
