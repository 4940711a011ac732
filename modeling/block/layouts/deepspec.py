"""DeepSpec's DFlash and DSpark (one architecture), with copies of the backbone's embeddings and unembedding."""

from __future__ import annotations

from ....configuration.block import BlockDrafterConfig
from ....configuration.fields import refuse
from ....generation.tensors.tensor_files import Fields
from .record import BlockLayout, Shapes, body_fields, markov_fields, parts_of, written_body, written_law

_NAME = "Qwen3DSparkModel"


def _is_deepspec(raw: Fields) -> bool:
    return raw.get("architectures") == [_NAME] or ("target_layer_ids" in raw and "markov_rank" in raw)


def _read(name: object, raw: Fields, shapes: Shapes) -> Fields:
    body = body_fields(name, raw, shapes)
    needed = ("block_size", "mask_token_id", "target_layer_ids")
    refuse((raw.get(each) is None, f"{name}: config.json has no {each}") for each in needed)
    values: Fields = {
        "block_size": raw["block_size"],
        "mask_token_id": raw["mask_token_id"],
        "sample_from_anchor": not raw.get("dspark_bonus_anchor"),
        "feature_layers": [index + 1 for index in raw["target_layer_ids"]],
        "num_target_layers": raw.get("num_target_layers"),
        "layer_types": ["full_attention"] * body["num_hidden_layers"],
    }
    return body | values | markov_fields(raw) | parts_of(shapes)


def _write(config: BlockDrafterConfig) -> Fields:
    refuse([(config.law == "selector", "layout='deepspec' has no law='selector'; 'z-lab' and 'speculators' do")])
    law, kinds = written_law(config, "deepspec"), {*(config.layer_types or ())}
    changes = {"input_embedding_scale": 1, "output_multiplier": 1, "final_logit_softcapping": None, "causal": False}
    used = [each for each, usual in changes.items() if getattr(config, each) != usual]
    refuse(
        [
            (kinds != {"full_attention"}, "layout='deepspec' has layers of full_attention alone (layer_types)"),
            (
                not config.sample_from_anchor,
                "layout='deepspec' drafts from row 0: make the drafter with from_backbone(..., "
                "sample_from_anchor=True)",
            ),
            (
                config.has_draft_vocabulary,
                f"layout='deepspec' drafts every token (draft_vocab_size={config.draft_vocab_size})",
            ),
            (bool(used), f"layout='deepspec' has no {', '.join(used)}"),
        ]
    )
    return written_body(config) | {
        "architectures": [_NAME],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [index - 1 for index in config.feature_layers or ()],
        "num_target_layers": config.num_target_layers,
        "enable_confidence_head": False,
        "markov_rank": 0,
        **law,
    }


DEEPSPEC = BlockLayout("deepspec", _is_deepspec, _read, _write, copies=True)
