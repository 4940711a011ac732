"""How the modules of a `DeepSeekMTP` learn: along with the main model, or alone from recorded states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...configuration.loss_options import ModuleLossOptions
from ...generation.tensors.shared_models import parameters_frozen
from ...generation.tensors.wrapped_models import input_embeddings
from ..common.backbone_parts import output_embeddings
from ..common.draft_vocabulary import DraftVocabulary
from ..common.online import OnlineMixin
from ..common.outputs import DraftDistributions, MTPOutput, stacked_steps
from ..common.recording import STATES
from ..heads.losses import DepthLossMixin, depth_targets
from .losses import chain_loss, depth_weights, teacher_forced
from .main_model import OverMainModel, has_towers, mapped_state, run_main


class ModuleLearningMixin(DepthLossMixin, OnlineMixin, OverMainModel):
    """The chain of states of known tokens, and the loss over it.

    Attributes:
        loss_options: How the modules' losses are weighted.
        draft_vocabulary: The tokens that modules may draft.
        window: Tokens that a call yields at the trained depth.
        num_modules: D.
    """

    config: PreTrainedConfig
    loss_options: ModuleLossOptions
    draft_vocabulary: DraftVocabulary | None
    window: int
    num_modules: int
    attends, learning_layers = True, [-1]

    @property
    def drafting_part(self) -> nn.Module:
        """See `OnlineMixin`; the modules."""
        if not self.num_modules or has_towers(self.main.config):
            kind = self.main.config.model_type
            raise ValueError(
                f"drafter: a {type(self).__name__} of model_type={kind!r} with num_modules={self.num_modules} does not "
                "learn online: it needs modules, and a main model of text alone"
            )
        return self.mtp

    def learning_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """See `OnlineMixin`; no gradient reaches the main model."""
        ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch["position_ids"]
        state = batch[STATES][:, :, 0]  # [B, L, H]
        with torch.no_grad():
            embeds = input_embeddings(self.main)(ids)  # [B, L, H]
            hidden = state
            if self.reads_early:
                hidden = mapped_state(self.main.get_decoder(), self.main.config, state)
        if self.mtp.embed_tokens is not None:
            embeds = self.mtp.embed_tokens(ids)
        targets = depth_targets(batch["labels"], self.window, mask, positions)
        chain = [hidden, *self.chain(state, embeds, mask, positions, self.window - 1)[1:]]
        with parameters_frozen(output_embeddings(self.main)):
            return cast(Tensor, self.chain_loss(chain, targets).loss)

    def chain(
        self,
        hidden: Tensor,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        depths: int,
    ) -> list[Tensor]:
        """Return h^0 to h^depths; all but the first are computed from states that `loss_options` may detach."""
        options = self.loss_options
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]  # [1, L]
        start = hidden.detach() if options.detach_trunk else hidden
        is_held = options.detach_embedding and self.mtp.embed_tokens is None
        embeds = inputs_embeds.detach() if is_held else inputs_embeds
        return [hidden, *teacher_forced(self.mtp, start, embeds, position_ids, attention_mask, depths)]

    def chain_loss(self, chain: list[Tensor], targets: Tensor, counts: Tensor | None = None) -> MTPOutput:
        """Return the loss over h^0 to h^D, `chain`, from the targets of all depths [B, L, D + 1]."""
        size = self.main.config.get_text_config().vocab_size
        heads = [self.readout_of(depth) for depth in range(len(chain[: self.window]))]
        states = [reads.normed(state) for reads, state in zip(heads, chain)]
        windows = [targets[:, : state.shape[1], k] for k, state in enumerate(states)]
        detached = self.loss_options.detach_head and not heads[-1].has_own_head
        learns = not detached and any(parameter.requires_grad for parameter in heads[-1].head.parameters())
        part = None if learns else self.draft_vocabulary
        return chain_loss(heads, states, windows, size, self.loss_options, counts, part)

    def distributions(self, batch: Mapping[str, Tensor], length: int) -> DraftDistributions:
        """Return the distributions of drafts of `length` tokens along `input_ids` of a batch."""
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        options = {"use_cache": False} | ({} if mask is None else {"attention_mask": mask})
        main = run_main(self.main, ids, None, batch.get("position_ids"), options)
        hidden, embeds = main.outputs.last_hidden_state, self.module_inputs(main, ids)
        chain = self.chain(main.state, embeds, mask, main.position_ids, length)[1:]
        states = stacked_steps(chain, hidden.shape[1])  # [B, L, depths, H]

        def draft(rows: Tensor, columns: Tensor, tokens: Tensor) -> Tensor:
            drafted = enumerate(states[rows, columns].unbind(1), start=1)
            return torch.stack([self.readout_of(depth)(state) for depth, state in drafted], 1).float().log_softmax(-1)

        return DraftDistributions(draft, self.readout, hidden)

    def pooled_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the loss of data from sums per depth.

        Args:
            sums: [D + 1], summed cross-entropies in nats.
            counts: [D + 1], targets.

        Returns:
            Scalar, equal to the loss of `forward` for all data in one batch.
        """
        return (sums * depth_weights(counts.to(sums), self.loss_options)).sum()
