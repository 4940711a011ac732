"""EvaByte with multi-token heads: next-byte logits, the discounted loss, and the distribution of the next window."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils.generic import can_return_tuple

from ...configuration import EvaByteConfig, MTPHeadConfig
from ...configuration.fields import check_options
from ...generation.attach import MTPGenerationMixin
from ...generation.call.options import DraftOptions
from ...generation.drafters.heads import DraftLayersSession, HeadSession
from ..heads.backbone_parts import BackboneParts, frozen
from ..heads.ff import FFHead
from ..heads.losses import IGNORE, counted, counts_of_update, depth_targets, depth_weights, head_loss
from ..heads.registry import build_head, distribution_after, init_head, window_distribution
from ..heads.window_distribution import WindowDistribution
from ..indices import selected_positions
from ..loading import HUB_OPTIONS, StrictLoadingMixin
from ..loss_options import DepthCountsMixin
from ..outputs import MTPOutput
from .backbone import EvaByteModel, EvaBytePreTrainedModel
from .cache import EvaByteCache
from .draft_layers import DraftLayersMixin, EvaDraftLayers, with_layer

_APART = ("hidden_size", "vocab_size", "base_model_name_or_path")  # fields of attached heads only


class EvaByteForMTPC(
    DepthCountsMixin, DraftLayersMixin, StrictLoadingMixin, MTPGenerationMixin, EvaBytePreTrainedModel
):
    """EvaByte that predicts several bytes per call and emits exactly what one byte at a time would give.

    Official checkpoints load unchanged. `generate` speculates by default; `use_mtp=False` decodes byte by byte.

    Example:
        >>> model = EvaByteForMTPC.from_pretrained(path)
        >>> tokenizer = EvaByteTokenizer.from_pretrained(path)
        >>> out = model.generate(**tokenizer("def main(", return_tensors="pt"), max_new_tokens=64)
    """

    mtp_loss_weight: float = 1.0
    """lambda: the weight of the drafter's depths relative to the next-byte head's."""
    silent_part = "head"
    remote_classes = {"AutoModel": "EvaByteModel", "AutoModelForCausalLM": "EvaByteForMTPC"}

    def __init__(self, config: EvaByteConfig) -> None:
        super().__init__(config)
        if config.mtp_head.family.rows_of_lm_head:
            config.num_pred_heads = max(config.num_pred_heads, config.mtp_head.window)
        self.loss_type = "ForCausalLM"
        self.model = EvaByteModel(config)
        self.lm_head = FFHead(config.hidden_size, config.vocab_size, config.num_pred_heads)
        self.mtp_head = self._circuit()
        self.draft_layers = EvaDraftLayers(config) if config.mtp_head.draft_layers else None
        self.post_init()
        if self.draft_layers is not None:
            self.train_only("drafter")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike | None, *args: Any, **kwargs: Any) -> Any:
        """Load a directory or a Hub repository.

        `mtp_head={...}` selects another head than the stored one: a smaller window of FF heads uses the first, a
        larger one appends new ones, and a circuit starts from stored FF heads (`set_head`).

        Raises:
            TypeError: An option of `mtp_head` that is no field of `MTPHeadConfig`.
            ValueError: A directory of another architecture, missing tensors, wrong shapes, a damaged file, or a stored
                circuit of another shape.
        """
        if isinstance(kwargs.get("mtp_head"), dict):
            check_options(kwargs["mtp_head"], MTPHeadConfig, "mtp_head", _APART)
        name = pretrained_model_name_or_path
        hub = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
        dtypes = {key: kwargs.pop(key) for key in ("dtype", "torch_dtype") if key in kwargs}  # a config would keep them
        cls.check_model_type(name, kwargs.get("config"), **hub)
        config, kwargs = _config_and_options(name, **kwargs)
        wanted = config.mtp_head
        stored = wanted if name is None else EvaByteConfig.from_pretrained(name, **hub).mtp_head
        if not wanted.same_parameters(stored) and not stored.family.rows_of_lm_head:
            raise ValueError(
                f"{name}: the checkpoint holds mtp_head={stored.options()}, not {wanted.options()}; load that, "
                "or start a new head from its FF heads with set_head(...)"
            )
        in_rows = wanted.family.rows_of_lm_head
        is_stored = not in_rows and wanted.same_parameters(stored)
        adds_layers = is_stored and wanted.draft_options() != stored.draft_options()
        config.mtp_head = wanted if is_stored and not adds_layers else stored
        if config.mtp_head.family.rows_of_lm_head:
            config.mtp_head.window = min(config.mtp_head.window, config.num_pred_heads)
        loaded = super().from_pretrained(name, *args, config=config, **(hub | dtypes | kwargs))
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if adds_layers:
            model.add_draft_layers(wanted.draft_layers, wanted.draft_lora_rank, wanted.draft_lora_alpha)
        elif config.mtp_head is not wanted:
            model.set_head(**wanted.options())
        if model.draft_layers is not None:
            model.train_only("drafter")  # loading makes every parameter anew
        return loaded

    @property
    def window(self) -> int:
        """n: tokens that the head's distribution covers; a draft has n - 1."""
        return self.config.mtp_head.window

    @property
    def head(self) -> nn.Module:
        """The module that drafts: `lm_head` for FF heads, else `mtp_head`."""
        return self.lm_head if self.mtp_head is None else self.mtp_head

    def set_head(self, **options: Any) -> None:
        """Replace the head; the new one is initialised from the FF heads.

        FF heads are appended (drawn like fresh weights) where the window needs more; a circuit starts with every
        state of position i equal to FF head i, so that its distribution is that of the FF heads, and with random sum
        weights.

        Args:
            **options: Fields of `MTPHeadConfig`; the window and draft layers are unchanged unless given.

        Raises:
            TypeError: An option that is no field of `MTPHeadConfig`.
            StrictDataclassError: Options out of range.
            ValueError: A full leaf tensor larger than this machine's memory.
        """
        check_options(options, MTPHeadConfig, "set_head", _APART)
        old = self.config.mtp_head
        kept = {"window": old.window, "gamma": old.gamma} | old.draft_options()
        self.config.mtp_head = MTPHeadConfig(**(kept | options))
        try:
            self.config.validate()
            head, layers = self._circuit(), self._layers(old)
        except Exception:
            self.config.mtp_head = old
            raise
        self.draft_layers = layers
        self.mtp_head = None if head is None else head.to(self.lm_head.weight)
        if head is None:
            self.lm_head.extend(self.window, self.config.initializer_range)
            self.config.num_pred_heads = self.lm_head.num_heads
            return
        for module in head.modules():
            init_head(module, self.config.initializer_range)
        if self.config.mtp_head.leaf == "full":
            head.copy_leaves(self.lm_head)

    def _circuit(self) -> nn.Module | None:
        config = self.config.mtp_head
        if config.family.rows_of_lm_head:
            return None
        return build_head(config, self.config.hidden_size, self.config.vocab_size)

    def backbone_parts(self) -> BackboneParts:
        """Return the next-byte head and the embedding, as heads borrow them, without gradients for their weights."""
        return BackboneParts(
            unembed=lambda states: frozen(self.lm_head, states.to(self.lm_head.weight.dtype), 1)[..., 0, :],
            embed=lambda tokens: frozen(self.model.embed_tokens, tokens),
            norm=lambda states: frozen(self.model.norm, states),
        )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize embeddings and all heads; every head keeps its own rows.

        Raises:
            ValueError: A head that cannot follow; nothing is changed.
        """
        if self.mtp_head is not None and not callable(getattr(self.mtp_head, "resize", None)):
            raise ValueError(f"heads of head_type={self.config.mtp_head.head_type!r} cannot be resized")
        return super().resize_token_embeddings(*args, **kwargs)

    def _get_resized_lm_head(
        self, old_lm_head: FFHead, new_num_tokens: int | None = None, mean_resizing: bool = True, **kwargs: Any
    ) -> FFHead:
        """Resize all heads with the embeddings; new rows are means, or drawn."""
        for head in (old_lm_head, self.mtp_head):
            if head is not None and new_num_tokens is not None:
                head.resize(new_num_tokens, None if mean_resizing else self.config.initializer_range)
        return old_lm_head

    def train_only(self, part: str) -> None:
        """Choose what is trained: `"all"`, or `"drafter"` (also `"heads"`) with backbone and next-byte head frozen.

        FF heads share a tensor with the next-byte head; its rows get no gradient, and `MTPTrainer` no weight decay.

        Raises:
            ValueError: An unknown part, or all of a model with draft layers, which need a frozen backbone.
        """
        if part not in ("all", "drafter", "heads"):
            raise ValueError(f"train_only({part!r}): choose 'all' or 'drafter'")
        if part == "all" and self.draft_layers is not None:
            raise ValueError("train_only('all'): draft layers need a frozen backbone; choose 'drafter'")
        self.model.requires_grad_(part == "all")
        self.lm_head.requires_grad_(part == "all" or self.mtp_head is None)
        self.lm_head.target_frozen = part != "all" and self.mtp_head is None

    def distribution_of_features(self, features: torch.Tensor) -> WindowDistribution:
        """Return the distribution of the next `window` tokens given `features` [..., D]."""
        return window_distribution(self.head, self.config.mtp_head, features, self.backbone_parts())

    def distribution_after(self, features: torch.Tensor, last: torch.Tensor, length: int) -> WindowDistribution:
        """Return the distribution of the next `length` tokens given `features` [..., F] and the next token [...]."""
        return distribution_after(self.head, self.config.mtp_head, features, last, length, self.backbone_parts())

    def window_distribution(self, hidden_states: torch.Tensor) -> WindowDistribution:
        """Return the distribution of the next `window` tokens given last hidden states [..., D].

        Raises:
            ValueError: A model with draft layers, whose distribution reads other states; use `features` and
                `distribution_of_features`.
        """
        if self.draft_layers is not None:
            raise ValueError(
                "window_distribution: draft layers read other states; use distribution_of_features(features(...))"
            )
        return self.distribution_of_features(hidden_states)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: EvaByteCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_all_pred_logits: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> MTPOutput:
        """Return next-byte logits and, with labels, the discounted loss over all depths of the window.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, past columns + L], 0 for padding.
            position_ids: [B or 1, L]; only to mark packed documents (see `EvaByteModel`).
            past_key_values: Cache to continue and to extend.
            inputs_embeds: [B, L, D] instead of `input_ids`.
            labels: [B, L] int64 as everywhere in transformers (shifted here, -100 ignored), or [B, L, n] with the
                target of every depth spelled out (the official form).
            use_cache: Return a cache.
            logits_to_keep: Compute logits of the last so many positions only (0: all), or of these positions.
            return_all_pred_logits: Logits of all N heads, [B, L, N, V].
            num_items_in_batch: Targets per depth over all micro-batches, [n] or one number (from the Trainer).
            **kwargs: For the backbone; `shift_labels` [B, L], the target of every position, in place of `labels`;
                `balance` [n], factors of the depths (`loss_balance="rms"`).

        Returns:
            `logits` [B, L, V] in float32 where the config has `fp32_logits`, and the rest of `MTPOutput`.
        """
        shift_labels, balance = kwargs.pop("shift_labels", None), kwargs.pop("balance", None)
        learns = labels is not None or shift_labels is not None
        if learns and self.draft_layers is not None:
            kwargs["output_hidden_states"] = with_layer(self.hidden_layers[0], kwargs.get("output_hidden_states"))
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            return_dict=True,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        kept = selected_positions(hidden, logits_to_keep)
        logits = self.lm_head(kept, None if return_all_pred_logits else 1)
        logits = logits if return_all_pred_logits and self.config.num_pred_heads > 1 else logits[..., 0, :]
        found = {}
        if learns:
            targets = depth_targets(labels, self.window, attention_mask, position_ids, shift_labels)
            states = outputs.hidden_states if self.draft_layers is not None else (hidden,)
            features = self.features(states, attention_mask, position_ids)
            found = self._loss(features, hidden, targets, input_ids, num_items_in_batch, balance)
        return MTPOutput(
            logits=logits.float() if self.config.fp32_logits else logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            **found,
        )

    @property
    def normalization(self) -> str:
        """See `DepthCountsMixin`."""
        return self.config.mtp_head.loss_normalization

    def _loss(
        self,
        features: torch.Tensor,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        input_ids: torch.Tensor | None,
        counts: torch.Tensor | int | None,
        balance: torch.Tensor | None,
    ) -> dict[str, Any]:
        """Return the loss of the head and its means; a circuit that trains with its backbone adds the next byte's."""
        tokens = input_ids if input_ids is None or input_ids.shape == targets.shape[:2] else None
        parts, config, scored = self.backbone_parts(), self.config.mtp_head, targets != IGNORE
        resolved = counts_of_update(counted(scored, config.loss_normalization), counts, scored[..., 0].sum())
        found = head_loss(
            self.head, config, features, targets, tokens, resolved, parts, hidden, self._loss_scale(hidden), balance
        )
        if self.mtp_head is None or not self.lm_head.weight.requires_grad:
            return dict(found)
        next_byte = MTPHeadConfig(window=1, gamma=config.gamma, loss_normalization=config.loss_normalization)
        own = head_loss(self.lm_head, next_byte, hidden, targets[..., :1], tokens, resolved[:1])
        return dict(found) | dict(loss=found["loss"] + own["loss"], backbone_loss=own["head_losses"][0])

    def _loss_scale(self, like: torch.Tensor) -> torch.Tensor:
        """Return factors of the depths besides their weights, [n]; depth 1 of FF heads is the next-byte head."""
        scale = torch.full((self.window,), float(self.mtp_loss_weight), device=like.device)
        if self.mtp_head is None:
            scale[0] = 1.0
        return scale

    def pooled_loss(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the loss of the head from sums per depth.

        Args:
            sums: [n], summed terms in nats.
            counts: [n], targets.

        Returns:
            Scalar: what `forward` would return for all of the data in one batch, without `backbone_loss`.
        """
        scale = self._loss_scale(sums).to(sums)
        return (sums * scale * depth_weights(self.config.mtp_head, counts.to(sums))).sum()

    def start(self, options: DraftOptions) -> HeadSession:
        """Return the draft session of one call of `generate`."""
        if self.draft_layers is None:
            return HeadSession(self.distribution_after, options)
        run, layer = self.draft_layers.bind(self.model), self.hidden_layers[0]
        return DraftLayersSession(self.distribution_after, options, layer, run, self._new_cache())

    def own_cache(self) -> Callable[[], EvaByteCache]:
        """What makes the cache that `generate` starts with."""
        return self._new_cache

    def _new_cache(self) -> EvaByteCache:
        """Return the cache that `generate` starts with."""
        return EvaByteCache(self.config)


def _config_and_options(
    name: str | PathLike | None, config: Any = None, **options: Any
) -> tuple[EvaByteConfig, dict[str, Any]]:
    """Return the configuration to load, and the options that are no fields of it.

    `config` may be a configuration, also of code that was loaded with another directory, or where to read one.
    """
    if isinstance(config, EvaByteConfig):
        return config, options
    if isinstance(config, PreTrainedConfig):
        return EvaByteConfig.from_dict(config.to_dict()), options
    found, unused = EvaByteConfig.from_pretrained(config or name, return_unused_kwargs=True, **options)
    return cast(EvaByteConfig, found), cast(dict[str, Any], unused)
