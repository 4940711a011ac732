"""Layouts of block drafters as data: z-lab's, DeepSpec's, that of assistants of transformers, and speculators'.

z-lab's DFlash and DFlash 2, and the DSparks and Dominos that others save like them, have a Qwen3 config with a
`dflash_config`, as those of SpecForge, NVIDIA's NeMo AutoModel and Model-Optimizer, JetSpec, and LiquidAI. DeepSpec's
DFlash and DSpark (one architecture) have copies of the backbone's embeddings and unembedding, and a copy of its config,
whose further fields describe the backbone: heads turn whole by a plain rope. Those for Gemma 4 have the layers of that
family that see everything, with their fields. Assistants (`muse_glimmer_assistant`) are read only. In speculators'
dflash, dflash2 and dspark (0.9) the config of the layers is nested, and ids are those of hidden states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ...configuration.block import BlockDrafterConfig
from ...configuration.foreign_fields import (
    LAYERS,
    ROPE,
    ROPE_LEVELS,
    FieldTable,
    agreed,
    names,
    refuse_unread,
    settled,
    speculators_table,
    stated,
)
from ...configuration.mtp_families import refuse_dspark
from ...generation.tensors.tensor_files import Fields, count_of
from ..common.draft_vocabulary import check_offsets
from ..common.foreign import (
    architectures,
    check_columns,
    rope_of,
    speculators_fields,
    verifier_fields,
    with_prefixes,
)

logger = logging.get_logger(__name__)
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors, under this library's names."""


@dataclass(frozen=True)
class BlockLayout:
    """A layout of checkpoints: what is read from the name of one, its config.json and shapes, and what is written."""

    name: str  # `config.layout` of what is read
    recognises: Callable[[Fields], bool]  # a config.json
    table: Callable[[object, Fields], FieldTable]  # of its fields
    read: Callable[[object, Fields, Shapes], Fields]  # fields of `BlockDrafterConfig`
    write: Callable[[BlockDrafterConfig], Fields]  # a config.json
    copies: bool = False  # embeddings and unembedding are in the file, copies of the backbone's
    renames: tuple[tuple[str, str], ...] = ()  # beginnings of tensors' names, theirs and ours


_SIZES = names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
    "max_position_embeddings"
)
_BODY = _SIZES | names(
    "hidden_act rms_norm_eps attention_bias layer_types sliding_window initializer_range attention_dropout dtype "
    "bos_token_id eos_token_id pad_token_id"
)
_OF_KIND = {
    "dflash": names(""),
    "dflash2": names("conv_kernel_size conv_group_size selector_rank selector_top_k"),
    "dspark": names(
        "markov_rank dspark_markov_rank markov_head_type enable_confidence_head use_confidence_head "
        "confidence_head_with_markov"
    ),
    "domino": names("emb_dim gru_hidden_dim pure_draft_prefix_len"),
}
"""Fields of the convolutions and the law of DFlash 2, of the law and the confidence head of DSpark, of Domino's law."""
_COMMON = names(
    "block_size mask_token_id pard_token ptd_token_id target_layer_ids eagle_aux_hidden_state_layer_ids num_aux_layers "
    "num_target_layers sample_from_anchor dspark_bonus_anchor shift_label projector_type attention_mode "
    "target_hidden_size draft_vocab_size rope_is_neox_style is_neox_style"
)
_CAUSAL = ("is_causal", "causal", "dflash_query_causal", "causal_head")
_SCALES = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": None}
"""Fields of z-lab's layout, at their usual values."""
_ZLAB = _COMMON.union(_CAUSAL, _SCALES, ("use_swa", "swa_window_size"))


def body_fields(owner: object, raw: Fields, shapes: Shapes) -> Fields:
    """Return the fields of the layers; sizes that are not stated are read off the tensors."""
    values = {key: raw[key] for key in _BODY if raw.get(key) is not None}
    if raw.get("torch_dtype") is not None:
        values.setdefault("dtype", raw["torch_dtype"])
    for key in ("hidden_size", "num_attention_heads", *_SIZES):
        usual = None if key in ("hidden_size", "num_attention_heads") else 1
        if type(size := values.get(key, usual)) is not int or size < 1:
            raise ValueError(f"{owner}: config.json has {key}={size!r}, which is no size")
    values["rope_parameters"] = rope_of(owner, raw)
    rows = {each: shapes.get(f"layers.0.self_attn.{each}_proj.weight", (0,))[0] for each in "qk"}
    tables = ("embed_tokens.weight", "markov_head.markov_w1.weight", "candidate_selector.predecessor_codebook", _DOMINO)
    layers = {int(key.split(".")[1]) for key in shapes if key.startswith("layers.")}
    head_dim = rows["q"] // values["num_attention_heads"]
    shown = {
        "hidden_size": shapes.get("norm.weight", (0,))[0],
        "num_hidden_layers": count_of(owner, layers, "layer"),
        "head_dim": head_dim,
        "num_key_value_heads": rows["k"] // max(head_dim, 1),
        "intermediate_size": shapes.get("layers.0.mlp.gate_proj.weight", (0,))[0],
        "vocab_size": next((shapes[key][0] for key in tables if key in shapes), 0),
    }
    values |= {key: settled(owner, key, values.get(key), size) for key, size in shown.items() if size}
    has_bias = "layers.0.self_attn.q_proj.bias" in shapes if rows["q"] else None
    values["attention_bias"] = bool(settled(owner, "attention_bias", values.get("attention_bias"), has_bias))
    if raw.get("use_sliding_window") and not values.get("layer_types"):
        raise ValueError(f"{owner}: config.json says use_sliding_window=True, and no layer_types: which layers?")
    parts = {"own_embeddings": "embed_tokens.weight" in shapes, "own_unembedding": "lm_head.weight" in shapes}
    return {"vocab_size": 0} | values | parts


def both(*fields: str) -> list[str]:
    """Return the places of fields that stand at the top or in `dflash_config`."""
    return [path for field in fields for path in (field, f"dflash_config.{field}")]


def said(owner: object, raw: Fields, *fields: str, **meanings: Callable[[Any], Any]) -> Any:
    """Return what names of one thing say, at the top and in `dflash_config` (`agreed`)."""
    return agreed(owner, raw, *both(*fields), meanings=meanings)


def law_fields(kind: str, owner: object, raw: Fields, shapes: Shapes, width: int) -> Fields:
    """Return the law of a kind of drafter, whose rows are so wide; tensors show where the config is silent."""

    def found(name: str, shown: object, *others: str) -> Any:
        return settled(owner, name, said(owner, raw, name, *others), shown)

    if kind == "dflash2":
        conv = "layers.0.attention_conv."
        taps = shapes.get(conv + "base_kernel", (0, 0, 0))[1]
        columns = shapes.get(conv + "kernel_projection.weight", (0,))[0]
        group = found("conv_group_size", 2 * taps * width // columns if columns else None)
        sizes = {"conv_kernel_size": found("conv_kernel_size", taps or None), "conv_group_size": group}
        rank = found("selector_rank", shapes.get("candidate_selector.hidden_projection.weight", (None,))[0])
        options = {"rank": rank or 256, "top_k": found("selector_top_k", None) or 16}
        return {key: each for key, each in sizes.items() if each} | {"law": "selector", "law_options": options}
    if kind == "domino":
        if _DOMINO not in shapes:
            named = f"architectures={architectures(raw)} with projector_type={said(owner, raw, 'projector_type')!r}"
            raise ValueError(f"{owner}: {named} is a Domino, and the checkpoint has no embed_proj.2.weight")
        state = found("gru_hidden_dim", shapes.get("domino_head.prefix_gru.weight_hh_l0", (None,))[-1])
        options = {"rank": found("emb_dim", shapes[_DOMINO][1]), "state_size": state}
        return {"law": kind, "law_options": options | {"free_places": found("pure_draft_prefix_len", None) or 0}}
    if kind != "dspark":
        return {}
    head, proj = "markov_head.{}.weight", shapes.get("confidence_head.proj.weight")
    rank = found("markov_rank", shapes.get(head.format("markov_w1"), (0, 0))[1], "dspark_markov_rank")
    kinds = {"gated": head.format("gate_proj"), "rnn": head.format("joint_proj")}
    shape = found("markov_head_type", next((each for each, key in kinds.items() if key in shapes), "vanilla"))
    law: Fields = {"law": "markov", "law_options": {"kind": shape, "rank": rank}} if rank else {}
    switches = ("enable_confidence_head", "use_confidence_head")
    switch = next((each for each in switches for path in both(each) if stated(raw, path) is not None), switches[0])
    has_confidence = settled(owner, switch, said(owner, raw, *switches), proj is not None)
    reads, field = None if proj is None else proj[1] > width, "confidence_head_with_markov"
    reads = found(field, reads) if has_confidence else reads
    return law | {"has_confidence": has_confidence, "confidence_reads_token": bool(reads)}


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
    return kind | {
        "markov_rank": options.get("rank", 256) if law == "markov" else 0,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_reads_token and law == "markov",
    }


_SHAPE_DRAFTS = names(
    "law sample_from_anchor block_size mask_token_id feature_layers target_hidden_size draft_vocab_size mask_embedding "
    "body keys_are_values causal layer_types conv_kernel_size has_confidence rope_parameters rms_norm_eps hidden_act"
).union(_SCALES)


def refuse_lost(config: BlockDrafterConfig, layout: BlockLayout, fields: Fields, shapes: Shapes) -> None:
    """Refuse a layout whose reader would make another drafter of the config.json `fields` that is written."""
    read = layout.read(f"layout={layout.name!r}", fields, shapes)
    read.pop("is_interleaved", None)
    held, shown = BlockDrafterConfig(**read), sorted(_SHAPE_DRAFTS)
    shown += ["sliding_window", "sliding_causal"] if "sliding_attention" in (config.layer_types or ()) else []
    if lost := [name for name in shown if getattr(held, name) != getattr(config, name)]:
        wanted, found = (", ".join(f"{name}={getattr(each, name)!r}" for name in lost) for each in (config, held))
        raise ValueError(f"layout={layout.name!r} cannot hold {wanted}: it holds {found}; save_pretrained holds all")


def written_body(config: BlockDrafterConfig) -> Fields:
    """Return the fields of the layers, those of a Qwen3 config."""
    values = config.to_dict()
    taken = sorted(_BODY | {"rope_parameters", "max_window_layers", "use_sliding_window"})
    return {key: values[key] for key in taken if key in values} | {"model_type": "qwen3", "tie_word_embeddings": False}


KINDS = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DSparkDraftModel": "dspark",
    "Lfm2DSparkDraftModel": "dspark",
    "Qwen3DFlashDraftModel": "dflash",
    "Qwen3DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DominoDraftModel": "domino",
    "Gemma4DSparkModel": "dspark",
}
"""The kinds of drafters that architectures name; the first three are those of speculators."""
_NAMES = {kind: name for name, kind in [*KINDS.items()][:3]}
_DOMINO = "domino_head.embed_proj.2.weight"  # [V, emb_dim]


def kind_of(owner: object, raw: Fields) -> str:
    """Return the kind of drafter that a config.json names; refuse others."""
    projector, named = said(owner, raw, "projector_type"), architectures(raw)
    kinds = {KINDS.get(name, "") for name in named}
    if projector in ("dspark", "domino") and kinds == {"dflash"}:  # Model-Optimizer's and NeMo's
        kinds = {projector}
    if len(kinds) != 1 or "" in kinds or projector not in (None, *kinds):
        known = ", ".join(KINDS)
        raise ValueError(f"{owner}: architectures={named} with projector_type={projector!r} is none of {known}")
    return kinds.pop()


def default_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """Return the layers of a backbone whose outputs drafters of so many layers read by default."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + index * (num_target_layers - 4) / (num_layers - 1)) for index in range(num_layers)]


def read_common(owner: object, raw: Fields, shapes: Shapes, kind: str) -> Fields:
    """Return the fields of all layouts but speculators'."""
    body, fields = body_fields(owner, raw, shapes), {"target_layer_ids": 0, "eagle_aux_hidden_state_layer_ids": 1}
    meanings = {field: lambda ids, more=more: [index - more for index in ids] for field, more in fields.items()}
    layers = said(owner, raw, *fields, **meanings)
    heads, mode = body["num_attention_heads"], said(owner, raw, "attention_mode")
    sizes = {"target_hidden_size": body["hidden_size"], "draft_vocab_size": body["vocab_size"]}
    sizes |= {"num_aux_layers": None if layers is None else len(layers)}
    for key, size in sizes.items():
        settled(owner, key, said(owner, raw, key), size)
    if mode not in (None, "gqa", *["mha"] * (body.get("num_key_value_heads", heads) == heads)):
        raise ValueError(f"{owner}: attention_mode={mode!r} contradicts the heads of attention")
    values: Fields = {
        "block_size": said(owner, raw, "block_size"),
        "mask_token_id": said(owner, raw, "mask_token_id", "pard_token", "ptd_token_id"),
        "sample_from_anchor": _anchor_first(owner, raw, kind),
        "feature_layers": None if layers is None else [index + 1 for index in layers],
        "num_target_layers": said(owner, raw, "num_target_layers"),
        "is_interleaved": is_interleaved(owner, raw),
    }
    return body | values | law_fields(kind, owner, raw, shapes, body["hidden_size"])


def is_interleaved(owner: object, raw: Fields) -> bool:
    """Return whether rope turns pairs of neighbours, and not of halves of a head."""
    return said(owner, raw, "rope_is_neox_style", "is_neox_style") in (False,)


def _anchor_first(owner: object, raw: Fields, kind: str) -> bool | None:
    """Return which rows draft; None: a `shift_label` says that it is not as usual, of which trainers disagree."""
    fields, is_dspark = ["sample_from_anchor", "dspark_bonus_anchor"], kind == "dspark"
    meanings = {"dspark_bonus_anchor": lambda bonus: not bonus if bonus or is_dspark else None}
    shift, known = said(owner, raw, "shift_label"), said(owner, raw, *fields, **meanings)
    if kind == "domino":  # whose trainers agree
        return bool(said(owner, raw, *fields, "shift_label", **meanings))
    if known is None:
        return is_dspark if shift in (None, is_dspark) else None
    return said(owner, raw, *fields, "shift_label", **meanings) if shift or is_dspark else known


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


def _read_zlab(owner: object, raw: Fields, shapes: Shapes) -> Fields:
    values, places = read_common(owner, raw, shapes, kind_of(owner, raw)), both(*_CAUSAL)
    if stated(raw, "is_causal") is False and stated(raw, "dflash_config.causal"):
        places.remove("is_causal")  # NeMo writes false for every drafter
    causal, targets = agreed(owner, raw, *places), values["num_target_layers"]
    if values["feature_layers"] is None and targets is not None:
        values["feature_layers"] = [index + 1 for index in default_ids(targets, values["num_hidden_layers"])]
    values |= {"causal": bool(causal)} | _windows(owner, raw, values, causal)
    scales = {key: said(owner, raw, key) for key in _SCALES}
    return values | {key: scale for key, scale in scales.items() if scale is not None}


def _rows(config: BlockDrafterConfig) -> Fields:
    layers = [index - 1 for index in config.feature_layers or ()]
    return {"mask_token_id": config.mask_token_id, "target_layer_ids": layers, "block_size": config.block_size}


def _written_domino(config: BlockDrafterConfig) -> Fields:
    options = config.law_options or {}
    sizes = {"emb_dim": options.get("rank", 256), "gru_hidden_dim": options.get("state_size", 1024)}
    rows = {"pure_draft_prefix_len": options.get("free_places", 0), "shift_label": config.sample_from_anchor}
    return sizes | rows | {"projector_type": "domino"}


def _write_zlab(config: BlockDrafterConfig) -> Fields:
    nested = _rows(config) | (_written_domino(config) if config.law == "domino" else written_law(config))
    nested |= {key: value for key, usual in _SCALES.items() if (value := getattr(config, key)) != usual}
    if config.law == "markov" and not config.sample_from_anchor:  # a DFlash has no choice
        nested["sample_from_anchor"] = False
    kind = {"selector": "dflash2", "markov": "dspark"}.get(config.law, "dflash")
    name = "DominoDraftModel" if config.law == "domino" else _NAMES[kind]
    values = written_body(config) | {"architectures": [name], "block_size": config.block_size}
    if config.num_target_layers is not None:
        values["num_target_layers"] = config.num_target_layers
    if config.causal or ("sliding_attention" in (config.layer_types or ()) and not config.sliding_causal):
        values["is_causal"] = config.causal
    return values | {"dflash_config": nested}


def _zlab_table(owner: object, raw: Fields) -> FieldTable:
    kind = kind_of(owner, raw)
    own, others = _ZLAB | _OF_KIND[kind], {"markov_rank": (0,), "dspark_markov_rank": (0,)}
    read = {"": LAYERS | own, "dflash_config": own} | ROPE_LEVELS
    known: dict[str, Collection[str]] = {"": _TENSORS_DECIDE, "dflash_config": _TENSORS_DECIDE}
    return FieldTable("z-lab", read, known, {"dspark_fixup_head_type": ("markov",)} if kind == "dspark" else others)


_TENSORS_DECIDE = names("has_embed_tokens has_lm_head max_window_layers")
_DEEPSPEC, _GEMMA = "Qwen3DSparkModel", "Gemma4DSparkModel"
_TABLE_OF_DEEPSPEC = FieldTable(
    "deepspec", {"": LAYERS | _COMMON | _OF_KIND["dspark"]} | ROPE_LEVELS, {"": _TENSORS_DECIDE}
)
_TABLE_OF_GEMMA = FieldTable(
    _GEMMA,
    {
        "": LAYERS | _COMMON | _OF_KIND["dspark"] | names("num_global_key_value_heads global_head_dim attention_k_eq_v")
        | names("hidden_activation final_logit_softcapping"),
        "rope_parameters": names(""),
        "rope_parameters.full_attention": ROPE | {"partial_rotary_factor"},
    },
    {
        "": _TENSORS_DECIDE
        | names("use_bidirectional_attention vocab_size_per_layer_input num_kv_shared_layers use_double_wide_mlp")
        | names("num_experts top_k_experts moe_intermediate_size target_text_model_type"),
        "rope_parameters.sliding_attention": ROPE | {"partial_rotary_factor"},
    },
    {"hidden_size_per_layer_input": (0,)},
)  # fmt: skip
_RENAMES = (
    *((f"{part}.", f"markov_head.{part}.") for part in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")),
    ("confidence_proj.", "confidence_head.proj."),
    *((f"{part}.", f"domino_head.{part}.") for part in ("prefix_gru", "embed_proj")),
)
"""Model-Optimizer's names of a DSpark's heads, and everybody's of Domino's."""


def _is_zlab(raw: Fields) -> bool:
    own = KINDS.keys() - {_DEEPSPEC, _GEMMA}
    return isinstance(raw.get("dflash_config"), dict) or any(name in own for name in architectures(raw)[:1])


def _is_deepspec(raw: Fields) -> bool:
    named = architectures(raw)
    return named in ([_DEEPSPEC], [_GEMMA]) or (not named and raw.keys() >= {"target_layer_ids", "markov_rank"})


def _deepspec_table(owner: object, raw: Fields) -> FieldTable:
    kind_of(owner, {"architectures": [_DEEPSPEC]} | raw)
    if architectures(raw) == [_GEMMA]:
        return _TABLE_OF_GEMMA
    plain, scaled = (_TABLE_OF_DEEPSPEC.with_copies(each) for each in (False, True))
    partial = {path for path, _ in scaled.unread(raw)} - {path for path, _ in plain.unread(raw)}
    if partial and is_interleaved(owner, raw):
        raise ValueError(f"{owner}: rope_is_neox_style or is_neox_style is false beside {', '.join(sorted(partial))}")
    return plain if rope_of(owner, raw, 1.0)["rope_type"] == "default" else scaled


def _read_deepspec(owner: object, raw: Fields, shapes: Shapes) -> Fields:
    gemma = _gemma_fields(owner, raw) if architectures(raw) == [_GEMMA] else {}
    values = read_common(owner, raw | gemma.pop("body_fields", {}), shapes, "dspark") | gemma
    return values | {"layer_types": ["full_attention"] * values["num_hidden_layers"]}


def _gemma_fields(owner: object, raw: Fields) -> Fields:
    """Return the fields of layers of Gemma 4 that see everything, and under `body_fields` those that Qwen3 has, too."""
    shared, kind = raw.get("attention_k_eq_v") is True, "full_attention"
    heads = "num_global_key_value_heads" if shared else "num_key_value_heads"
    rope = stated(raw, f"rope_parameters.{kind}") or {}
    if missing := [name for name in ("global_head_dim", "hidden_activation", heads) if raw.get(name) is None]:
        raise ValueError(f"{owner}: architectures={[_GEMMA]}, but config.json does not say {', '.join(missing)}")
    body = {"head_dim": raw["global_head_dim"], "hidden_act": raw["hidden_activation"], "rope_parameters": rope}
    return {
        "body_fields": body | {"num_key_value_heads": raw[heads]},
        "body": "gemma4",
        "keys_are_values": shared,
        "input_embedding_scale": raw["hidden_size"] ** 0.5,
        "final_logit_softcapping": raw.get("final_logit_softcapping"),
        "rope_parameters": rope,
    }


def _write_deepspec(config: BlockDrafterConfig) -> Fields:
    own = {"architectures": [_DEEPSPEC], "num_target_layers": config.num_target_layers}
    if config.body == "gemma4":
        own |= {
            "architectures": [_GEMMA],
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "global_head_dim": config.head_dim,
            "num_global_key_value_heads": config.num_key_value_heads,
            "attention_k_eq_v": config.keys_are_values,
            "hidden_activation": config.hidden_act,
            "final_logit_softcapping": config.final_logit_softcapping,
            "rope_parameters": {"full_attention": config.rope_parameters},
        }
    silent = {"enable_confidence_head": False, "markov_rank": 0}
    return written_body(config) | own | silent | _rows(config) | written_law(config)


def _read_assistant(owner: object, raw: Fields, shapes: Shapes) -> Fields:
    values = read_common(owner, raw, shapes, "dflash")
    if raw.get("layer_types") is None:
        raise ValueError(f"{owner}: config.json has no layer_types")
    if (window := values.get("sliding_window")) is not None:
        values["sliding_window"] = window + 1  # theirs does not count a row's own position
    return values | {"vocab_size": 0}


_IDS = "aux_hidden_state_layer_ids"
_SPECULATORS = names(
    f"block_size mask_token_id sample_from_anchor {_IDS} target_hidden_size draft_vocab_size sliding_window_non_causal"
)
_SPECULATORS_TABLES = {kind: speculators_table(_SPECULATORS | own) for kind, own in _OF_KIND.items()}


def _is_speculators(raw: Fields) -> bool:
    return raw.get("speculators_model_type") in _NAMES


def _speculators_table(owner: object, raw: Fields) -> FieldTable:
    kind, named = raw["speculators_model_type"], raw.get("architectures")
    if named and named != [_NAMES[kind]]:
        raise ValueError(f"{owner}: architectures={named}, but speculators_model_type={kind!r} is {_NAMES[kind]}")
    return _SPECULATORS_TABLES[kind]


def _read_speculators(owner: object, raw: Fields, shapes: Shapes) -> Fields:
    kind = raw["speculators_model_type"]
    body = body_fields(owner, {"dtype": raw.get("dtype")} | (raw.get("transformer_layer_config") or {}), shapes)
    engine, is_free = raw.get("speculators_config") or {}, raw.get("sliding_window_non_causal")
    drafted, size = shapes.get("lm_head.weight", (None,))[0], raw.get("block_size", 8)
    anchor = raw.get("sample_from_anchor")
    if anchor is None and kind == "dspark":  # older configs do not say it, but how many tokens are proposed
        proposed = {each.get("speculative_tokens") for each in engine.get("proposal_methods") or ()}
        anchor = {(size,): True, (size - 1,): False}.get(tuple(proposed))
    values: Fields = {
        "block_size": size,
        "mask_token_id": raw.get("mask_token_id"),
        "sample_from_anchor": False if anchor is None and kind != "dspark" else anchor,
        "feature_layers": raw.get(_IDS),
        "target_hidden_size": raw.get("target_hidden_size"),
        "draft_vocab_size": settled(owner, "draft_vocab_size", raw.get("draft_vocab_size"), drafted),
        "sliding_causal": not (kind == "dflash2" if is_free is None else is_free),
    }
    law = law_fields(kind, owner, raw, shapes, body["hidden_size"])
    return body | values | law | verifier_fields(engine.get("verifier") or {})


def _write_speculators(config: BlockDrafterConfig) -> Fields:
    plain = "dspark" if config.has_confidence else "dflash"
    kind = {"independent": plain, "selector": "dflash2"}.get(config.law, "dspark")
    if kind == "dflash2" and config.has_draft_vocabulary:
        raise ValueError(f"layout='speculators' drafts every token with law='selector', not {config.draft_vocab_size}")
    values = speculators_fields(config, kind, _NAMES[kind], written_body(config), config.num_drafts)
    return values | {
        _IDS: config.feature_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not config.sliding_causal,
        **written_law(config),
    }


_OF_ASSISTANTS = FieldTable(
    "muse_glimmer_assistant", {"": LAYERS | names("block_size mask_token_id target_layer_ids")} | ROPE_LEVELS
)
_ENCODER = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."))
LAYOUTS: tuple[BlockLayout, ...] = (
    BlockLayout("speculators", _is_speculators, _speculators_table, _read_speculators, _write_speculators),
    BlockLayout("z-lab", _is_zlab, _zlab_table, _read_zlab, _write_zlab, renames=_RENAMES),
    BlockLayout(
        "tokenahead",
        lambda raw: raw.get("model_type") == "muse_glimmer_assistant",
        lambda owner, raw: _OF_ASSISTANTS,
        _read_assistant,
        BlockDrafterConfig.to_dict,
        renames=_ENCODER,
    ),
    BlockLayout("deepspec", _is_deepspec, _deepspec_table, _read_deepspec, _write_deepspec, True, _RENAMES),
)
"""In the order in which they are tried."""
OVERRIDES = {
    "feature_layers": "name the states that the drafter reads (target_layer_ids)",
    "sample_from_anchor": "say whether the first row drafts (shift_label alone does not)",
    "block_size": "say how many rows a block has",
}
"""Fields that `from_pretrained` takes in place of those of a checkpoint, and what one without them does not say."""
_LIKE_OURS = re.compile(r".*(DFlash|DSpark|Domino|XPress|LiLiCorr).*")
"""Names of architectures that are those of block drafters."""
_TURNED = re.compile(r".*self_attn\.[qk]_(proj|norm)\.(weight|bias)")


def layout_of(raw: Fields) -> BlockLayout | None:
    """Return the layout of a config.json; None where it is no block drafter. One without code here is refused."""
    for name in [*architectures(raw), "XPressSpeculator" if raw.get("speculators_model_type") == "xpress" else ""]:
        if _LIKE_OURS.fullmatch(name) and name not in KINDS:
            raise ValueError(f"architectures={raw.get('architectures')}: there is no code for {name} here")
    return next((layout for layout in LAYOUTS if layout.recognises(raw)), None)


def checked_layout(name: object, raw: Fields, ignored: Sequence[str] = ()) -> BlockLayout:
    """Return the layout of a config.json whose fields are all read, known to change nothing, or ignored."""
    layout = layout_of(raw)
    refuse_dspark(name, raw)
    if layout is None:
        said = f"model_type={raw.get('model_type')!r}, architectures={raw.get('architectures')}"
        raise ValueError(f"{name}: config.json is none of a block drafter ({said})")
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
    """Return configuration and tensors of a checkpoint of a `checked_layout` from another library.

    `mask` is what `mask_embedding.pt` beside it holds; `overrides` are those of `OVERRIDES`, where they are not None.
    """
    renames = (("model.", ""), ("logit_head.", ""), *layout.renames)
    state = {with_prefixes(key, renames).replace("codebook.weight", "codebook"): state[key] for key in state}
    given = {key: value for key, value in overrides.items() if value is not None}
    values = layout.read(name, raw, {key: tuple(tensor.shape) for key, tensor in state.items()})
    check_overrides(name, values, given)
    values |= given
    for key, what in (OVERRIDES | {"mask_token_id": "name the mask token"}).items():
        if values[key] is None:
            raise ValueError(f"{name}: config.json does not {what}; pass {key}=")
    if "fc.weight" not in state:
        raise ValueError(f"{name}: the checkpoint has no fc.weight")
    width = values.get("target_hidden_size") or values["hidden_size"]
    check_columns(name, state["fc.weight"].shape[-1], values["feature_layers"], width, "feature_layers")
    if values.pop("is_interleaved", False):
        pairs = (-1, values["head_dim"] // 2, 2)  # of neighbours, which become pairs of halves
        turned = {key: each.unflatten(0, pairs) for key, each in state.items() if _TURNED.fullmatch(key)}
        state |= {key: each.transpose(1, 2).flatten(0, 2) for key, each in turned.items()}  # [H, 2, D / 2]
    if mask is not None:
        number, row = mask.get("mask_token_id"), mask["embedding"].reshape(-1)
        settled(name, "mask_token_id", values["mask_token_id"], None if number is None else int(number))
        settled(name, "hidden_size", values["hidden_size"], len(row))
        state["mask_embedding"], values["mask_embedding"] = row, True
    config = BlockDrafterConfig(layout=layout.name, **values)
    check_offsets(name, state, config.draft_vocab_size or config.vocab_size, config.vocab_size)
    return config, {key: tensor for key, tensor in state.items() if key != "t2d"}


def check_overrides(name: object, values: Fields, given: Fields) -> None:
    """Refuse a longer block than the drafter learned, and warn of a shorter one."""
    size, wanted = values["block_size"], given.get("block_size")
    if None in (size, wanted):
        return
    if wanted > size:
        raise ValueError(f"{name}: block_size={wanted} is more than the {size} rows that the drafter learned")
    if wanted < size:
        logger.warning_once(f"{name}: block_size={wanted} changes every draft: the drafter learned {size} rows")


def written(
    config: BlockDrafterConfig, layout: str, state: dict[str, Tensor], tables: Mapping[str, Tensor]
) -> tuple[Fields, dict[str, Tensor]]:
    """Return config.json and tensors of a drafter in another library's layout.

    `tables` are embeddings and unembedding [V, d] of the backbone by their names here, if the drafter is attached.
    """
    record = next((each for each in LAYOUTS if each.name == layout != "tokenahead"), None)
    if record is None:
        raise ValueError(f"layout={layout!r} is unknown; choose 'deepspec', 'speculators' or 'z-lab'")
    fields, state = record.write(config), dict(state)
    refuse_lost(config, record, fields, {key: tuple(tensor.shape) for key, tensor in state.items()})
    for key in ("embed_tokens.weight", *["lm_head.weight"] * ("d2t" not in state)):
        if record.copies == (key in state):
            continue
        if key not in tables:
            does = "repeats" if record.copies else "reads"
            raise ValueError(f"layout={layout!r} {does} the backbone's {key}: call attach(backbone) first")
        if record.copies:
            state[key] = tables[key]
        elif not torch.equal(state.pop(key).to(tables[key]), tables[key]):
            raise ValueError(f"layout={layout!r} reads the backbone's {key}, and the drafter's differs")
    if "d2t" in state:
        ids = state["d2t"].cpu() + torch.arange(config.draft_vocab_size or 0)  # [Vd]
        state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return fields, {key.removeprefix("domino_head."): tensor for key, tensor in state.items()}
