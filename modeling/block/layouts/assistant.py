"""DFlash assistants of transformers (`muse_glimmer_assistant`), which are read only."""

from __future__ import annotations

from ....configuration.block import BlockDrafterConfig
from ....configuration.fields import refuse
from ....configuration.foreign_fields import ROPE_LEVELS, FieldTable, names
from ....generation.tensors.tensor_files import Fields
from .record import BODY, BlockLayout, Shapes, body_fields

_TYPE = "muse_glimmer_assistant"
_NEEDED = ("block_size", "mask_token_id", "target_layer_ids", "layer_types")
_TABLE = FieldTable(
    "muse_glimmer_assistant", {"": BODY | names("block_size mask_token_id target_layer_ids")} | ROPE_LEVELS
)


def _read(name: object, raw: Fields, shapes: Shapes) -> Fields:
    refuse((raw.get(each) is None, f"{name}: config.json has no {each}") for each in _NEEDED)
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
    lambda raw: raw.get("model_type") == _TYPE,
    lambda owner, raw: _TABLE,
    _read,
    BlockDrafterConfig.to_dict,
    renames=(("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm.")),
)
