"""Every private name of another library that we rely on, so that an upgrade gives a list of what it broke."""

import inspect
import re

import accelerate
import peft
import pytest
import torch
import transformers
import trl
from transformers import (
    AutoModelForCausalLM,
    GenerationMixin,
    PrefixConstrainedLogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizer,
    Trainer,
)

from tests.private_names import accessed, overridden

FUNCTIONS = [
    (GenerationMixin, "_has_unfinished_sequences", "this_peer_finished synced_gpus device"),
    (GenerationMixin, "_prefill", "input_ids generation_config model_kwargs"),
    (GenerationMixin, "_prepare_generation_config", "generation_config kwargs"),
    (
        GenerationMixin,
        "_sample",
        "input_ids logits_processor stopping_criteria generation_config synced_gpus streamer",
    ),
    (GenerationMixin, "_supports_default_dynamic_cache", ""),
    (PreTrainedModel, "_can_set_attn_implementation", ""),
    (PreTrainedModel, "_can_set_experts_implementation", ""),
    (PreTrainedModel, "_get_resized_lm_head", "old_lm_head new_num_tokens"),
    (PreTrainedModel, "_init_weights", "module"),
    (PreTrainedModel, "_set_gradient_checkpointing", "enable"),
    (PreTrainedTokenizer, "_convert_id_to_token", "index"),
    (PreTrainedTokenizer, "_tokenize", "text kwargs"),
    (PreTrainedTokenizer, "_update_total_vocab_size", ""),
    (Trainer, "_finish_current_push", ""),
    (Trainer, "_get_num_items_in_batch", "batch_samples device"),
    (Trainer, "_load_best_model", ""),
    (Trainer, "_load_from_checkpoint", "resume_from_checkpoint model"),
    (Trainer, "_prepare_inputs", "inputs"),
    (Trainer, "_set_signature_columns_if_needed", ""),
    (torch.nn.Module, "_apply", "fn recurse"),
    (peft.LoraConfig, "_register_custom_module", "mapping"),
]
"""Functions that we override or call: where they are found, their names, and their first parameters in order."""

ATTRIBUTES = [
    (AutoModelForCausalLM, "_model_mapping"),
    (PreTrainedConfig, "_attn_implementation"),
    (PreTrainedConfig, "_auto_class"),
    (PreTrainedModel, "_hf_peft_config_loaded"),
    (PreTrainedModel, "_is_stateful"),
    (PreTrainedModel, "_keys_to_ignore_on_load_unexpected"),
    (PreTrainedModel, "_keep_in_fp32_modules_strict"),
    (PreTrainedModel, "_no_split_modules"),
    (PreTrainedModel, "_skip_keys_device_placement"),
    (PreTrainedModel, "_supports_attention_backend"),
    (PreTrainedModel, "_supports_flash_attn"),
    (PreTrainedModel, "_supports_flex_attn"),
    (PreTrainedModel, "_supports_sdpa"),
    (torch, "_standard_gamma"),
    (trl.SFTTrainer, "_tag_names"),
    (torch.Tensor, "_version"),
    (torch.nn.Linear(1, 1), "_forward_hooks"),
]
"""Class attributes, properties and what a module offers."""

WRITTEN_IN_SOURCE = [
    (GenerationMixin, "_pad_token_tensor"),
    (PreTrainedConfig, "_name_or_path"),
    (PreTrainedModel, "_gradient_checkpointing_func"),
    (PreTrainedModel, "_is_hf_initialized"),
    (PrefixConstrainedLogitsProcessor, "_prefix_allowed_tokens_fn"),
    (Trainer, "_created_lr_scheduler"),
    (Trainer, "_initial_global_step"),
    (Trainer, "_signature_columns"),
    (accelerate.hooks, "_hf_hook"),
    (torch._dynamo.OptimizedModule, "_orig_mod"),
    (inspect.getmodule(PreTrainedTokenizer), "_added_tokens_encoder"),
    (transformers.core_model_loading, "_weight_conversions"),
    (transformers.utils.hub, "_raise_exceptions_for_connection_errors"),
    (transformers.integrations.peft, "_hf_peft_config_loaded"),
    (transformers.utils.hub, "_raise_exceptions_for_missing_entries"),
    (transformers.utils.output_capturing, "_output_capturing_hooks_installed"),
    (trl.SFTTrainer, "_metrics"),
    (trl.SFTTrainer, "_total_train_tokens"),
]
"""Attributes that objects get at run time, and keyword arguments: words in the source of their owners."""

LISTED = {name for _, name, *_ in (*FUNCTIONS, *ATTRIBUTES, *WRITTEN_IN_SOURCE)}


def label(value) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value)).rpartition(".")[2]


@pytest.mark.parametrize(("owner", "name", "parameters"), FUNCTIONS, ids=label)
def test_a_private_function_takes_what_we_pass(owner, name, parameters):
    found = [parameter for parameter in inspect.signature(getattr(owner, name)).parameters if parameter != "self"]
    assert found[: len(parameters.split())] == parameters.split()


@pytest.mark.parametrize(("owner", "name"), ATTRIBUTES, ids=label)
def test_a_private_attribute_exists(owner, name):
    assert hasattr(owner, name)


@pytest.mark.parametrize(("owner", "name"), WRITTEN_IN_SOURCE, ids=label)
def test_a_private_word_is_still_in_the_source(owner, name):
    assert re.search(rf"\b{name}\b", inspect.getsource(owner))


@pytest.mark.parametrize("find", [overridden, accessed])
def test_every_private_name_that_we_use_is_listed(find):
    """Whoever uses a new private name adds a row above, with the parameters that are passed by position."""
    assert {name: place for name, place in find() if name not in LISTED} == {}


def test_every_name_listed_is_used():
    assert LISTED - {name for name, _ in (*overridden(), *accessed())} == set()
