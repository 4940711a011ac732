"""Every private name of another library that we rely on, so that an upgrade gives a list of what it broke."""

import inspect
import re
import sys
from importlib import import_module

import accelerate
import peft
import pytest
import torch
import transformers
import trl

from tests.private_names import accessed, overridden
from tokenahead.configuration.transformers_names import TESTED_VERSIONS, obstacle_of_peft, warn_of_newer_version

NAMES = {
    "transformers.generation.utils:GenerationMixin": (
        "_get_candidate_generator _get_logits_processor _has_unfinished_sequences _pad_token_tensor "
        "_previous_max_cache_length _prefill _prepare_generation_config _prepare_position_ids_for_generation "
        "_prepare_special_tokens _sample _supports_default_dynamic_cache _valid_auto_compile_criteria "
        "_update_model_kwargs_for_generation _validate_generation_mode _validate_model_kwargs"
    ),
    "transformers.modeling_utils:PreTrainedModel": (
        "_can_set_attn_implementation _can_set_experts_implementation _gradient_checkpointing_func "
        "_hf_peft_config_loaded _init_weights _initialize_weights _is_hf_initialized _is_stateful "
        "_keep_in_fp32_modules_strict "
        "_keys_to_ignore_on_load_unexpected _no_split_modules _set_gradient_checkpointing _skip_keys_device_placement "
        "_supports_attention_backend _supports_flash_attn _supports_flex_attn _supports_sdpa _tied_weights_keys "
        "_tp_size"
    ),
    "transformers.configuration_utils:PreTrainedConfig": "_attn_implementation _experts_implementation _auto_class",
    "transformers.generation.logits_process:PrefixConstrainedLogitsProcessor": "_num_beams _prefix_allowed_tokens_fn",
    "transformers.core_model_loading": "_weight_conversions",
    "transformers.utils.hub": "_raise_exceptions_for_connection_errors _raise_exceptions_for_missing_entries",
    "transformers.utils.output_capturing": "_output_capturing_hooks_installed",
    "transformers.trainer:Trainer": (
        "_finish_current_push _get_dataloader _get_num_items_in_batch "
        "_initial_global_step _load_best_model _load_from_checkpoint _prepare_for_training _prepare_inputs "
        "_save _set_signature_columns_if_needed _signature_columns"
    ),
}
"""Private names of transformers that this library uses, by owner ("module" or "module:Class")."""

PARAMETERS = {
    "_has_unfinished_sequences": "this_peer_finished synced_gpus device",
    "_prefill": "input_ids generation_config model_kwargs",
    "_get_logits_processor": "generation_config input_ids_seq_length encoder_input_ids prefix_allowed_tokens_fn",
    "_prepare_generation_config": "generation_config kwargs",
    "_sample": "input_ids logits_processor stopping_criteria generation_config synced_gpus streamer",
    "_supports_default_dynamic_cache": "",
    "_can_set_attn_implementation": "",
    "_can_set_experts_implementation": "",
    "_init_weights": "module",
    "_initialize_weights": "module",
    "_set_gradient_checkpointing": "enable",
    "_validate_generation_mode": "generation_mode generation_config generation_mode_kwargs",
    "_valid_auto_compile_criteria": "model_kwargs generation_config",
    "_finish_current_push": "",
    "_get_num_items_in_batch": "batch_samples device",
    "_load_best_model": "",
    "_save": "output_dir state_dict",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_prepare_inputs": "inputs",
    "_set_signature_columns_if_needed": "",
}
"""By function of transformers that we override or call: its first parameters, in order."""

OTHERS = [
    (torch.nn.Module, "_apply"),
    (torch.nn.Linear(1, 1), "_backward_hooks"),
    (torch.nn.Linear(1, 1), "_buffers"),
    (torch.nn.Linear(1, 1), "_forward_hooks"),
    (torch.nn.Linear(1, 1), "_forward_pre_hooks"),
    (torch.nn.Linear(1, 1), "_modules"),
    (torch.nn.Linear(1, 1), "_parameters"),
    (torch.Tensor, "_version"),
    (torch, "_dynamo"),
    (torch, "_standard_gamma"),
    (torch.utils, "_python_dispatch"),
    (torch.utils, "_pytree"),
    (accelerate.parallelism_config.ParallelismConfig, "_validate_accelerator"),
    (peft.LoraConfig, "_register_custom_module"),
    (trl.SFTTrainer, "_prepare_dataset"),
    (trl.SFTTrainer, "_push_from_checkpoint"),
    (transformers.PreTrainedTokenizerBase, "_decode"),
    (trl.SFTTrainer, "_tag_names"),
]
"""Names of other libraries that exist on a class or a module."""

WRITTEN_IN_SOURCE = [
    (accelerate.hooks, "_hf_hook"),
    (torch._dynamo.OptimizedModule, "_orig_mod"),
    (trl.SFTTrainer, "_metrics"),
]
"""Names of other libraries that objects get at run time."""

OWNERS = {name: owner for owner, names in NAMES.items() for name in names.split()}
IN_FILES = {"_name_or_path", "_exp_gamma_weights", "_proj", "_draft_", "_id", "_target_"}
"""Fields of config.json and of rows, and parts of names of tensors and metrics, which look like private names."""
LISTED = {*OWNERS, *IN_FILES, *(name for _, name in (*OTHERS, *WRITTEN_IN_SOURCE))}


def label(value) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value)).rpartition(".")[2]


@pytest.mark.parametrize("owner", NAMES)
def test_transformers_has_every_listed_name(owner):
    """As an attribute, or in the source, for what objects get at run time and for keyword arguments."""
    module_name, _, kind = owner.partition(":")
    module = import_module(module_name)
    holder, source = getattr(module, kind) if kind else module, inspect.getsource(module)
    assert [name for name in NAMES[owner].split() if not hasattr(holder, name) and name not in source] == []


def test_a_version_newer_than_all_tested_is_said(caplog):
    transformers.utils.logging.enable_propagation()
    try:
        warn_of_newer_version("5.24.3")
        assert not caplog.records
        warn_of_newer_version("5.99.0")
        warn_of_newer_version("5.99.0")
    finally:
        transformers.utils.logging.disable_propagation()
    (record,) = caplog.records
    assert "5.99.0" in record.getMessage() and TESTED_VERSIONS[-1] in record.getMessage()


def test_a_peft_that_transformers_refuses_is_named(monkeypatch):
    names = sys.modules[obstacle_of_peft.__module__]
    monkeypatch.setattr(names, "MIN_PEFT_VERSION", "99.0")
    assert "peft 99.0" in obstacle_of_peft() and transformers.__version__ in obstacle_of_peft()
    monkeypatch.setattr(names, "MIN_PEFT_VERSION", "0.1")
    assert obstacle_of_peft() is None


@pytest.mark.nightly
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_private_function_takes_what_we_pass(name):
    module, _, kind = OWNERS[name].partition(":")
    function = getattr(getattr(import_module(module), kind), name)
    found = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
    assert found[: len(PARAMETERS[name].split())] == PARAMETERS[name].split()


@pytest.mark.nightly
@pytest.mark.parametrize(("owner", "name"), OTHERS, ids=label)
def test_a_private_attribute_exists(owner, name):
    assert hasattr(owner, name)


@pytest.mark.parametrize(("owner", "name"), WRITTEN_IN_SOURCE, ids=label)
def test_a_private_word_is_still_in_the_source(owner, name):
    assert re.search(rf"\b{name}\b", inspect.getsource(owner))


@pytest.mark.by_day("accessed")
@pytest.mark.parametrize("find", [overridden, accessed])
def test_every_private_name_that_we_use_is_listed(find):
    """Whoever uses a new private name lists it, and adds the parameters that are passed by position above."""
    assert {name: place for name, place in find() if name not in LISTED} == {}


def test_every_name_listed_is_used():
    assert LISTED - {name for name, _ in (*overridden(), *accessed())} == set()
