"""Drafts of Gemma 4's assistants, small models that attend to nothing but the keys and values of their backbone.

The backbone's last layer with full attention and its last one with a sliding window, of those that make keys and values
of their own, lend them to all layers of the assistant that are of their kind. A draft is a chain of single positions:

    token      b      d1     d2          embedded by the backbone
    state      h      s1     s2          h: the backbone's last state before b; s: what the assistant returned
    position   n      n      n           b's own, for the whole draft
    reads      keys and values of the n verified tokens before b; of drafts there are none
    proposes   d1     d2     d3

Nothing has to be rolled back: the backbone's cache holds verified tokens only whenever a draft is made.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ..contract import DraftTree, VerificationResult, cached_arange
from ..masks import added_to_scores
from ..targets import TargetOutput
from ..tokens import Sequences
from .protocol import DraftOptions, View


def lending_layers(config: PreTrainedConfig) -> dict[str, int]:
    """The last layer of each kind that makes keys and values, by kind."""
    own = len(config.layer_types) - (getattr(config, "num_kv_shared_layers", 0) or 0)
    return {kind: layer for layer, kind in enumerate(config.layer_types[:own])}


def check_lender(assistant: PreTrainedModel, backbone: PreTrainedModel) -> None:
    """Refuses a backbone whose states the assistant cannot read.

    Raises:
        ValueError: Another family, another width, or keys and values of another shape.
    """
    name, theirs = type(assistant).__name__, backbone.config.get_text_config()
    if not theirs.model_type.startswith("gemma4"):
        raise ValueError(
            f"{name} reads keys and values of a Gemma 4 backbone, and {type(backbone).__name__} has "
            f"model_type={theirs.model_type!r}: attach it to the model that it was made for"
        )
    if assistant.config.backbone_hidden_size != theirs.hidden_size:
        raise ValueError(
            f"backbone_hidden_size={assistant.config.backbone_hidden_size} of {name}, but {type(backbone).__name__} "
            f"has hidden_size={theirs.hidden_size}: attach it to the model that it was made for"
        )
    own, lenders = assistant.config.get_text_config(), lending_layers(theirs)
    for layer, kind in enumerate(own.layer_types):
        wanted, lent = _shape(own, layer), _shape(theirs, lenders[kind]) if kind in lenders else None
        if wanted != lent:
            raise ValueError(
                f"layer {layer} of {name} reads {kind} keys of (heads, width) {wanted}, and {type(backbone).__name__} "
                f"has {lent}: attach it to the model that it was made for"
            )


def _shape(config: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """Heads of keys, and their width."""
    of_layer = config.per_layer_config[layer]
    return of_layer.num_key_value_heads, of_layer.head_dim


class Gemma4Chain:
    """The drafts of one call; see the head of this file.

    Args:
        model: transformers' `Gemma4AssistantForCausalLM`, or the same of a unified model.
        options: Of the call.
    """

    hidden_layers = -1
    supports_confidence_threshold = True

    def __init__(self, model: PreTrainedModel, options: DraftOptions) -> None:
        self.model, self.options, self.num_tokens = model, options, options.num_tokens
        self.layers = lending_layers(options.backbone.config.get_text_config())
        self.cache: Cache | None = None
        self.view: View | None = None
        self.state: torch.Tensor | None = None

    def begin(self, outputs: Any, view: View) -> None:
        """Keeps the state before the first new token, [B, 1, D], and the cache, which it only reads."""
        self.view, self.cache = view, outputs.past_key_values
        self.state = outputs.hidden_states[-1][:, -1:]

    def advance(self, fed: TargetOutput, result: VerificationResult) -> None:
        """Keeps the state before each row's last token; a row that has ended keeps any."""
        states = fed.hidden_states[-1]
        self.state = states[cached_arange(len(states), states.device), result.num_accepted.to(states.device)][:, None]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """A chain of up to `length` tokens behind every row; it ends with a token of which no row was sure."""
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        token, state, lent = tokens.last(), self.state, self._lent()
        drafts, probs = [], []
        while len(drafts) < length and not (drafts and self.options.is_unsure(token, probs[-1])):
            logits, state = self._step(token, state, lent)
            token, distribution = self.options.choose(logits.to(tokens.ids.device))
            drafts.append(token)
            probs.append(distribution)
        return DraftTree.chain(torch.stack(drafts, 1), torch.stack(probs, 1) if self.options.do_sample else None)

    def _lent(self) -> dict[str, Any]:
        """What all steps of a draft read: the backbone's keys and values, which of them exist, and the position.

        A window is cut from the columns here, so that no mask is needed where no row is padded. It holds what a layer
        keeps between blocks, the last W - 1 verified tokens, whatever kind of cache the call was given.
        """
        own, device = self.model.config.get_text_config(), self.model.device
        states, masks = {}, {}
        for kind in set(own.layer_types):
            layer = self.cache.layers[self.layers[kind]]
            first = 1 - own.sliding_window if kind == "sliding_attention" else 0
            states[kind] = tuple(part[:, :, first:].to(device, self.model.dtype) for part in (layer.keys, layer.values))
            seen = self.view.mask[:, -states[kind][0].shape[2] :]
            masks[kind] = added_to_scores(seen[:, None].to(device), self.model.dtype) if self.view.is_padded else None
        position = self.view.counts[:, None].to(device)
        return {"shared_kv_states": states, "attention_mask": masks, "position_ids": position}

    def _step(
        self, token: torch.Tensor, state: torch.Tensor, lent: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, V] of what follows tokens [B], and the state [B, 1, D] that the next step reads.

        transformers' own forward would make the masks anew in every step, and wait for the device to do so.
        """
        model = self.model
        device, dtype = model.device, model.dtype
        embedded = self.options.backbone.get_input_embeddings()(token[:, None])
        inputs = torch.cat([embedded.to(device, dtype), state.to(device, dtype)], dim=-1)
        hidden = model.model(inputs_embeds=model.pre_projection(inputs), use_cache=False, **lent).last_hidden_state
        if model.masked_embedding is None:
            logits = model.lm_head(hidden)
        else:
            logits = _of_its_row(model.masked_embedding(hidden, model.lm_head.weight), model.config)
        return logits[:, -1], model.post_projection(hidden)


def _of_its_row(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Gives tokens of clusters that were not looked at the least score of their row less 1.

    transformers takes the least score of the batch, so that a row's drafts would depend on the other rows.
    """
    if config.centroid_intermediate_top_k >= config.num_centroids:
        return logits
    unseen = logits == logits.amin(-1, keepdim=True)
    return torch.where(unseen, logits.masked_fill(unseen, torch.inf).amin(-1, keepdim=True) - 1, logits)
