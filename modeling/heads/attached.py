"""Heads that live apart from their backbone: a small folder that makes any plain causal LM speculate.

The heads know the backbone only while attached to it, and what they save is theirs alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator
from transformers.utils.generic import can_return_tuple

from ...configuration import MTPHeadConfig
from ...generation.drafters.heads import HeadDrafter
from ..loading import StrictLoadingMixin
from ..outputs import MTPOutput
from .losses import window_targets
from .registry import SharedHead, build_head, frozen_unembedding, head_loss, init_head, window_law
from .window_law import WindowLaw


class MTPHeads(StrictLoadingMixin, PreTrainedModel):
    """Multi-token heads for a backbone that stays as it is.

    Attached heads pass as `assistant_model`: `base.generate(..., assistant_model=heads)` speculates losslessly in
    transformers' own loop (batch 1), greedy and sampled. `Trainer(model=heads)` trains them on the frozen backbone.

    Args:
        config: Head options, with `window`, `hidden_size` and `vocab_size`.

    Raises:
        ValueError: A config without those three.

    Example:
        >>> heads = MTPHeads.from_backbone(base, window=4)
        >>> out = base.generate(**inputs, assistant_model=heads)
        >>> heads.save_pretrained("heads")
        >>> heads = MTPHeads.from_pretrained("heads").attach(base)
    """

    config_class = MTPHeadConfig
    base_model_prefix = ""
    main_input_name = "input_ids"

    def __init__(self, config: MTPHeadConfig) -> None:
        super().__init__(config)
        missing = [name for name in ("window", "hidden_size", "vocab_size") if getattr(config, name) is None]
        if missing:
            raise ValueError(f"the config of MTPHeads lacks {', '.join(missing)}")
        self.loss_type = "ForCausalLM"
        self.head = build_head(config, config.hidden_size, config.vocab_size)
        self._base: list[PreTrainedModel] = []  # in a list, so that it is no submodule and is never saved
        self.post_init()

    @classmethod
    def from_backbone(cls, base: PreTrainedModel, window: int = 4, leaf: str = "shared", **options: Any) -> MTPHeads:
        """New heads for `base`, attached; with `leaf="shared"` every head starts as the backbone's own.

        Args:
            base: Any causal language model of transformers.
            window: n; drafts have n - 1 tokens.
            leaf: See `MTPHeadConfig`.
            **options: Further fields of `MTPHeadConfig`.
        """
        text = base.config.get_text_config()
        config = MTPHeadConfig(
            window=window,
            leaf=leaf,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            base_model_name_or_path=base.config._name_or_path or None,
            **options,
        )
        return cls(config).to(device=base.device, dtype=base.dtype).attach(base)

    @property
    def window(self) -> int:
        """n: tokens that the law covers; a draft has n - 1."""
        return self.config.window

    @property
    def base(self) -> PreTrainedModel:
        """The backbone.

        Raises:
            RuntimeError: The heads are not attached.
        """
        if not self._base:
            raise RuntimeError("these heads are not attached: call heads.attach(base) first")
        return self._base[0]

    @property
    def _shared(self) -> SharedHead | None:
        return next((module for module in self.modules() if isinstance(module, SharedHead)), None)

    @property
    def generation_config(self) -> None:
        """Heads generate nothing; transformers asks for this where they are used without `attach`."""
        raise RuntimeError("MTPHeads cannot assist this model: call heads.attach(base) first")

    @generation_config.setter
    def generation_config(self, value: None) -> None:
        pass

    def attach(self, base: PreTrainedModel) -> MTPHeads:
        """Makes `base` accept these heads as `assistant_model`; nothing else about it changes.

        Raises:
            ValueError: Another hidden size or vocabulary than the heads were made for.
            RuntimeError: The heads are attached to another model.
        """
        text = base.config.get_text_config()
        for name in ("hidden_size", "vocab_size"):
            if getattr(text, name) != getattr(self.config, name):
                raise ValueError(
                    f"{name}: the heads were made for {getattr(self.config, name)}, but {type(base).__name__} has "
                    f"{getattr(text, name)}"
                )
        if self._base and self.base is not base:
            raise RuntimeError(f"these heads are attached to another {type(self.base).__name__}: detach() them first")
        if self._base:
            return self
        self._base = [base]
        if self._shared is not None:
            self._shared.unembed = frozen_unembedding(
                lambda: base.get_output_embeddings().weight[: self.config.vocab_size]
            )
        attached = vars(base).get("_get_candidate_generator") or _AttachedHeads(base)
        attached.heads.append(self)
        base._get_candidate_generator = attached
        return self

    def detach(self) -> MTPHeads:
        """Undoes `attach`: the backbone is bit for bit what it was."""
        if self._base:
            attached = vars(self.base)["_get_candidate_generator"]
            attached.heads.remove(self)
            if not attached.heads:
                del self.base._get_candidate_generator
            self._base = []
        if self._shared is not None:
            self._shared.unembed = None
        return self

    def window_law(self, hidden_states: torch.Tensor) -> WindowLaw:
        """Law of the next `window` tokens given the backbone's last hidden states [..., D]."""
        return window_law(self.head, self.config, hidden_states)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> MTPOutput:
        """The discounted loss of the heads on the frozen backbone, and the backbone's logits of the last position.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, L], 0 for padding.
            position_ids: [B or 1, L]; where they restart, a packed document begins.
            labels: [B, L] int64, shifted here, -100 ignored.
            num_items_in_batch: Targets per depth over all micro-batches, [n] or one number (from the Trainer).

        Returns:
            `MTPOutput`; `logits` is [B, 1, V].
        """
        options = {"attention_mask": attention_mask, "position_ids": position_ids, "use_cache": False}
        with torch.no_grad():
            outputs = self.base(input_ids, **options, logits_to_keep=1, output_hidden_states=-1, return_dict=True)
        loss, head_losses = None, None
        if labels is not None:
            targets = window_targets(labels, self.window, attention_mask, position_ids)
            states = outputs.hidden_states[-1]
            loss, head_losses = head_loss(self.head, self.config, states, targets, input_ids, num_items_in_batch)
        return MTPOutput(loss=loss, logits=outputs.logits, head_losses=head_losses)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_head(module)


class _AttachedHeads:
    """Stands on a backbone before the `_get_candidate_generator` of its class, which `generate` looks up there."""

    def __init__(self, base: PreTrainedModel) -> None:
        self.base, self.heads = base, []

    def __call__(self, *args: Any, assistant_model: Any = None, **kwargs: Any) -> CandidateGenerator:
        for heads in self.heads:
            if heads is assistant_model:
                config, processors = kwargs["generation_config"], kwargs["logits_processor"]
                return HeadDrafter(heads.window_law, heads.window, config, processors)
        of_class = type(self.base)._get_candidate_generator
        return of_class(self.base, *args, assistant_model=assistant_model, **kwargs)
