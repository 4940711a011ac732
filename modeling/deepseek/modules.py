"""Sequential modules (DeepSeek-V3): each turns a hidden state and the embedding of one more token into the next state.

x = eh_proj [enorm(Emb(t)); hnorm(h)], y = block(x), h' = norm(y). Depth k reads h^{k-1} and the token k places ahead.
Knows neither the head, nor losses, nor drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from ..checkpointing import caches_kept


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
        self.embedding_first = embedding_first

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
            earlier: Keys and values of columns before these, or (). They come as tensors and not as a cache, so that
                gradients reach them through a checkpoint, which runs this twice.
            **options: The decoder layer's.

        Returns:
            h^k [B, R, H]; with `earlier`, also the keys and values of all columns.
        """
        device = self.enorm.weight.device  # with a device map, modules may lie on another device than the main model
        if device.type != "meta":  # weights that are offloaded fetch their inputs themselves
            inputs_embeds, hidden_states = inputs_embeds.to(device), hidden_states.to(device)
        parts = self.enorm(inputs_embeds), self.hnorm(hidden_states)
        merged = self.eh_proj(torch.cat(parts if self.embedding_first else parts[::-1], dim=-1))
        if earlier is None:
            return self.norm(self.block(merged, **options))
        cache, slot = DynamicCache(), self.block.self_attn.layer_idx
        if earlier:
            cache.update(*earlier, slot)
        state = self.norm(self.block(merged, past_key_values=cache, **options))
        return state, cache.layers[slot].keys, cache.layers[slot].values


class MTPModules(nn.Module):
    """The chain of modules, with the main model's configuration and a copy of its rotary embedding.

    Not an `nn.ModuleList`, which peft refuses to save, but its parts are named as in one.

    Args:
        modules: The modules in order.
        config: Configuration of the main model.
        rotary: Its rotary embedding.

    Attributes:
        count: D.
    """

    def __init__(self, modules: Iterable[MTPModule], config: PreTrainedConfig, rotary: nn.Module) -> None:
        super().__init__()
        self.config, self.count = config, 0
        for index, module in enumerate(modules):
            module.block.self_attn.layer_idx = index  # the module's place in the modules' own cache
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
        index = min(k, self.count) - 1
        mask = attention_mask
        if mask is None or mask.dim() < 4:
            make_mask = create_sliding_window_causal_mask if is_sliding(self.config) else create_causal_mask
            mask = make_mask(
                config=self.config,
                inputs_embeds=hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
                layer_idx=index,
            )
        with caches_kept(self):
            return self[index](
                hidden_states,
                inputs_embeds,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                position_embeddings=self.rotary_emb(hidden_states, position_ids),
            )


def is_sliding(config: PreTrainedConfig) -> bool:
    """Whether the modules attend within a sliding window: they do what the main model's last layer does."""
    if layer_types := getattr(config, "layer_types", None):
        return layer_types[-1] == "sliding_attention"
    return getattr(config, "sliding_window", None) is not None
