"""Sequential modules (DeepSeek-V3): each turns a hidden state and the embedding of one more token into the next state.

x = eh_proj [enorm(Emb(t)); hnorm(h)], y = block(x), h' = norm(y). Depth k reads h^{k-1} and the token k places ahead.
Knows neither the head, nor losses, nor drafts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicIndexedLayer
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.modeling_layers import GradientCheckpointingLayer


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
        parts = self.enorm(inputs_embeds.to(device)), self.hnorm(hidden_states.to(device))
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

    def run(self, states: torch.Tensor, **options: Any) -> torch.Tensor:
        """The block alone, [B, R, H] to [B, R, H]."""
        output = self.block(states, **options)  # some families' layers also hand their index on
        return output[0] if isinstance(output, tuple) else output


class MTPModules(nn.ModuleList):
    """The chain of modules, with what they share with the main model: its configuration and its rotary positions.

    Args:
        modules: The modules in order.
        config: Configuration of the main model.
        rotary: Its rotary embedding, if any; it stays a part of the main model.
        kinds: How each module attends, in the words of `layer_types`; like the main model's last layer where None.
    """

    def __init__(
        self,
        modules: Iterable[MTPModule],
        config: PreTrainedConfig,
        rotary: nn.Module | None,
        kinds: Sequence[str] | None = None,
    ) -> None:
        super().__init__(modules)
        self.config = config
        self._rotary = (rotary,)  # in a tuple, so that it is not registered a second time
        for index, module in enumerate(self):
            module.slot = index  # the module's place in the modules' own cache
            module.kind = kinds[index] if kinds else layer_kind(config, -1)
            for owner in module.block.modules():
                if isinstance(getattr(owner, "layer_idx", None), int):
                    owner.layer_idx = index

    def new_cache(self) -> Cache:
        """An empty cache for all modules; one that forgets nothing, a sliding window being a matter of the mask."""
        return new_cache(self[0].kind)

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
    ) -> torch.Tensor:
        """One depth of the chain.

        Args:
            k: Depth from 1 on; beyond D the last module is used again.
            hidden_states: h^{k-1}, [B, R, H], after the norm of its depth.
            inputs_embeds: Embeddings of the tokens k places further on, [B, R, H].
            position_ids: [B or 1, R]; a constant shift changes nothing.
            attention_mask: [B, past + R], 0 for padding, or a finished mask [B, 1, R, past + R].
            past_key_values: The modules' own cache; module k has slot k - 1.

        Returns:
            h^k, [B, R, H], after the module's norm.
        """
        index = min(k, len(self)) - 1
        options = self.options(index, hidden_states, position_ids, attention_mask, past_key_values)
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
        """The main model's rotary embedding of position_ids [B or 1, R], as module `index` takes it."""
        (rotary,) = self._rotary
        if rotary is None:
            return None
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        return rotary(states, position_ids, self[index].kind) if by_kind else rotary(states, position_ids)


def layer_kind(config: PreTrainedConfig, index: int) -> str:
    """How a layer attends, in the words of `layer_types`."""
    if layer_types := getattr(config, "layer_types", None):
        return layer_types[index]
    return "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"


def new_cache(kind: str) -> Cache:
    """An empty cache whose layers forget nothing, for attention of one kind."""
    indexed = kind == "indexed_attention"
    return Cache(layer_class_to_replicate=DynamicIndexedLayer) if indexed else DynamicCache()
