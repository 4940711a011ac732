"""Decoding functions to verify, and small models: plain decoding, transformers' own drafts, this library's drafters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from ...generation.assistant.drafter import AssistantDrafter
from ...generation.attach import AttachableDrafter
from ...generation.backbone.wrapped_models import untyped
from ...generation.lookups.lookahead import LookaheadDrafter
from ...generation.lookups.ngram import NgramDrafter
from ...generation.lookups.recycling import RecyclingDrafter
from ...generation.lookups.suffix import SuffixDrafter
from ...modeling import BlockDrafter, DeepSeekMTP, EagleHead, MTPHeads


class Decoder(Protocol):
    """A decoding function: what it is given is what `generate` of a plain model would be given."""

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
        """Return the prompts [B, L], padded on the left with 0, and what was written after them, [B, L + T] int64.

        `options` are those of `generate`: `attention_mask`, `max_new_tokens`, `do_sample`, `temperature`, `top_k`,
        `eos_token_id`, `stop_strings` with `tokenizer`, `repetition_penalty`, `logits_processor`, ...
        """
        ...


MakesModel = Callable[[int, int], PreTrainedModel]
"""Makes a small model in float64 from a seed and the size of its vocabulary."""


def small_model(seed: int = 0, vocab_size: int = 6, width: int = 16) -> PreTrainedModel:
    """Return a random Llama in float64 whose distributions are neither flat nor sharp."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=128, initializer_range=2 * width**-0.5, **sizes, **ids
    )
    return untyped(LlamaForCausalLM(config)).double().eval()


def letters(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token i is the i-th letter."""
    known = {chr(97 + index if index < 26 else 0x100 + index): index for index in range(size)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def _root() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tokenahead-verify-")  # removed when the process ends


@cache
def model_with_modules(seed: int = 0, vocab_size: int = 6) -> PreTrainedModel:
    """Return a random GLM-4 in float64, read from a folder that holds two modules, as `use_mtp` reads them."""
    torch.manual_seed(seed)
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_group": 1}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=vocab_size, **sizes, **experts, num_key_value_heads=2, head_dim=8, topk_group=1,
        first_k_dense_replace=2, num_nextn_predict_layers=2, max_position_embeddings=128, initializer_range=0.5,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = Path(_root().name) / f"modules-{seed}-{vocab_size}"
    DeepSeekMTP(config).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    model.generation_config.eos_token_id = None
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\."]  # by which `use_mtp` finds the modules
    return model.eval()


@cache
def block_folder(model: PreTrainedModel) -> Path:
    """Return a folder with a random DFlash drafter of a model, in z-lab's layout."""
    torch.manual_seed(2)
    drafter = BlockDrafter.from_backbone(
        model, law="independent", sample_from_anchor=False, layers=1, block_size=4, feature_layers=[1], mask_token_id=1
    )
    folder = Path(_root().name) / f"block-{id(model)}"
    drafter.export(folder, layout="z-lab")
    drafter.detach()
    return folder


@torch.no_grad()
def disturbed(model: PreTrainedModel, by: float = 0.15) -> PreTrainedModel:
    """Return a copy whose weights are a little off, to draft for the model: some of its drafts are right."""
    twin, draws = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for each in twin.parameters():
        each.add_(torch.randn(each.shape, generator=draws, dtype=each.dtype) * by)
    return twin


@cache
def _assistant(model: PreTrainedModel) -> PreTrainedModel:
    return disturbed(model)


def plain(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    """Decode one token at a time, in transformers' own loop."""
    return untyped(GenerationMixin).generate(model, input_ids, **options)


def _assisted(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    return plain(model, input_ids, assistant_model=_assistant(model), **options)


class OnModels(NamedTuple):
    """A decoding function, and what makes the small models that the kit takes for it in place of its own."""

    decode: Decoder
    small_model: MakesModel

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
        """Decode."""
        return self.decode(model, input_ids, **options)


def drafted_by(made: Callable[[PreTrainedModel], AttachableDrafter], **own: Any) -> Decoder:
    """Return decoding with a drafter of this library; `own` are further options of `generate`."""

    def decode(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
        drafter = made(model).attach(model)
        try:
            return untyped(model).generate(input_ids, assistant_model=drafter, **own, **options)
        finally:
            drafter.detach()

    return decode


def _shaken(drafter: Any) -> Any:
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for each in drafter.parameters():
            each.add_(torch.randn(each.shape, generator=draws).to(each) * 0.1)
    return drafter.eval()


def _eagle(model: PreTrainedModel) -> Any:
    return _shaken(EagleHead.from_backbone(model, aux_layers=[0, 1, 2]))


DECODERS: dict[str, Decoder] = {
    "transformers: plain": plain,
    "transformers: assistant": _assisted,
    "transformers: prompt lookup": partial(plain, prompt_lookup_num_tokens=3),
    "transformers: use_mtp": OnModels(partial(plain, use_mtp=True), model_with_modules),
    "ngram": drafted_by(lambda model: NgramDrafter(num_tokens=6)),
    "suffix": drafted_by(lambda model: SuffixDrafter(num_tokens=6)),
    "recycling": drafted_by(lambda model: RecyclingDrafter()),
    "lookahead": drafted_by(lambda model: LookaheadDrafter(5, 4, 4)),
    "assistant": drafted_by(lambda model: AssistantDrafter(_assistant(model))),
    "assistant, by token": drafted_by(lambda model: AssistantDrafter(_assistant(model)), verification="token"),
    "heads": drafted_by(lambda model: _shaken(MTPHeads.from_backbone(model, unembedding="own"))),
    "hmm heads": drafted_by(
        lambda model: _shaken(MTPHeads.from_backbone(model, head_type="hmm", rank=2, unembedding="own"))
    ),
    "EAGLE": drafted_by(_eagle),
    "dflash": drafted_by(lambda model: BlockDrafter.from_pretrained(block_folder(model)).to(model.dtype).eval()),
    "EAGLE, as a tree": drafted_by(_eagle, draft_tree={"depth": 3, "top_k": 2, "total_tokens": 6}),
}
"""What `tokenahead verify` looks at, by name."""
