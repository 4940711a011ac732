"""Any smaller causal language model as a drafter for any batch, with its own cache."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file

from ...configuration.fields import field, has_short_convolutions
from ..attach import AttachableDrafter
from ..backbone.backbones import can_roll_back, check_model
from ..backbone.target import is_recurrent
from ..backbone.wrapped_models import carries_adapters, check_whole, own_cache_of, uncompiled, untyped, unwrap
from ..call.options import CallOptions, DraftOptions
from ..contract import DraftSession
from ..tensors.masks import check_attention
from ..tensors.saving import reads_whole, whole_directory
from ..tensors.tensor_files import check_index, hub_options
from .session import AssistantSession, SharedVocabulary, shared_vocabulary
from .state_readers import Gemma4Chain, borrows_states, buildable
from .translation import CommonSession, TextSession, Tokenizers, Translation

_TOKENIZERS = "tokenizer", "assistant_tokenizer"


class AssistantDrafter(AttachableDrafter):
    """Lets a smaller model draft for a larger one; sampled drafts come with their distributions.

    Args:
        model: A causal language model of transformers with attention in every layer, also within a PeftModel or a
            compiled model; or an assistant of Gemma 4 (`gemma4_assistant`), which reads the backbone's own keys and
            values.
        num_tokens: Tokens to draft, unless `num_assistant_tokens` says otherwise: of a call, of the backbone's
            generation config, or of the model's own. `assistant_confidence_threshold` is looked up there, too. None: 5.
        vocab_size: How many ids mean the same token in both models, where their embeddings are padded to different
            sizes: `len(tokenizer)`. None: read from the tokenizers in the models' directories.
        tokenizer: The backbone's, where the model has another one; a call may name both, as in transformers.
        assistant_tokenizer: The model's.
        translate: How drafts become the backbone's: `"vocabulary"`, tokens that both have, or `"text"`, all that the
            model writes, likeliest first; None: as in transformers, tokens where the call samples, else text.

    Raises:
        ValueError: `num_tokens` below 1, one tokenizer alone, another way to translate, or a PeftModel with prompts.
        TypeError: No model of transformers.

    Example:
        >>> drafter = AssistantDrafter(small).attach(large)
        >>> out = large.generate(**inputs, assistant_model=drafter)  # or assistant_model=small
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_tokens: int | None = None,
        vocab_size: int | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        translate: str | None = None,
    ) -> None:
        if num_tokens is not None and num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens!r} must be at least 1, or None")
        if isinstance(model, AttachableDrafter) or not (isinstance(model, nn.Module) and hasattr(model, "config")):
            raise TypeError(f"model is a {type(model).__name__}: AssistantDrafter takes a model of transformers")
        if translate not in (None, "vocabulary", "text"):
            raise ValueError(f"translate={translate!r} must be 'vocabulary' or 'text', or None")
        self.saved, model = uncompiled(model), unwrap(model)
        if all(field(model.config, name) is not None for name in ("block_size", "mask_token_id", "target_layer_ids")):
            raise ValueError("model fills in blocks, as DFlash does: BlockDrafter.from_pretrained reads its directory")
        self.model, self.num_tokens, self.vocab_size = model, num_tokens or 5, vocab_size
        self.tokenizers, self.translate = (tokenizer, assistant_tokenizer), translate
        self.vocabulary: SharedVocabulary | None = None
        self.translation: Translation | None = None

    @classmethod
    @reads_whole
    def from_pretrained(
        cls,
        folder: str | PathLike,
        *,
        num_tokens: int | None = None,
        vocab_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None,
        translate: str | None = None,
        **kwargs: Any,
    ) -> AssistantDrafter:
        """Load a drafting model, not attached yet; see the class for all arguments but these.

        Args:
            folder: A directory or a repository of the Hub: of a model, of adapters of one, or of an assistant of Gemma
                4, which `AutoModelForCausalLM` of transformers 5.23.0 cannot build.
            **kwargs: Of transformers' `from_pretrained`: `dtype`, `device_map`, `revision`, ...
        """
        texts = {"tokenizer": tokenizer, "assistant_tokenizer": assistant_tokenizer, "translate": translate}
        return cls(load_assistant(folder, **kwargs), num_tokens, vocab_size, **texts)

    @classmethod
    def from_backbone(cls, backbone: PreTrainedModel, layers: int = 2, num_tokens: int = 5) -> AssistantDrafter:
        """Return an attached assistant of copies of the backbone's first layers and norms; tuning makes it a good one.

        Embeddings and head are copies, too, and frozen.

        Raises:
            ValueError: As many layers as the backbone has or more, or a backbone that cannot be cut.
        """
        return cls(first_layers(backbone, layers), num_tokens).attach(unwrap(backbone))

    def save_pretrained(self, folder: str | PathLike, **kwargs: Any) -> None:
        """Save the drafting model, or a PeftModel's adapters; arguments as for its `save_pretrained`."""
        if kwargs.get("push_to_hub"):  # its name would be that of the temporary directory
            kwargs.setdefault("repo_id", Path(folder).absolute().name)
        spread = kwargs.get("distributed_checkpoint", False)
        with whole_directory(folder, kwargs.get("variant"), updated=["README.md"], in_place=spread) as directory:
            self.saved.save_pretrained(directory, **kwargs)

    def matches(self, model: Any) -> bool:
        return model is self.model or uncompiled(model) is self.saved

    def parts(self) -> dict[str, nn.Module]:
        return {"model": self.model}

    @property
    def config(self) -> PreTrainedConfig:
        return self.backbone.config

    @property
    def label(self) -> str:
        return f"{type(self).__name__} of {type(self.model).__name__}"

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuse another vocabulary, caches that cannot be rolled back, and states that do not fit."""
        self.vocabulary = self.translation = None
        if not borrows_states(self.model.config):
            check_model(self.model, "choose another assistant")
        if own_cache_of(self.model):
            name = type(self.model).__name__
            raise ValueError(f"the assistant {name} has its own kind of cache; choose one on transformers' caches")
        if self.tokenizers != (None, None):
            self._translation(self.tokenizers, backbone)
        if self.translation is None:
            self.vocabulary = shared_vocabulary(self.model, backbone, self.vocab_size)
        is_free = untyped(self.model)._supports_default_dynamic_cache() and can_roll_back(self.model)
        has_states = is_recurrent(DynamicCache(config=self.model.config))
        if not is_free or (has_states and not has_short_convolutions(self.model.config)):
            name = type(self.model).__name__
            raise ValueError(f"the assistant {name} keeps a recurrent state; choose one with attention in every layer")

    def longest_draft(self) -> int | None:
        return None

    def default_draft(self) -> int:
        return self.num_tokens

    def assistant_config(self) -> GenerationConfig | None:
        return self.model.generation_config

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        named = {name: options.extra[name] for name in _TOKENIZERS if name in options.extra}
        rest = {name: value for name, value in options.extra.items() if name not in named}
        prepared = super().prepare_call(replace(options, extra=rest), config)
        if named:
            self._translation((named.get(_TOKENIZERS[0]), named.get(_TOKENIZERS[1])), self.backbone)
        return replace(prepared, extra=prepared.extra | named)

    def start(self, options: DraftOptions) -> DraftSession:
        named = options.extra.get(_TOKENIZERS[0]), options.extra.get(_TOKENIZERS[1])
        tokenizers = self.tokenizers if named[1] is None else named
        if tokenizers != (None, None):
            translation = self._translation(tokenizers, options.backbone)
            is_common = self.translate == "vocabulary" or (self.translate is None and options.do_sample)
            is_common = is_common and len(translation.ids) > 0
            return (CommonSession if is_common else TextSession)(self.model, options, translation)
        chain = Gemma4Chain if borrows_states(self.model.config) else AssistantSession
        return chain(self.model, options, self.shared_with(options.backbone))

    def _translation(self, tokenizers: Tokenizers, backbone: PreTrainedModel) -> Translation:
        """Return the translation between two tokenizers, made once for several calls."""
        known, name = self.translation, type(self.model).__name__
        if known is not None and all(one is other for one, other in zip(known.tokenizers, tokenizers)):
            return known
        if borrows_states(self.model.config) or self.vocab_size is not None:
            other = name if self.vocab_size is None else f"vocab_size={self.vocab_size}"
            raise ValueError(f"assistant_tokenizer=: {other} is for an assistant with the backbone's own tokenizer")
        check_attention(self.model.config, "assistants with another tokenizer")
        sizes = (model.config.get_text_config().vocab_size for model in (backbone, self.model))
        self.translation = Translation(tokenizers, *sizes)
        return self.translation

    def shared_with(self, backbone: PreTrainedModel) -> SharedVocabulary:
        return self.vocabulary or shared_vocabulary(self.model, backbone, self.vocab_size)


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a model of the same class with copies of the first layers of another one; embeddings and head are frozen.

    Raises:
        ValueError: Not fewer layers than the model has, or a model that cannot be cut.
    """
    model = unwrap(model)
    config, kind = deepcopy(model.config), type(model).__name__
    whole = config.get_text_config().num_hidden_layers
    if not 1 <= layers < whole:
        raise ValueError(f"layers={layers!r} must be from 1 to {whole - 1}: {kind} has {whole} layers")
    linear = isinstance(model.get_output_embeddings(), nn.Linear)
    if config.get_text_config() is not config or own_cache_of(model) or carries_adapters(model) or not linear:
        raise ValueError(f"{kind} cannot be cut to layers={layers}: pass a plain language model, without adapters")
    check_whole(model, f"layers={layers} of {kind}")
    for name, value in config.to_dict().items():  # layer_types, and other fields with an entry per layer
        if isinstance(value, list) and len(value) == whole:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    with torch.device(model.device):
        small = type(model)(config)
    untyped(small).to(model.dtype)
    known = small.state_dict()
    copied = {name: tensor for name, tensor in model.state_dict().items() if name in known}
    small.load_state_dict(copied)
    for table in (small.get_input_embeddings(), small.get_output_embeddings()):
        cast(nn.Module, table).requires_grad_(False)
    small.generation_config = deepcopy(model.generation_config)
    return small.eval()


def load_assistant(name: str | PathLike, **kwargs: Any) -> PreTrainedModel:
    """Load a model that drafts, or adapters of one."""
    hub = hub_options(kwargs)
    check_index(name, kwargs.get("variant"), **hub)
    if find_adapter_config_file(str(name), **hub) is None:
        hub |= {key: kwargs[key] for key in ("trust_remote_code",) if key in kwargs}
        kwargs["config"] = buildable(kwargs.get("config") or AutoConfig.from_pretrained(name, **hub))
    return AutoModelForCausalLM.from_pretrained(name, **kwargs)
