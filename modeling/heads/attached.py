"""Heads that live apart from their backbone: a small folder that makes any plain causal LM speculate.

The heads know the backbone only while attached to it, and what they save is theirs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.generation import CandidateGenerator
from transformers.utils.generic import can_return_tuple

from ...configuration import MTPHeadConfig
from ...configuration.head_families import takers
from ...generation.drafters.heads import HeadDrafter
from ..loading import StrictLoadingMixin
from ..outputs import MTPOutput
from .backbone_parts import BackboneParts, backbone_parts
from .losses import head_loss, window_targets
from .official import OfficialLayoutsMixin
from .registry import FAMILIES, HeadFamily, build_head, head_features, init_head, window_law
from .window_law import WindowLaw


class MTPHeads(OfficialLayoutsMixin, StrictLoadingMixin, PreTrainedModel):
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
    def from_backbone(cls, base: PreTrainedModel, window: int = 4, leaf: str | None = None, **options: Any) -> MTPHeads:
        """New heads for `base`, attached; where they share or copy its unembedding, they start as its own head.

        Args:
            base: Any causal language model of transformers, also one that peft has wrapped. `detach` undoes what
                `attach` does to it.
            window: n; drafts have n - 1 tokens.
            leaf: See `MTPHeadConfig`; None: `"shared"`, where the family has a choice.
            **options: Further fields of `MTPHeadConfig`.
        """
        base = _unwrapped(base)
        text = base.config.get_text_config()
        kind = options.get("head_type", "ff")
        if leaf is None and kind in takers("leaf"):
            leaf = "shared"
        config = MTPHeadConfig(
            window=window,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            base_model_name_or_path=base.config._name_or_path or None,
            **({} if leaf is None else {"leaf": leaf}),
            **options,
        )
        if config.backbone_config is None:
            config.backbone_config = FAMILIES[kind].layer_config(config, text)
        heads = cls(config)
        if start := getattr(heads.head, "start_from", None):
            start(base)
        return heads.to(device=_device(base), dtype=base.dtype).attach(base)

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

    def _parts(self) -> BackboneParts | None:
        """What the heads borrow of the backbone for one call."""
        return backbone_parts(self.base) if self._base else None

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
        base = _unwrapped(base)
        self._check_sizes(base)
        if self._base and self.base is not base:
            raise RuntimeError(f"these heads are attached to another {type(self.base).__name__}: detach() them first")
        if self._base:
            return self
        self._check_embedding(base)
        self._base = [base]
        attached = vars(base).get("_get_candidate_generator") or _AttachedHeads(base)
        attached.heads.append(self)
        base._get_candidate_generator = attached
        return self

    def _check_sizes(self, base: PreTrainedModel) -> None:
        text = base.config.get_text_config()
        for name in ("hidden_size", "vocab_size"):
            if getattr(text, name) != getattr(self.config, name):
                raise ValueError(
                    f"{name}: the heads were made for {getattr(self.config, name)}, but {type(base).__name__} has "
                    f"{getattr(text, name)}"
                )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> None:
        """Heads have no embeddings, and those that were made for one vocabulary fit no other.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"heads for vocab_size={self.config.vocab_size} cannot be resized: make new ones")

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: they are detached."""
        return vars(self) | {"_base": []}

    def detach(self) -> MTPHeads:
        """Undoes `attach`: the backbone is bit for bit what it was."""
        if self._base:
            attached = vars(self.base)["_get_candidate_generator"]
            attached.heads.remove(self)
            if not attached.heads:
                del self.base._get_candidate_generator
            self._base = []
        return self

    @property
    def family(self) -> HeadFamily:
        """What the registry says of heads of this type."""
        return FAMILIES[self.config.head_type]

    @property
    def hidden_layers(self) -> list[int]:
        """The states of the backbone that the heads read, as `output_hidden_states` counts them."""
        return self.family.hidden_layers(self.config)

    def features(
        self,
        hidden_states: Sequence[torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """What the law of every position is made from, [B, T, F].

        Args:
            hidden_states: The backbone's output of that name, with those that `hidden_layers` names.
            attention_mask: [B, past + T], 0 for padding.
            position_ids: [B or 1, T]; None: the real tokens are counted.
            cache: The heads' own keys and values of earlier rows, where they attend; extended.
        """
        states = [hidden_states[index] for index in self.hidden_layers]
        if position_ids is None:
            position_ids = _positions(states[-1], attention_mask)
        return head_features(self.head, states, attention_mask, position_ids, self._parts(), cache)

    def law(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> WindowLaw:
        """Laws of the next `window` tokens behind every position of a text: runs the backbone.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, T], 0 for padding, on either side.
            position_ids: [B or 1, T]; None: the real tokens are counted.

        Returns:
            A law whose tensors have leading axes [B, T].
        """
        if position_ids is None and attention_mask is not None:
            position_ids = _positions(input_ids[..., None], attention_mask)
        outputs = self._run_backbone(input_ids, attention_mask, position_ids)
        features = self.features(outputs.hidden_states, attention_mask, position_ids)
        return self.law_of_features(features)

    def law_of_features(self, features: torch.Tensor) -> WindowLaw:
        """Law of the next `window` tokens given `features` [..., F]."""
        return window_law(self.head, self.config, features, self._parts())

    def window_law(self, hidden_states: torch.Tensor) -> WindowLaw:
        """Law of the next `window` tokens given the backbone's last hidden states [..., D].

        Raises:
            ValueError: Heads that read more than one state; use `law`.
        """
        if self.family.attends(self.config) or set(self.hidden_layers) != {-1}:
            raise ValueError(
                f"head_type={self.config.head_type!r} reads more than the last state of one position: use "
                "law(input_ids, attention_mask)"
            )
        return self.law_of_features(hidden_states)

    def _run_backbone(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> Any:
        """The backbone's outputs, with the states that the heads read and the logits of the last position."""
        with torch.no_grad():
            return self.base(
                input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=False,
                logits_to_keep=1,
                output_hidden_states=self.hidden_layers,
                return_dict=True,
            )

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
        outputs = self._run_backbone(input_ids, attention_mask, position_ids)
        loss, head_losses = None, None
        if labels is not None:
            targets = window_targets(labels, self.window, attention_mask, position_ids)
            features, last = (
                self.features(outputs.hidden_states, attention_mask, position_ids),
                outputs.hidden_states[-1],
            )
            parts, count = self._parts(), num_items_in_batch
            loss, head_losses = head_loss(self.head, self.config, features, targets, input_ids, count, parts, last)
        return MTPOutput(loss=loss, logits=outputs.logits, head_losses=head_losses)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_head(module, self.config.initializer_range)


def _unwrapped(base: Any) -> PreTrainedModel:
    """The model itself where peft has wrapped it; its adapters are layers of that model."""
    return base.get_base_model() if hasattr(base, "get_base_model") else base


def _device(base: PreTrainedModel) -> torch.device:
    """Where the backbone computes; its weights may be offloaded."""
    hooks = (module._hf_hook for module in base.modules() if hasattr(module, "_hf_hook"))
    devices = [hook.execution_device for hook in hooks if getattr(hook, "execution_device", None) is not None]
    return torch.device(devices[0]) if devices else base.device


def _positions(states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Position ids [B or 1, T] of states [B, T, d]; padding has 0."""
    if attention_mask is None:
        return torch.arange(states.shape[1], device=states.device)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -states.shape[1] :]


class _AttachedHeads:
    """Stands on a backbone before the `_get_candidate_generator` of its class, which `generate` looks up there."""

    def __init__(self, base: PreTrainedModel) -> None:
        self.base, self.heads = base, []

    def __call__(self, *args: Any, assistant_model: Any = None, **kwargs: Any) -> CandidateGenerator:
        for heads in self.heads:
            if heads is assistant_model:
                heads._check_sizes(self.base)  # it may have been resized since
                config, processors = kwargs["generation_config"], kwargs["logits_processor"]
                return HeadDrafter(heads.window_law, heads.window, config, processors)
        of_class = type(self.base)._get_candidate_generator
        return of_class(self.base, *args, assistant_model=assistant_model, **kwargs)
