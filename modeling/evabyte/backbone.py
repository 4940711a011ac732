"""EvaByte, native: a byte-level decoder with EVA attention and several next-byte heads (EvaByte, 2025).

Parameter names and shapes are the official ones. `EvaByteForMTPC` adds how
drafts are made and verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.utils.generic import can_return_tuple

from ...configuration import EvaByteConfig
from ..heads.registry import init_head
from ..loading import StrictLoadingMixin
from .attention import EvaAttention, States
from .cache import EvaByteCache, EvaCacheLayer, SequenceLengths
from .geometry import EvaBlock, Rows

if TYPE_CHECKING:
    from ...generation.trees.contract import DraftTree

Layer = Callable[..., Tensor]
"""Called as `EvaByteDecoderLayer` is."""
KeptStates = tuple[Tensor | None, ...]
"""Hidden states by layer; None where they were not requested."""
Run = Callable[..., tuple[Tensor, KeptStates | None]]


class EvaByteRMSNorm(nn.Module):
    """RMSNorm in float32; with `unit_offset` the gain is 1 + weight, rounded to the model's dtype first."""

    def __init__(self, width: int, eps: float, unit_offset: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if unit_offset else torch.ones(width))
        self.eps, self.unit_offset = eps, unit_offset

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [..., D] to [..., D], same dtype."""
        gain = 1 + self.weight if self.unit_offset else self.weight
        normed = nn.functional.rms_norm(hidden_states.float(), (hidden_states.shape[-1],), None, self.eps)
        return (gain * normed).to(hidden_states.dtype)


class EvaByteDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm layer: attention, then MLP, each added to the stream."""

    def __init__(self, config: EvaByteConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = EvaAttention(config, layer_idx)
        self.mlp = Qwen2MLP(config)  # Down(act(Gate x) * Up x)
        self.input_layernorm = _norm(config)
        self.post_attention_layernorm = _norm(config)

    def forward(self, hidden_states: Tensor, rotary: States, block: EvaBlock, cache: EvaCacheLayer | None) -> Tensor:
        """Map [R, M, D] to [R, M, D]; `cache` is this layer's and is updated."""
        attended = self.self_attn(self.input_layernorm(hidden_states), rotary, block, cache)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class EvaBytePreTrainedModel(PreTrainedModel):
    """Config class, initialisation and capabilities of all EvaByte models."""

    config: EvaByteConfig
    config_class = EvaByteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EvaByteDecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_head(module, self.config.initializer_range)
        if isinstance(module, EvaByteRMSNorm) and module.unit_offset:
            init.zeros_(module.weight)
        elif isinstance(module, EvaAttention):
            for parameter in (module.adaptive_mu_k, module.adaptive_phi):
                init.copy_(parameter, torch.randn_like(parameter).clamp(-1, 1) * module.scaling)


class EvaByteModel(StrictLoadingMixin, EvaBytePreTrainedModel):
    """The backbone: token ids to hidden states.

    Positions and EVA's window grid follow from `attention_mask` and the cache, per row, so that a padded row equals
    the unpadded run. `position_ids` are needed only to mark packed documents: without a cache, a 0 starts one, and
    documents do not see each other.
    """

    remote_classes = {"AutoModel": "EvaByteModel"}

    def __init__(self, config: EvaByteConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(EvaByteDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = _norm(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: EvaByteCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        draft_tree: DraftTree | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the layers.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, past columns + L], 0 for padding on any side; only the last L columns are read.
            position_ids: [B or 1, L]; see the class.
            past_key_values: Cache to continue and to extend.
            inputs_embeds: [B, L, D] instead of `input_ids`.
            use_cache: Return a cache; defaults to the config's `use_cache`; off where activations are checkpointed.
            output_hidden_states: True for all layers, or the indices to return (-1: after the final norm).
            draft_tree: Which of `input_ids` descend from which, where drafts after the first one are a tree; needs a
                cache, whose `keep_last` leaves one path.

        Returns:
            `last_hidden_state` [B, L, D] after the final norm, the cache and the requested hidden states.

        Raises:
            ValueError: Neither or both of `input_ids` and `inputs_embeds`, or a cache of another kind.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        given = hidden, attention_mask, position_ids, cache, output_hidden_states
        states, kept = self._runner(cache)(*given, tree=draft_tree)
        return BaseModelOutputWithPast(last_hidden_state=states, past_key_values=cache, hidden_states=kept)

    def continue_from(
        self,
        hidden: Tensor,
        layers: Iterable[Layer],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: EvaByteCache | None = None,
    ) -> Tensor:
        """Return the last hidden states [B, L, D], after the final norm, of other `layers` on `hidden` [B, L, D].

        The layers are called like the backbone's own; `cache` holds their keys and values alone, and is extended.
        """
        return self._runner(cache)(hidden, attention_mask, position_ids, cache, False, layers)[0]

    def _runner(self, cache: EvaByteCache | None) -> Run:
        """Return `_run`, uncompiled with a cache: its geometry changes with every token, and would recompile it."""
        return self._run if cache is None else cast(Run, torch.compiler.disable(self._run))

    def _run(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: EvaByteCache | None,
        output_hidden_states: bool | int | list[int] | None,
        layers: Iterable[Layer] | None = None,
        tree: DraftTree | None = None,
    ) -> tuple[Tensor, KeptStates | None]:
        """Return the last states of the forward from embeddings [B, L, D] on, and those that were requested."""
        rows = _rows(hidden, attention_mask, position_ids if cache is None else None)
        hidden = hidden if rows is None else rows.gather(hidden)
        counts = [hidden.shape[1]] * hidden.shape[0] if rows is None or cache is None else rows.counts.tolist()
        plan = SequenceLengths(self.config.window_size, self.config.chunk_size) if cache is None else cache.sequences
        block = plan.begin(counts, hidden.shape[1], hidden.device, tree)
        block.with_mask(hidden.dtype, explicit=self.config._attn_implementation == "eager")
        rotary = self.rotary_emb(hidden, block.positions())
        chosen, states = _chosen(self.config, output_hidden_states), []
        for index, layer in enumerate(self.layers if layers is None else layers):
            states.append(_restored(hidden, rows) if index in chosen else None)
            hidden = layer(hidden, rotary, block, cache=None if cache is None else cache.layers[index])
        hidden = _restored(self.norm(hidden), rows)
        states.append(hidden if self.config.num_hidden_layers in chosen else None)
        plan.finish(block, counts)
        return hidden, tuple(states) if chosen else None

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> EvaByteCache | None:
        if cache is not None and not isinstance(cache, EvaByteCache):
            raise ValueError(f"past_key_values is a {type(cache).__name__}; give an EvaByteCache(model.config)")
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            return None
        wanted = self.config.use_cache if use_cache is None else use_cache
        return EvaByteCache(self.config) if wanted and cache is None else cache


def _chosen(config: EvaByteConfig, wanted: bool | int | list[int] | None) -> set[int]:
    """Return the indices of the hidden states to return."""
    wanted = config.output_hidden_states if wanted is None else wanted
    total = config.num_hidden_layers + 1
    if wanted is None or isinstance(wanted, bool):
        return set(range(total)) if wanted else set()
    return {index % total for index in ([wanted] if isinstance(wanted, int) else wanted)}


def _norm(config: EvaByteConfig) -> EvaByteRMSNorm:
    return EvaByteRMSNorm(config.hidden_size, config.rms_norm_eps, config.norm_add_unit_offset)


def _rows(hidden: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Rows | None:
    """Return how the batch maps to rows; None where every row already starts in column 0 and is full."""
    batch, length = hidden.shape[:2]
    real = None if mask is None else mask[:, -length:].bool()
    if position_ids is not None and bool((position_ids[:, 1:] == 0).any()):
        everything = torch.ones(batch, length, dtype=torch.bool, device=hidden.device)
        return Rows.from_documents(everything if real is None else real, position_ids)
    if real is None or (real.device.type == "cpu" and bool(real.all())):  # elsewhere a look would wait for the device
        return None
    return Rows.from_mask(real)


def _restored(states: Tensor, rows: Rows | None) -> Tensor:
    """Return states in the columns of the batch."""
    return states if rows is None else rows.restore(states)
