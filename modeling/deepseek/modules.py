"""Sequential modules (DeepSeek-V3): each turns a hidden state and the embedding of one more token into the next state.

x = eh_proj [enorm(Emb(t)); hnorm(h)], y = block(x), h' = norm(y). Depth k reads h^{k-1} and the token k places ahead.
Knows neither the head, nor losses, nor drafts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.modeling_layers import GradientCheckpointingLayer

from ..wrapped_models import caches_kept


class MTPModule(GradientCheckpointingLayer):
    """One module.

    Args:
        enorm: Norm of embeddings.
        hnorm: Norm of hidden states.
        eh_proj: From both, [2 H], to [H].
        block: A decoder layer of the family.
        norm: Norm whose output goes to the head and to the next module (`nn.Identity` where a family has none).
        embedding_first: Order of the two halves that `eh_proj` reads.
    """

    def __init__(
        self,
        enorm: nn.Module,
        hnorm: nn.Module,
        eh_proj: nn.Module,
        block: nn.Module,
        norm: nn.Module,
        embedding_first: bool = True,
    ) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.eh_proj, self.block, self.norm = enorm, hnorm, eh_proj, block, norm
        self.embedding_first, self.slot, self.kind = embedding_first, 0, "full_attention"

    def forward(
        self,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor,
        earlier: tuple[torch.Tensor, ...] | None = None,
        **options: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One depth.

        Args:
            hidden_states: h^{k-1}, [B, R, H].
            inputs_embeds: [B, R, H].
            earlier: Keys and values of columns before these (and keys of an indexer, where there is one), or (). They
                come as tensors and not as a cache, so that gradients reach them through a checkpoint, which runs this
                twice.
            **options: The decoder layer's.

        Returns:
            h^k [B, R, H]; with `earlier`, also what it would hold of all columns.
        """
        device = self.enorm.weight.device  # with a device map, modules may lie on another device than the main model
        if device.type != "meta":  # weights that are offloaded fetch their inputs themselves
            inputs_embeds, hidden_states = inputs_embeds.to(device), hidden_states.to(device)
        self._check_dtype(hidden_states)
        parts = self.enorm(inputs_embeds), self.hnorm(hidden_states)
        merged = self.eh_proj(torch.cat(parts if self.embedding_first else parts[::-1], dim=-1))
        if earlier is None:
            return self.norm(self.run(merged, **options))
        cache = new_cache(self.kind)
        if earlier:
            cache.update(*earlier[:2], self.slot)
            for keys in earlier[2:]:
                cache.update_indexer(keys, self.slot)
        state = self.norm(self.run(merged, past_key_values=cache, **options))
        layer = cache.layers[self.slot]
        indexed = (layer.indexer_keys,) if isinstance(layer, DynamicIndexedLayer) else ()
        return state, layer.keys, layer.values, *indexed

    def _check_dtype(self, states: torch.Tensor) -> None:
        dtype = self.eh_proj.weight.dtype
        is_plain = dtype in (torch.float32, torch.float16, torch.bfloat16)  # quantised weights bring their own rules
        if is_plain and dtype != states.dtype and not torch.is_autocast_enabled(states.device.type):
            raise ValueError(
                f"the modules are {dtype} and the main model gives {states.dtype}: use model.mtp.to({states.dtype}), "
                "or train under autocast (bf16=True in TrainingArguments)"
            )

    def run(self, states: torch.Tensor, **options: Any) -> torch.Tensor:
        """The block alone, [B, R, H] to [B, R, H]."""
        output = self.block(states, **options)  # some families' layers also hand their index on
        return output[0] if isinstance(output, tuple) else output


class MTPModules(nn.Module):
    """The chain of modules, with the main model's configuration and a copy of its rotary embedding.

    Not an `nn.ModuleList`, which peft refuses to save, but its parts are named as in one.

    Args:
        modules: The modules in order.
        config: Configuration of the main model.
        rotary: Its rotary embedding, if any.
        kinds: How each module attends, in the words of `layer_types`; like the main model's last layer where None.

    Attributes:
        count: D.
    """

    def __init__(
        self,
        modules: Iterable[MTPModule],
        config: PreTrainedConfig,
        rotary: nn.Module | None,
        kinds: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.count = config, 0
        for index, module in enumerate(modules):
            module.slot = index  # the module's place in the modules' own cache
            module.kind = kinds[index] if kinds else layer_kind(config, -1)
            for owner in module.block.modules():
                if isinstance(getattr(owner, "layer_idx", None), int):
                    owner.layer_idx = index
            self.add_module(str(index), module)
            self.count += 1
        self.rotary_emb = copy.deepcopy(rotary)

    def __getitem__(self, index: int) -> MTPModule:
        return self.get_submodule(str(range(self.count)[index]))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[MTPModule]:
        return (self[index] for index in range(self.count))

    @property
    def last(self) -> MTPModule:
        """The module of depth D, which goes on beyond it."""
        return self[-1]

    @property
    def kinds(self) -> list[str]:
        """How each module attends, in the words of `layer_types`."""
        return [module.kind for module in self]

    def new_cache(self, forgets: bool = True) -> Cache:
        """An empty cache for all modules; layers with a sliding window forget what is older, if they may."""
        is_bounded = [kind == "sliding_attention" and forgets for kind in self.kinds]
        if not any(is_bounded):
            return new_cache(self.kinds[0])
        window = self.config.sliding_window
        return Cache(
            layers=[DynamicSlidingWindowLayer(window) if bounded else DynamicLayer() for bounded in is_bounded]
        )

    def mask(
        self,
        index: int,
        states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **options: Any,
    ) -> Any:
        """What a module's attention takes for states [B, R, H] behind the columns of a cache.

        Args:
            index: The module, from 0.
            states: For their shape, dtype and device.
            position_ids: [B or 1, R].
            attention_mask: [B, past + R], 0 for padding.
            past_key_values: The modules' own cache.
            options: As for transformers' own functions.
        """
        return LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[self[index].kind](
            config=self.config,
            inputs_embeds=states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
            layer_idx=index,
            **options,
        )

    def step(
        self,
        k: int,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        prepared: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """One depth of the chain.

        Args:
            k: Depth from 1 on; beyond D the last module is used again.
            hidden_states: h^{k-1}, [B, R, H], after the norm of its depth.
            inputs_embeds: Embeddings of the tokens k places further on, [B, R, H].
            position_ids: [B or 1, R]; a constant shift changes nothing.
            attention_mask: [B, past + R], 0 for padding, or a finished mask [B, 1, R, past + R].
            past_key_values: The modules' own cache; module k has slot k - 1.
            prepared: What `options` made of the same positions, mask and columns for a module that attends alike.

        Returns:
            h^k, [B, R, H], after the module's norm.
        """
        index = min(k, self.count) - 1
        options = prepared or self.options(index, hidden_states, position_ids, attention_mask, past_key_values)
        with caches_kept(self):
            return self[index](hidden_states, inputs_embeds, **options)

    def options(
        self,
        index: int,
        states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> dict[str, Any]:
        """What the block of module `index`, from 0, takes beside its states [B, R, H]; arguments as for `step`."""
        mask = attention_mask
        if mask is None or mask.dim() < 4:
            mask = self.mask(index, states, position_ids, attention_mask, past_key_values)
        return {
            "attention_mask": mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "position_embeddings": self.rotary(states, position_ids, index),
        }

    def rotary(
        self, states: torch.Tensor, position_ids: torch.Tensor, index: int = -1
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The rotary embedding of position_ids [B or 1, R], as module `index` takes it."""
        if self.rotary_emb is None:
            return None
        kind = (self[index].kind,) if _knows_kinds(type(self.rotary_emb)) else ()
        return self.rotary_emb(states, position_ids, *kind)


@cache
def _knows_kinds(rotary: type[nn.Module]) -> bool:
    """Whether a rotary embedding is asked by kind of layer."""
    return "layer_type" in inspect.signature(rotary.forward).parameters


def layer_kind(config: PreTrainedConfig, index: int) -> str:
    """How a layer attends, in the words of `layer_types`."""
    if layer_types := getattr(config, "layer_types", None):
        return layer_types[index]
    return "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"


def is_sliding(config: PreTrainedConfig) -> bool:
    """Whether the main model's last layer attends within a sliding window."""
    return layer_kind(config, -1) == "sliding_attention"


def new_cache(kind: str) -> Cache:
    """An empty cache whose layers forget nothing, for attention of one kind."""
    indexed = kind == "indexed_attention"
    return Cache(layer_class_to_replicate=DynamicIndexedLayer) if indexed else DynamicCache()
