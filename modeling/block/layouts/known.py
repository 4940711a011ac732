"""Layouts as data: z-lab's, DeepSpec's, that of assistants of transformers, and speculators'.

z-lab's DFlash and DFlash 2, and the DSparks that others save like them, have a Qwen3 config with a `dflash_config`, as
those of SpecForge, NVIDIA's NeMo AutoModel and Model-Optimizer, JetSpec, and LiquidAI. DeepSpec's DFlash and DSpark
(one architecture) have copies of the backbone's embeddings and unembedding, and a copy of its config, whose further
fields describe the backbone: heads turn whole by a plain rope. Assistants (`muse_glimmer_assistant`) are read only. In
speculators' dflash, dflash2 and dspark (0.9) the config of the layers is nested, and ids are those of hidden states.
"""

from __future__ import annotations

from ....configuration.block import BlockDrafterConfig
from ....configuration.fields import refuse
from ....configuration.foreign_fields import COPIED_FROM_TARGET, ROPE_LEVELS, FieldTable, agreed, names, settled, stated
from ....generation.tensors.tensor_files import Fields
from ...common.drafter_configs import architectures, rope_of, speculators_fields, verifier_fields
from .record import (
    BODY,
    MARKOV,
    SELECTOR,
    BlockLayout,
    Shapes,
    body_fields,
    both,
    law_fields,
    parts_of,
    said,
    written_body,
    written_law,
)

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
