"""Sequential modules (DeepSeek-V3): each turns a hidden state and the embedding of one more token into the next state.

x = eh_proj [enorm(Emb(t)); hnorm(h)], y = block(x), h' = norm(y). Depth k reads h^{k-1} and the k-th next token.
The main model's head reads h' as it reads its own last hidden state (`LMHeadView`). Some families hand on h' = y, and
what a head reads is norm(y). The residual of models with hyper-connections is several streams of hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from ...configuration.cache_names import CACHE
from ...configuration.fields import field, has_short_convolutions, rotates_anew
from ...configuration.mtp_families import MTPFamily, family_of
from ...generation.backbone.wrapped_models import Kwargs, call, checkpointing_paused, input_embeddings
from ..common.backbone_parts import (
    final_norm,
    finished_logits,
    layer_options,
    output_embeddings,
    rotary_positions,
    rotated,
    set_cache_slots,
)


class MTPModule(GradientCheckpointingLayer):
    """One sequential module: norms, a linear map, a decoder layer of the family, and a norm, which a family may lack.

    Attributes:
        eh_proj: Maps both, [2 H], to [H]; of several streams, [H + N H] to [N H].
        embedding_first: Order of the two halves that `eh_proj` reads.
        head: The module's own head, which reads what `norm` makes of its state; None: the main model's.
        early: The state is handed on without `norm`, which is the head's alone.
        streams: Streams that the block takes on a separate axis, [B, R, N, H], normed one by one; 0: no such axis.
        embed_tokens: Embeddings of the module's own, or None.
    """

    def __init__(
        self, enorm: nn.Module, hnorm: nn.Module, eh_proj: nn.Module, block: nn.Module, norm: nn.Module
    ) -> None:
        super().__init__()
        self.head: nn.Module | None = None
        self.embed_tokens: nn.Module | None = None
        self.enorm, self.hnorm, self.eh_proj, self.block, self.norm = enorm, hnorm, eh_proj, block, norm
        self.embedding_first, self.early, self.streams, self.slot, self.kind = True, False, 0, 0, "full_attention"

    def forward(
        self, hidden_states: Tensor, inputs_embeds: Tensor, earlier: tuple[Tensor, ...] | None = None, **options: object
    ) -> Tensor | tuple[Tensor, ...]:
        """Return h^k [B, R, H] of h^{k-1} and embeddings [B, R, H]; `options` are arguments of the layer.

        With keys and values of `earlier` columns (and keys of an indexer), or (), also those of all columns. They are
        tensors and no cache, so that gradients reach them through a checkpoint, which runs this twice.
        """
        device = next(self.eh_proj.parameters()).device  # a device map may put modules on another one
        if device.type != "meta":  # accelerate's hooks move the inputs of offloaded weights
            inputs_embeds, hidden_states = inputs_embeds.to(device), hidden_states.to(device)
        dtype = next(self.eh_proj.parameters()).dtype
        is_plain = dtype in (torch.float32, torch.float16, torch.bfloat16)  # quantised weights have their own rules
        if is_plain and dtype != hidden_states.dtype and not torch.is_autocast_enabled(hidden_states.device.type):
            raise ValueError(f"modules of {dtype} read {hidden_states.dtype}: use mtp.to(...), or bf16=True")
        if earlier is None and not hidden_states.shape[1]:
            return hidden_states  # not every family's norm takes nothing
        split = hidden_states.unflatten(-1, (self.streams, -1)) if self.streams > 1 else hidden_states  # [B, R, N, H]
        parts = self.enorm(inputs_embeds), self.hnorm(split).view_as(hidden_states)
        merged = self.eh_proj(torch.cat(parts if self.embedding_first else parts[::-1], dim=-1))  # [B, R, H or N H]
        if earlier is None:
            return self._handed_on(self.run(merged, **options))
        cache = new_cache(self.kind, self.slot + 1)
        if earlier:
            cache.update(earlier[0], earlier[1], self.slot)
            for keys in earlier[2:]:
                cache.update_indexer(keys, self.slot)
        state = self._handed_on(self.run(merged, **{CACHE: cache}, **options))
        layer = cast(CacheLayerMixin, cache.layers[self.slot])
        indexed = [layer.indexer_keys] if isinstance(layer, DynamicIndexedLayer) else []
        return state, *cast(list[Tensor], [layer.keys, layer.values, *indexed])

    def _handed_on(self, states: Tensor) -> Tensor:
        return states if self.early else self.norm(states)

    def run(self, states: Tensor, **options: object) -> Tensor:
        """Run the block alone, [B, R, H] to [B, R, H]; streams lie side by side, [B, R, N H]."""
        output = self.block(states.unflatten(-1, (self.streams, -1)) if self.streams else states, **options)
        output = output[0] if isinstance(output, tuple) else output  # layers of some families also return their index
        return output.flatten(-2) if self.streams else output  # [B, R, N H]


class MTPModules(nn.Module):
    """The chain of D modules, with the main model's configuration and a copy of its rotary embedding.

    Not an `nn.ModuleList`, which peft refuses to save, but its parts are named as in one. `kinds` are the modules'
    attention types, as in `layer_types`.
    """

    def __init__(
        self, modules: Iterable[MTPModule], config: PreTrainedConfig, rotary: nn.Module | None, kinds: Sequence[str]
    ) -> None:
        super().__init__()
        modules = list(modules)
        self.config, self.count = config, len(modules)
        for index, module in enumerate(modules):
            module.slot = index  # of the modules' own cache
            module.kind = kinds[index]
            self.add_module(str(index), module)
        set_cache_slots(module.block for module in modules)
        self.rotary_emb = copy.deepcopy(rotary)

    def __getitem__(self, index: int) -> MTPModule:
        return cast(MTPModule, self.get_submodule(str(range(self.count)[index])))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[MTPModule]:
        return (self[index] for index in range(self.count))

    def at(self, depth: int) -> MTPModule:
        """Return the module of a depth k >= 1; wrappers of peft pass methods on, and no indices."""
        return self[min(depth, self.count) - 1]

    @property
    def embed_tokens(self) -> nn.Module | None:
        """Embeddings of the modules' own; None: they read the main model's."""
        return self[0].embed_tokens if self.count else None

    @property
    def kinds(self) -> list[str]:
        """Attention type of each module as in `layer_types`."""
        return [module.kind for module in self]

    def new_cache(self) -> Cache:
        """Return an empty cache for all modules."""
        kinds, window = self.kinds, field(self.config, "sliding_window")
        if has_short_convolutions(self.config):
            sizes = {"number_of_states": self.config.number_of_conv_states, "sliding_window": window}
            return Cache(layers=[DYNAMIC_LAYER_TYPE_MAPPING[kind](**sizes) for kind in kinds])
        if "sliding_attention" not in kinds:
            return new_cache(kinds[0], self.count)
        bounded = [kind == "sliding_attention" for kind in kinds]
        return Cache(layers=[DynamicSlidingWindowLayer(window) if each else DynamicLayer() for each in bounded])

    def step(
        self,
        k: int,
        hidden_states: Tensor,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        prepared: Kwargs | None = None,
    ) -> Tensor:
        """Return h^k, [B, R, H], as depth k >= 1 hands it on, from h^{k-1} and embeddings of tokens k positions ahead.

        Beyond D the last module is reused. Positions [B or 1, R] are as `rotary_positions` reads them; the mask is
        [B, past + R], 0 for padding, or what is seen, [B, 1, R, W] bool; module k has slot k - 1 of their own cache;
        `prepared` is a result of `options` for the same positions, mask, columns and attention type.
        """
        index = min(k, self.count) - 1
        options = prepared or self.options(index, hidden_states, position_ids, attention_mask, past_key_values)
        with checkpointing_paused(self):
            return self[index](hidden_states, inputs_embeds, **options)

    def options(
        self,
        index: int,
        states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Kwargs:
        """Return the keyword arguments of the block of module `index`, from 0; arguments as for `step`."""
        given = states, attention_mask, position_ids, past_key_values, self[index].kind, index
        return layer_options(self.config, self.rotary_emb, *given)

    def rotary(self, states: Tensor, position_ids: Tensor, index: int = -1) -> tuple[Tensor, Tensor] | None:
        """Return the rotary embedding of position ids for module `index`."""
        if self.rotary_emb is None:
            return None
        positions = rotary_positions(position_ids)
        if rotates_anew(self.config):
            positions = positions.expand(3, len(states), -1)  # [3, B, R]
        return rotated(self.rotary_emb, states, positions, self[index].kind)


class LMHeadView:
    """The head that reads states of the main model or of a `module`, and its family's changes to logits."""

    def __init__(self, main: PreTrainedModel, module: MTPModule | None = None) -> None:
        self.main, self.module = main, module

    @property
    def has_own_head(self) -> bool:
        """Whether it is the module's head, and not the main model's."""
        return self.module is not None and self.module.head is not None

    @property
    def head(self) -> nn.Module:
        """The output embeddings of the main model, or the module's own."""
        own = None if self.module is None else self.module.head
        return output_embeddings(self.main) if own is None else own

    def __call__(self, states: Tensor) -> Tensor:
        """Return logits [..., V] of states [..., H] as they are handed on."""
        return self.logits(self.normed(states))

    def normed(self, states: Tensor) -> Tensor:
        """Return what the head reads of states [..., H] as they are handed on."""
        if self.module is None or not self.module.early:
            return states
        if not states.numel():  # as in the module's forward
            return states[..., : self.main.config.get_text_config().hidden_size]
        return self.module.norm(states)

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits [..., V] of what the head reads."""
        return self.finish(call(self.head, normed))

    def finish(self, logits: Tensor) -> Tensor:
        """Apply the family's changes to logits of the head, of all tokens or of some."""
        return finished_logits(logits, self.main.config.get_text_config())


def new_cache(kind: str, count: int) -> Cache:
    """Return an empty cache with so many layers, which keep all columns, for one attention type."""
    if kind in ("indexed_attention", "minimax_m3_sparse"):
        return Cache(layers=[DYNAMIC_LAYER_TYPE_MAPPING[kind]() for _ in range(count)])
    return DynamicCache()


class OneStream(nn.Module):
    """A substitute for a hyper-connection in a layer with one stream; `mixes`: with a matrix of streams, 1."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes

    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        """Return weights 1 [B, R, 1] of the output, a matrix [B, R, 1, 1] where it mixes, and the stream [B, R, H]."""
        ones = streams.new_ones(streams.shape[:-1])  # [B, R, 1]
        return (ones, ones[..., None], streams.squeeze(-2)) if self.mixes else (ones, streams.squeeze(-2))


class StreamProjection(nn.Module):
    """Linear maps of an embedding and of N streams of a hidden state; the embedding's is added to every stream's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.e_proj, self.h_proj = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)

    def forward(self, joined: Tensor) -> Tensor:
        """Map [B, R, H + N H], the embedding first, to [B, R, N H]."""
        embeds, *streams = joined.split(self.e_proj.in_features, dim=-1)  # [B, R, H], N of [B, R, H]
        added = self.e_proj(embeds)  # [B, R, H]
        return torch.cat([self.h_proj(stream) + added for stream in streams], dim=-1)  # [B, R, N H]


class StreamHead(nn.Module):
    """The head's input from N streams: a mixer makes one of them (`DeepseekV4HyperHead`), a norm follows."""

    def __init__(self, mixer: nn.Module, norm: nn.Module, count: int) -> None:
        super().__init__()
        self.hc_head, self.out_norm, self.count = mixer, norm, count

    def forward(self, streams: Tensor) -> Tensor:
        """Map [..., N H] to [..., H]."""
        mixed = self.hc_head(streams.reshape(1, -1, self.count, streams.shape[-1] // self.count))  # [1, positions, H]
        return self.out_norm(mixed).view(*streams.shape[:-1], mixed.shape[-1])


@dataclass
class MainOutput:
    """Output of a main model without its head."""

    outputs: Any  # those of its class
    inputs_embeds: Tensor  # [B, L, H] that its first layer read, features of images among them
    position_ids: Tensor | None  # as its first layer read them
    state: Tensor  # [B, L, H], h^0, which the first module reads: after `last_map`, or before it (`early`)


def run_main(
    main: PreTrainedModel,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    position_ids: Tensor | None,
    inputs: Kwargs,
) -> MainOutput:
    """Call a main model without its head, on ids [B, L] or embeddings [B, L, H]; `inputs` are pixels, for example."""
    decoder, body, config = main.get_decoder(), cast(nn.Module, main.base_model), main.config
    if not has_towers(config):
        body = decoder
        if inputs_embeds is None:
            inputs_embeds = cast(Tensor, input_embeddings(main)(input_ids))
            if field(config, "ple_layer_ids"):
                inputs = inputs | {"ple_input_ids": input_ids}
            if "hash_moe" not in (field(config, "mlp_layer_types") or ()):  # experts that are chosen by a token's id
                input_ids = None
    family, inputs_read = family_of(config), {"inputs_embeds": inputs_embeds, "position_ids": position_ids}
    read = inputs_read | ({"inputs_embeds": None} if body is decoder and input_ids is not None else {})
    looked_at = _inputs_of(decoder) if has_towers(config) else nullcontext(inputs_read)
    with looked_at as seen, _inputs_of(last_map(decoder, family)) if family.early else nullcontext({}) as mapped:
        outputs = body(input_ids=input_ids, **read, **inputs)
    state = mapped["args"][0].flatten(2) if family.early else outputs.last_hidden_state  # [B, L, H or N H]
    return MainOutput(outputs, cast(Tensor, seen["inputs_embeds"]), seen.get("position_ids"), state)


def last_map(decoder: nn.Module, family: MTPFamily) -> nn.Module:
    """Return the module that reads the last layer's output: a norm, or a mixer of streams."""
    named = dict(decoder.named_children()) if family.streams else {}
    return named.get("hyper_connection_mixer") or named.get("hc_head") or final_norm(decoder)


def mapped_state(decoder: nn.Module, config: PreTrainedConfig, state: Tensor) -> Tensor:
    """Return the input of the unembedding, [B, L, H], from a state before `last_map`."""
    family, text = family_of(config), config.get_text_config()
    last, streams = last_map(decoder, family), field(text, "hc_mult") if family.streams else None
    return last(state) if streams is None else final_norm(decoder)(last(state.unflatten(-1, (streams, -1))))


@contextmanager
def _inputs_of(module: nn.Module) -> Iterator[Kwargs]:
    """Yield a dict that receives the arguments of a module's next call in this thread; positional ones as `args`."""
    seen: Kwargs = {}
    own = get_ident()

    def note(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None) -> None:
        if get_ident() == own and kwargs is not None:
            seen.update(kwargs, args=args)

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def has_towers(config: PreTrainedConfig) -> bool:
    """Return whether a model has towers of other modalities."""
    return config.get_text_config() is not config
