"""Every private name of transformers that this library uses, with what it is for, and the check that they exist.

The core names are checked when `tokenahead` is imported, those of the `Trainer` with our trainers: a version of
transformers that lacks one says so there, not in the middle of a call. Imports nothing that is not imported anyway.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import transformers
from packaging.version import parse
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import logging

logger = logging.get_logger(__name__)

TESTED_VERSIONS = ("5.21", "5.22", "5.23", "5.24")
"""Versions of transformers on which all core tests pass (docs/compatibility.md)."""

CORE = {
    "transformers.generation.utils:GenerationMixin": {
        "_get_candidate_generator": "replaced on a model to which a drafter's candidates were given",
        "_get_logits_processor": "the processors of a call, whose texts `tokenahead.testing` enumerates",
        "_has_unfinished_sequences": "asks all processes whether a sequence is unfinished (synced_gpus)",
        "_pad_token_tensor": "pads finished sequences",
        "_previous_max_cache_length": "the room of the longest call on a static cache, which later calls keep",
        "_prefill": "runs the prompt, in chunks where the generation config says so",
        "_prepare_generation_config": "reads the options of a call",
        "_prepare_position_ids_for_generation": "overridden: the main model's, which may be three beside images",
        "_prepare_special_tokens": "ids that the processors of a call read",
        "_sample": "decodes plainly where nothing is drafted",
        "_supports_default_dynamic_cache": "whether the cache is a DynamicCache",
        "_valid_auto_compile_criteria": "whether forwards of a call are compiled",
        "_update_model_kwargs_for_generation": "the inputs of the model after one more token",
        "_validate_generation_mode": "overridden on a backbone: refuses a drafter that was attached within the call",
        "_validate_model_kwargs": "overridden: pixels go to the main model",
    },
    "transformers.modeling_utils:PreTrainedModel": {
        "_can_set_attn_implementation": "overridden: a wrapper answers for its backbone",
        "_can_set_experts_implementation": "overridden: a wrapper answers for its backbone",
        "_gradient_checkpointing_func": "set on layers: wrapped, so that gates are open again in backward",
        "_hf_peft_config_loaded": "whether adapters were added with `add_adapter`",
        "_init_weights": "overridden: initialises our modules",
        "_is_hf_initialized": "marks tensors that `from_pretrained` must not initialise again",
        "_is_stateful": "whether a model has a recurrent state, which cannot be cropped",
        "_keep_in_fp32_modules_strict": "set: adapters and slot embeddings stay in float32",
        "_keys_to_ignore_on_load_unexpected": "read and set: tensors of modules that are not loaded",
        "_no_split_modules": "set: layers that a device map does not split",
        "_set_gradient_checkpointing": "overridden: passes checkpointing on to the backbone",
        "_skip_keys_device_placement": "set: caches that hooks of accelerate must not move",
        "_supports_attention_backend": "set: as the backbone's",
        "_supports_flash_attn": "set: as the backbone's",
        "_supports_flex_attn": "set: as the backbone's",
        "_supports_sdpa": "set: models that take `attn_implementation='sdpa'`",
        "_tied_weights_keys": "set: the output embeddings, which a config may tie to the embeddings of the input",
        "_tp_size": "among how many processes tensor parallelism divides a model",
    },
    "transformers.configuration_utils:PreTrainedConfig": {
        "_attn_implementation": "the attention that a model uses; copied where a config becomes part of another",
        "_experts_implementation": "how a model computes its experts, which draft layers follow",
        "_auto_class": "hidden while a config is saved with its code",
    },
    "transformers.generation.logits_process:PrefixConstrainedLogitsProcessor": {
        "_num_beams": "how a prefix function numbers rows",
        "_prefix_allowed_tokens_fn": "wrapped: the user's function sees the sequences of a tree's nodes",
    },
    "transformers.core_model_loading": {
        "_weight_conversions": "how the tensors of a checkpoint were converted, for saving them as they were"
    },
    "transformers.utils.hub": {
        "_raise_exceptions_for_connection_errors": "asks for files that may not exist",
        "_raise_exceptions_for_missing_entries": "asks for files that may not exist",
    },
    "transformers.utils.output_capturing": {
        "_output_capturing_hooks_installed": "marks layers with local functions, which no pickle takes"
    },
}
"""By owner ("module" or "module:Class"): what each name is for."""

TRAINER = {
    "transformers.trainer:Trainer": {
        "_finish_current_push": "waits for an upload before the next",
        "_get_collator_with_removed_columns": "overridden: drops columns that are not read, of any data set",
        "_get_dataloader": "makes the loader of batches that were chosen already",
        "_get_num_items_in_batch": "overridden: counts the targets of every depth",
        "_initial_global_step": "the step that training resumes from",
        "_load_best_model": "loads the best checkpoint of a sharded model",
        "_load_from_checkpoint": "overridden: loads what our models save",
        "_prepare_for_training": "overridden: hides from DDP what processes share",
        "_prepare_inputs": "overridden: moves a batch to the device",
        "_remove_unused_columns": "overridden: the same of `datasets`",
        "_save": "overridden: model, tokenizer and arguments are one version of a directory",
        "_set_signature_columns_if_needed": "overridden: retains the columns that registers need",
        "_signature_columns": "the columns that a batch retains",
    }
}
"""As `CORE`, of the `Trainer`, which is imported for training alone."""


def missing_names(table: dict[str, dict[str, str]]) -> list[str]:
    """Return the names of a table that the installed transformers lacks, each with its owner.

    Methods and class attributes are looked up; attributes that objects get at run time, and keyword arguments, must
    occur in the source of their owner's module (which is skipped where there is no source).
    """
    missing = []
    for owner, names in table.items():
        module_name, _, class_name = owner.partition(":")
        module = import_module(module_name)
        holder = getattr(module, class_name, None) if class_name else module
        unknown = [name for name in names if not hasattr(holder, name)]
        source = Path(module.__file__ or "") if unknown else None
        if source is not None and source.suffix == ".py" and source.is_file():
            text = source.read_text(encoding="utf-8")
            missing += [f"{owner.replace(':', '.')}.{name}" for name in unknown if name not in text]
    return missing


def warn_of_newer_version(installed: str = transformers.__version__) -> None:
    """Say once that a version of transformers is newer than all that were tested."""
    if parse(installed).release[:2] > parse(TESTED_VERSIONS[-1]).release:
        logger.warning_once(
            f"transformers {installed} is newer than {TESTED_VERSIONS[-1]}, the newest tested with tokenahead; "
            f"if a call fails: pip install 'transformers=={TESTED_VERSIONS[-1]}.*'"
        )


def obstacle_of_peft() -> str | None:
    """Return why `add_adapter` and its kind cannot be used: transformers refuses older versions of peft; else None."""
    installed = version("peft")
    if parse(installed) >= parse(MIN_PEFT_VERSION):
        return None
    return f"transformers {transformers.__version__} needs peft {MIN_PEFT_VERSION} for add_adapter, found {installed}"


def check_names(table: dict[str, dict[str, str]]) -> None:
    """Check that the installed transformers has the names of a table.

    Raises:
        ImportError: A name is missing.
    """
    if missing := missing_names(table):
        raise ImportError(
            f"transformers {transformers.__version__} lacks {', '.join(missing)}, which tokenahead uses; it was tested "
            f"with transformers {', '.join(TESTED_VERSIONS)}: pip install 'transformers=={TESTED_VERSIONS[-1]}.*'"
        )
