"""Configurations of EAGLE heads: of new ones for a backbone, and of checkpoints from other libraries.

A layout is data: the names of its architectures, and the fields of its config.json. Fields that a config lacks are read
off the tensors; unknown and contradictory values are refused. Imports no network.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ...configuration.eagle import EagleHeadConfig
from ...configuration.foreign_fields import (
    COPIED_FROM_TARGET,
    ROPE_LEVELS,
    FieldTable,
    agreed,
    names,
    refuse_unread,
    settled,
)
from ...generation.tensors.tensor_files import Fields, count_of
from ..common.draft_vocabulary import check_offsets
from ..common.drafter_configs import (
    architectures,
    check_columns,
    new_config,
    rope_of,
    verifier_fields,
)

logger = logging.get_logger(__name__)
_DEFAULT_LAYERS = 7
"""With fewer layers, the default choice of hidden states would repeat one."""
_OFFICIAL_THETA = 10_000.0


def resolved_aux_layers(config: EagleHeadConfig, num_layers: int) -> list[int]:
    """Return indices of the hidden states that `fc` reads of a backbone's L layers; [] where it reads none."""
    if not config.num_aux:
        return []
    if config.aux_layers is None:
        if num_layers < _DEFAULT_LAYERS:
            raise ValueError(f"aux_layers=None needs {_DEFAULT_LAYERS} layers, not {num_layers}; pass aux_layers=")
        return default_aux_layers(num_layers)
    if not all(0 <= index <= num_layers for index in config.aux_layers):
        raise ValueError(f"aux_layers={config.aux_layers}: {num_layers} layers have hidden states 0..{num_layers}")
    return list(config.aux_layers)


def default_aux_layers(num_layers: int) -> list[int]:
    """Return the hidden states that the official code reads of L layers."""
    return [2, num_layers // 2, num_layers - 3]


def backbone_config(backbone: PreTrainedModel, **options: Any) -> EagleHeadConfig:
    """Return the configuration of a new head: the backbone's sizes and rope, unless `options` has others."""
    reads_several = options.get("version", 3) == 3 and options.get("use_aux_hidden_state", True)
    own = lambda text: {"aux_layers": _small_aux_layers(text.num_hidden_layers)} if reads_several else {}  # noqa: E731
    return new_config(EagleHeadConfig, "EagleHead", backbone, options, own)


def warn_of_misfit(config: EagleHeadConfig, backbone: PreTrainedModel) -> None:
    """Warn of states that nobody named, which may let fewer drafts be accepted."""
    if config.num_aux and config.aux_layers is None and config.layout != "tokenahead":
        layers = default_aux_layers(backbone.config.get_text_config().num_hidden_layers)
        logger.warning_once(
            f"{config.name_or_path or 'This EAGLE head'} does not name the hidden states that it reads: taken are "
            f"aux_layers={layers}, as in the official code; if it learned from others, few drafts are accepted: pass "
            "aux_layers= to from_pretrained"
        )


def _small_aux_layers(num_layers: int) -> list[int]:
    """Return the default choice for a small backbone, three different states where it has three."""
    last = max(num_layers - 1, 1)
    wanted = sorted(min(max(index, 1), last) for index in (2, num_layers // 2, num_layers - 3))
    if last < len(wanted):
        return wanted
    for index in range(1, len(wanted)):
        wanted[index] = max(wanted[index], wanted[index - 1] + 1)
    return wanted


AUX_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id", "dflash_config.mask_token_id")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state")
NESTED = ("transformer_layer_config", "model")
"""Objects that hold the fields of the layers: speculators', vLLM's."""
LAYER_FIELDS = names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "rms_norm_eps vocab_size max_position_embeddings rope_theta attention_bias mlp_bias layer_types sliding_window "
    "use_sliding_window"
)
_HEAD_FIELDS = names(
    "draft_vocab_size target_hidden_size parallel_drafting num_aux_hidden_states num_aux_layers target_layer_ids bias "
    f"loss_options {AUX_IDS} {' '.join(FLAGS)} mask_token_id pard_token ptd_token_id"
)
_INFORMATION = names(
    "qkv_bias max_window_layers max_sequence_length has_lm_head has_embed_tokens truncated_vocab_size "
    "num_target_layers num_depths down_sample_ratio down_sample_ratio_min parallel_draft_heads_num_layers "
    "method num_lookahead_tokens num_speculative_tokens"
)
_TRAINED_BY_MODEL_OPTIMIZER = {
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "position_embedding_type": ("rope",),
}
"""Fields of its networks, at the values of EAGLE-3's."""
_PLAIN = FieldTable(
    "official",
    {"": LAYER_FIELDS | _HEAD_FIELDS, "eagle_config": names(f"{AUX_IDS} {' '.join(FLAGS)}"), **ROPE_LEVELS}
    | {"dflash_config": ("mask_token_id",), "model": LAYER_FIELDS}
    | {f"model.{level}": fields for level, fields in ROPE_LEVELS.items()},
    {"": _INFORMATION, "model": _INFORMATION, "eagle_config": _INFORMATION},
    _TRAINED_BY_MODEL_OPTIMIZER,
)


@dataclass(frozen=True)
class EagleLayout:
    """A layout of checkpoints of EAGLE heads.

    Attributes:
        names: Of architectures; those that begin with `PEagle` have rows that run at once.
        table: The fields of its config.json.
        saved_as: `config.layout` of what is read.
        states_theta: Its config always has a `rope_theta`; in others, 10,000 is meant where there is none.
        scales_rope: Its code knows other rotary positions than the default ones.
        counts_layers: `num_hidden_layers` is the head's, and not the target's, whose config was copied.
    """

    names: Collection[str]
    table: FieldTable
    saved_as: str
    states_theta: bool = False
    scales_rope: bool = True
    counts_layers: bool = True


def _named(layout: str, top: Collection[str] = (), rope: Collection[str] = ()) -> FieldTable:
    """Return the table of a layout that knows more fields than the official one, at the top and of rope."""
    more = {"": {*_INFORMATION, *top}} | dict.fromkeys(ROPE_LEVELS, rope)
    return replace(_PLAIN, layout=layout, known={**_PLAIN.known, **more})


_SPECULATORS = FieldTable(
    "speculators",
    {"": _HEAD_FIELDS, "transformer_layer_config": LAYER_FIELDS, "speculators_config": ("verifier",)}
    | {f"transformer_layer_config.{level}": fields for level, fields in ROPE_LEVELS.items()},
    {
        "": names("speculators_model_type speculators_version ignore_keys"),
        "transformer_layer_config": _INFORMATION,
        "speculators_config": names("algorithm default_proposal_method proposal_methods"),
    },
    _PLAIN.only,
)
SPECULATORS = EagleLayout(names("Eagle3DraftModel Eagle3Speculator"), _SPECULATORS, "speculators")
_OF_ROPE = names("partial_rotary_factor mrope_*")
"""Of the target: DeepSpec's heads rotate whole heads by a plain rope, and NeMo's as their config says."""
_OF_TARGETS = COPIED_FROM_TARGET - _OF_ROPE | names("resid_pdrop embd_pdrop")
_DEEPSPEC = EagleLayout(
    names("Qwen3Eagle3Model"), _named("deepspec", COPIED_FROM_TARGET, _OF_ROPE), "tokenahead", states_theta=True
)
_DEEPSPEC_SCALED = replace(_DEEPSPEC, table=_named("deepspec", COPIED_FROM_TARGET - _OF_ROPE))
_OFFICIAL = "LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM MistralForCausalLM MixtralForCausalLM"
_OF_VLLM = (
    "EagleLlamaForCausalLM LlamaForCausalLMEagle Eagle3LlamaForCausalLM PeagleLlamaForCausalLM "
    "Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM"
)
_NEMO = names("LlamaEagle3DraftModel")
LAYOUTS = (
    EagleLayout(names(_OFFICIAL), _PLAIN, "official"),
    EagleLayout(names("LlamaForCausalLMEagle3"), _named("specforge"), "specforge"),
    EagleLayout(names("PEagleDraftModel"), _named("specforge (P-EAGLE)"), "vllm", states_theta=True, scales_rope=False),
    EagleLayout(names(_OF_VLLM), _named("vllm"), "official"),
    _DEEPSPEC,
    EagleLayout(_NEMO, _named("nemo", _OF_TARGETS), "vllm", states_theta=True, counts_layers=False),
    SPECULATORS,
)


def layout_of(name: object, raw: Fields) -> EagleLayout:
    """Return the layout of the config.json of a head; one that names no architecture has the official one."""
    named = architectures(raw)
    found = [next((each for each in LAYOUTS if kind in each.names), None) for kind in named]
    if None in found:
        raise ValueError(f"{name}: architectures={named}: {named[found.index(None)]} is no EAGLE head known here")
    if "speculators_model_type" in raw:
        return SPECULATORS
    layout = next((each for each in found if each), LAYOUTS[0])
    is_scaled = layout is _DEEPSPEC and rope_of(name, raw, 1.0)["rope_type"] != "default"
    return _DEEPSPEC_SCALED if is_scaled else layout


_RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^draft_id_to_target_id$"), "d2t"),
    (re.compile(r"^target_id_to_draft_id$"), "t2d"),
)
_ADDITIONAL = re.compile(r"^additional_layers\.(\d+)\.(.*)")
_HEAD = re.compile(r"\w*eagle3?\w*", re.IGNORECASE)
"""Names of heads of any layout, but for the official ones, which are those of models."""
_TAKEN = LAYER_FIELDS | names("draft_vocab_size target_hidden_size bos_token_id eos_token_id pad_token_id dtype")
_TAKEN |= names("attention_dropout initializer_range loss_options")
_TAKEN -= names("num_hidden_layers rope_theta layer_types sliding_window use_sliding_window")


def own_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of any layout to the names of `EagleHead`."""
    state = {own_name(name): tensor for name, tensor in state.items()}
    return state | {key: state[key].reshape(1, 1, -1) for key in ("mask_hidden",) if key in state}


def own_name(name: str) -> str:
    """Return the name in `EagleHead` of a tensor of any layout."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    if match := _ADDITIONAL.match(name):  # SGLang's name of a further layer's first norm
        return f"layers.{int(match[1]) + 1}." + match[2].replace("hidden_norm", "input_layernorm")
    return name


def is_foreign_head(raw: Fields, names: Iterable[str]) -> bool:
    """Return whether a checkpoint of another library is an EAGLE head, by its config.json and its tensors' names.

    One that its config names so is, even where tensors are missing.
    """
    nested = raw.get("eagle_config")
    is_named = any(map(_HEAD.fullmatch, architectures(raw)))
    if is_named or AUX_IDS in raw or (isinstance(nested, dict) and AUX_IDS in nested):
        return True
    own, last_norm = set(map(own_name, names)), "norm.weight"
    is_first = {"layers.0.self_attn.q_proj.weight", "fc.weight"} <= own and last_norm not in own
    drafts_part = "draft_vocab_size" in raw and not own.isdisjoint(("d2t", "t2d"))
    return "speculators_model_type" in raw or "layers.0.hidden_norm.weight" in own or is_first or drafts_part


def foreign_head(
    name: object, raw: Fields, state: dict[str, Tensor], ignored: Sequence[str] = (), **overrides: Any
) -> tuple[EagleHeadConfig, dict[str, Tensor]]:
    """Return configuration and tensors of a checkpoint from another library, from its config.json and its tensors.

    `overrides` are fields of the configuration that replace the checkpoint's, where they are not None; `ignored` are
    names of fields of the config.json that are passed over.
    """
    counts_layers = not any(map(_ADDITIONAL.match, state))  # SGLang's further layers are not counted
    state = own_names(state)
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    version, layout = _version(name, raw, shapes), layout_of(name, raw)
    refuse_unread(name, raw, layout.table, ignored)
    layers = raw | next((raw[nested] for nested in NESTED if isinstance(raw.get(nested), dict)), {})
    stated = {key: layers[key] for key in _TAKEN if layers.get(key) is not None}
    stated |= verifier_fields((raw.get("speculators_config") or {}).get("verifier") or {})
    if "hidden_size" not in stated:
        raise ValueError(f"{name}: config.json has no hidden_size")
    stated.setdefault("dtype", layers.get("torch_dtype"))
    flags = {key: agreed(name, raw, key, f"eagle_config.{key}") for key in FLAGS}
    shown = _sizes(name, stated, shapes, version) | _read_off(name, shapes, version)
    for key, value in (shown | _implied(stated, shapes, version)).items():
        if key != "num_hidden_layers" or (counts_layers and layout.counts_layers):
            settled(name, key, (layers | flags).get(key), value)
    _refuse_windows(name, layers, shown["num_hidden_layers"])
    values: Fields = shown | stated | {"rope_parameters": _rope(name, layers, layout)}
    values |= {key: flag for key, flag in flags.items() if flag is not None and version == 3}
    values |= {key: value for key, value in overrides.items() if value is not None}
    values["mask_token_id"] = _mask_token(name, raw, "mask_hidden" in shapes, overrides.get("mask_token_id"))
    if version == 3 and values.get("use_aux_hidden_state", True):
        if values.get("aux_layers") is None:
            values["aux_layers"] = _aux_layers(name, raw)
        width = values.get("target_hidden_size") or values["hidden_size"]
        named = values["aux_layers"] or [None] * 3  # the official code's
        check_columns(name, shapes.get("fc.weight", (0, 0))[1], named, width, "aux_layers")
    elif values.get("aux_layers") is not None:
        raise ValueError(f"{name}: aux_layers={values['aux_layers']}: this head reads the last hidden state only")
    saved_as = "vllm" if "mask_hidden" in shapes else layout.saved_as
    config = EagleHeadConfig(version=version, layout=saved_as, **values)
    config.name_or_path = str(name)
    if "t2d" in state and "d2t" not in state and version == 3:
        ids = state["t2d"].nonzero()[:, 0]  # [Vd]
        state["d2t"] = ids - torch.arange(len(ids))
    check_offsets(name, state, config.draft_vocab_size or config.vocab_size, config.vocab_size)
    return config, {key: tensor for key, tensor in state.items() if key != "t2d"}


def _mask_token(name: object, raw: Fields, is_parallel: bool, given: int | None) -> int | None:
    """Return the token of P-EAGLE's rows, by the names that vLLM reads; None for other heads."""
    token = agreed(name, raw, *MASK_TOKENS, meanings=dict.fromkeys(MASK_TOKENS, int))
    token = token if given is None else given
    says = raw.get("parallel_drafting")
    is_named = any(kind.lower().startswith("peagle") for kind in architectures(raw))
    if is_parallel and token is None:
        raise ValueError(
            f"{name}: mask_hidden is present, but config.json has none of {', '.join(MASK_TOKENS)}: SpecForge does not "
            "save this option of a run; pass mask_token_id="
        )
    if (says is False) if is_parallel else (token is not None or says or is_named):
        raise ValueError(
            f"{name}: mask_token_id={token}, parallel_drafting={says}, architectures={architectures(raw)}: rows run at "
            f"once where there is mask_hidden, which its tensors {'have' if is_parallel else 'lack'}"
        )
    return token


def _version(name: object, raw: Fields, shapes: dict[str, tuple[int, ...]]) -> int:
    speculator = raw.get("speculators_model_type")
    if speculator not in (None, "eagle3"):
        raise ValueError(f"{name}: speculators_model_type={speculator!r} is not supported; only 'eagle3' is")
    if "layers.0.hidden_norm.weight" in shapes:
        return 3
    fc, first = shapes.get("fc.weight"), shapes.get("layers.0.self_attn.q_proj.weight")
    if fc is None or first is None or fc[1] != 2 * fc[0]:
        raise ValueError(f"{name} is no EAGLE head: no hidden_norm.weight (EAGLE-3) and no fc.weight [d, 2 d]")
    return 1


def _implied(stated: Fields, shapes: dict[str, tuple[int, ...]], version: int) -> Fields:
    """Return fields that other libraries write of what the shapes show, and this one does not have."""
    fc = shapes.get("fc.weight")
    if version == 1:
        return {"bias": "fc.bias" in shapes} | dict.fromkeys(FLAGS[:-1], False)
    count = fc[-1] // (stated.get("target_hidden_size") or stated["hidden_size"]) if fc else 0
    return {"use_aux_hidden_state": fc is not None, "num_aux_hidden_states": count, "num_aux_layers": count}


def _refuse_windows(name: object, layers: Fields, count: int) -> None:
    """Refuse layers with a window: all rows are read."""
    kinds, window = layers.get("layer_types"), layers.get("sliding_window")
    others = [kind for kind in (kinds or ())[:count] if kind != "full_attention"]
    if others or (not kinds and window is not None and layers.get("use_sliding_window")):
        raise ValueError(
            f"{name}: layer_types={kinds} with sliding_window={window}: layers of EAGLE heads attend to all rows here, "
            "and these learned to see some"
        )


def _rope(name: object, layers: Fields, layout: EagleLayout) -> Fields:
    """Return the rope of the layers: official heads learned with 10,000, which their configs do not say."""
    rope = rope_of(name, layers, None if layout.states_theta else _OFFICIAL_THETA)
    if (kind := rope["rope_type"]) != "default" and not layout.scales_rope:
        raise ValueError(f"{name}: rope_type={kind!r}: the code that trained it ({layout.table.layout}) drops it")
    return rope


def _sizes(name: object, stated: Fields, shapes: dict[str, tuple[int, ...]], version: int) -> Fields:
    """Return the sizes that the tensors show; for those that a config does not state, Llama's defaults are wrong."""

    def rows(tensor: str) -> int:
        return shapes.get(tensor, (0,))[0]

    attention = "layers.0.self_attn.{}_proj.weight"
    heads, head_dim = (stated.get(key) for key in ("num_attention_heads", "head_dim"))
    heads = rows(attention.format("q")) // head_dim if head_dim else heads
    head_dim = head_dim or rows(attention.format("q")) // (heads or 1)
    drafted = rows("lm_head.weight") if version == 3 else 0
    whole = 0 if "d2t" in shapes or "vocab_size" in stated else drafted
    shown = {
        "num_attention_heads": heads,
        "num_key_value_heads": rows(attention.format("k")) // (head_dim or 1),
        "head_dim": head_dim if heads else 0,
        "hidden_size": rows("layers.0.post_attention_layernorm.weight"),
        "intermediate_size": rows("layers.0.mlp.gate_proj.weight"),
        "vocab_size": rows("embed_tokens.weight") or rows("t2d") or whole,
        "draft_vocab_size": drafted,
    }
    if missing := [key for key in ("num_attention_heads", "vocab_size") if key not in stated and not shown[key]]:
        raise ValueError(f"{name}: config.json has no {', '.join(missing)}, and no tensor shows it")
    return {key: size for key, size in shown.items() if size}


SHOWN_BY = {
    "qk_norm": "layers.0.self_attn.q_norm.weight",
    "attention_bias": "layers.0.self_attn.q_proj.bias",
    "mlp_bias": "layers.0.mlp.gate_proj.bias",
    "fc_bias": "fc.bias",
    "norm_before_fc": "input_norm.weight",
    "fc_norm": "fc_norm.0.weight",
}
"""By option, the tensor that is there where it is true."""


def _read_off(name: object, shapes: dict[str, tuple[int, ...]], version: int) -> Fields:
    """Return options that the tensors show; many configs lack them."""
    layers = {int(key.split(".")[1]) for key in shapes if key.startswith("layers.")}
    options = [*SHOWN_BY][: None if version == 3 else -2]
    values = {option: SHOWN_BY[option] in shapes for option in options}
    own = "embed_tokens.weight" in shapes
    return {"num_hidden_layers": count_of(name, layers, "layer"), "own_embeddings": own} | values


def _aux_layers(name: object, raw: Fields) -> list[int] | None:
    """Return indices into transformers' hidden states.

    At the top level, which vLLM and speculators read, ids are such indices. In `eagle_config` they are SpecForge's and
    SGLang's: a first id of 1 means indices of layers' outputs, one less. DeepSpec's are such outputs.
    """
    outputs = lambda ids: [index + 1 for index in ids]  # noqa: E731
    meanings = {
        f"eagle_config.{AUX_IDS}": lambda ids: outputs(ids) if ids[0] == 1 else ids,
        "target_layer_ids": outputs,
    }
    return agreed(name, raw, AUX_IDS, *meanings, meanings=meanings)
