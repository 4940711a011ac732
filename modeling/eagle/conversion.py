"""Configurations of EAGLE heads: of new ones for a backbone, and of checkpoints of other libraries, read and written.

A layout is data. Fields that a config.json lacks are read off the tensors; unknown and contradictory ones are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...configuration.eagle import EagleHeadConfig
from ...configuration.foreign_fields import (
    COPIED_FROM_TARGET,
    INFORMATION,
    LAYERS,
    ROPE_LEVELS,
    ROPE_OF_TARGET,
    FieldTable,
    agreed,
    names,
    refuse_unread,
    settled,
    speculators_table,
    stated,
)
from ...generation.tensors.tensor_files import Fields, count_of
from ..common.draft_vocabulary import check_offsets
from ..common.foreign import (
    architectures,
    check_columns,
    new_config,
    rope_of,
    speculators_fields,
    verifier_fields,
    with_prefixes,
)

_DEFAULT_LAYERS = 7  # with fewer layers, the default choice of hidden states would repeat one


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


def _small_aux_layers(num_layers: int) -> list[int]:
    """Return the default choice for a small backbone, three different states where it has three."""
    last = max(num_layers - 1, 1)
    wanted = sorted(min(max(index, 1), last) for index in default_aux_layers(num_layers))
    for index in range(1, len(wanted) if last >= len(wanted) else 0):
        wanted[index] = max(wanted[index], wanted[index - 1] + 1)
    return wanted


AUX_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id", "dflash_config.mask_token_id")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state")
NESTED = ("transformer_layer_config", "model")  # objects with the fields of the layers: speculators', vLLM's
LAYER_FIELDS = LAYERS | {"mlp_bias"}
_HEAD_FIELDS = names(
    "draft_vocab_size target_hidden_size parallel_drafting num_aux_hidden_states num_aux_layers target_layer_ids bias "
    f"loss_options {AUX_IDS} {' '.join(FLAGS)} mask_token_id pard_token ptd_token_id"
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
    {"": INFORMATION, "model": INFORMATION, "eagle_config": INFORMATION},
    _TRAINED_BY_MODEL_OPTIMIZER,
)


@dataclass(frozen=True)
class EagleLayout:
    """A layout of checkpoints of EAGLE heads."""

    names: Collection[str]  # of architectures
    table: FieldTable
    saved_as: str  # `config.layout` of what is read
    states_theta: bool = False  # a `rope_theta` must be stated; else 10,000 is meant
    scales_rope: bool = True  # its code knows other rotary positions than the default ones
    has_windows: bool = True  # who serves it reads `layer_types`
    counts_layers: bool = True  # `num_hidden_layers` is the head's, and not the target's


SPECULATORS = EagleLayout(
    names("Eagle3DraftModel Eagle3Speculator"),
    speculators_table(_HEAD_FIELDS, LAYER_FIELDS, _TRAINED_BY_MODEL_OPTIMIZER),
    "speculators",
)
_OF_TARGETS = COPIED_FROM_TARGET - ROPE_OF_TARGET | names("resid_pdrop embd_pdrop")
_NEMO = replace(_PLAIN, layout="nemo", known={**_PLAIN.known, "": INFORMATION | _OF_TARGETS})
_PEAGLE = replace(_PLAIN, layout="specforge (P-EAGLE)")
_DEEPSPEC = EagleLayout(names("Qwen3Eagle3Model"), _PLAIN.with_copies(False), "tokenahead", True, has_windows=False)
_OFFICIAL = "LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM MistralForCausalLM MixtralForCausalLM"
_OF_VLLM = (
    "EagleLlamaForCausalLM LlamaForCausalLMEagle Eagle3LlamaForCausalLM PeagleLlamaForCausalLM "
    "Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM"
)
LAYOUTS = (
    EagleLayout(names(_OFFICIAL), _PLAIN, "official"),
    EagleLayout(names("LlamaForCausalLMEagle3"), replace(_PLAIN, layout="specforge"), "specforge"),
    EagleLayout(names("PEagleDraftModel"), _PEAGLE, "vllm", True, scales_rope=False, has_windows=False),
    EagleLayout(names(_OF_VLLM), replace(_PLAIN, layout="vllm"), "official"),
    _DEEPSPEC,
    EagleLayout(names("LlamaEagle3DraftModel"), _NEMO, "vllm", True, counts_layers=False, has_windows=False),
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
    return replace(layout, table=_PLAIN.with_copies(True)) if is_scaled else layout


_RENAMES = (
    *(("model.", ""), ("midlayer.", "layers.0.")),
    *(("draft_id_to_target_id", "d2t"), ("target_id_to_draft_id", "t2d")),
)
_ADDITIONAL = re.compile(r"^additional_layers\.(\d+)\.(.*)")
_HEAD = re.compile(r"\w*eagle3?\w*", re.IGNORECASE)
"""Names of heads of any layout, but for the official ones, which are those of models."""
_TAKEN = LAYER_FIELDS - names("num_hidden_layers rope_theta layer_types sliding_window use_sliding_window") | names(
    "draft_vocab_size target_hidden_size bos_token_id eos_token_id pad_token_id dtype attention_dropout "
    "initializer_range loss_options"
)


def own_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of any layout to the names of `EagleHead`."""
    state = {own_name(name): tensor for name, tensor in state.items()}
    return state | {key: state[key].reshape(1, 1, -1) for key in ("mask_hidden",) if key in state}


def own_name(name: str) -> str:
    """Return the name in `EagleHead` of a tensor of any layout."""
    name = with_prefixes(name, _RENAMES)
    if match := _ADDITIONAL.match(name):  # SGLang's name of a further layer's first norm
        return f"layers.{int(match[1]) + 1}." + match[2].replace("hidden_norm", "input_layernorm")
    return name


def is_foreign_head(raw: Fields, names: Iterable[str]) -> bool:
    """Return whether a checkpoint of another library is an EAGLE head, by its config.json and its tensors' names."""
    is_named = any(map(_HEAD.fullmatch, architectures(raw)))
    if is_named or AUX_IDS in raw or stated(raw, f"eagle_config.{AUX_IDS}") or "speculators_model_type" in raw:
        return True
    own = set(map(own_name, names))
    is_first = {"layers.0.self_attn.q_proj.weight", "fc.weight"} <= own and "norm.weight" not in own
    drafts_part = "draft_vocab_size" in raw and not own.isdisjoint(("d2t", "t2d"))
    return "layers.0.hidden_norm.weight" in own or is_first or drafts_part


def foreign_head(
    name: object, raw: Fields, state: dict[str, Tensor], ignored: Sequence[str] = (), **overrides: Any
) -> tuple[EagleHeadConfig, dict[str, Tensor]]:
    """Return configuration and tensors of a checkpoint from another library, from its config.json and its tensors.

    `overrides` replace fields of the checkpoint's, where they are not None; `ignored` fields are passed over.
    """
    counts_layers = not any(map(_ADDITIONAL.match, state))  # SGLang's further layers are not counted
    state = own_names(state)
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    version, layout = _version(name, raw, shapes), layout_of(name, raw)
    refuse_unread(name, raw, layout.table, ignored)
    layers = raw | next((raw[nested] for nested in NESTED if isinstance(raw.get(nested), dict)), {})
    said = {key: layers[key] for key in _TAKEN if layers.get(key) is not None}
    said |= verifier_fields(stated(raw, "speculators_config.verifier") or {})
    if "hidden_size" not in said:
        raise ValueError(f"{name}: config.json has no hidden_size")
    said.setdefault("dtype", layers.get("torch_dtype"))
    flags = {key: agreed(name, raw, key, f"eagle_config.{key}") for key in FLAGS}
    shown = _sizes(name, said, shapes, version) | _read_off(name, shapes, version)
    for key, value in (shown | _implied(said, shapes, version)).items():
        if key != "num_hidden_layers" or (counts_layers and layout.counts_layers):
            settled(name, key, (layers | flags).get(key), value)
    shown |= _windows(name, layers, shown["num_hidden_layers"], version == 3 and layout.has_windows)
    rope = rope_of(name, layers, None if layout.states_theta else 10_000.0)  # which official configs do not say
    if (kind := rope["rope_type"]) != "default" and not layout.scales_rope:
        raise ValueError(f"{name}: rope_type={kind!r}: the code that trained it ({layout.table.layout}) drops it")
    values: Fields = shown | said | {"rope_parameters": rope}
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


def _windows(name: object, layers: Fields, count: int, is_read: bool) -> Fields:
    """Return the kinds of the layers and the window, where one has it; a Qwen's is off unless its config says so."""
    kinds, window, switch = (layers.get(key) for key in ("layer_types", "sliding_window", "use_sliding_window"))
    used = [*(kinds or ())][:count]
    if {*used} <= {"full_attention"} and (kinds or window is None or not switch):
        return {}
    is_on = layers.get("model_type") not in ("qwen2", "qwen3") if switch is None else switch
    is_known = "sliding_attention" in used and {*used} <= {"full_attention", "sliding_attention"}
    if not (is_read and is_known and is_on and window):
        said = f"layer_types={kinds} with sliding_window={window} and use_sliding_window={switch}"
        raise ValueError(f"{name}: {said}: no windows that are read from this layout")
    return {"layer_types": used + ["full_attention"] * (count - len(used)), "sliding_window": window}


def _mask_token(name: object, raw: Fields, is_parallel: bool, given: int | None) -> int | None:
    """Return the token of P-EAGLE's rows, by the names that vLLM reads; None for other heads."""
    token = agreed(name, raw, *MASK_TOKENS, meanings=dict.fromkeys(MASK_TOKENS, int)) if given is None else given
    says, kinds = raw.get("parallel_drafting"), architectures(raw)
    if is_parallel and token is None:
        raise ValueError(f"{name}: mask_hidden without {', '.join(MASK_TOKENS)} in config.json; pass mask_token_id=")
    is_named = any(kind.lower().startswith("peagle") for kind in kinds)
    if (says is False) if is_parallel else (token is not None or says or is_named):
        shown = "have" if is_parallel else "lack"
        claims = f"mask_token_id={token}, parallel_drafting={says}, architectures={kinds}"
        raise ValueError(f"{name}: {claims}, but its tensors {shown} mask_hidden")
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


def _implied(said: Fields, shapes: dict[str, tuple[int, ...]], version: int) -> Fields:
    """Return fields that other libraries write of what the shapes show, and this one does not have."""
    fc = shapes.get("fc.weight")
    if version == 1:
        return {"bias": "fc.bias" in shapes} | dict.fromkeys(FLAGS[:-1], False)
    count = fc[-1] // (said.get("target_hidden_size") or said["hidden_size"]) if fc else 0
    return {"use_aux_hidden_state": fc is not None, "num_aux_hidden_states": count, "num_aux_layers": count}


def _sizes(name: object, said: Fields, shapes: dict[str, tuple[int, ...]], version: int) -> Fields:
    """Return the sizes that the tensors show; for those that a config does not state, Llama's defaults are wrong."""
    rows = Counter({tensor: shape[0] for tensor, shape in shapes.items() if shape})
    queries, keys = (rows[f"layers.0.self_attn.{each}_proj.weight"] for each in "qk")
    heads, head_dim = said.get("num_attention_heads"), said.get("head_dim")
    heads = queries // head_dim if head_dim else heads
    head_dim = head_dim or queries // (heads or 1)
    drafted = rows["lm_head.weight"] if version == 3 else 0
    whole = 0 if "d2t" in shapes or "vocab_size" in said else drafted
    shown = {
        "num_attention_heads": heads,
        "num_key_value_heads": keys // (head_dim or 1),
        "head_dim": head_dim if heads else 0,
        "hidden_size": rows["layers.0.post_attention_layernorm.weight"],
        "intermediate_size": rows["layers.0.mlp.gate_proj.weight"],
        "vocab_size": rows["embed_tokens.weight"] or rows["t2d"] or whole,
        "draft_vocab_size": drafted,
    }
    if missing := [key for key in ("num_attention_heads", "vocab_size") if key not in said and not shown[key]]:
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
    layers = count_of(name, {int(key.split(".")[1]) for key in shapes if key.startswith("layers.")}, "layer")
    values = {option: SHOWN_BY[option] in shapes for option in [*SHOWN_BY][: None if version == 3 else -2]}
    return {"num_hidden_layers": layers, "own_embeddings": "embed_tokens.weight" in shapes} | values


def _aux_layers(name: object, raw: Fields) -> list[int] | None:
    """Return indices into transformers' hidden states, which ids at the top level are (vLLM, speculators).

    In `eagle_config` (SpecForge, SGLang) a first id of 1 means indices of layers' outputs, one less; DeepSpec's always.
    """
    outputs = lambda ids: [index + 1 for index in ids]  # noqa: E731
    meanings = {
        f"eagle_config.{AUX_IDS}": lambda ids: outputs(ids) if ids[0] == 1 else ids,
        "target_layer_ids": outputs,
    }
    return agreed(name, raw, AUX_IDS, *meanings, meanings=meanings)


_LLAMA_FIELDS = sorted(
    names(
        "hidden_act hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers "
        "num_key_value_heads rms_norm_eps vocab_size head_dim attention_bias bos_token_id eos_token_id pad_token_id"
    )
)
_ARCHITECTURES = {(1, "sglang"): "LlamaForCausalLMEagle"} | dict.fromkeys(
    [(3, "specforge"), (3, "vllm"), (3, "sglang")], "LlamaForCausalLMEagle3"
)
_OPTIONS_OF_3 = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def layout_config(config: EagleHeadConfig, layout: str, dtype: torch.dtype) -> Fields:
    """Return the fields of config.json in a layout, for tensors of `dtype`."""
    values, rope = config.to_dict(), dict(cast(Fields, config.rope_parameters))
    theta, kind = rope.pop("rope_theta"), rope["rope_type"]
    options = {name: values[name] for name in _OPTIONS_OF_3}
    values = {name: values[name] for name in _LLAMA_FIELDS} | {"rope_theta": theta, "tie_word_embeddings": False}
    if kind != "default":  # flat fields, which every reader supports; old ones call `rope_type` `type`
        values["rope_scaling"] = rope | {"type": kind}
    if (window := config.sliding_window) is not None:
        values |= {"layer_types": config.layer_types, "sliding_window": window, "use_sliding_window": True}
    loss = {"loss_options": changed} if (changed := config.loss_options.changed()) else {}
    if layout == "speculators":
        layer = values | {"model_type": "qwen3" if config.qk_norm else "llama", "mlp_bias": False}
        ids = {} if config.aux_layers is None else {AUX_IDS: config.aux_layers}
        fields = speculators_fields(config, "eagle3", "Eagle3DraftModel", layer, 5)
        return fields | {"embed_requires_grad": False} | ids | loss | options
    name = _ARCHITECTURES.get((config.version, layout), "LlamaForCausalLM")
    values |= loss | {"torch_dtype": str(dtype).removeprefix("torch."), "architectures": [name], "model_type": "llama"}
    if config.version == 1:
        return values | {"bias": config.fc_bias or layout == "sglang", "qkv_bias": config.attention_bias}
    values |= {"draft_vocab_size": config.draft_vocab_size} | options
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    nested: Fields = {"use_aux_hidden_state": config.use_aux_hidden_state}
    if config.aux_layers is not None:
        values |= {AUX_IDS: config.aux_layers, "num_aux_hidden_states": config.num_aux}
        if config.aux_layers[0] != 1:  # which would be ambiguous here
            by_outputs = config.aux_layers[0] == 2  # SpecForge and SGLang take a first id of 1 for indices of outputs
            nested[AUX_IDS] = [index - by_outputs for index in config.aux_layers]
    if config.mask_token_id is not None:
        values["ptd_token_id"] = config.mask_token_id
    if config.norm_before_fc:
        nested["norm_before_fc"] = True
    return values | {"eagle_config": nested}


def layout_tensors(
    config: EagleHeadConfig, layout: str, state: dict[str, Tensor], embeddings: Tensor | None = None
) -> dict[str, Tensor]:
    """Return a head's tensors under the layout's names; `embeddings` are the backbone's, which some layouts repeat."""
    state = dict(state)
    if layout == "speculators" and embeddings is not None:
        state.setdefault("embed_tokens.weight", embeddings)
    if config.version == 1:
        if layout == "sglang":  # it builds fc with a bias, and would not initialise a missing one
            state.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=state["fc.weight"].dtype))
        return state
    # vLLM refuses a map where all tokens are drafted; the others need it
    size = config.draft_vocab_size or config.vocab_size
    if layout not in ("official", "vllm") or size < config.vocab_size:
        offsets = state["d2t"].cpu() if "d2t" in state else torch.zeros(size, dtype=torch.long)
        ids = offsets + torch.arange(size)  # [Vd]
        state |= {"d2t": offsets, "t2d": torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)}
    if layout == "speculators":
        return state
    return {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in state.items()}


def check_layout(config: EagleHeadConfig, layout: str) -> None:
    """Refuse an unknown layout, or one whose reader does not support an option of the head."""
    values, rope, layers = config.to_dict(), cast(Fields, config.rope_parameters), config.aux_layers or []
    first, kind = config.version == 1, rope["rope_type"]
    third = {name: bool(value) and not first for name, value in values.items()}
    unordered = not first and layers != sorted(set(layers))
    narrow = bool(config.head_dim) and config.hidden_size != (config.head_dim or 0) * config.num_attention_heads
    sglang, all_others = "sglang specforge", "official specforge speculators sglang"
    refusals = [
        (all_others, config.mask_token_id is not None, "mask_token_id"),
        (f"vllm {all_others}", first and config.draft_vocab_size != config.vocab_size, "draft_vocab_size of version 1"),
        ("specforge speculators", first, "version=1, but version 3 alone"),
        ("speculators official", not config.use_aux_hidden_state, "use_aux_hidden_state=False"),
        (f"official vllm {sglang}", config.qk_norm, "qk_norm, which 'speculators' has"),
        *(("official", third[name], name) for name in _OPTIONS_OF_3),
        ("official specforge", config.sliding_window is not None, f"layer_types={config.layer_types}"),
        ("official", config.num_hidden_layers > 1, f"num_hidden_layers={config.num_hidden_layers}"),
        ("official", narrow, f"head_dim={config.head_dim} of its own"),
        ("official", kind not in ("default", "linear", "dynamic"), f"rope_type={kind!r}"),
        ("official", kind != "default" and rope["rope_theta"] != 10_000, "scaled rope of a base other than 10000"),
        ("vllm", first and config.fc_bias, "fc_bias of version 1"),
        ("vllm", first and config.attention_bias, "attention_bias of version 1"),
        ("vllm", unordered, f"aux_layers={layers} in this order"),
        *((sglang, third[name], name) for name in ("attention_bias", "norm_before_residual", "norm_before_fc")),
        (sglang, not first and config.num_hidden_layers > 1, "num_hidden_layers above 1"),
        (sglang, not first and layers[:1] == [1], f"aux_layers={layers}, of which it adds 1 to ids that begin with 1"),
    ]
    if layout not in (readers := ("vllm", *all_others.split())):
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(readers)}")
    for layouts, refused, option in refusals:
        if refused and layout in layouts.split():
            raise ValueError(f"layout={layout!r} cannot hold this head: its reader has no {option}")
