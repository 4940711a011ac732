"""The network of an EAGLE head: transformers' Llama layers; the first one differs by version.

Version 1 (EAGLE-1, EAGLE-2, HASS) merges embedding and feature before a layer without input norm. In version 3 the
first layer's attention reads both, normed. Row t takes the backbone's feature f_t and the embedding of token x_{t+1},
at position t, and predicts x_{t+2}; its output is the feature of the next row while drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from ...configuration.cache_names import CACHE
from ...configuration.eagle import EagleHeadConfig
from ...generation.backbone.wrapped_models import is_unit, untyped
from ...generation.tensors.masks import blocks_of, model_mask
from ..common.backbone_parts import BackboneParts, dtype_of, frozen, output_embeddings, part_logits
from ..common.learning import DraftModel, States
from .conversion import resolved_aux_layers

Masks = Tensor | None | Mapping[str, Tensor | None]
"""What rows see, or what they see in each kind of layer."""


class EagleLayer(LlamaDecoderLayer):
    """A Llama layer whose attention is Llama's or (with `qk_norm`) Qwen3's over states [.., width] (d by default)."""

    def __init__(self, config: EagleHeadConfig, index: int, width: int | None = None) -> None:
        super().__init__(config, index)
        attention = Qwen3Attention(untyped(config), index) if config.qk_norm else LlamaAttention(config, index)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(width or config.hidden_size, rows, bias=config.attention_bias))
        attention.o_proj = nn.Linear(attention.o_proj.in_features, config.hidden_size, bias=False)
        self.self_attn = attention


class FusingLayer(EagleLayer):
    """The first layer of version 3: its attention reads [norm(e(x_{t+1})); norm(g_t)], 2 d wide."""

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, features: Tensor, embeddings: Tensor, **options: object) -> Tensor:
        """Map g [B, R, d] and e [B, R, d] to [B, R, d]; `options` are keyword arguments of the attention."""
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)  # [B, R, 2 d]
        hidden = (normed if self.norm_before_residual else features) + self.self_attn(both, **options)[0]  # [B, R, d]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class EagleNetwork(DraftModel):
    """The parameters of an EAGLE head, and its forward for rows, which drafting and training share.

    The embeddings (and, in version 1, the unembedding) are the backbone's, looked up when needed, and always frozen.
    """

    hidden_layers: int | list[int]  # of `hidden_states` of its backbone, which `fuse` reads; -1: the last one
    config: EagleHeadConfig
    config_class = EagleHeadConfig

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self._backbones, self.windows = [], config.windows
        # here, where as many layers are made: Qwen3's attention looks its kind up
        config.layer_types = config.layer_types or [*self.windows] * config.num_hidden_layers
        self.hidden_layers, width = -1, config.hidden_size
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, width).requires_grad_(False)
        first = FusingLayer(config) if config.version == 3 else EagleLayer(config, 0)
        if config.version != 3:  # it reads fc [e(x_{t+1}); f_t] without a norm
            cast(nn.Module, first).input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([first, *(EagleLayer(config, each) for each in range(1, config.num_hidden_layers))])
        self._no_split_modules = sorted({type(layer).__name__ for layer in self.layers})
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.add_draft_ids(config.draft_vocab_size, config.vocab_size)
        target_width, eps = config.target_hidden_size or width, config.rms_norm_eps
        states = config.num_aux * target_width
        if states or config.version == 1:
            self.fc = nn.Linear(states or 2 * width, width, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = LlamaRMSNorm(states, eps=eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(target_width, eps=eps) for _ in range(config.num_aux))
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, states or width))
        if config.version == 3:
            self.norm = LlamaRMSNorm(width, eps=eps)
            self.lm_head = nn.Linear(width, self.draft_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens if self.config.own_embeddings else None

    def fuse(self, hidden_states: States) -> Tensor:
        """Return the features [B, T, d] of the backbone's states that `hidden_layers` names, on the head's device."""
        wanted = [-1]
        if self.config.num_aux:
            is_mapping = isinstance(hidden_states, Mapping)
            layers = self.backbone.config.get_text_config().num_hidden_layers if is_mapping else len(hidden_states) - 1
            wanted = resolved_aux_layers(self.config, layers)
        return self.fused([cast(Tensor, hidden_states[index]) for index in wanted])

    def masked(self, batch: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return features [B, R, d] and ids [B, R] of rows that know no token (P-EAGLE)."""
        states = self.config.num_aux
        feature = self.fused(list(self.mask_hidden.chunk(states, dim=-1))) if states else self.mask_hidden
        ids = torch.full((batch, rows), cast(int, self.config.mask_token_id), device=feature.device)
        return feature.expand(batch, rows, -1), ids

    def fused(self, states: list[Tensor]) -> Tensor:
        """Return the features [B, T, d] of the states [B, T, D] that `hidden_layers` names, in its order."""
        device = next(self.parameters()).device
        states = [state.to(device, self.dtype) for state in states]
        if self.config.version == 1 or "fc" not in self._modules:
            return states[-1]
        if self.config.fc_norm:
            states = [norm(state) for norm, state in zip(self.fc_norm, states)]
        fused = torch.cat(states, dim=-1)  # [B, T, num_aux D]
        return self.fc(self.input_norm(fused) if self.config.norm_before_fc else fused)

    def step(
        self,
        features: Tensor,
        next_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        logits_to_keep: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Return features of the next rows, [B, R, d], and logits [B, R, V] of the token after each pair, or -inf.

        Row t is the pair of feature t (of `fuse`, or an output) and the token after it, `next_ids` [B, R]. Without
        `position_ids` the real columns of the mask before a row are counted; `attention_mask` is [B, past + R], or bool
        [B, 1, R, past + R] for all layers; `past_key_values`, the head's own cache, is extended; of 0 `logits_to_keep`
        all are.
        """
        features = self.rows(features, next_ids, position_ids, attention_mask, past_key_values)
        return features, self.spread(self.draft_logits(features[:, -logits_to_keep:]))

    def spread(self, columns: Tensor) -> Tensor:
        """Return values [.., V] of all tokens from those of drafted ones [.., Vd]; others have -inf."""
        if columns.shape[-1] == self.config.vocab_size:
            return columns
        full = columns.new_full((*columns.shape[:-1], self.config.vocab_size), -torch.inf)
        return full.index_copy_(-1, self.draft_ids, columns)

    def rows(
        self,
        features: Tensor,
        next_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Run rows as `step` does, and return the features of the next rows, [B, R, d]."""
        if position_ids is None:
            position_ids = _counted_positions(attention_mask, next_ids.shape[1], past_key_values).to(features.device)
        return self.run(features, self.embedding()(next_ids), position_ids, attention_mask, past_key_values)

    def run(
        self, features: Tensor, embeddings: Tensor, position_ids: Tensor, mask: Masks, cache: Cache | None
    ) -> Tensor:
        """Run rows as `rows` does, from `embedding` of their tokens [B, R, d]; masks may differ by kind of layer."""
        embeddings, windows = embeddings.to(features), self.windows
        masks = mask if isinstance(mask, Mapping) else dict.fromkeys(windows, mask)
        masks = {kind: self._mask(embeddings, position_ids, masks[kind], cache, windows[kind]) for kind in windows}
        options = {
            "position_ids": position_ids,
            CACHE: cache,
            "position_embeddings": self.rotary_emb(features, position_ids),
        }
        is_first = self.config.version == 1
        inputs = [self.fc(torch.cat([embeddings, features], dim=-1))] if is_first else [features, embeddings]
        for layer, kind in zip(self.layers, self.config.layer_types or ()):
            inputs = [layer(*inputs, attention_mask=masks[kind], **options)]
        hidden = inputs[0]
        return self.norm(hidden) if self.config.norm_output else hidden

    def draft_logits(self, features: Tensor) -> Tensor:
        """Return logits [.., Vd] over the draft vocabulary from the output of rows [.., d]."""
        if self.config.version == 1:  # the unembedding alone, without the backbone's further changes to its logits
            unembedding, part = output_embeddings(self.backbone), self.draft_vocabulary
            features = features.to(dtype_of(unembedding, features))
            return frozen(unembedding, features) if part is None else part_logits(part, unembedding, features)
        return self.lm_head(features if self.config.norm_output else self.norm(features))

    def backbone_logits(self, states: Tensor, only_drafted: bool = False) -> Tensor:
        """Return the backbone's logits [.., V], or [.., Vd] of drafted tokens, of its last states [.., D], frozen."""
        return BackboneParts(self.backbone, self.draft_vocabulary if only_drafted else None).unembed(states)

    def embedding(self) -> Callable[[Tensor], Tensor]:
        """Return the embedding of tokens, without a family's scale, with which heads are not trained."""
        table = self.embed_tokens if self.config.own_embeddings else self.backbone.get_input_embeddings()
        if type(table) is nn.Embedding and not torch.is_grad_enabled():
            return table
        if type(table) is nn.Embedding or is_unit(table):
            return partial(frozen, table)
        return partial(nn.functional.embedding, weight=cast(nn.Embedding, table).weight.detach())

    def _mask(
        self, embeddings: Tensor, position_ids: Tensor, mask: Tensor | None, cache: Cache | None, window: int | None
    ) -> Tensor | None:
        if mask is None and embeddings.shape[1] == 1 and window is None:
            return None  # it sees all
        if blocks_of(mask) is not None and self.config._attn_implementation == "sdpa":
            return mask
        if mask is not None and mask.dim() == 4:
            return model_mask(mask[:, 0], self.config, embeddings.dtype) if mask.dtype == torch.bool else mask
        create = create_causal_mask if window is None else create_sliding_window_causal_mask
        return create(
            config=self.config,
            inputs_embeds=embeddings,
            attention_mask=mask,
            position_ids=position_ids,
            **cast(Any, {CACHE: cache}),
        )


def _counted_positions(mask: Tensor | None, rows: int, cache: Cache | None) -> Tensor:
    """Return positions [B or 1, R], the number of real columns before each row."""
    if mask is None:
        past = 0 if cache is None else cache.get_seq_length()
        return torch.arange(past, past + rows)[None]  # [1, R]
    counts = mask.long().cumsum(-1)[:, -rows:] if mask.dim() == 2 else mask[:, 0].long().sum(-1)  # [B, R]
    return (counts - 1).clamp(min=0)
