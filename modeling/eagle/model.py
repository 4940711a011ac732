"""EagleHead: one small layer that drafts from the hidden states of any transformers causal language model.

EAGLE: 2401.15077, EAGLE-2: 2406.16858, EAGLE-3: 2503.01840, HASS: 2408.15766.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ...configuration.eagle import EagleHeadConfig
from ...configuration.loss_options import EagleLossOptions, ResolvedEagleOptions
from ...generation.backbone.wrapped_models import input_embeddings, unwrap
from ...generation.call.options import CallOptions, DraftOptions
from ...generation.drafter import DRAFTERS, DrafterFacts
from ...generation.tensors.saving import reads_whole
from ...generation.tensors.tensor_files import Fields, read_tensors, tensor_names, weight_files
from ..common.draft_vocabulary import DraftVocabulary, drafted_tokens
from ..common.foreign import ForeignLayoutsMixin, Stored
from ..common.learning import States, run_backbone
from ..common.outputs import DraftDistributions, EagleOutput, stacked_steps
from ..heads.losses import check_targets, unshifted
from .conversion import (
    backbone_config,
    check_layout,
    foreign_head,
    is_foreign_head,
    layout_config,
    layout_tensors,
    own_names,
    resolved_aux_layers,
)
from .losses import Steps, TrainingBatch, counts_per_step, eagle_loss, step_weights
from .modules import EagleNetwork
from .session import EagleSession

logger = logging.get_logger(__name__)
_CHAIN = 5  # default length of a chain, as in the published ones


class EagleHead(ForeignLayoutsMixin, EagleNetwork):
    """An EAGLE head, apart from its backbone, which is unchanged.

    `hidden_states` below are those of transformers: a tuple over layers of [B, L, D], the last after the final norm.

    Args:
        config: See `EagleHeadConfig`.

    Example:
        >>> head = EagleHead.from_pretrained(directory).attach(backbone)
        >>> tree = {"depth": 5, "top_k": 10, "total_tokens": 60}
        >>> out = backbone.generate(**inputs, assistant_model=head, draft_tree=tree)
    """

    remote_classes = {"AutoModel": "EagleHead"}
    loss_unit = "step"

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__(config)
        config.loss_options = EagleLossOptions.of(config.loss_options)  # a dict where `from_pretrained` sets it

    @classmethod
    def from_backbone(
        cls,
        backbone: PreTrainedModel,
        version: int = 3,
        draft_vocab_size: int | None = None,
        draft_ids: Tensor | None = None,
        **options: Any,
    ) -> EagleHead:
        """Return a new head that is attached to `backbone`.

        Args:
            backbone: A causal language model of transformers; a PeftModel is unwrapped.
            version: 1 or 3.
            draft_vocab_size: Vd: the first Vd tokens are drafted, unless `draft_ids` is set.
            draft_ids: [Vd] distinct token ids, usually the most frequent tokens of outputs.
            **options: Further fields of `EagleHeadConfig`; sizes and rope default to the backbone's.
        """
        backbone = unwrap(backbone)
        if draft_ids is not None:
            draft_ids = DraftVocabulary(draft_ids, backbone.config.get_text_config().vocab_size, "draft_ids").ids
            draft_vocab_size = len(draft_ids)
        head = cls(backbone_config(backbone, version=version, draft_vocab_size=draft_vocab_size, **options))
        if head.config.mask_token_id is not None:
            nn.init.normal_(head.mask_hidden)
        return head._begun(backbone, draft_ids)

    def _set_gradient_checkpointing(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the loss keeps no activations of its steps."""

    def made_for(self) -> Mapping[str, object]:
        return {"hidden_size": self.config.target_hidden_size, "vocab_size": self.config.vocab_size}

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        super().check_backbone(backbone)
        resolved_aux_layers(self.config, backbone.config.get_text_config().num_hidden_layers)

    def on_attach(self, backbone: PreTrainedModel) -> None:
        super().on_attach(backbone)
        layers = resolved_aux_layers(self.config, backbone.config.get_text_config().num_hidden_layers)
        self.hidden_layers = layers or -1
        if layers and self.config.aux_layers is None and self.config.layout != "tokenahead":
            logger.warning_once(
                f"{self.config.name_or_path or 'This EAGLE head'} does not name the hidden states that it reads: if it "
                f"learned from others than aux_layers={layers}, few drafts are accepted; pass them to from_pretrained"
            )

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Validate and complete `draft_tree`; a head whose rows run at once takes none."""
        if self.config.mask_token_id is not None:
            raise ValueError(f"draft_tree={options.draft_tree!r}: a P-EAGLE head drafts chains only; leave it out")
        return super().prepare_tree(options, config)

    def longest_draft(self) -> int | None:
        return None

    def default_draft(self) -> int:
        return self.config.draft_length or _CHAIN

    @classmethod
    def facts(cls, config: EagleHeadConfig, drafter: object = None) -> DrafterFacts:
        states = f"{config.num_aux} states of the backbone" if config.num_aux else "the backbone's last state"
        length, papers = config.draft_length or _CHAIN, ("li2024eagle", "li2025eagle3")
        rows = [
            ("Head", f"EAGLE, version {config.version}: {config.num_hidden_layers} decoder layer(s) on {states}"),
            ("Draft length", f"{length} tokens, where a call does not say"),
            *drafted_tokens(config),
        ]
        return DrafterFacts("eagle", length + 1, rows, papers[: 1 if config.version == 1 else 2])

    def start(self, options: DraftOptions) -> EagleSession:
        return EagleSession(self, options)

    @classmethod
    @reads_whole
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike,
        *,
        aux_layers: list[int] | None = None,
        norm_output: bool | None = None,
        norm_before_residual: bool | None = None,
        mask_token_id: int | None = None,
        ignore_fields: Sequence[str] = (),
        **kwargs: Any,
    ) -> Any:
        """Load a directory or a Hub repository in our layout or in one that `modeling/eagle/conversion.py` lists.

        Args:
            pretrained_model_name_or_path: Directory or repository of the head.
            aux_layers: Indices into `hidden_states`, where those of the checkpoint are wrong or missing.
            norm_output: See `EagleHeadConfig`; False for heads that SpecForge trained from July to September
                2026, whose configs have true with another meaning.
            norm_before_residual: See `EagleHeadConfig`; a missing field means different values in other libraries.
            mask_token_id: The mask token of a P-EAGLE head whose config.json does not say it, such as SpecForge's.
            ignore_fields: Fields of a config.json of another library that are passed over; unknown ones are refused.
            **kwargs: As for transformers' `from_pretrained`: `dtype`, `device_map`, `attn_implementation`, ...

        Raises:
            ValueError: No EAGLE head, or one that could not be the published one: unknown fields, other tensors.
        """
        fields = {"aux_layers": aux_layers, "norm_output": norm_output, "norm_before_residual": norm_before_residual}
        fields["mask_token_id"] = mask_token_id
        return cls.load_stored(pretrained_model_name_or_path, fields, kwargs | {"ignore_fields": ignore_fields})

    @classmethod
    def recognises(cls, name: str | PathLike, fields: Fields, hub: Fields) -> bool:
        return bool(fields) and is_foreign_head(fields, tensor_names(name, **hub))

    @classmethod
    def read_foreign(
        cls, name: str | PathLike, raw: Fields, hub: Fields, fields: Fields, ignored: Sequence[str] = ()
    ) -> Stored:
        return foreign_head(name, raw, read_tensors(weight_files(name, pickles=True, **hub)), ignored, **fields)

    def in_layout(self, layout: str, state: dict[str, Tensor]) -> tuple[Fields, dict[str, Tensor]]:
        embeddings = input_embeddings(self.backbone).weight if self.is_attached else None
        fields = layout_config(self.config, layout, self.dtype)
        return fields, layout_tensors(self.config, layout, state, embeddings)

    def export(self, folder: str | PathLike, layout: str = "vllm") -> None:
        check_layout(self.config, layout)
        super().export(folder, layout)

    def export_to(self, engine: str, folder: Path) -> Fields:
        self.export(folder, layout=engine)
        return {"method": "eagle" if self.config.version == 1 else "eagle3", "num_speculative_tokens": 3}

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Load tensors under this head's names, or those of a saved checkpoint, which a resuming Trainer reads."""
        surplus = {"d2t", "t2d"}.difference(self.state_dict())
        state = {name: tensor for name, tensor in own_names(state_dict).items() if name not in surplus}
        return super().load_state_dict(state, strict, assign)

    @property
    def learning_layers(self) -> list[int]:
        wanted = self.hidden_layers
        return [-1] if isinstance(wanted, int) else [*dict.fromkeys(wanted), -1]

    @property
    def num_losses(self) -> int:
        return self._loss_options().steps

    def loss_counts(
        self,
        labels: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        labels = cast(Tensor, unshifted(labels, shift_labels))
        batch = TrainingBatch.of(labels, labels, attention_mask, position_ids, labels)
        return counts_per_step(batch, self._loss_options())

    def distributions(self, batch: Mapping[str, Tensor], length: int) -> DraftDistributions:
        """Return the distributions of drafts of `length` tokens along `input_ids` of a batch.

        Row t of step i - 1 drafts token t + 1 + i, from the head's outputs as in decoding.
        """
        ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
        hidden = run_backbone(self.backbone, ids, mask, positions, self.learning_layers).hidden_states
        features, whole = self.fuse(hidden), TrainingBatch.of(ids, ids, mask, positions, hidden[-1])
        outputs = [features[:, :0]] * length  # of steps 0, 1, ..., [B, R, d] each
        if whole.num_rows:
            options = replace(self._loss_options(), steps=length)
            steps = Steps(self, whole, options, features.new_ones(length), features)
            first, columns = steps.first_step(features[:, : whole.num_rows])
            outputs = [first, *steps.later_steps(first, 0, columns)]
        unrolled = stacked_steps(outputs, ids.shape[1])

        def draft(rows: Tensor, columns: Tensor, tokens: Tensor) -> Tensor:
            drafted = self.draft_logits(unrolled[rows, columns]).float().log_softmax(-1)  # [N, length, Vd]
            return self.spread(drafted)  # [N, length, V]

        return DraftDistributions(draft, self.backbone_logits, hidden[-1])

    def pooled_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        return (sums * step_weights(counts, self._loss_options(), sums)).sum()

    def _loss_options(self) -> ResolvedEagleOptions:
        return self.loss_options.resolved(self.config.version)

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
        **kwargs: object,
    ) -> EagleOutput:
        """Return the loss on the backbone's states that `learning_layers` names, [B, L, D] each; see `forward`.

        Row t of step i has a target where token t + 2 + i exists, is not padding, and its label is not -100.
        """
        labels, output = unshifted(labels, shift_labels), EagleOutput()
        if labels is not None:
            labels, last = check_targets(labels, self.config.vocab_size), cast(Tensor, states[-1])
            batch = TrainingBatch.of(input_ids, labels, attention_mask, position_ids, last, summaries)
            output = eagle_loss(self, self.fuse(states), batch, self._loss_options(), counts)
        output.logits = logits
        return output

    def _run_backbone(self, input_ids: Tensor, *given: Any) -> Any:
        """Return the backbone's outputs, with the logits of the last position alone."""
        return super()._run_backbone(input_ids, *given[:2])


DRAFTERS["eagle"] = EagleHead
