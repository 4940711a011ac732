"""EvaByte with multi-token heads: next-byte logits, the discounted loss, and the law of the next window."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple

from ..configuration import EvaByteConfig
from ..generation.mixin import MTPGenerationMixin
from .eva_cache import EvaByteCache
from .evabyte import EvaByteModel, EvaBytePreTrainedModel
from .heads import FFHead, window_law
from .loading import StrictLoadingMixin
from .losses import IGNORE, depth_means, discounted_mtp_loss, independent_terms, window_targets
from .outputs import MTPOutput
from .window_law import WindowLaw


class EvaByteForMTPC(StrictLoadingMixin, MTPGenerationMixin, EvaBytePreTrainedModel):
    """EvaByte that predicts several bytes per call and emits exactly what one byte at a time would give.

    Official checkpoints load unchanged. `generate` speculates by default; `use_mtp=False` decodes byte by byte.

    Example:
        >>> model = EvaByteForMTPC.from_pretrained(path)
        >>> tokenizer = EvaByteTokenizer.from_pretrained(path)
        >>> out = model.generate(**tokenizer("def main(", return_tensors="pt"), max_new_tokens=64)
    """

    def __init__(self, config: EvaByteConfig) -> None:
        super().__init__(config)
        config.num_pred_heads = max(config.num_pred_heads, config.mtp_head.window)
        self.loss_type = "ForCausalLM"
        self.model = EvaByteModel(config)
        self.lm_head = FFHead(config.hidden_size, config.vocab_size, config.num_pred_heads)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike | None, *args: Any, **kwargs: Any) -> Any:
        """Loads a folder or a Hub repository; a `mtp_head.window` above the stored heads appends new ones.

        Raises:
            ValueError: Missing tensors, wrong shapes, a damaged file.
        """
        config = kwargs.pop("config", None)
        if not isinstance(config, EvaByteConfig):
            config, kwargs = EvaByteConfig.from_pretrained(
                config or pretrained_model_name_or_path, return_unused_kwargs=True, **kwargs
            )
        window = config.mtp_head.window
        config.mtp_head.window = min(window, config.num_pred_heads)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.set_window(window)
        return loaded

    @property
    def window(self) -> int:
        """n: tokens that the head's law covers; a draft has n - 1."""
        return self.config.mtp_head.window

    def set_window(self, window: int) -> None:
        """Sets the window; heads are appended (drawn like fresh weights) where the model has fewer.

        Raises:
            StrictDataclassError: A window below 1 or above `window_size`.
        """
        head = self.config.mtp_head
        head.window, old = window, head.window
        try:
            head.validate()
            self.config.validate()
        except Exception:
            head.window = old
            raise
        self.lm_head.extend(window, self.config.initializer_range)
        self.config.num_pred_heads = self.lm_head.num_heads

    def train_only(self, part: str) -> None:
        """Chooses what is trained: `"all"`, or `"heads"` with the backbone and the next-byte head frozen.

        Head 0 shares a tensor with the drafting heads; its rows get no gradient, and `MTPTrainer` no weight decay.

        Raises:
            ValueError: An unknown part.
        """
        if part not in ("all", "heads"):
            raise ValueError(f"train_only({part!r}): choose 'all' or 'heads'")
        self.model.requires_grad_(part == "all")
        self.lm_head.target_frozen = part == "heads"

    def window_law(self, hidden_states: torch.Tensor) -> WindowLaw:
        """Law of the next `window` tokens given last hidden states [..., D]."""
        return window_law(self.lm_head, self.config.mtp_head, hidden_states)

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
        """Next-byte logits and, with labels, the discounted loss over all depths of the window.

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

        Returns:
            `logits` [B, L, V] in float32 where the config has `fp32_logits`, and the rest of `MTPOutput`.
        """
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
        kept = slice_logits_to_keep(hidden, logits_to_keep)
        logits = self.lm_head(kept, None if return_all_pred_logits else 1)
        logits = logits if return_all_pred_logits and self.config.num_pred_heads > 1 else logits[..., 0, :]
        loss, head_losses = None, None
        if labels is not None:
            targets = self._targets(labels, attention_mask, position_ids)
            loss, head_losses = self._loss(hidden, targets, num_items_in_batch)
        return MTPOutput(
            loss=loss,
            logits=logits.float() if self.config.fp32_logits else logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            head_losses=head_losses,
        )

    def _targets(
        self, labels: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> torch.Tensor:
        if labels.dim() == 2:
            return window_targets(labels, self.window, attention_mask, position_ids)
        if labels.shape[2] > self.lm_head.num_heads:
            raise ValueError(f"labels have {labels.shape[2]} depths, but the model has {self.lm_head.num_heads} heads")
        return labels

    def _loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor | int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        terms, valid = independent_terms(self.lm_head, hidden, targets), targets != IGNORE
        loss = discounted_mtp_loss(terms, valid, self.config.mtp_head.gamma, "tokens", counts)
        return loss, depth_means(terms, valid)

    def _new_cache(self) -> EvaByteCache:
        """The cache that `generate` starts with."""
        return EvaByteCache(self.config)
