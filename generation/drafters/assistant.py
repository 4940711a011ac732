"""Any smaller causal language model with the same vocabulary as a drafter, with a cache of its own, for any batch.

Drafts of Gemma 4's assistants, small models that attend to nothing but the keys and values of their backbone.

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

from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ...configuration.fields import learned_positions
from ...modeling.assistants import borrows_states, first_layers, load_assistant
from ...modeling.masks import additive_mask, cached_arange, to_device
from ...modeling.wrapped_models import unwrap
from ..attach import AttachableDrafter
from ..call.options import DraftOptions
from ..call.sequences import NewTokens, Sequences
from ..protocols import CacheView, DraftSession
from ..target.backbones import target_of
from ..target.cache import RowLayer
from ..target.target import TargetOutput, is_recurrent
from ..trees.contract import DraftTree, VerificationResult
from .vocabulary import SharedVocabulary, shared_vocabulary


class AssistantDrafter(AttachableDrafter):
    """Lets a smaller model draft for a larger one; sampled drafts come with their distributions.

    Args:
        model: A causal language model of transformers with attention in every layer; or an assistant of Gemma 4
            (`gemma4_assistant`), which reads the backbone's own keys and values.
        num_tokens: Tokens to draft, unless `num_assistant_tokens` says otherwise: of a call, of the backbone's
            generation config, or of the model's own. `assistant_confidence_threshold` is looked up there, too.
        vocab_size: How many ids mean the same token in both models, where their embeddings are padded to different
            sizes: `len(tokenizer)`. None: the tokenizers beside the two models say it.

    Raises:
        ValueError: `num_tokens` below 1.
        TypeError: No model of transformers.

    Example:
        >>> drafter = AssistantDrafter(small).attach(large)
        >>> out = large.generate(**inputs, assistant_model=drafter)  # or assistant_model=small
    """

    def __init__(self, model: PreTrainedModel, num_tokens: int = 5, vocab_size: int | None = None) -> None:
        if not isinstance(num_tokens, int) or num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens!r} must be a whole number of at least 1")
        if isinstance(model, AttachableDrafter) or not (isinstance(model, nn.Module) and hasattr(model, "config")):
            raise TypeError(f"model is a {type(model).__name__}: AssistantDrafter takes a model of transformers")
        self._backbones = []
        self.model, self.num_tokens, self.vocab_size = model, num_tokens, vocab_size
        self.vocabulary: SharedVocabulary | None = None

    @classmethod
    def from_pretrained(
        cls, folder: str | PathLike, *, num_tokens: int = 5, vocab_size: int | None = None, **kwargs: Any
    ) -> AssistantDrafter:
        """Loads a drafting model, not attached yet.

        Args:
            folder: A directory or a repository of the Hub; of Gemma 4's assistants, too, which `AutoModelForCausalLM`
                of transformers 5.23.0 cannot build.
            num_tokens: Tokens to draft.
            vocab_size: See the class.
            **kwargs: Of transformers' `from_pretrained`: `dtype`, `device_map`, `revision`, ...
        """
        return cls(load_assistant(folder, **kwargs), num_tokens, vocab_size)

    @classmethod
    def from_backbone(cls, backbone: PreTrainedModel, layers: int = 2, num_tokens: int = 5) -> AssistantDrafter:
        """Return an assistant of the backbone's own first layers and its head, attached; tuning makes it a good one.

        Layers and norms are copies. Embeddings and head share the backbone's memory, and are frozen.

        Args:
            backbone: A plain causal language model of transformers.
            layers: How many layers the assistant has.
            num_tokens: Tokens to draft.

        Raises:
            ValueError: Not fewer layers than the backbone has, or a backbone that cannot be cut.
        """
        return cls(first_layers(backbone, layers), num_tokens).attach(unwrap(backbone))

    def save_pretrained(self, folder: str | PathLike, **kwargs: Any) -> None:
        """Save the drafting model, an ordinary one of transformers; arguments as for its `save_pretrained`."""
        self.model.save_pretrained(folder, **kwargs)

    def matches(self, model: Any) -> bool:
        """The drafting model itself, once it is attached."""
        return model is self.model

    @property
    def config(self) -> PreTrainedConfig:
        """The backbone's, whose vocabulary and special ids are the drafter's own."""
        return self.backbone.config

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuses another vocabulary, assistants that cannot forget rejected drafts, and states that do not fit.

        Raises:
            ValueError: The two do not fit.
        """
        if self.model.config.is_encoder_decoder:
            raise ValueError(f"the assistant {type(self.model).__name__} is an encoder-decoder; choose a decoder")
        if borrows_states(self.model.config):
            check_lender(self.model, backbone)
        self.vocabulary = shared_vocabulary(self.model, backbone, self.vocab_size)
        is_free = self.model._supports_default_dynamic_cache() and not self.model._is_stateful
        if not is_free or is_recurrent(DynamicCache(config=self.model.config)):
            name = type(self.model).__name__
            raise ValueError(f"the assistant {name} keeps a recurrent state; choose one with attention in every layer")

    def longest_draft(self) -> int | None:
        """Any number."""
        return None

    def default_draft(self) -> int:
        """`num_tokens`."""
        return self.num_tokens

    def assistant_config(self) -> GenerationConfig | None:
        """The drafting model's."""
        return self.model.generation_config

    def start(self, options: DraftOptions) -> DraftSession:
        """One call's chains."""
        chain = Gemma4Chain if borrows_states(self.model.config) else AssistantSession
        return chain(self.model, options, self.shared_with(options.backbone))

    def shared_with(self, backbone: PreTrainedModel) -> SharedVocabulary:
        """The ids that both models have."""
        return self.vocabulary or shared_vocabulary(self.model, backbone, self.vocab_size)


class AssistantSession(DraftSession):
    """The drafts of one call; see `AssistantDrafter`.

    Between cycles the assistant's cache holds all tokens but the last two of every sequence: a sequence that keeps its
    whole draft ends with one that the assistant was never fed, and so all sequences are fed alike.
    """

    supports_confidence_threshold = True

    def __init__(self, model: PreTrainedModel, options: DraftOptions, vocabulary: SharedVocabulary) -> None:
        self.model, self.options, self.num_tokens = model, options, options.num_tokens
        self.vocabulary = vocabulary
        self.lag = 0  # tokens that cycles without drafts left out
        self.table = learned_positions(model.config.get_text_config()) or 2**31  # beyond it the backbone goes on alone

    def begin(self, outputs: Any, view: CacheView) -> None:
        """Reads the prompt, all but its last token."""
        self.view, whole = view, self.options.prompt
        prompt = whole[:, :-1]
        mask = torch.ones_like(prompt) if view.mask is None else view.mask[:, -whole.shape[1] : -1]
        if mask.shape[1] < prompt.shape[1]:  # the call continues from a cache: there is nothing to read of it
            prompt = prompt[:, prompt.shape[1] - mask.shape[1] :]
        cache, device = DynamicCache(config=self.model.config), self.model.device
        if 0 < prompt.shape[1] <= self.table:
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            self.model(
                self.vocabulary.readable(prompt).to(device),
                attention_mask=mask.long().to(device),
                position_ids=positions.to(device),
                past_key_values=cache,
                use_cache=True,
            )
        room = self.options.max_length, self.num_tokens + 2
        self.target = target_of(self.model, cache, whole[:, 0].to(device), mask, None, *room)

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """A chain of up to `length` tokens after every sequence; it ends with a token of which no sequence was sure."""
        length = min(length, self.table + 1 - max(tokens.lengths))
        if length < 1:
            self.lag += 1
            return DraftTree.chain(tokens.ids[:, :0])
        block, drafts, probs = self.vocabulary.readable(tokens.newest(2 + self.lag)), [], []
        masks = self.options.masks(tokens)
        for _ in range(length):
            logits = self.target.extend(block.to(self.model.device), logits_to_keep=1).logits[:, -1]
            token, distribution = self.vocabulary.choose(logits.to(tokens.ids.device), self.options, masks)
            drafts.append(token)
            probs.append(distribution)
            if self.options.is_unsure(token, distribution):
                break
            block = token[:, None]
        q = torch.stack(probs, 1) if self.options.do_sample else None
        return DraftTree.chain(torch.stack(drafts, 1), q)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Leaves all but the last two tokens of every sequence in the assistant's cache."""
        if result.tokens.shape[1] == 1:  # nothing was drafted
            return
        kept = self.view.new_tokens
        if self.lag:
            kept = NewTokens([count + self.lag if count else 0 for count in kept.counts], kept.device)
        self.target.keep(kept)
        self.lag = 0


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
    """Heads of keys, and their width."""
    of_layer = config.per_layer_config[layer]
    return of_layer.num_key_value_heads, of_layer.head_dim


class Gemma4Chain(DraftSession):
    """The drafts of one call; see the head of this file.

    Args:
        model: transformers' `Gemma4AssistantForCausalLM`, or the same of a unified model.
        options: Of the call.
        vocabulary: What the two share.
    """

    hidden_layers = -1
    supports_confidence_threshold = reads_cache = True

    def __init__(self, model: PreTrainedModel, options: DraftOptions, vocabulary: SharedVocabulary) -> None:
        self.model, self.options, self.num_tokens = model, options, options.num_tokens
        self.vocabulary = vocabulary
        self.layers = lending_layers(options.backbone.config.get_text_config())

    def begin(self, outputs: Any, view: CacheView) -> None:
        """Keeps the state before the first new token, [B, 1, D], and the cache, which it only reads."""
        self.view, self.cache = view, outputs.past_key_values
        self.state = outputs.hidden_states[-1][:, -1:]

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Keeps the state before each sequence's last token; a sequence that has ended keeps any."""
        states = outputs.state()
        last = to_device(result.num_accepted, states.device)
        self.state = states[cached_arange(len(states), states.device), last][:, None]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """A chain of up to `length` tokens after every sequence; it ends with a token of which no sequence was sure."""
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        token, state, lent, masks = tokens.last(), self.state, self._lent(), self.options.masks(tokens)
        drafts, probs = [], []
        while len(drafts) < length and not (drafts and self.options.is_unsure(token, probs[-1])):
            logits, state = self._step(token, state, lent)
            token, distribution = self.vocabulary.choose(logits.to(tokens.ids.device), self.options, masks)
            drafts.append(token)
            probs.append(distribution)
        return DraftTree.chain(torch.stack(drafts, 1), torch.stack(probs, 1) if self.options.do_sample else None)

    def _lent(self) -> dict[str, Any]:
        """What all steps of a draft read: the backbone's keys and values, which of them exist, and the position.

        A window holds the last W - 1 verified tokens, whatever kind of cache the call was given.
        """
        own, device = self.model.config.get_text_config(), self.model.device
        states, masks = {}, {}
        for kind in set(own.layer_types):
            layer = self.cache.layers[self.layers[kind]]
            window = own.sliding_window - 1 if kind == "sliding_attention" else None
            if isinstance(layer, RowLayer):
                keys, values, seen = layer.verified(window)
            else:
                keys, values = (part[:, :, -(window or 0) :] for part in (layer.keys, layer.values))
                seen = self.view.mask[:, -keys.shape[2] :] if self.view.is_padded else None
            states[kind] = keys.to(device, self.model.dtype), values.to(device, self.model.dtype)
            masks[kind] = None if seen is None else additive_mask(seen[:, None, None].to(device), self.model.dtype)
        position = self.view.counts[:, None].to(device)
        return {"shared_kv_states": states, "attention_mask": masks, "position_ids": position}

    def _step(self, token: Tensor, state: Tensor, lent: dict[str, Any]) -> tuple[Tensor, Tensor]:
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


def _of_its_row(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Gives tokens of clusters that were not looked at the least score of their row less 1.

    transformers takes the least score of the batch, so that a sequence's drafts would depend on the other sequences.
    """
    if config.centroid_intermediate_top_k >= config.num_centroids:
        return logits
    unseen = logits == logits.amin(-1, keepdim=True)
    return torch.where(unseen, logits.masked_fill(unseen, torch.inf).amin(-1, keepdim=True) - 1, logits)
