"""Drafts of DFlash assistants: a block of tokens from one forward, given what several layers of the backbone made.

The assistant's keys and values are of two kinds: those of verified tokens, made of the backbone's states of some
layers, and those of the block that it fills in. The block's first token is b, the one that verification added last; the
others are a mask token. All of the block see each other and every verified token, within a window where there is one.

    cache      states of the verified tokens           written once, as they are accepted
    fed        states of the new ones | b  m  m  m     embedded by the backbone, without a norm of its embeddings
    proposes                            -  d1 d2 d3    by the backbone's unembedding, each independent of the others

Sequences accept different numbers of tokens. Each has its block in the columns after the most that any has accepted, at
the positions after its own; what stands between is seen by nobody, and the next cycle writes over the block.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...modeling.masks import cached_arange, cached_range, check_attention, given_mask, to_device
from ...modeling.wrapped_models import has_own_cache
from ..call.options import DraftOptions
from ..call.sequences import NewTokens, Sequences
from ..protocols import CacheView, DraftSession
from ..target.cache import Rows
from ..target.target import HiddenLayers, States, TargetOutput
from ..trees.contract import DraftTree, VerificationResult
from ..trees.growth import block_chain


def check_source(assistant: PreTrainedModel, backbone: PreTrainedModel) -> None:
    """Refuse a backbone whose states the assistant cannot read, or whose embeddings it cannot use.

    Raises:
        ValueError: Another width, fewer layers or ids, a cache of its own kind, or attention without dense masks.
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
        raise ValueError(f"{name} has a cache of its own kind, whose columns the assistant's cannot follow")


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
        mask, span = view.mask[:, -states.shape[1] :].to(states.device), self.num_tokens + 1
        counts, room = view.counts.to(states.device), self.options.max_length
        self.rows = Rows(mask, view.is_padded, room, span + self.model.config.block_size, counts)
        self.rows.take_over(self.cache)
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
        last, options, config = tokens.last()[:, None], self.options, self.model.config
        masked = torch.full_like(last, config.mask_token_id).expand(-1, config.block_size - 1)
        block = _embedded(options.backbone.get_input_embeddings(), torch.cat([last, masked], 1))
        for states, new in self.accepted:
            filled = self._run(states, new, block.to(self.model.device, self.model.dtype))
        self.accepted = []
        unembedding = cast(nn.Module, options.backbone.get_output_embeddings())
        logits = unembedding(to_device(filled[:, 1 : 1 + length], last.device, options.backbone.dtype))
        return block_chain(to_device(logits, last.device), options, options.masks(tokens))

    def _states(self, hidden_states: States) -> Tensor:
        """Return the states of all layers that the assistant reads, side by side, [B, L, n D]."""
        device, dtype = self.model.device, self.model.dtype
        layers = (hidden_states[layer + 1] for layer in self.model.config.target_layer_ids)
        return torch.cat([state.to(device, dtype) for state in layers if state is not None], dim=-1)

    def _run(self, states: Tensor, new: NewTokens | None, block: Tensor) -> Tensor:
        """Store states [B, C, n D], of which `new` are a sequence's (None: the prompt's), and fill in a block."""
        rows, config, (batch, size, _), width = self.rows, self.model.config, block.shape, states.shape[1]
        depths, among = cached_arange(size, states.device)[None], states.new_ones(batch, size, size, dtype=torch.bool)
        if new is None:  # the prompt, which ends where the sequences do
            rows.ahead, begin, positions = 0, -width, cached_range(-width, width, states.device)
        else:
            rows.ahead, begin, positions = width, 0, cached_arange(width, states.device)
            count = to_device(new.on_device, states.device)[:, None]
            among = torch.cat([(positions < count)[:, None].expand(-1, size, -1), among], dim=-1)
            depths = torch.cat([positions.expand(batch, -1), depths + count], dim=1)
        windows = {kind: config.sliding_window + 1 if "sliding" in kind else None for kind in config.layer_types}
        seen = {kind: rows.visible(size, window, new=among, depths=depths) for kind, window in windows.items()}
        depths = torch.cat([positions.expand(batch, -1), depths[:, -size:].expand(batch, -1)], dim=1)
        rows.ahead = begin
        outputs = self.model(
            noise_embeds=block,
            context_hidden_states=states,
            position_ids=(rows.counts[:, None] + depths).clamp(min=0),
            attention_mask={kind: given_mask(mask, config, block.dtype) for kind, mask in seen.items()},
            past_key_values=self.cache,
        )
        if new is not None:
            rows.keep(new)
        return outputs.last_hidden_state


def _embedded(embedding: nn.Module, ids: Tensor) -> Tensor:
    """Return the backbone's embeddings of ids, before a norm of theirs that blocks are not made for."""
    if isinstance(embedding, nn.Embedding) and "embed_norm" in dict(embedding.named_children()):
        return nn.functional.embedding(ids, embedding.weight)
    return embedding(ids)
