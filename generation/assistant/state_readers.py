"""Drafts of Gemma 4's assistants, which read the backbone's own keys and values.

Gemma 4's assistants have no keys and values. The backbone's last layer with full attention and its last one with a
sliding window, of those that make keys and values, lend them to all layers of the assistant of their kind. A draft is a
chain of single positions, and nothing has to be rolled back:

    token      b      d1     d2          embedded by the backbone
    state      h      s1     s2          h: the backbone's last state before b; s: the assistant's output
    position   n      n      n           b's own, for the whole draft
    reads      keys and values of the n verified tokens before b; of drafts there are none
    proposes   d1     d2     d3

transformers before 5.24 looks up which layers compute what the others reuse, finds none, and refuses to build any; the
configurations below define `kv_sharing_modes` for that case.
"""

from __future__ import annotations

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...configuration.cache_names import cache_of
from ..backbone.cache import RaggedLayer
from ..backbone.wrapped_models import Kwargs, untyped
from ..call.options import DraftOptions, grow_chain
from ..call.sequences import Sequences
from ..contract import CacheView, DraftSession, DraftTree, PrefillOutput, TargetOutput, VerificationResult
from ..tensors.masks import additive_mask, cached_arange, to_device
from .session import SharedVocabulary


def lending_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Return the last layer of each kind that makes keys and values, by kind."""
    own = len(config.layer_types) - (getattr(config, "num_kv_shared_layers", 0) or 0)
    return {kind: layer for layer, kind in enumerate(config.layer_types[:own])}


class _Reusing:
    """A configuration of transformers all of whose layers may read keys and values of another model."""

    num_hidden_layers: int
    num_kv_shared_layers: int

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        if self.num_kv_shared_layers == self.num_hidden_layers:
            return ["reuse"] * self.num_hidden_layers
        return untyped(super()).kv_sharing_modes


class Gemma4TextConfig(_Reusing, transformers.Gemma4TextConfig):
    """The same for assistants of plain models."""


class Gemma4UnifiedTextConfig(_Reusing, transformers.Gemma4UnifiedTextConfig):
    """The same for assistants of unified models."""


_ASSISTANTS = {"gemma4_assistant": Gemma4TextConfig, "gemma4_unified_assistant": Gemma4UnifiedTextConfig}


def borrows_states(config: PreTrainedConfig) -> bool:
    """Return whether a model reads the keys and values of its backbone and makes none itself."""
    return config.model_type in _ASSISTANTS


def buildable(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration from which transformers can build an assistant; others are unchanged."""
    if borrows_states(config):
        config.text_config.__class__ = _ASSISTANTS[config.model_type]
    return config


class Gemma4Chain(DraftSession):
    """The drafts of one call; see the head of this file."""

    hidden_layers = -1
    supports_confidence_threshold = reads_cache = True

    def __init__(self, model: PreTrainedModel, options: DraftOptions, vocabulary: SharedVocabulary) -> None:
        self.model, self.options, self.num_tokens = model, options, options.num_tokens
        self.vocabulary = vocabulary
        self.layers = lending_layers(options.backbone.config.get_text_config())

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        self.view, self.cache = view, cache_of(outputs)
        self.state = outputs.hidden_states[-1][:, -1:]  # [B, 1, D]

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Take the state before each sequence's last token; any state where it has ended."""
        states = outputs.state()  # [B, k + 1, D]
        last = to_device(result.num_accepted, states.device)  # [B]
        self.state = states[cached_arange(len(states), states.device), last][:, None]  # [B, 1, D]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        last, state, lent, masks = tokens.last(), self.state, self._lent(), self.options.masks(tokens)

        def step(token: Tensor | None) -> tuple[Tensor, Tensor | None]:
            nonlocal state
            logits, state = self._step(last if token is None else token, state, lent)
            return self.vocabulary.choose(logits.to(last.device), self.options, masks)

        return grow_chain(step, self.options, length)

    def _lent(self) -> Kwargs:
        """Return what all steps of a draft read; a window holds the last W - 1 verified tokens, for any cache."""
        own, device = self.model.config.get_text_config(), self.model.device
        states, masks = {}, {}
        for kind in set(own.layer_types):
            layer = self.cache.layers[self.layers[kind]]
            window = own.sliding_window - 1 if kind == "sliding_attention" else None
            if isinstance(layer, RaggedLayer):
                keys, values, seen = layer.verified(window)  # [B, H, W, D] twice, [B, W]
            else:
                keys, values = (part[:, :, -(window or 0) :] for part in (layer.keys, layer.values))
                seen = self.view.mask[:, -keys.shape[2] :] if self.view.is_padded else None  # [B, W]
            states[kind] = keys.to(device, self.model.dtype), values.to(device, self.model.dtype)
            masks[kind] = None if seen is None else additive_mask(seen[:, None, None].to(device), self.model.dtype)
        position = self.view.counts[:, None].to(device)  # [B, 1]
        return {"shared_kv_states": states, "attention_mask": masks, "position_ids": position}

    def _step(self, token: Tensor, state: Tensor, lent: Kwargs) -> tuple[Tensor, Tensor]:
        """Return logits [B, V] of the token after [B], and the state [B, 1, D] that the next step reads.

        transformers' own forward would make the masks again in every step, and synchronise with the device for that.
        """
        model = self.model
        device, dtype = model.device, model.dtype
        embedded = self.options.backbone.get_input_embeddings()(token[:, None])  # [B, 1, D]
        inputs = torch.cat([embedded.to(device, dtype), state.to(device, dtype)], dim=-1)  # [B, 1, 2 D]
        hidden = model.model(inputs_embeds=model.pre_projection(inputs), use_cache=False, **lent).last_hidden_state
        if model.masked_embedding is None:
            logits = model.lm_head(hidden)  # [B, 1, V]
        else:
            logits = _with_own_least(model.masked_embedding(hidden, model.lm_head.weight), model.config)
        return logits[:, -1], model.post_projection(hidden)  # [B, V], [B, 1, D]


def _with_own_least(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Give tokens of clusters that were not scored the smallest score of their sequence minus 1.

    transformers takes the least score of the batch, so that a sequence's drafts would depend on the other sequences.
    """
    if config.centroid_intermediate_top_k >= config.num_centroids:
        return logits
    unseen = logits == logits.amin(-1, keepdim=True)  # [B, 1, V]
    return torch.where(unseen, logits.masked_fill(unseen, torch.inf).amin(-1, keepdim=True) - 1, logits)
