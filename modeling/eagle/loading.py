"""Directories of EAGLE heads as others write them: configuration and tensors in this library's names. Knows no network.

Layouts: the official one of EAGLE-1, EAGLE-2 and HASS; the official one of EAGLE-3; SpecForge's; speculators'. What a
config leaves open is read off the tensors; what contradicts them, or what nobody here knows, is refused by name.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
    logging,
)

from ...configuration import EagleHeadConfig
from ..tensor_files import naming, read_pickle

logger = logging.get_logger(__name__)

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
_RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^draft_id_to_target_id$"), "d2t"),
    (re.compile(r"^target_id_to_draft_id$"), "t2d"),
)
_ADDITIONAL = re.compile(r"^additional_layers\.(\d+)\.(.*)")
_FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output", "use_aux_hidden_state")
_OWN = {field.name for field in fields(EagleHeadConfig)}
_NOT_TAKEN = {"version", "layout", "tie_word_embeddings", "num_hidden_layers", "architectures"}


def own_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of any layout under the names that `EagleHead` has."""
    return {_own_name(name): tensor for name, tensor in state.items()}


def _own_name(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    if match := _ADDITIONAL.match(name):  # SGLang's further layers call their first norm hidden_norm
        return f"layers.{int(match[1]) + 1}." + match[2].replace("hidden_norm", "input_layernorm")
    return name


def foreign_head(
    name: Any, raw: dict[str, Any], state: dict[str, torch.Tensor], **overrides: Any
) -> tuple[EagleHeadConfig, dict[str, torch.Tensor]]:
    """Configuration and tensors of a directory that another library wrote.

    Args:
        name: What the directory is called, for messages.
        raw: Its config.json.
        state: Its tensors.
        overrides: Fields of the configuration that the caller knows better; None: not given.

    Raises:
        ValueError: No EAGLE head, ambiguous auxiliary layers, a draft vocabulary that is none.
    """
    state = own_names(state)
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    version = _version(name, raw, shapes)
    if "hidden_size" not in _llama_fields(raw):
        raise ValueError(f"{name}: config.json says no hidden_size")
    values = _llama_fields(raw) | _read_off(raw, shapes, version)
    flags = dict(raw.get("eagle_config") or {}) | raw
    values |= {key: bool(flags[key]) for key in _FLAGS if key in flags and version == 3}
    values |= {key: value for key, value in overrides.items() if value is not None}
    if version == 3 and values.get("use_aux_hidden_state", True):
        if values.get("aux_layers") is None:
            values["aux_layers"] = _aux_layers(name, raw)
        _check_fc(name, values, shapes)
    elif values.get("aux_layers") is not None:
        raise ValueError(f"{name}: aux_layers={values['aux_layers']}, but this head reads the last hidden state alone")
    config = EagleHeadConfig(version=version, layout=_layout(raw), **values)
    check_vocabulary(name, config, state)
    return config, {key: tensor for key, tensor in state.items() if key != "t2d"}


def _version(name: Any, raw: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> int:
    speculator = raw.get("speculators_model_type")
    if speculator not in (None, "eagle3"):
        raise ValueError(f"{name}: speculators_model_type={speculator!r} is not supported; 'eagle3' is")
    if "layers.0.hidden_norm.weight" in shapes:
        return 3
    fc, first = shapes.get("fc.weight"), shapes.get("layers.0.self_attn.q_proj.weight")
    if fc is None or first is None or fc[1] != 2 * fc[0]:
        raise ValueError(
            f"{name} holds no EAGLE head: neither midlayer.hidden_norm.weight (EAGLE-3) nor fc.weight [d, 2 d] with "
            f"layers.0.* (EAGLE-1) is among its tensors: {', '.join(sorted(shapes)[:5])}, ..."
        )
    return 1


def _layout(raw: dict[str, Any]) -> str:
    if "speculators_model_type" in raw:
        return "speculators"
    return "specforge" if raw.get("architectures") == ["LlamaForCausalLMEagle3"] else "official"


def _llama_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """What a config says of the layers; speculators and vLLM nest it."""
    values = dict(raw)
    for nested in ("transformer_layer_config", "model"):
        if isinstance(raw.get(nested), dict):
            values |= raw[nested]
    known = _OWN | {"rope_theta", "rope_scaling", "dtype"}
    kept = {key: values[key] for key in values if key in known and key not in _NOT_TAKEN and values[key] is not None}
    if "torch_dtype" in values:
        kept.setdefault("dtype", values["torch_dtype"])
    return kept | _of_verifier((raw.get("speculators_config") or {}).get("verifier") or {})


def _of_verifier(verifier: dict[str, Any]) -> dict[str, Any]:
    """What speculators say of the backbone: its name, and classes that read it."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    kinds = [(kind, name) for kind, name in classes if name in (verifier.get("architectures") or ())]
    # the class of Llama reads other kinds, too
    kind, _ = min(kinds, key=lambda pair: not pair[1].lower().startswith(pair[0]), default=(None, None))
    said = {"base_model_name_or_path": verifier.get("name_or_path") or None, "base_model_type": kind}
    return {key: value for key, value in said.items() if value is not None}


def _read_off(raw: dict[str, Any], shapes: dict[str, tuple[int, ...]], version: int) -> dict[str, Any]:
    """Options that the tensors show; a config that forgets them is common."""
    layers = {int(key.split(".")[1]) for key in shapes if key.startswith("layers.")}
    values = {
        "num_hidden_layers": max(layers) + 1,
        "own_embeddings": "embed_tokens.weight" in shapes,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in shapes,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in shapes,
        "fc_bias": "fc.bias" in shapes,
    }
    said = _llama_fields(raw)
    if "num_attention_heads" in said and "head_dim" not in said:
        values["head_dim"] = shapes["layers.0.self_attn.q_proj.weight"][0] // said["num_attention_heads"]
    if version == 3:
        shown = {"norm_before_fc": "input_norm.weight" in shapes, "fc_norm": "fc_norm.0.weight" in shapes}
        values |= {key: value for key, value in shown.items() if value and key not in said}
    return values


def _aux_layers(name: Any, raw: dict[str, Any]) -> list[int] | None:
    """Indices into transformers' hidden states.

    At the top level, where vLLM and speculators look, ids are such indices. In `eagle_config` they are SpecForge's and
    SGLang's: a first id of 1 means that they count outputs of layers, one less.
    """
    top, nested = raw.get(AUX_IDS), (raw.get("eagle_config") or {}).get(AUX_IDS)
    if nested is not None:
        nested = [index + 1 for index in nested] if nested and nested[0] == 1 else list(nested)
    if top is not None and nested is not None and list(top) != nested:
        raise ValueError(
            f"{name}: {AUX_IDS} is {list(top)} at the top level of config.json, but means {nested} in eagle_config; "
            "pass aux_layers= with indices into hidden_states"
        )
    return nested if top is None else list(top)


def _check_fc(name: Any, values: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """The columns of `fc` must be those of the named states."""
    columns = shapes["fc.weight"][1] if "fc.weight" in shapes else 0
    width = values.get("target_hidden_size") or values["hidden_size"]
    named = 3 if values["aux_layers"] is None else len(values["aux_layers"])
    if columns != named * width:
        given = "none are named (so three)" if values["aux_layers"] is None else f"aux_layers={values['aux_layers']}"
        raise ValueError(
            f"{name}: fc.weight reads {columns} columns, which are not {named} hidden states of {width}: {given}; "
            "pass aux_layers= with one index for each state"
        )


def check_vocabulary(name: Any, config: EagleHeadConfig, state: dict[str, torch.Tensor]) -> None:
    """`d2t` holds offsets, and says the same as `t2d`; where all tokens are drafted it says nothing and goes.

    Args:
        name: What the directory is called, for messages.
        config: Of the head.
        state: Tensors under this library's names.

    Raises:
        ValueError: A draft vocabulary that is none.
    """
    if config.version == 1 or "d2t" not in state:
        return
    size, vocab = config.draft_vocab_size, config.vocab_size
    if state["d2t"].shape != (size,):
        raise ValueError(f"{name}: d2t has shape {tuple(state['d2t'].shape)}, but draft_vocab_size={size}")
    if state["d2t"].is_floating_point():
        raise ValueError(f"{name}: d2t has dtype {state['d2t'].dtype}; it holds whole numbers, token id - draft id")
    ids = state["d2t"] + torch.arange(size)
    if not bool(((ids >= 0) & (ids < vocab)).all()):
        raise ValueError(
            f"{name}: d2t maps draft ids to {int(ids.min())}..{int(ids.max())}, outside the vocabulary 0..{vocab - 1}; "
            "it holds offsets (token id - draft id)"
        )
    drafted = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    if int(drafted.sum()) != size:
        raise ValueError(f"{name}: d2t maps {size} draft ids to {int(drafted.sum())} tokens; it must be one to one")
    if "t2d" in state and not torch.equal(state["t2d"].bool(), drafted):
        raise ValueError(f"{name}: t2d and d2t do not name the same tokens (d2t holds offsets: token id - draft id)")
    if size == vocab:
        if bool(state["d2t"].any()):
            raise ValueError(f"{name}: d2t permutes a draft vocabulary that is the whole one, {vocab} tokens")
        del state["d2t"]


def read_tensors(name: Any, **hub: Any) -> dict[str, torch.Tensor]:
    """All tensors of a directory or a Hub repository; pickles are read with `weights_only=True`.

    Raises:
        ValueError: No weights, a damaged file, or a pickle of more than tensors.
    """
    found: dict[str, torch.Tensor] = {}
    for file in _weight_files(name, **hub):
        with naming(file):
            found |= load_file(file) if file.endswith(".safetensors") else read_pickle(file)
    return found


def _weight_files(name: Any, **hub: Any) -> list[str]:
    optional = {"_raise_exceptions_for_missing_entries": False, **hub}
    for index, single in ((SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME), (WEIGHTS_INDEX_NAME, WEIGHTS_NAME)):
        if listed := cached_file(name, index, **optional):
            shards = json.loads(Path(listed).read_text(encoding="utf-8"))["weight_map"].values()
            return [cached_file(name, shard, **hub) for shard in sorted(set(shards))]
        if file := cached_file(name, single, **optional):
            return [file]
    raise ValueError(f"{name}: no weights; {SAFE_WEIGHTS_NAME} or {WEIGHTS_NAME} should be there")
