"""Layouts of block drafters as data: z-lab's, DeepSpec's, that of assistants of transformers, and speculators'.

z-lab's DFlash and DFlash 2, and the DSparks that others save like them, have a Qwen3 config with a `dflash_config`, as
those of SpecForge, NVIDIA's NeMo AutoModel and Model-Optimizer, JetSpec, and LiquidAI. DeepSpec's DFlash and DSpark
(one architecture) have copies of the backbone's embeddings and unembedding, and a copy of its config, whose further
fields describe the backbone: heads turn whole by a plain rope. Assistants (`muse_glimmer_assistant`) are read only. In
speculators' dflash, dflash2 and dspark (0.9) the config of the layers is nested, and ids are those of hidden states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ...configuration.block import BlockDrafterConfig
from ...configuration.fields import refuse
from ...configuration.foreign_fields import (
    COPIED_FROM_TARGET,
    ROPE_LEVELS,
    FieldTable,
    agreed,
    names,
    refuse_unread,
    settled,
    stated,
)
from ...configuration.mtp_families import refuse_dspark
from ...generation.tensors.tensor_files import Fields, count_of
from ..common.draft_vocabulary import check_offsets
from ..common.drafter_configs import architectures, check_columns, rope_of, speculators_fields, verifier_fields

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors, under this library's names."""


@dataclass(frozen=True)
class BlockLayout:
    """A layout of checkpoints.

    Attributes:
        name: `config.layout` of what is read; `"tokenahead"`: it is saved in this library's own.
        recognises: Whether a config.json is in it.
        table: From the name of a checkpoint and its config.json to the fields that may stand there.
        read: From the name of a checkpoint, its config.json and shapes to fields of `BlockDrafterConfig`.
        write: From a configuration to a config.json.
        copies: Embeddings and unembedding are in the file, copies of the backbone's.
        renames: Beginnings of tensors' names, theirs and this library's.
    """

    name: str
    recognises: Callable[[Fields], bool]
    table: Callable[[object, Fields], FieldTable]
    read: Callable[[object, Fields, Shapes], Fields]
    write: Callable[[BlockDrafterConfig], Fields]
    copies: bool = False
    renames: tuple[tuple[str, str], ...] = ()


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
_LAYERS = (*_SIZES, "hidden_act", "rms_norm_eps", "attention_bias", "layer_types", "sliding_window")
_BODY = (
    *(*_LAYERS, "initializer_range", "attention_dropout", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
)
BODY = names("use_sliding_window rope_theta").union(_LAYERS)
"""Fields of the layers."""
MARKOV = names(
    "markov_rank dspark_markov_rank markov_head_type enable_confidence_head use_confidence_head "
    "confidence_head_with_markov"
)
"""Fields of DSpark's law and confidence head."""
SELECTOR = names("conv_kernel_size conv_group_size selector_rank selector_top_k")
"""Fields of DFlash 2's convolutions and law."""


def body_fields(owner: object, raw: Fields, shapes: Shapes) -> Fields:
    """Return the fields of the layers; sizes that are not stated are read off the tensors."""
    values = {key: raw[key] for key in _BODY if raw.get(key) is not None}
    if raw.get("torch_dtype") is not None:
        values.setdefault("dtype", raw["torch_dtype"])
    if missing := [key for key in ("hidden_size", "num_attention_heads") if key not in values]:
        raise ValueError(f"{owner}: config.json has no {', '.join(missing)}")
    for key in _SIZES:
        if type(values.get(key, 1)) is not int or values.get(key, 1) < 1:
            raise ValueError(f"{owner}: config.json has {key}={values[key]!r}, which is no size")
    values["rope_parameters"] = rope_of(owner, raw)
    attention = "layers.0.self_attn.{}_proj.weight"
    rows = {each: shapes.get(attention.format(each), (0,))[0] for each in "qk"}
    tables = ("embed_tokens", "markov_head.markov_w1", "candidate_selector.predecessor_codebook")
    sizes = [shapes[key] for each in tables for key in (each, each + ".weight") if key in shapes]
    head_dim = rows["q"] // values["num_attention_heads"]
    shown = {
        "hidden_size": shapes.get("norm.weight", (0,))[0],
        "num_hidden_layers": count_of(
            owner, {int(key.split(".")[1]) for key in shapes if key[:7] == "layers."}, "layer"
        ),
        "head_dim": head_dim,
        "num_key_value_heads": rows["k"] // max(head_dim, 1),
        "intermediate_size": shapes.get("layers.0.mlp.gate_proj.weight", (0,))[0],
        "vocab_size": sizes[0][0] if sizes else 0,
    }
    values |= {key: settled(owner, key, values.get(key), size) for key, size in shown.items() if size}
    has_bias = "layers.0.self_attn.q_proj.bias" in shapes if rows["q"] else None
    values["attention_bias"] = bool(settled(owner, "attention_bias", values.get("attention_bias"), has_bias))
    if raw.get("use_sliding_window") and not values.get("layer_types"):
        raise ValueError(f"{owner}: config.json says use_sliding_window=True, and no layer_types: which layers?")
    return {"vocab_size": 0} | values


def parts_of(shapes: Shapes) -> Fields:
    """Return which parts of the backbone a checkpoint holds itself."""
    return {"own_embeddings": "embed_tokens.weight" in shapes, "own_unembedding": "lm_head.weight" in shapes}


def law_fields(kind: str, owner: object, raw: Fields, shapes: Shapes, width: int) -> Fields:
    """Return the law of a kind of drafter, `"dflash"`, `"dflash2"` or `"dspark"`, whose rows are so wide."""
    readers: Mapping[str, Callable[..., Fields]] = {"dflash2": _selector_fields, "dspark": _markov_fields}
    return readers[kind](owner, raw, shapes, width) if kind in readers else {}


def both(*fields: str) -> list[str]:
    """Return the places of fields that stand at the top or in `dflash_config`."""
    return [path for field in fields for path in (field, f"dflash_config.{field}")]


def said(owner: object, raw: Fields, *fields: str, **meanings: Callable[[Any], Any]) -> Any:
    """Return what names of one thing say, at the top and in `dflash_config`; see `agreed`."""
    return agreed(owner, raw, *both(*fields), meanings=meanings)


def _markov_fields(owner: object, raw: Fields, shapes: Shapes, width: int) -> Fields:
    """Return the law and the confidence head of DSpark, as tensors show them where the config is silent."""
    head, proj = "markov_head.{}.weight", shapes.get("confidence_head.proj.weight")
    kinds = {"gated": head.format("gate_proj"), "rnn": head.format("joint_proj")}
    shown = shapes.get(head.format("markov_w1"), (0, 0))[1]
    rank = settled(owner, "markov_rank", said(owner, raw, "markov_rank", "dspark_markov_rank"), shown)
    named = [kind for kind, key in kinds.items() if key in shapes]
    kind = settled(owner, "markov_head_type", said(owner, raw, "markov_head_type"), (named or ["vanilla"])[0])
    law: Fields = {"law": "markov", "law_options": {"kind": kind, "rank": rank}} if rank else {}
    switches = ("enable_confidence_head", "use_confidence_head")
    switch = next((each for each in switches for path in both(each) if stated(raw, path) is not None), switches[0])
    has_confidence = settled(owner, switch, said(owner, raw, *switches), proj is not None)
    reads, field = None if proj is None else proj[1] > width, "confidence_head_with_markov"
    reads = settled(owner, field, said(owner, raw, field) if has_confidence else None, reads)
    return law | {"has_confidence": has_confidence, "confidence_reads_token": bool(reads)}


def _selector_fields(owner: object, raw: Fields, shapes: Shapes, width: int) -> Fields:
    """Return the convolutions and the law of DFlash 2."""
    conv = "layers.0.attention_conv."
    taps = shapes.get(conv + "base_kernel", (0, 0, 0))[1]
    columns = shapes.get(conv + "kernel_projection.weight", (0,))[0]
    shown = {
        "conv_kernel_size": taps or None,
        "conv_group_size": 2 * taps * width // columns if columns else None,
        "selector_rank": shapes.get("candidate_selector.hidden_projection.weight", (None,))[0],
        "selector_top_k": None,
    }
    found = {key: settled(owner, key, said(owner, raw, key), each) for key, each in shown.items()}
    options = {"rank": found.pop("selector_rank") or 256, "top_k": found.pop("selector_top_k") or 16}
    return {key: each for key, each in found.items() if each} | {"law": "selector", "law_options": options}


def written_law(config: BlockDrafterConfig) -> Fields:
    """Return the fields of a law and a confidence head in layouts of others; see `refuse_lost`."""
    law, options = config.law, config.law_options or {}
    if law == "selector":
        if config.conv_kernel_size is None:
            raise ValueError("law='selector' with conv_kernel_size=None is no DFlash 2, which has convolutions")
        sizes = {"conv_kernel_size": config.conv_kernel_size, "conv_group_size": config.conv_group_size}
        return sizes | {"selector_rank": options.get("rank", 256), "selector_top_k": options.get("top_k", 16)}
    if law == "independent" and not config.has_confidence:
        return {}
    kind = {"markov_head_type": options.get("kind", "vanilla")} if law == "markov" else {}
    return {
        "markov_rank": options.get("rank", 256) if law == "markov" else 0,
        **kind,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_reads_token and law == "markov",
    }


_SHAPE_DRAFTS = (
    *("law", "sample_from_anchor", "block_size", "mask_token_id", "feature_layers", "target_hidden_size"),
    *("draft_vocab_size", "mask_embedding", "causal", "layer_types", "input_embedding_scale", "output_multiplier"),
    *("final_logit_softcapping", "conv_kernel_size", "has_confidence", "rope_parameters", "rms_norm_eps", "hidden_act"),
)


def refuse_lost(config: BlockDrafterConfig, layout: BlockLayout, fields: Fields, shapes: Shapes) -> None:
    """Refuse a layout whose reader would make another drafter of what is written.

    Args:
        config: The drafter's.
        layout: The other library's.
        fields: The config.json in it.
        shapes: Of the tensors.
    """
    read = layout.read(f"layout={layout.name!r}", fields, shapes)
    read.pop("is_interleaved", None)
    held, names = BlockDrafterConfig(**read), list(_SHAPE_DRAFTS)
    names += ["sliding_window", "sliding_causal"] if "sliding_attention" in (config.layer_types or ()) else []
    lost = [name for name in names if getattr(held, name) != getattr(config, name)]
    if lost:
        wanted, found = (", ".join(f"{name}={getattr(each, name)!r}" for name in lost) for each in (config, held))
        raise ValueError(f"layout={layout.name!r} cannot hold {wanted}: it holds {found}; save_pretrained holds all")


def written_body(config: BlockDrafterConfig) -> Fields:
    """Return the fields of the layers, those of a Qwen3 config."""
    values = config.to_dict()
    taken = {key: values[key] for key in (*_BODY, "rope_parameters", "max_window_layers") if key in values}
    return taken | {
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "use_sliding_window": config.use_sliding_window,
    }


KINDS = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DSparkDraftModel": "dspark",
    "Lfm2DSparkDraftModel": "dspark",
    "Qwen3DFlashDraftModel": "dflash",
    "Qwen3DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
}
"""The kinds of drafters that architectures name."""
COMMON = names(
    "block_size mask_token_id pard_token ptd_token_id target_layer_ids eagle_aux_hidden_state_layer_ids num_aux_layers "
    "num_target_layers sample_from_anchor dspark_bonus_anchor shift_label projector_type attention_mode "
    "target_hidden_size draft_vocab_size rope_is_neox_style is_neox_style"
)
"""Fields that drafters of all kinds may have, at the top or in `dflash_config`."""
RENAMES = (
    *((f"{part}.", f"markov_head.{part}.") for part in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")),
    ("confidence_proj.", "confidence_head.proj."),
)
"""Model-Optimizer's names of a DSpark's heads."""
_CAUSAL = ("is_causal", "causal", "dflash_query_causal", "causal_head")
_ZLAB = COMMON | names(
    "is_causal causal dflash_query_causal causal_head use_swa swa_window_size final_logit_softcapping "
    "input_embedding_scale output_multiplier"
)
_OF_KIND = {"dflash": names(""), "dflash2": SELECTOR, "dspark": MARKOV}
_TENSORS_DECIDE = names("has_embed_tokens has_lm_head max_window_layers")
_TABLES = {
    kind: FieldTable(
        "z-lab",
        {"": BODY | _ZLAB | own, "dflash_config": _ZLAB | own} | ROPE_LEVELS,
        {"": _TENSORS_DECIDE, "dflash_config": _TENSORS_DECIDE},
        {"dspark_fixup_head_type": ("markov",)}
        if kind == "dspark"
        else {"markov_rank": (0,), "dspark_markov_rank": (0,)},
    )
    for kind, own in _OF_KIND.items()
}


def kind_of(owner: object, raw: Fields) -> str:
    """Return the kind of drafter that a config.json names, `"dflash"`, `"dflash2"` or `"dspark"`; refuse others."""
    projector, named = said(owner, raw, "projector_type"), raw.get("architectures")
    kinds = {KINDS.get(name) for name in architectures(raw)} or {None}
    kinds = {"dspark"} if projector == "dspark" and kinds == {"dflash"} else kinds  # Model-Optimizer's
    kind = next(iter(kinds))
    if kind is None or len(kinds) > 1:
        raise ValueError(f"{owner}: architectures={named} is none of {', '.join(KINDS)}")
    if projector not in (None, kind):
        raise ValueError(
            f"{owner}: projector_type={projector!r} of architectures={named} is not supported, {kind!r} is"
        )
    return kind


def default_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """Return the layers of a backbone whose outputs drafters of so many layers read by default."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + index * (num_target_layers - 4) / (num_layers - 1)) for index in range(num_layers)]


def read_common(owner: object, raw: Fields, shapes: Shapes, kind: str) -> Fields:
    """Return the fields that z-lab's and DeepSpec's layouts share."""
    body, fields = body_fields(owner, raw, shapes), {"target_layer_ids": 0, "eagle_aux_hidden_state_layer_ids": 1}
    meanings = {field: lambda ids, more=more: [index - more for index in ids] for field, more in fields.items()}
    layers = said(owner, raw, *fields, **meanings)
    heads, mode = body["num_attention_heads"], said(owner, raw, "attention_mode")
    sizes = {"target_hidden_size": body["hidden_size"], "draft_vocab_size": body["vocab_size"]}
    sizes |= {"num_aux_layers": None if layers is None else len(layers)}
    modes = ("gqa", "mha") if body.get("num_key_value_heads", heads) == heads else ("gqa",)
    mask = said(owner, raw, "mask_token_id", "pard_token", "ptd_token_id")
    for key, size in sizes.items():
        settled(owner, key, said(owner, raw, key), size)
    refuse(
        [
            (mask is None, f"{owner}: config.json has no mask_token_id"),
            (mode not in (None, *modes), f"{owner}: attention_mode={mode!r} contradicts the heads of attention"),
        ]
    )
    values: Fields = {
        "block_size": said(owner, raw, "block_size"),
        "mask_token_id": mask,
        "sample_from_anchor": _anchor_first(owner, raw, kind == "dspark"),
        "feature_layers": None if layers is None else [index + 1 for index in layers],
        "num_target_layers": said(owner, raw, "num_target_layers"),
        "is_interleaved": is_interleaved(owner, raw),
    }
    return body | values | law_fields(kind, owner, raw, shapes, body["hidden_size"]) | parts_of(shapes)


def is_interleaved(owner: object, raw: Fields) -> bool:
    """Return whether rope turns pairs of neighbours, and not of halves of a head."""
    return said(owner, raw, "rope_is_neox_style", "is_neox_style") in (False,)


def _anchor_first(owner: object, raw: Fields, is_dspark: bool) -> bool | None:
    """Return which rows draft; None: a `shift_label` says that it is not as usual, of which trainers disagree."""
    fields = ["sample_from_anchor", "dspark_bonus_anchor"]
    meanings = {"dspark_bonus_anchor": lambda bonus: not bonus if bonus or is_dspark else None}
    shift, known = said(owner, raw, "shift_label"), said(owner, raw, *fields, **meanings)
    if known is None:
        return is_dspark if shift in (None, is_dspark) else None
    return said(owner, raw, *fields, "shift_label", **meanings) if shift or is_dspark else known


def _causal(owner: object, raw: Fields) -> bool | None:
    """Return whether rows see rows up to their own alone; None: the config does not say it."""
    places = both(*_CAUSAL)
    if stated(raw, "is_causal") is False and stated(raw, "dflash_config.causal"):
        places.remove("is_causal")  # NeMo writes false for every drafter
    return agreed(owner, raw, *places)


def _windows(owner: object, raw: Fields, values: Fields, causal: bool | None) -> Fields:
    """Return the windows of layers; Model-Optimizer's `use_swa` gives one to every layer."""
    size = agreed(owner, raw, "sliding_window", *both("swa_window_size"))
    kinds = values.get("layer_types") or []
    is_whole = bool(said(owner, raw, "use_swa")) and "sliding_attention" not in kinds
    if not is_whole and "sliding_attention" not in kinds:
        return {"sliding_window": size}
    smallest = (values["block_size"] or 1) if is_whole else 1
    if type(size) is not int or size < smallest:
        raise ValueError(f"{owner}: swa_window_size or sliding_window is {size!r}, not {smallest} or more")
    windows = {"sliding_window": size, "sliding_causal": not is_whole if causal is None else causal}
    return windows | ({"layer_types": ["sliding_attention"] * values["num_hidden_layers"]} if is_whole else {})


def _read(owner: object, raw: Fields, shapes: Shapes) -> Fields:
    values, causal = read_common(owner, raw, shapes, kind_of(owner, raw)), _causal(owner, raw)
    targets = values["num_target_layers"]
    if values["feature_layers"] is None and targets is not None:
        values["feature_layers"] = [index + 1 for index in default_ids(targets, values["num_hidden_layers"])]
    values |= {"causal": bool(causal)} | _windows(owner, raw, values, causal)
    scales = {key: said(owner, raw, key) for key in ("input_embedding_scale", "output_multiplier")}
    values |= {key: scale for key, scale in scales.items() if scale is not None}
    return values | {"final_logit_softcapping": said(owner, raw, "final_logit_softcapping")}


_USUAL = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": None}
_ARCHITECTURES = {"selector": "DFlash2DraftModel", "markov": "DSparkDraftModel"}


def _rows(config: BlockDrafterConfig) -> Fields:
    layers = [index - 1 for index in config.feature_layers or ()]
    return {"mask_token_id": config.mask_token_id, "target_layer_ids": layers, "block_size": config.block_size}


def _write(config: BlockDrafterConfig) -> Fields:
    is_dspark, has_window = config.law == "markov", "sliding_attention" in (config.layer_types or ())
    nested = _rows(config)
    nested |= {key: value for key, usual in _USUAL.items() if (value := getattr(config, key)) != usual}
    if is_dspark and not config.sample_from_anchor:  # a DFlash has no choice
        nested["sample_from_anchor"] = False
    name = _ARCHITECTURES.get(config.law, "DFlashDraftModel")
    values = written_body(config) | {"architectures": [name], "block_size": config.block_size}
    if config.num_target_layers is not None:
        values["num_target_layers"] = config.num_target_layers
    if config.causal or (has_window and not config.sliding_causal):
        values["is_causal"] = config.causal
    return values | {"dflash_config": nested | written_law(config)}


def _is_zlab(raw: Fields) -> bool:
    own = KINDS.keys() - {"Qwen3DSparkModel"}
    return isinstance(raw.get("dflash_config"), dict) or any(name in own for name in architectures(raw)[:1])


ZLAB = BlockLayout("z-lab", _is_zlab, lambda owner, raw: _TABLES[kind_of(owner, raw)], _read, _write, renames=RENAMES)

_DEEPSPEC = "Qwen3DSparkModel"
_OF_DEEPSPEC = {"": BODY | COMMON | MARKOV} | ROPE_LEVELS
_OF_ROPE = names("partial_rotary_factor mrope_*")
_PLAIN, _COPIED = (
    FieldTable("deepspec", _OF_DEEPSPEC, {"": _TENSORS_DECIDE | copied} | dict.fromkeys(ROPE_LEVELS, of_rope))
    for copied, of_rope in ((COPIED_FROM_TARGET - _OF_ROPE, ()), (COPIED_FROM_TARGET, _OF_ROPE))
)


def _is_deepspec(raw: Fields) -> bool:
    named = architectures(raw)
    return named == [_DEEPSPEC] or (not named and "target_layer_ids" in raw and "markov_rank" in raw)


def _deepspec_table(owner: object, raw: Fields) -> FieldTable:
    kind_of(owner, {"architectures": [_DEEPSPEC]} | raw)
    partial = {path for path, _ in _PLAIN.unread(raw)} - {path for path, _ in _COPIED.unread(raw)}
    if partial and is_interleaved(owner, raw):
        raise ValueError(f"{owner}: rope_is_neox_style or is_neox_style is false beside {', '.join(sorted(partial))}")
    return _COPIED if rope_of(owner, raw, 1.0)["rope_type"] == "default" else _PLAIN


def _read_deepspec(owner: object, raw: Fields, shapes: Shapes) -> Fields:
    values = read_common(owner, raw, shapes, "dspark")
    return values | {"layer_types": ["full_attention"] * values["num_hidden_layers"]}


def _write_deepspec(config: BlockDrafterConfig) -> Fields:
    silent = {"architectures": [_DEEPSPEC], "enable_confidence_head": False, "markov_rank": 0}
    targets = {"num_target_layers": config.num_target_layers}
    return written_body(config) | silent | targets | _rows(config) | written_law(config)


DEEPSPEC = BlockLayout("deepspec", _is_deepspec, _deepspec_table, _read_deepspec, _write_deepspec, True, RENAMES)

_ASSISTANT = "muse_glimmer_assistant"
_SAID_BY_ASSISTANTS = ("block_size", "mask_token_id", "target_layer_ids", "layer_types")
_OF_ASSISTANTS = FieldTable(
    "muse_glimmer_assistant", {"": BODY | names("block_size mask_token_id target_layer_ids")} | ROPE_LEVELS
)


def _read_assistant(name: object, raw: Fields, shapes: Shapes) -> Fields:
    refuse((raw.get(each) is None, f"{name}: config.json has no {each}") for each in _SAID_BY_ASSISTANTS)
    body = body_fields(name, raw, shapes)
    window = body.get("sliding_window")
    return body | {
        "vocab_size": 0,
        "block_size": raw["block_size"],
        "mask_token_id": raw["mask_token_id"],
        "sample_from_anchor": False,
        "feature_layers": [index + 1 for index in raw["target_layer_ids"]],
        "sliding_window": None if window is None else window + 1,  # theirs does not count a row's own position
    }


ASSISTANT = BlockLayout(
    "tokenahead",
    lambda raw: raw.get("model_type") == _ASSISTANT,
    lambda owner, raw: _OF_ASSISTANTS,
    _read_assistant,
    BlockDrafterConfig.to_dict,
    renames=(("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")),
)

_IDS = "aux_hidden_state_layer_ids"
_OF_SPECULATORS = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
_LAYER_CONFIG = "transformer_layer_config"
_READ_BY_SPECULATORS = names(
    "speculators_model_type block_size mask_token_id sample_from_anchor aux_hidden_state_layer_ids target_hidden_size "
    "draft_vocab_size sliding_window_non_causal"
)
_SPECULATORS_TABLES = {
    kind: FieldTable(
        "speculators",
        {"": _READ_BY_SPECULATORS | own, _LAYER_CONFIG: BODY, "speculators_config": names("proposal_methods verifier")}
        | {f"{_LAYER_CONFIG}.{level}": read for level, read in ROPE_LEVELS.items()},
        {
            "": names("speculators_version"),
            _LAYER_CONFIG: names("max_window_layers"),
            "speculators_config": names("algorithm default_proposal_method"),
        },
    )
    for kind, own in _OF_KIND.items()
}


def _speculators_table(owner: object, raw: Fields) -> FieldTable:
    kind, named = raw["speculators_model_type"], raw.get("architectures")
    if named and named != [_OF_SPECULATORS[kind]]:
        raise ValueError(
            f"{owner}: architectures={named}, but speculators_model_type={kind!r} is {_OF_SPECULATORS[kind]}"
        )
    return _SPECULATORS_TABLES[kind]


def _read_speculators(name: object, raw: Fields, shapes: Shapes) -> Fields:
    kind = raw["speculators_model_type"]
    body = body_fields(name, {"dtype": raw.get("dtype")} | (raw.get(_LAYER_CONFIG) or {}), shapes)
    if raw.get("mask_token_id") is None:
        raise ValueError(f"{name}: config.json has no mask_token_id")
    is_free, drafted = raw.get("sliding_window_non_causal"), shapes.get("lm_head.weight", (None,))[0]
    values: Fields = {
        "block_size": raw.get("block_size", 8),
        "mask_token_id": raw["mask_token_id"],
        "sample_from_anchor": _speculators_anchor(raw),
        "feature_layers": raw.get(_IDS),
        "target_hidden_size": raw.get("target_hidden_size"),
        "draft_vocab_size": settled(name, "draft_vocab_size", raw.get("draft_vocab_size"), drafted),
        "sliding_causal": not (kind == "dflash2" if is_free is None else is_free),
    }
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    law = law_fields(kind, name, raw, shapes, body["hidden_size"])
    return body | values | law | parts_of(shapes) | verifier_fields(verifier)


def _speculators_anchor(raw: Fields) -> bool | None:
    """Return which rows draft; older configs do not say it, but how many tokens are proposed."""
    if raw.get("sample_from_anchor") is not None:
        return bool(raw["sample_from_anchor"])
    if raw["speculators_model_type"] != "dspark":
        return False
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or ()
    proposed, size = {each.get("speculative_tokens") for each in methods}, raw.get("block_size", 8)
    return {(size,): True, (size - 1,): False}.get(tuple(proposed))


def _write_speculators(config: BlockDrafterConfig) -> Fields:
    plain = "dspark" if config.has_confidence else "dflash"
    kind = {"independent": plain, "selector": "dflash2"}.get(config.law, "dspark")
    if kind == "dflash2" and config.has_draft_vocabulary:
        raise ValueError(f"layout='speculators' drafts every token with law='selector', not {config.draft_vocab_size}")
    values = speculators_fields(config, kind, _OF_SPECULATORS[kind], written_body(config), config.num_drafts)
    return values | {
        _IDS: config.feature_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not config.sliding_causal,
        **written_law(config),
    }


SPECULATORS = BlockLayout(
    "speculators",
    lambda raw: raw.get("speculators_model_type") in _OF_SPECULATORS,
    _speculators_table,
    _read_speculators,
    _write_speculators,
)


logger = logging.get_logger(__name__)
LAYOUTS: tuple[BlockLayout, ...] = (SPECULATORS, ZLAB, ASSISTANT, DEEPSPEC)
"""In the order in which they are tried."""
OVERRIDES = {
    "feature_layers": "name the states that the drafter reads (target_layer_ids)",
    "sample_from_anchor": "say whether the first row drafts (shift_label alone does not)",
    "block_size": "say how many rows a block has",
}
"""Fields that `from_pretrained` takes in place of those of a checkpoint, and what one without them does not say."""
_LIKE_OURS = re.compile(r".*(DFlash|DSpark|Domino|XPress|LiLiCorr).*")
"""Names of architectures that are those of block drafters."""
_PREFIXES = ("model.", "logit_head.")
_TURNED = re.compile(r".*self_attn\.[qk]_(proj|norm)\.(weight|bias)")


def layout_of(raw: Fields) -> BlockLayout | None:
    """Return the layout of a config.json; None where it is no block drafter of another library.

    One whose architecture has no code here is refused.
    """
    for name in [*architectures(raw), "XPressSpeculator" if raw.get("speculators_model_type") == "xpress" else ""]:
        if _LIKE_OURS.fullmatch(name) and name not in KINDS:
            raise ValueError(f"architectures={raw.get('architectures')}: there is no code for {name} here")
    return next((layout for layout in LAYOUTS if layout.recognises(raw)), None)


def checked_layout(name: object, raw: Fields, ignored: Sequence[str] = ()) -> BlockLayout:
    """Return the layout of a config.json whose fields are all read, known to change nothing, or ignored."""
    layout = layout_of(raw)
    refuse_dspark(name, raw)
    if layout is None:
        raise ValueError(
            f"{name}: config.json is none of a block drafter (model_type={raw.get('model_type')!r}, "
            f"architectures={raw.get('architectures')})"
        )
    refuse_unread(name, raw, layout.table(name, raw), ignored)
    return layout


def foreign_drafter(
    name: object,
    raw: Fields,
    layout: BlockLayout,
    state: dict[str, Tensor],
    mask: Fields | None = None,
    **overrides: object,
) -> tuple[BlockDrafterConfig, dict[str, Tensor]]:
    """Return configuration and tensors of a checkpoint from another library.

    Args:
        name: Of the checkpoint, for messages.
        raw: Its config.json.
        layout: Of this, see `checked_layout`.
        state: Its tensors.
        mask: The embedding of the mask token that lies beside it (`mask_embedding.pt`), and its id.
        **overrides: Of `OVERRIDES`, in place of what the checkpoint says; None: not.
    """
    state = own_names(state, layout)
    given = {key: value for key, value in overrides.items() if value is not None}
    values = layout.read(name, raw, {key: tuple(tensor.shape) for key, tensor in state.items()})
    check_overrides(name, values, given)
    values |= given
    refuse(
        (values[key] is None, f"{name}: config.json does not {what}; pass {key}=") for key, what in OVERRIDES.items()
    )
    if "fc.weight" not in state:
        raise ValueError(f"{name}: the checkpoint has no fc.weight")
    width = values.get("target_hidden_size") or values["hidden_size"]
    check_columns(name, state["fc.weight"].shape[-1], values["feature_layers"], width, "feature_layers")
    if values.pop("is_interleaved", False):
        state = {key: _of_halves(key, tensor, values["head_dim"]) for key, tensor in state.items()}
    if mask is not None:
        number, row = mask.get("mask_token_id"), mask["embedding"].reshape(-1)
        settled(name, "mask_token_id", values["mask_token_id"], None if number is None else int(number))
        settled(name, "hidden_size", values["hidden_size"], len(row))
        state["mask_embedding"], values["mask_embedding"] = row, True
    config = BlockDrafterConfig(layout=layout.name, **values)
    check_offsets(name, state, config.draft_vocab_size or config.vocab_size, config.vocab_size)
    return config, {key: tensor for key, tensor in state.items() if key != "t2d"}


def _of_halves(key: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Return a map to queries or keys whose rope turns pairs of neighbours as one that turns pairs of halves."""
    if not _TURNED.fullmatch(key):
        return tensor
    return tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)  # [H, D / 2, 2] -> [H, 2, D / 2]


def check_overrides(name: object, values: Fields, given: Fields) -> None:
    """Refuse a longer block than the drafter learned, and warn of a shorter one."""
    size, wanted = values["block_size"], given.get("block_size")
    if None in (size, wanted):
        return
    if wanted > size:
        raise ValueError(f"{name}: block_size={wanted} is more than the {size} rows that the drafter learned")
    if wanted < size:
        logger.warning_once(f"{name}: block_size={wanted} changes every draft: the drafter learned {size} rows")


def own_names(state: dict[str, Tensor], layout: BlockLayout) -> dict[str, Tensor]:
    """Rename the tensors of a layout to the names of `BlockDrafter`."""
    return {_own_name(name, layout): tensor for name, tensor in state.items()}


def _own_name(name: str, layout: BlockLayout) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for theirs, ours in layout.renames:
        name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
    return name.removesuffix(".weight") if name.endswith("codebook.weight") else name


def layout_named(layout: str) -> BlockLayout:
    """Return the layout of another library that a drafter can be written in."""
    records = {each.name: each for each in LAYOUTS if each is not ASSISTANT}
    if layout not in records:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(sorted(records))}")
    return records[layout]


def written(
    config: BlockDrafterConfig,
    layout: str,
    state: dict[str, Tensor],
    embeddings: Tensor | None,
    unembedding: Tensor | None,
) -> tuple[Fields, dict[str, Tensor]]:
    """Return config.json and tensors of a drafter in another library's layout.

    Args:
        config: The drafter's.
        layout: `"z-lab"`, `"speculators"` or `"deepspec"`.
        state: The drafter's tensors.
        embeddings: [V, d] of the backbone, which some layouts repeat; None: it is not attached.
        unembedding: The same of its unembedding.
    """
    record = layout_named(layout)
    fields, state = record.write(config), dict(state)
    refuse_lost(config, record, fields, {key: tuple(tensor.shape) for key, tensor in state.items()})
    parts = {"embed_tokens.weight": embeddings} | ({} if "d2t" in state else {"lm_head.weight": unembedding})
    for key, tensor in parts.items():
        if record.copies == (key in state):
            continue
        if tensor is None:
            does = "repeats" if record.copies else "reads"
            raise ValueError(f"layout={layout!r} {does} the backbone's {key}: call attach(backbone) first")
        if not record.copies and not torch.equal(state.pop(key).to(tensor), tensor):
            raise ValueError(f"layout={layout!r} reads the backbone's {key}, and the drafter's differs")
        if record.copies:
            state[key] = tensor
    if "d2t" in state:
        ids = state["d2t"].cpu() + torch.arange(config.draft_vocab_size or 0)  # [Vd]
        state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return fields, state
