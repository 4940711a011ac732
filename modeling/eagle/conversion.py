"""Checkpoints of EAGLE heads from other libraries: configuration and tensors in this library's names.

Layouts: the official one of EAGLE-1, EAGLE-2 and HASS; the official one of EAGLE-3; SpecForge's; speculators'. Fields
that a config lacks are read off the tensors; unknown and contradictory values are refused. Imports no network.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import (
    logging,
)

from ...configuration import EagleHeadConfig

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
    """Rename tensors of any layout to the names of `EagleHead`."""
    return {_own_name(name): tensor for name, tensor in state.items()}


def _own_name(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    if match := _ADDITIONAL.match(name):  # SGLang's name of a further layer's first norm
        return f"layers.{int(match[1]) + 1}." + match[2].replace("hidden_norm", "input_layernorm")
    return name


def foreign_head(
    name: Any, raw: dict[str, Any], state: dict[str, torch.Tensor], **overrides: Any
) -> tuple[EagleHeadConfig, dict[str, torch.Tensor]]:
    """Return configuration and tensors of a checkpoint from another library.

    Args:
        name: Name of the checkpoint, for messages.
        raw: Its config.json.
        state: Its tensors.
        overrides: Fields of the configuration that replace the checkpoint's; None: not given.

    Raises:
        ValueError: No EAGLE head, ambiguous auxiliary layers, an invalid draft vocabulary.
    """
    state = own_names(state)
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    version = _version(name, raw, shapes)
    if "hidden_size" not in _llama_fields(raw):
        raise ValueError(f"{name}: config.json has no hidden_size")
    values = _llama_fields(raw) | _read_off(raw, shapes, version)
    flags = dict(raw.get("eagle_config") or {}) | raw
    values |= {key: bool(flags[key]) for key in _FLAGS if key in flags and version == 3}
    values |= {key: value for key, value in overrides.items() if value is not None}
    if version == 3 and values.get("use_aux_hidden_state", True):
        if values.get("aux_layers") is None:
            values["aux_layers"] = _aux_layers(name, raw)
        _check_fc(name, values, shapes)
    elif values.get("aux_layers") is not None:
        raise ValueError(f"{name}: aux_layers={values['aux_layers']}: this head reads the last hidden state only")
    config = EagleHeadConfig(version=version, layout=_layout(raw), **values)
    check_vocabulary(name, config, state)
    return config, {key: tensor for key, tensor in state.items() if key != "t2d"}


def _version(name: Any, raw: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> int:
    speculator = raw.get("speculators_model_type")
    if speculator not in (None, "eagle3"):
        raise ValueError(f"{name}: speculators_model_type={speculator!r} is not supported; only 'eagle3' is")
    if "layers.0.hidden_norm.weight" in shapes:
        return 3
    fc, first = shapes.get("fc.weight"), shapes.get("layers.0.self_attn.q_proj.weight")
    if fc is None or first is None or fc[1] != 2 * fc[0]:
        raise ValueError(
            f"{name} is no EAGLE head: neither midlayer.hidden_norm.weight (EAGLE-3) nor fc.weight [d, 2 d] with "
            f"layers.0.* (EAGLE-1) is among its tensors: {', '.join(sorted(shapes)[:5])}, ..."
        )
    return 1


def _layout(raw: dict[str, Any]) -> str:
    if "speculators_model_type" in raw:
        return "speculators"
    return "specforge" if raw.get("architectures") == ["LlamaForCausalLMEagle3"] else "official"


def _llama_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the layers; speculators and vLLM nest them."""
    values = dict(raw)
    for nested in ("transformer_layer_config", "model"):
        if isinstance(raw.get(nested), dict):
            values |= raw[nested]
    known = _OWN | {"rope_theta", "rope_scaling", "dtype"}
    found = {key: value for key, value in values.items() if key in known - _NOT_TAKEN and value is not None}
    if "torch_dtype" in values:
        found.setdefault("dtype", values["torch_dtype"])
    return found | _of_verifier((raw.get("speculators_config") or {}).get("verifier") or {})


def _of_verifier(verifier: dict[str, Any]) -> dict[str, Any]:
    """Return speculators' fields of the backbone: its name and its kind."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    kinds = [(kind, name) for kind, name in classes if name in (verifier.get("architectures") or ())]
    # Llama's class also reads other kinds
    kind, _ = min(kinds, key=lambda pair: not pair[1].lower().startswith(pair[0]), default=(None, None))
    found = {"base_model_name_or_path": verifier.get("name_or_path") or None, "base_model_type": kind}
    return {key: value for key, value in found.items() if value is not None}


def _read_off(raw: dict[str, Any], shapes: dict[str, tuple[int, ...]], version: int) -> dict[str, Any]:
    """Return options that the tensors show; many configs lack them."""
    layers = {int(key.split(".")[1]) for key in shapes if key.startswith("layers.")}
    values = {
        "num_hidden_layers": max(layers) + 1,
        "own_embeddings": "embed_tokens.weight" in shapes,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in shapes,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in shapes,
        "fc_bias": "fc.bias" in shapes,
    }
    given = _llama_fields(raw)
    if "num_attention_heads" in given and "head_dim" not in given:
        values["head_dim"] = shapes["layers.0.self_attn.q_proj.weight"][0] // given["num_attention_heads"]
    if version == 3:
        shown = {"norm_before_fc": "input_norm.weight" in shapes, "fc_norm": "fc_norm.0.weight" in shapes}
        values |= {key: value for key, value in shown.items() if value and key not in given}
    return values


def _aux_layers(name: Any, raw: dict[str, Any]) -> list[int] | None:
    """Return indices into transformers' hidden states.

    At the top level, which vLLM and speculators read, ids are such indices. In `eagle_config` they are SpecForge's and
    SGLang's: a first id of 1 means indices of layers' outputs, one less.
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
    """Refuse an `fc` whose columns are not those of the named states."""
    columns = shapes["fc.weight"][1] if "fc.weight" in shapes else 0
    width = values.get("target_hidden_size") or values["hidden_size"]
    named = 3 if values["aux_layers"] is None else len(values["aux_layers"])
    if columns != named * width:
        raise ValueError(
            f"{name}: fc.weight has {columns} columns, but {named} hidden states of {width} (aux_layers="
            f"{values['aux_layers']}, by default three) have {named * width}; pass aux_layers= with one index per state"
        )


def check_vocabulary(name: Any, config: EagleHeadConfig, state: dict[str, torch.Tensor]) -> None:
    """Check that `d2t` holds offsets and agrees with `t2d`; where all tokens are drafted, `d2t` is removed.

    Args:
        name: Name of the checkpoint, for messages.
        config: Of the head.
        state: Tensors under this library's names.

    Raises:
        ValueError: An invalid draft vocabulary.
    """
    if config.version == 1 or "d2t" not in state:
        return
    size, vocab = config.draft_vocab_size or config.vocab_size, config.vocab_size
    if state["d2t"].shape != (size,):
        raise ValueError(f"{name}: d2t has shape {tuple(state['d2t'].shape)}; draft_vocab_size={size} needs {(size,)}")
    if state["d2t"].is_floating_point():
        raise ValueError(f"{name}: d2t has dtype {state['d2t'].dtype}; it must hold integers, token id - draft id")
    ids = state["d2t"] + torch.arange(size)
    if not bool(((ids >= 0) & (ids < vocab)).all()):
        raise ValueError(
            f"{name}: d2t maps draft ids to {int(ids.min())}..{int(ids.max())}, outside the vocabulary 0..{vocab - 1}; "
            "it must hold offsets (token id - draft id)"
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
