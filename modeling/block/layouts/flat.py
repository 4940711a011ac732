"""Layouts whose config.json is that of the layers: z-lab's, DeepSpec's, and that of assistants of transformers.

z-lab's DFlash and DFlash 2, and the DSparks that others save like them, have a Qwen3 config with a `dflash_config`, as
those of SpecForge, NVIDIA's NeMo AutoModel and Model-Optimizer, JetSpec, and LiquidAI. DeepSpec's DFlash and DSpark
(one architecture) have copies of the backbone's embeddings and unembedding, and a copy of its config, whose further
fields describe the backbone: heads turn whole by a plain rope. Assistants (`muse_glimmer_assistant`) are read only.
"""

from __future__ import annotations

from ....configuration.block import BlockDrafterConfig
from ....configuration.fields import refuse
from ....configuration.foreign_fields import COPIED_FROM_TARGET, ROPE_LEVELS, FieldTable, agreed, names, settled, stated
from ....generation.tensors.tensor_files import Fields
from ...common.drafter_configs import architectures, rope_of
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
