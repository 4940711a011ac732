"""speculators' dflash, dflash2 and dspark (0.9): the layers' config is nested, ids are those of hidden states."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ....configuration.block import BlockDrafterConfig
from ....configuration.foreign_fields import ROPE_LEVELS, FieldTable, names, settled
from ....generation.tensors.tensor_files import Fields
from ...common.drafter_configs import verifier_fields
from .record import (
    BODY,
    MARKOV,
    SELECTOR,
    BlockLayout,
    Shapes,
    body_fields,
    law_fields,
    parts_of,
    written_body,
    written_law,
)

_LAYERS = "aux_hidden_state_layer_ids"
_KINDS = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
_LAYER_CONFIG = "transformer_layer_config"
_READ = names(
    "speculators_model_type block_size mask_token_id sample_from_anchor aux_hidden_state_layer_ids target_hidden_size "
    "draft_vocab_size sliding_window_non_causal"
)
_TABLES = {
    kind: FieldTable(
        "speculators",
        {"": _READ | own, _LAYER_CONFIG: BODY, "speculators_config": names("proposal_methods verifier")}
        | {f"{_LAYER_CONFIG}.{level}": read for level, read in ROPE_LEVELS.items()},
        {
            "": names("speculators_version"),
            _LAYER_CONFIG: names("max_window_layers"),
            "speculators_config": names("algorithm default_proposal_method"),
        },
    )
    for kind, own in (("dflash", names("")), ("dflash2", SELECTOR), ("dspark", MARKOV))
}


def _table(owner: object, raw: Fields) -> FieldTable:
    kind, named = raw["speculators_model_type"], raw.get("architectures")
    if named and named != [_KINDS[kind]]:
        raise ValueError(f"{owner}: architectures={named}, but speculators_model_type={kind!r} is {_KINDS[kind]}")
    return _TABLES[kind]


def _read(name: object, raw: Fields, shapes: Shapes) -> Fields:
    kind = raw["speculators_model_type"]
    body = body_fields(name, {"dtype": raw.get("dtype")} | (raw.get(_LAYER_CONFIG) or {}), shapes)
    if raw.get("mask_token_id") is None:
        raise ValueError(f"{name}: config.json has no mask_token_id")
    is_free, drafted = raw.get("sliding_window_non_causal"), shapes.get("lm_head.weight", (None,))[0]
    values: Fields = {
        "block_size": raw.get("block_size", 8),
        "mask_token_id": raw["mask_token_id"],
        "sample_from_anchor": _anchor_first(raw),
        "feature_layers": raw.get(_LAYERS),
        "target_hidden_size": raw.get("target_hidden_size"),
        "draft_vocab_size": settled(name, "draft_vocab_size", raw.get("draft_vocab_size"), drafted),
        "sliding_causal": not (kind == "dflash2" if is_free is None else is_free),
    }
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    law = law_fields(kind, name, raw, shapes, body["hidden_size"])
    return body | values | law | parts_of(shapes) | verifier_fields(verifier)


def _anchor_first(raw: Fields) -> bool | None:
    """Return which rows draft; older configs do not say it, but how many tokens are proposed."""
    if raw.get("sample_from_anchor") is not None:
        return bool(raw["sample_from_anchor"])
    if raw["speculators_model_type"] != "dspark":
        return False
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or ()
    proposed, size = {each.get("speculative_tokens") for each in methods}, raw.get("block_size", 8)
    return {(size,): True, (size - 1,): False}.get(tuple(proposed))


def _write(config: BlockDrafterConfig) -> Fields:
    plain = "dspark" if config.has_confidence else "dflash"
    kind = {"independent": plain, "selector": "dflash2"}.get(config.law, "dspark")
    if kind == "dflash2" and config.has_draft_vocabulary:
        raise ValueError(f"layout='speculators' drafts every token with law='selector', not {config.draft_vocab_size}")
    verifiers = [each for key, each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if key == config.base_model_type]
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
    width = config.target_hidden_size
    return {
        "architectures": [_KINDS[kind]],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        _LAYER_CONFIG: written_body(config),
        _LAYERS: config.feature_layers,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not config.sliding_causal,
        "target_hidden_size": None if width == config.hidden_size else width,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": config.base_model_name_or_path, "architectures": verifiers},
        },
        **written_law(config),
    }


SPECULATORS = BlockLayout("speculators", lambda raw: raw.get("speculators_model_type") in _KINDS, _table, _read, _write)
