"""DeepSpec's DFlash and DSpark (one architecture), with copies of the backbone's embeddings and unembedding.

The config is a copy of the backbone's, whose further fields describe the backbone: heads turn whole by a plain rope.
"""

from __future__ import annotations

from ....configuration.block import BlockDrafterConfig
from ....configuration.foreign_fields import COPIED_FROM_TARGET, ROPE_LEVELS, FieldTable, names
from ....generation.tensors.tensor_files import Fields
from ...common.drafter_configs import architectures, rope_of
from .record import BODY, MARKOV, BlockLayout, Shapes, written_body, written_law
from .zlab import COMMON, RENAMES, is_interleaved, kind_of, read_common

_NAME = "Qwen3DSparkModel"
_READ = {"": BODY | COMMON | MARKOV} | ROPE_LEVELS
_KNOWN, _OF_ROPE = names("max_window_layers has_embed_tokens has_lm_head"), names("partial_rotary_factor mrope_*")
_PLAIN, _COPIED = (
    FieldTable("deepspec", _READ, {"": _KNOWN | copied} | dict.fromkeys(ROPE_LEVELS, of_rope))
    for copied, of_rope in ((COPIED_FROM_TARGET - _OF_ROPE, ()), (COPIED_FROM_TARGET, _OF_ROPE))
)


def _is_deepspec(raw: Fields) -> bool:
    named = architectures(raw)
    return named == [_NAME] or (not named and "target_layer_ids" in raw and "markov_rank" in raw)


def _table(owner: object, raw: Fields) -> FieldTable:
    kind_of(owner, {"architectures": [_NAME]} | raw)
    partial = {path for path, _ in _PLAIN.unread(raw)} - {path for path, _ in _COPIED.unread(raw)}
    if partial and is_interleaved(owner, raw):
        raise ValueError(f"{owner}: rope_is_neox_style or is_neox_style is false beside {', '.join(sorted(partial))}")
    return _COPIED if rope_of(owner, raw, 1.0)["rope_type"] == "default" else _PLAIN


def _read(owner: object, raw: Fields, shapes: Shapes) -> Fields:
    values = read_common(owner, raw, shapes, "dspark")
    return values | {"layer_types": ["full_attention"] * values["num_hidden_layers"]}


def _write(config: BlockDrafterConfig) -> Fields:
    return written_body(config) | {
        "architectures": [_NAME],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [index - 1 for index in config.feature_layers or ()],
        "num_target_layers": config.num_target_layers,
        "enable_confidence_head": False,
        "markov_rank": 0,
        **written_law(config),
    }


DEEPSPEC = BlockLayout("deepspec", _is_deepspec, _table, _read, _write, copies=True, renames=RENAMES)
