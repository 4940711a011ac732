"""EvaByte, native: a byte-level decoder with EVA attention and several next-byte heads (EvaByte, 2025).

Attention reads the open window byte by byte, and earlier windows as one learned summary per chunk. Parameter names and
shapes are the official ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb, eager_attention_forward
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.utils.generic import can_return_tuple

from ...configuration.cache_names import CACHE, given_cache
from ...configuration.evabyte import EvaByteConfig
from ...generation.backbone.wrapped_models import untyped
from ..common.loading import StrictLoadingMixin
from .cache import EvaBlock, EvaByteCache, EvaCacheLayer, SequenceLengths, SequenceMap, States

if TYPE_CHECKING:
    from ...generation.contract import DraftTree

Layer = Callable[..., Tensor]
LayerStates = tuple[Tensor | None, ...]
Run = Callable[..., tuple[Tensor, LayerStates | None]]


class EvaAttention(nn.Module):
    """One EVA attention layer.

    With s = 1/sqrt(d), a chunk's rotated keys k_i and values v_i become (per head, one landmark per chunk)

        k_bar = sum_i softmax_i(mu . k_i) k_i        v_bar = sum_i softmax_i(s (phi . k_i - |k_i|^2 / 2)) v_i

    and a query takes one softmax over s q . k for the tokens of its own window up to itself and s q . k_bar for all
    chunks of earlier windows.
    """

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config: EvaByteConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        self.chunk_size = config.chunk_size
        width = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        landmark = (1, config.num_attention_heads, 1, 1, self.head_dim)
        self.adaptive_mu_k = nn.Parameter(torch.empty(landmark))
        self.adaptive_phi = nn.Parameter(torch.empty(landmark))

    def forward(
        self, hidden_states: Tensor, rotary: States, block: EvaBlock, cache: EvaCacheLayer | None = None
    ) -> Tensor:
        """Attend from the new tokens: [R, M, D] to [R, M, D]; `rotary` is cos and sin, [R or 1, M, d]."""
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        query, key, value = (
            p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)  # [R, H, M, d]
        memory = (key, value)
        if cache is not None:
            stored = cache.update(key, value, block, self.summarise)
            memory = memory if block.is_fresh else stored
        attend = self._attend_windows if block.is_long else self._attend_block
        output = attend(query, memory, block, cache)  # [R, M, H, d]
        if cache is not None:
            cache.summarise_after(block, self.summarise)
        return self.o_proj(output.flatten(2))  # [R, M, D]

    def summarise(self, keys: Tensor, values: Tensor) -> States:
        """Return summaries [..., H, T / C, d] of rotated keys and values [..., H, T, d]; C divides T."""
        keys, values = (x.unflatten(-2, (-1, self.chunk_size)) for x in (keys, values))  # [..., H, T / C, C, d]
        mu, phi = self.adaptive_mu_k[0], self.adaptive_phi[0]  # [H, 1, 1, d]
        key_logits = (keys * mu).sum(-1).float()  # [..., H, T / C, C]
        value_logits = self.scaling * ((keys * phi).sum(-1) - keys.square().sum(-1) / 2).float()  # [..., H, T / C, C]
        key_weights, value_weights = (x.softmax(-1)[..., None] for x in (key_logits, value_logits))
        return (key_weights.to(keys.dtype) * keys).sum(-2), (value_weights.to(values.dtype) * values).sum(-2)

    def _attend_block(self, query: Tensor, memory: States, block: EvaBlock, cache: EvaCacheLayer | None) -> Tensor:
        """Return the output of dense attention over [cached summaries | raw tokens | provisional summaries]."""
        keys, values = memory
        if cache is not None and block.provisional:
            more_keys, more_values = self.summarise(*cache.raw(block, block.provisional * block.window))
            keys, values = torch.cat([keys, more_keys], dim=2), torch.cat([values, more_values], dim=2)
        return self._attention(query, keys, values, block.mask)

    def _attend_windows(self, query: Tensor, memory: States, block: EvaBlock, cache: EvaCacheLayer | None) -> Tensor:
        """Attend window by window, each to itself and to summaries, so that no L x L scores are made."""
        count, window = block.provisional + 1, block.window
        if cache is None or block.is_fresh:
            raw = tuple(block.at_slots(states, count * window) for states in memory)  # [R, H, count W, d]
            past = tuple(states[:, :, :0] for states in memory)  # [R, H, 0, d]
        else:
            raw = cache.raw(block, count * window)  # [R, H, count W, d]
            past = tuple(states[:, :, : max(block.summaries)] for states in memory)  # [R, H, S, d]
        new = self.summarise(*(states[:, :, : (count - 1) * window] for states in raw))
        keys, values = (_per_window(*parts, count) for parts in zip(past, new, raw))
        query = block.at_slots(query, count * window).unflatten(2, (count, window)).transpose(1, 2).flatten(0, 1)
        output = self._attention(query, keys, values, block.mask)  # [R count, W, H, d]
        return block.take(output.unflatten(0, (-1, count)).flatten(1, 2))  # [R, M, H, d]

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        name = self.config._attn_implementation or "eager"
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        return function(self, query, key, value, mask, scaling=self.scaling, dropout=0.0)[0]


def _per_window(past: Tensor, new: Tensor, raw: Tensor, count: int) -> Tensor:
    """Return the keys (or values) of every window: [R * windows, H, cached + new summaries + W, d]."""
    summaries = torch.cat([past, new], dim=2)[:, None].expand(-1, count, -1, -1, -1)  # [R, count, H, S, d]
    windows = raw.unflatten(2, (count, -1)).transpose(1, 2)  # [R, count, H, W, d]
    return torch.cat([summaries, windows], dim=3).flatten(0, 1)


class EvaByteRMSNorm(nn.Module):
    """RMSNorm in float32; with `unit_offset` the gain is 1 + weight, rounded to the model's dtype first."""

    def __init__(self, config: EvaByteConfig) -> None:
        super().__init__()
        self.eps, self.unit_offset = config.rms_norm_eps, config.norm_add_unit_offset
        self.weight = nn.Parameter(torch.full((config.hidden_size,), 0.0 if self.unit_offset else 1.0))

    def forward(self, hidden_states: Tensor) -> Tensor:
        gain = 1 + self.weight if self.unit_offset else self.weight
        normed = nn.functional.rms_norm(hidden_states.float(), (hidden_states.shape[-1],), None, self.eps)
        return (gain * normed).to(hidden_states.dtype)


class EvaByteDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm layer: attention, then MLP, each added to the stream."""

    def __init__(self, config: EvaByteConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = EvaAttention(config, layer_idx)
        self.mlp = Qwen2MLP(config)  # Down(act(Gate x) * Up x)
        self.input_layernorm = EvaByteRMSNorm(config)
        self.post_attention_layernorm = EvaByteRMSNorm(config)

    def forward(self, hidden_states: Tensor, rotary: States, block: EvaBlock, cache: EvaCacheLayer | None) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), rotary, block, cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class EvaByteModel(StrictLoadingMixin, PreTrainedModel):
    """The backbone: token ids to hidden states.

    Positions and EVA's window grid follow from `attention_mask` and the cache, per sequence, so that a padded sequence
    equals the unpadded run. `position_ids` are needed only to mark packed documents: without a cache, a 0 starts one,
    and documents do not see each other.
    """

    config: EvaByteConfig
    config_class, base_model_prefix = EvaByteConfig, "model"
    remote_classes = {"AutoModel": "EvaByteModel"}
    supports_gradient_checkpointing, _supports_sdpa = True, True
    _no_split_modules = ["EvaByteDecoderLayer"]
    _skip_keys_device_placement = ["cache"]

    def __init__(self, config: EvaByteConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(EvaByteDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = EvaByteRMSNorm(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, EvaByteRMSNorm) and module.unit_offset:
            init.zeros_(module.weight)
        elif isinstance(module, EvaAttention):
            for parameter in (module.adaptive_mu_k, module.adaptive_phi):
                init.copy_(parameter, torch.randn_like(parameter).clamp(-1, 1) * module.scaling)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: EvaByteCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        draft_tree: DraftTree | None = None,
        past_key_values: EvaByteCache | None = None,
        **kwargs: object,
    ) -> BaseModelOutputWithPast:
        """Run the layers.

        Args:
            input_ids: [B, L] int64, or `inputs_embeds` [B, L, D].
            attention_mask: [B, past columns + L], 0 for padding on any side; only the last L columns are read.
            position_ids: [B or 1, L]; see the class.
            cache: Cache to continue and to extend.
            inputs_embeds: See `input_ids`.
            use_cache: Return a cache; defaults to the config's `use_cache`; off where activations are checkpointed.
            output_hidden_states: True for all layers, or the indices to return (-1: after the final norm).
            draft_tree: Which of `input_ids` descend from which, where drafts after the first one are a tree; needs a
                cache, whose `keep_last` leaves one path.
            past_key_values: The older name of `cache`.
        """
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = given_cache(cache, past_key_values)
        if cache is not None and not isinstance(cache, EvaByteCache):
            raise ValueError(f"{CACHE} is a {type(cache).__name__}; give an EvaByteCache(model.config)")
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            cache = None
        elif cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = EvaByteCache(self.config)
        inputs = hidden, attention_mask, position_ids, cache, output_hidden_states
        last, states = self._runner(cache)(*inputs, tree=draft_tree)
        found = cast(tuple[Tensor, ...] | None, states)  # entries that were not requested are None
        return BaseModelOutputWithPast(last_hidden_state=last, hidden_states=found, **untyped({CACHE: cache}))

    def continue_from(
        self,
        hidden: Tensor,
        layers: Iterable[Layer],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: EvaByteCache | None = None,
    ) -> Tensor:
        """Return the normed states [B, L, D] of other `layers` on `hidden` [B, L, D]; `cache` is theirs alone."""
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
    ) -> tuple[Tensor, LayerStates | None]:
        """Return the last states of the forward from embeddings [B, L, D] on, and those that were requested."""
        map_ = _sequence_map(hidden, attention_mask, position_ids if cache is None else None)
        hidden = hidden if map_ is None else map_.gather(hidden)  # [R, M, D]
        restored = (lambda states: states) if map_ is None else map_.restore
        counts = [hidden.shape[1]] * hidden.shape[0] if map_ is None or cache is None else map_.counts.tolist()
        plan = SequenceLengths(self.config.window_size, self.config.chunk_size) if cache is None else cache.sequences
        block = plan.begin(counts, hidden.shape[1], hidden.device, tree)
        block.with_mask(hidden.dtype, explicit=self.config._attn_implementation == "eager")
        rotary = self.rotary_emb(hidden, block.positions())
        chosen, states = _chosen(self.config, output_hidden_states), []
        for index, layer in enumerate(self.layers if layers is None else layers):
            states.append(restored(hidden) if index in chosen else None)
            hidden = layer(hidden, rotary, block, cache=None if cache is None else cache.layers[index])
        hidden = restored(self.norm(hidden))
        states.append(hidden if self.config.num_hidden_layers in chosen else None)
        plan.finish(block, counts)
        return hidden, tuple(states) if chosen else None


def _chosen(config: EvaByteConfig, wanted: bool | int | list[int] | None) -> set[int]:
    wanted = config.output_hidden_states if wanted is None else wanted
    total = config.num_hidden_layers + 1
    if wanted is None or isinstance(wanted, bool):
        return set(range(total)) if wanted else set()
    return {index % total for index in ([wanted] if isinstance(wanted, int) else wanted)}


def _sequence_map(hidden: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> SequenceMap | None:
    """Return where the tokens of every sequence are; None where all start in column 0 and are full."""
    batch, length = hidden.shape[:2]
    real = None if mask is None else mask[:, -length:].bool()  # [B, L]
    if position_ids is not None and bool((position_ids[:, 1:] == 0).any()):
        everything = torch.ones(batch, length, dtype=torch.bool, device=hidden.device)
        return SequenceMap.from_documents(everything if real is None else real, position_ids)
    if real is None or (real.device.type == "cpu" and bool(real.all())):  # elsewhere the host would wait for the device
        return None
    return SequenceMap.from_mask(real)
