"""Drafts of transformers' assistants that read the backbone: its keys and values (Gemma 4) or its states (DFlash).

Gemma 4's assistants have no keys and values. The backbone's last layer with full attention and its last one with a
sliding window, of those that make keys and values, lend them to all layers of the assistant of their kind. A draft is a
chain of single positions, and nothing has to be rolled back:

    token      b      d1     d2          embedded by the backbone
    state      h      s1     s2          h: the backbone's last state before b; s: the assistant's output
    position   n      n      n           b's own, for the whole draft
    reads      keys and values of the n verified tokens before b; of drafts there are none
    proposes   d1     d2     d3

DFlash assistants fill in a block in one forward. Their keys and values are of two kinds: those of verified tokens, made
of the backbone's states of some layers, and those of the block. The block's first token is b; the others are a mask
token. All of the block see each other and every verified token, within a window where there is one:

    cache      states of the verified tokens           written once, as they are accepted
    inputs     states of the new ones | b  m  m  m     embedded by the backbone, without a norm of its embeddings
    proposes                            -  d1 d2 d3    by the backbone's unembedding, each independent of the others

Sequences accept different numbers of tokens. Each has its block in the columns after the most that any has accepted, at
the positions after its own; nobody sees the columns between, and the next cycle overwrites the block.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...configuration.cache_names import CACHE, cache_of
from ..backbone.cache import CacheLayout, RaggedLayer
from ..call.options import DraftOptions
from ..call.sequences import NewTokens, Sequences
from ..contract import (
    CacheView,
    DraftSession,
    DraftTree,
    HiddenLayers,
    PrefillOutput,
    States,
    TargetOutput,
    VerificationResult,
)
from ..tensors.masks import additive_mask, cached_arange, cached_range, check_attention, model_mask, to_device
from ..tensors.wrapped_models import Kwargs, has_own_cache
from ..trees.growth import block_chain, grow_chain
from .session import SharedVocabulary


def lending_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Return the last layer of each kind that makes keys and values, by kind."""
    own = len(config.layer_types) - (getattr(config, "num_kv_shared_layers", 0) or 0)
    return {kind: layer for layer, kind in enumerate(config.layer_types[:own])}


def check_lender(assistant: PreTrainedModel, backbone: PreTrainedModel) -> None:
    """Refuse a backbone whose states the assistant cannot read.

    Raises:
        ValueError: Another family, another width, or keys and values of another shape.
    """
    name, theirs = type(assistant).__name__, backbone.config.get_text_config()
    if not theirs.model_type.startswith("gemma4"):
        raise ValueError(f"{name} needs a Gemma 4 backbone, not model_type={theirs.model_type!r}")
    if assistant.config.backbone_hidden_size != theirs.hidden_size:
        own, other = assistant.config.backbone_hidden_size, theirs.hidden_size
        raise ValueError(f"backbone_hidden_size={own} of {name}, but {type(backbone).__name__} has hidden_size={other}")
    own, lenders = assistant.config.get_text_config(), lending_layers(theirs)
    for layer, kind in enumerate(own.layer_types):
        wanted, lent = _shape(own, layer), _shape(theirs, lenders[kind]) if kind in lenders else None
        if wanted != lent:
            raise ValueError(f"layer {layer} of {name} reads {kind} keys {wanted} (heads, width), not {lent}")


def _shape(config: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """Return how many heads of keys a layer has, and their width."""
    of_layer = config.per_layer_config[layer]
    return of_layer.num_key_value_heads, of_layer.head_dim


class Gemma4Chain(DraftSession):
    """The drafts of one call; see the head of this file."""

    hidden_layers = -1
    supports_confidence_threshold = reads_cache = True

    def __init__(self, model: PreTrainedModel, options: DraftOptions, vocabulary: SharedVocabulary) -> None:
        self.model, self.options, self.num_tokens = model, options, options.num_tokens
        self.vocabulary = vocabulary
        self.layers = lending_layers(options.backbone.config.get_text_config())

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        """Take the state before the first new token, [B, 1, D], and the cache, which it only reads."""
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
        """Return the backbone's keys and values, their masks, and the position, which all steps of a draft read.

        A window holds the last W - 1 verified tokens, for every kind of cache.
        """
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


def check_source(assistant: PreTrainedModel, backbone: PreTrainedModel) -> None:
    """Refuse a backbone whose states the assistant cannot read, or whose embeddings it cannot use.

    Raises:
        ValueError: Another width, fewer layers or ids, its own kind of cache, or attention without dense masks.
    """
    own, theirs, name = assistant.config, backbone.config.get_text_config(), type(backbone).__name__
    check_attention(own, "DFlash assistants")
    if own.hidden_size != theirs.hidden_size:
        raise ValueError(f"hidden_size={own.hidden_size} of the assistant, but {name} has {theirs.hidden_size}")
    if not 0 <= min(own.target_layer_ids) <= max(own.target_layer_ids) < theirs.num_hidden_layers:
        layers = f"{name} has layers 0 to {theirs.num_hidden_layers - 1}"
        raise ValueError(f"target_layer_ids={own.target_layer_ids} of the assistant, but {layers}")
    if not 0 <= own.mask_token_id < theirs.vocab_size:
        raise ValueError(f"mask_token_id={own.mask_token_id}, but {name} has ids 0 to {theirs.vocab_size - 1}")
    if has_own_cache(backbone):
        raise ValueError(f"{name} has its own kind of cache, whose columns the assistant's cannot follow")


class DFlashSession(DraftSession):
    """The drafts of one call; see the head of this file."""

    supports_confidence_threshold = True

    def __init__(self, model: PreTrainedModel, options: DraftOptions) -> None:
        self.model, self.options, self.num_tokens = model, options, options.num_tokens
        self.hidden_layers: HiddenLayers = [layer + 1 for layer in model.config.target_layer_ids]
        self.cache, self.accepted = DynamicCache(), list[tuple[Tensor, NewTokens | None]]()

    def begin(self, outputs: CausalLMOutputWithPast, view: CacheView) -> None:
        """Take the prompt's states; columns of an earlier call in the backbone's cache are ignored."""
        self.view, states = view, self._states(outputs.hidden_states or ())
        mask, span = view.mask[:, -states.shape[1] :].to(states.device), self.num_tokens + 1  # [B, L]
        counts, room = view.counts.to(states.device), self.options.max_length  # [B]
        self.layout = CacheLayout(mask, view.is_padded, room, span + self.model.config.block_size, counts)
        self.layout.install_layers(self.cache)
        self.accepted.append((states, None))

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Take the states of the accepted path."""
        new = self.view.new_tokens
        if new.longest:
            self.accepted.append((self._states(outputs.first(new.longest)), new))

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Return the first `length` tokens of a block after every sequence, up to the first of which no sequence is
        sure."""
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        last, options, config = tokens.last()[:, None], self.options, self.model.config  # [B, 1]
        masked = torch.full_like(last, config.mask_token_id).expand(-1, config.block_size - 1)  # [B, block - 1]
        block = _embedded(options.backbone.get_input_embeddings(), torch.cat([last, masked], 1))  # [B, block, D]
        for states, new in self.accepted:
            filled = self._run(states, new, block.to(self.model.device, self.model.dtype))  # [B, block, D]
        self.accepted = []
        unembedding = cast(nn.Module, options.backbone.get_output_embeddings())
        logits = unembedding(to_device(filled[:, 1 : 1 + length], last.device, options.backbone.dtype))  # [B, m, V]
        return block_chain(to_device(logits, last.device), options, options.masks(tokens))

    def _states(self, hidden_states: States) -> Tensor:
        """Return the states of all layers that the assistant reads, side by side, [B, L, n D]."""
        device, dtype = self.model.device, self.model.dtype
        layers = (hidden_states[layer + 1] for layer in self.model.config.target_layer_ids)
        return torch.cat([state.to(device, dtype) for state in layers if state is not None], dim=-1)

    def _run(self, states: Tensor, new: NewTokens | None, block: Tensor) -> Tensor:
        """Store states [B, C, n D], of which `new` are a sequence's (None: the prompt's), and fill in a block."""
        layout, config, (batch, size, _), width = self.layout, self.model.config, block.shape, states.shape[1]
        depths, among = cached_arange(size, states.device)[None], states.new_ones(batch, size, size, dtype=torch.bool)
        if new is None:  # the prompt, which ends where the sequences do
            layout.block_offset, begin, positions = 0, -width, cached_range(-width, width, states.device)
        else:
            layout.block_offset, begin, positions = width, 0, cached_arange(width, states.device)  # [C]
            count = to_device(new.on_device, states.device)[:, None]  # [B, 1]
            among = torch.cat([(positions < count)[:, None].expand(-1, size, -1), among], dim=-1)  # [B, size, C + size]
            depths = torch.cat([positions.expand(batch, -1), depths + count], dim=1)  # [B, C + size]
        windows = {kind: config.sliding_window + 1 if "sliding" in kind else None for kind in config.layer_types}
        seen = {kind: layout.visible(size, window, new=among, depths=depths) for kind, window in windows.items()}
        depths = torch.cat([positions.expand(batch, -1), depths[:, -size:].expand(batch, -1)], dim=1)  # [B, C + size]
        layout.block_offset = begin
        outputs = self.model(
            noise_embeds=block,
            context_hidden_states=states,
            position_ids=(layout.counts[:, None] + depths).clamp(min=0),
            attention_mask={kind: model_mask(mask, config, block.dtype) for kind, mask in seen.items()},
            **{CACHE: self.cache},
        )
        if new is not None:
            layout.keep(new)
        return outputs.last_hidden_state


def _embedded(embedding: nn.Module, ids: Tensor) -> Tensor:
    """Return the backbone's embeddings of ids, before a norm of theirs that blocks are not made for."""
    if isinstance(embedding, nn.Embedding) and "embed_norm" in dict(embedding.named_children()):
        return nn.functional.embedding(ids, embedding.weight)
    return embedding(ids)
