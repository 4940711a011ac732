"""EagleHead: one small layer that drafts from the hidden states of any transformers causal language model.

Row t takes the backbone's feature f_t and the embedding of token x_{t+1}, at position t, and predicts x_{t+2}; what it
returns is the feature of the next row while drafting (EAGLE: 2401.15077, EAGLE-2: 2406.16858, EAGLE-3: 2503.01840,
HASS: 2408.15766).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from ...configuration import EagleHeadConfig
from ...generation.attach import AttachableDrafter, NoGenerationMixin, adopt_special_ids
from ...generation.call.options import DraftOptions
from ...generation.drafters.eagle import EagleSession
from ..heads.backbone_parts import backbone_parts, dtype_of, frozen
from ..loss_options import LossOptions
from ..unwrapping import unwrap
from .folders import EagleFolderMixin
from .layers import build_layers
from .learning import EagleLearningMixin
from .retrofit import backbone_config, resolved_aux_layers, warn_of_another_kind

_CHAIN = 5
"""Tokens of a chain where nobody asks for a number."""


class EagleHead(EagleLearningMixin, EagleFolderMixin, AttachableDrafter, NoGenerationMixin, PreTrainedModel):
    """An EAGLE head, apart from its backbone, which stays as it is.

    `hidden_states` below are those of transformers: a tuple over layers of [B, L, D], the last after the final norm.
    The embeddings (and, in version 1, the unembedding) are the backbone's, looked up when needed, and always frozen.

    Args:
        config: See `EagleHeadConfig`.

    Attributes:
        loss_options: How `forward` makes its loss (`LossOptions`).

    Example:
        >>> head = EagleHead.from_pretrained(directory).attach(backbone)
        >>> tree = {"depth": 5, "top_k": 10, "total_tokens": 60}
        >>> out = backbone.generate(**inputs, assistant_model=head, draft_tree=tree)
    """

    config_class = EagleHeadConfig
    remote_classes = {"AutoModel": "EagleHead"}
    travels_when_pushed = False
    base_model_prefix = ""
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    drafts_trees = True

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.loss_options = LossOptions.of("eagle", config.loss_options)
        self._backbones = []
        width = config.hidden_size
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, width).requires_grad_(False)
        self.layers = build_layers(config)
        self._no_split_modules = sorted({type(layer).__name__ for layer in self.layers})  # those that are there
        self.rotary_emb = LlamaRotaryEmbedding(config)
        if config.version == 1:
            self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        else:
            self._add_parts_of_version_3(config)
        self.post_init()

    def _add_parts_of_version_3(self, config: EagleHeadConfig) -> None:
        width, eps = config.hidden_size, config.rms_norm_eps
        states = config.num_aux * config.target_hidden_size
        if states:
            self.fc = nn.Linear(states, width, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(states, eps=eps)
        if config.fc_norm:
            norms = [LlamaRMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_aux)]
            self.fc_norm = nn.ModuleList(norms)
        self.norm = LlamaRMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.draft_vocab_size < config.vocab_size:  # offsets, as every layout stores them
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    @classmethod
    def from_backbone(
        cls,
        backbone: PreTrainedModel,
        version: int = 3,
        draft_vocab_size: int | None = None,
        draft_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> EagleHead:
        """A new head for `backbone`, attached.

        Args:
            backbone: Any causal language model of transformers; of a PeftModel, the model within.
            version: 1 or 3.
            draft_vocab_size: Vd, for version 3: the first Vd tokens are drafted, unless `draft_ids` says which.
            draft_ids: [Vd] distinct token ids: the most frequent tokens of the text to be written, as a rule.
            **options: Further fields of `EagleHeadConfig`; by default sizes and rope are the backbone's.

        Raises:
            ValueError: `draft_ids` out of range or not distinct, or an option that contradicts the backbone.
        """
        if draft_ids is not None:
            draft_ids = torch.as_tensor(draft_ids).sort().values.cpu()
            draft_vocab_size = len(draft_ids)
        backbone = unwrap(backbone)
        head = cls(backbone_config(backbone, version=version, draft_vocab_size=draft_vocab_size, **options))
        if draft_ids is not None:
            head.set_draft_ids(draft_ids)
        head = head.attach(backbone)
        if version == 3:
            unembedding = backbone.get_output_embeddings().weight
            with torch.no_grad():
                head.lm_head.weight.copy_(unembedding[head.draft_ids.to(unembedding.device)])
        return head

    @property
    def generation_config(self) -> GenerationConfig:
        """The backbone's: trainers align special tokens with it, and `generate` of another model asks for it."""
        return self.backbone.generation_config

    @generation_config.setter
    def generation_config(self, value: GenerationConfig | None) -> None:
        """Ignored: a head has none of its own."""

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """Nothing to choose: the loss computes its steps again in backward in any case."""

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuses a backbone that the head was not made for.

        Raises:
            ValueError: Another hidden size, vocabulary or number of layers, or a cache of the backbone's own kind.
        """
        text, kind = backbone.config.get_text_config(), type(backbone).__name__
        wanted = {"hidden_size": self.config.target_hidden_size, "vocab_size": self.config.vocab_size}
        for name, value in wanted.items():
            if getattr(text, name) != value:
                raise ValueError(f"{name}: the head was made for {value}, but {kind} has {getattr(text, name)}")
        if hasattr(backbone, "_new_cache"):
            raise ValueError(f"{kind} keeps a cache of its own kind, whose columns a head's cache cannot follow")
        resolved_aux_layers(self.config, text.num_hidden_layers)

    def on_attach(self, backbone: PreTrainedModel) -> None:
        """Follows the backbone's dtype and device, takes over its special ids, and warns of another kind of model."""
        if backbone.device.type != "meta":  # offloaded: the weights come and go
            self.to(device=backbone.device, dtype=backbone.dtype if backbone.dtype.is_floating_point else None)
        adopt_special_ids(self.config, backbone)
        warn_of_another_kind(self.config, backbone)

    def longest_draft(self) -> int | None:
        """Any number: a head goes on from its own output."""
        return None

    def default_draft(self) -> int:
        """What the published chains of these heads have."""
        return _CHAIN

    def start(self, options: DraftOptions) -> EagleSession:
        """Drafts of the head, for one call of `generate`."""
        return EagleSession(self, options)

    @property
    def hidden_layers(self) -> int | list[int]:
        """Indices of the backbone's `hidden_states` that `fuse` reads; -1: the last one."""
        if not self.config.num_aux:
            return -1
        return resolved_aux_layers(self.config, self.backbone.config.get_text_config().num_hidden_layers)

    @property
    def draft_ids(self) -> torch.Tensor:
        """Token ids that are drafted, [Vd] int64, on the head's device."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.device)
        return ids + self.d2t if hasattr(self, "d2t") else ids

    def set_draft_ids(self, draft_ids: torch.Tensor) -> None:
        """Sets which tokens are drafted.

        Args:
            draft_ids: [Vd] int64, distinct.

        Raises:
            ValueError: Another number of ids, ids that repeat or that the vocabulary does not have.
        """
        size, vocab = self.config.draft_vocab_size, self.config.vocab_size
        inside = bool(((draft_ids >= 0) & (draft_ids < vocab)).all())
        if len(draft_ids) != size or len(draft_ids.unique()) != size or not inside:
            raise ValueError(f"draft_ids must be draft_vocab_size={size} distinct ids in 0..{vocab - 1}")
        if hasattr(self, "d2t"):
            self.d2t.copy_(draft_ids.to(self.d2t.device) - torch.arange(size, device=self.d2t.device))

    def get_input_embeddings(self) -> nn.Module | None:
        """The head's own embeddings, or None where it reads the backbone's."""
        return getattr(self, "embed_tokens", None)

    def fuse(self, hidden_states: Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The features that `step` reads, from the backbone's hidden states.

        Args:
            hidden_states: L + 1 entries [B, T, D], of which those that `hidden_layers` does not name may be None; or a
                mapping from their indices.

        Returns:
            [B, T, d], on the head's device and in its dtype.
        """
        place = {"device": self.device, "dtype": self.dtype}
        if not self.config.num_aux:
            return hidden_states[-1].to(**place)
        count = None if isinstance(hidden_states, Mapping) else len(hidden_states) - 1
        chosen = self.hidden_layers if count is None else resolved_aux_layers(self.config, count)
        states = [hidden_states[index].to(**place) for index in chosen]
        if self.config.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states)]
        states = torch.cat(states, dim=-1)
        return self.fc(self.input_norm(states) if self.config.norm_before_fc else states)

    def step(
        self,
        features: torch.Tensor,
        next_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs rows of the head.

        Args:
            features: [B, R, d], from `fuse` for known tokens, or returned by an earlier row.
            next_ids: [B, R] int64; row t is the pair of feature t and the token after it.
            position_ids: [B or 1, R]; by default the real columns of the mask are counted.
            attention_mask: [B, past + R], 0 for padding, or boolean [B, 1, R, past + R].
            past_key_values: The head's own cache, which these rows are added to.
            logits_to_keep: Logits of so many last rows only; 0: of all.

        Returns:
            What the next rows read, [B, R, d], and logits [B, R, V] of the token after each pair, -inf for tokens that
            are not drafted.
        """
        features = self.rows(features, next_ids, position_ids, attention_mask, past_key_values)
        logits = self.draft_logits(features[:, -logits_to_keep:])
        if logits.shape[-1] == self.config.vocab_size:
            return features, logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return features, full.index_copy_(-1, self.draft_ids, logits)

    def rows(
        self,
        features: torch.Tensor,
        next_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """`step` without logits: what the next rows read, [B, R, d]."""
        embeddings = self._embed(next_ids).to(features)
        if position_ids is None:
            position_ids = _counted_positions(attention_mask, next_ids.shape[1], past_key_values).to(features.device)
        options = {
            "attention_mask": self._mask(embeddings, position_ids, attention_mask, past_key_values),
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "position_embeddings": self.rotary_emb(features, position_ids),
        }
        if self.config.version == 1:
            hidden = self.layers[0](self.fc(torch.cat([embeddings, features], dim=-1)), **options)
        else:
            hidden = self.layers[0](features, embeddings, **options)
        for layer in self.layers[1:]:
            hidden = layer(hidden, **options)
        return self.norm(hidden) if self.config.norm_output else hidden

    def draft_logits(self, features: torch.Tensor) -> torch.Tensor:
        """Logits [.., Vd] over the draft vocabulary from what rows returned [.., d]."""
        if self.config.version == 1:  # the unembedding alone, whatever the backbone does to its logits afterwards
            unembedding = self.backbone.get_output_embeddings()
            return frozen(unembedding, features.to(dtype_of(unembedding, features)))
        return self.lm_head(features if self.config.norm_output else self.norm(features))

    def backbone_logits(self, states: torch.Tensor) -> torch.Tensor:
        """The backbone's logits [.., V] of its last hidden states [.., D]; no gradient reaches its parameters."""
        return backbone_parts(self.backbone).unembed(states)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Raw rows of the table: a family that scales its embeddings does so behind them, and heads never saw that."""
        table = self.embed_tokens if self.config.own_embeddings else self.backbone.get_input_embeddings()
        if type(table) is nn.Embedding:
            return frozen(table, ids)
        return nn.functional.embedding(ids, table.weight.detach())

    def _mask(
        self,
        embeddings: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor | None:
        if mask is not None and mask.dim() == 4:
            if self.config._attn_implementation != "eager" or mask.dtype != torch.bool:
                return mask
            return torch.zeros_like(mask, dtype=embeddings.dtype).masked_fill(~mask, torch.finfo(embeddings.dtype).min)
        return create_causal_mask(
            config=self.config,
            inputs_embeds=embeddings,
            attention_mask=mask,
            past_key_values=cache,
            position_ids=position_ids,
        )


def _counted_positions(mask: torch.Tensor | None, rows: int, cache: Cache | None) -> torch.Tensor:
    """Positions [B or 1, R] that count the real columns which each row sees."""
    if mask is None:
        past = 0 if cache is None else cache.get_seq_length()
        return torch.arange(past, past + rows)[None]
    counts = mask.long().cumsum(-1)[:, -rows:] if mask.dim() == 2 else mask[:, 0].long().sum(-1)
    return (counts - 1).clamp(min=0)
