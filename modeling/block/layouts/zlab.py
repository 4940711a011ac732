"""z-lab's DFlash and DFlash 2, and SpecForge's DSpark: a Qwen3 config with a `dflash_config`."""

from __future__ import annotations

from ....configuration.block import BlockDrafterConfig
from ....configuration.fields import refuse
from ....generation.tensors.tensor_files import Fields
from ...common.drafter_configs import architectures
from .record import (
    BlockLayout,
    Shapes,
    body_fields,
    markov_fields,
    parts_of,
    selector_fields,
    written_body,
    written_law,
)

_ENGINE_ONLY = ("use_swa", "swa_window_size", "attention_sink_bias")


def default_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """Return the layers of a backbone whose outputs drafters of so many layers read by default."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + index * (num_target_layers - 4) / (num_layers - 1)) for index in range(num_layers)]


def _read(name: object, raw: Fields, shapes: Shapes) -> Fields:
    flat = raw | (raw.get("dflash_config") or {})
    body = body_fields(name, raw, shapes)
    kind = "dspark" if flat.get("projector_type") == "dspark" else _KINDS.get((raw.get("architectures") or [""])[0])
    layers, targets = flat.get("target_layer_ids"), flat.get("num_target_layers")
    refuse(
        [
            *((flat.get(each), f"{name}: {each}={flat.get(each)!r} is not supported") for each in _ENGINE_ONLY),
            (kind is None, f"{name}: architectures={raw.get('architectures')} is none of {', '.join(_KINDS)}"),
            (flat.get("mask_token_id") is None, f"{name}: dflash_config has no mask_token_id"),
        ]
    )
    stated = next((flat[each] for each in ("is_causal", "causal") if flat.get(each) is not None), None)
    causal_head = bool(flat.get("causal_head"))
    if layers is None and targets is not None:
        layers = default_ids(targets, body["num_hidden_layers"])
    law = {"dflash": lambda _: {}, "dflash2": selector_fields, "dspark": markov_fields}[kind or "dflash"](flat)
    values: Fields = {
        "block_size": flat.get("block_size", 16),
        "mask_token_id": flat["mask_token_id"],
        "sample_from_anchor": kind == "dspark" and not flat.get("dspark_bonus_anchor"),
        "feature_layers": None if layers is None else [index + 1 for index in layers],
        "num_target_layers": targets,
        "causal": bool(stated) or causal_head,
        "sliding_causal": stated is None or bool(stated) or causal_head,
        "final_logit_softcapping": flat.get("final_logit_softcapping"),
    }
    values |= {key: flat.get(key, 1.0) for key in ("input_embedding_scale", "output_multiplier")}
    return body | values | law | parts_of(shapes)


_KINDS = {"DFlashDraftModel": "dflash", "DFlash2DraftModel": "dflash2", "DSparkDraftModel": "dspark"}
_ARCHITECTURES = {"independent": "DFlashDraftModel", "selector": "DFlash2DraftModel", "markov": "DSparkDraftModel"}


def _write(config: BlockDrafterConfig) -> Fields:
    law, is_dspark = written_law(config, "z-lab"), config.law == "markov"
    has_window = "sliding_attention" in (config.layer_types or ())
    refuse(
        [
            (
                config.sample_from_anchor != is_dspark,
                f"layout='z-lab' with law={config.law!r} drafts from row {int(not is_dspark)}: make the "
                f"drafter with from_backbone(..., sample_from_anchor={is_dspark})",
            ),
            (
                config.has_draft_vocabulary,
                f"layout='z-lab' drafts every token (draft_vocab_size={config.draft_vocab_size})",
            ),
            (config.has_confidence and not is_dspark, "layout='z-lab' has a confidence head with law='markov' alone"),
            (
                has_window and config.causal and not config.sliding_causal,
                "layout='z-lab' has no causal layers without a window beside bidirectional ones with one",
            ),
        ]
    )
    nested: Fields = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [index - 1 for index in config.feature_layers or ()],
        "block_size": config.block_size,
    }
    defaults = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": None}
    nested |= {key: getattr(config, key) for key, usual in defaults.items() if getattr(config, key) != usual}
    values = written_body(config) | {"architectures": [_ARCHITECTURES[config.law]], "block_size": config.block_size}
    if config.num_target_layers is not None:
        values["num_target_layers"] = config.num_target_layers
    if config.causal or (has_window and not config.sliding_causal):
        values["is_causal"] = config.causal
    return values | {"dflash_config": nested | law}


def _is_zlab(raw: Fields) -> bool:
    return isinstance(raw.get("dflash_config"), dict) or any(name in _KINDS for name in architectures(raw)[:1])


ZLAB = BlockLayout("z-lab", _is_zlab, _read, _write)
