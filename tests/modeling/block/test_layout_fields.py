"""Fields of block drafters' configs: read, known to change nothing, refused by name, or ignored on request."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.modeling.block.test_golden import DATA, GEMMA, SMALL
from tokenahead import BlockDrafter
from tokenahead.modeling.common.loading import drafter_class, read_drafter
from tokenahead.training.evaluation.decoding import named_method

DSPARK, WINDOWS, FILL_IN, PAIRS, DOMINO, _ = SMALL
DFLASH, SPECULATORS, DEEPSPEC = "zlab_llama", "speculators_dspark", "deepspec_dspark_gated"
COPIED = {
    "partial_rotary_factor": 0.25,
    "attn_output_gate": True,
    "linear_num_value_heads": 48,
    "mtp_num_hidden_layers": 1,
    "text_config": {"a": 3},
    "image_token_id": 7,
    "num_experts": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 1, 2]},
}


def read(folder, **options):
    """Fields and tensors of a drafter."""
    drafter = BlockDrafter.from_pretrained(folder, **options)
    return drafter.config.to_dict() | {"_name_or_path": None}, drafter.state_dict()


def check_same(one, other):
    (fields, tensors), (others, expected) = one, other
    assert fields == others and tensors.keys() == expected.keys()
    assert all(tensors[key].equal(expected[key]) for key in tensors)


@pytest.mark.by_day("modelopt_swa", "zlab_dspark_fill_in", "specforge_domino", "domino_fill_in", "deepspec_gemma4")
@pytest.mark.parametrize("name", [*SMALL, *GEMMA])
def test_what_was_read_is_saved_and_read_back(name, tmp_path):
    BlockDrafter.from_pretrained(DATA / name).save_pretrained(tmp_path)
    check_same(read(tmp_path), read(DATA / name))


EQUAL = [
    (DFLASH, {"_attn_implementation": "x", "num_anchors": 9, "sep_token_id": 2, "rope_scaling": None}),
    (
        DFLASH,
        {"logit_scale": 1.0, "attention_sink_bias": False, "dflash_config.embed_norm": False, "num_experts": None},
    ),
    (DFLASH, {"architectures": ["Qwen3DFlashDraftModel"]}),
    (DFLASH, {"block_size": 5, "target_layer_ids": [1, 4], "eagle_aux_hidden_state_layer_ids": [2, 5]}),
    (DFLASH, {"pard_token": 90, "num_aux_layers": 2, "has_lm_head": True, "target_hidden_size": 32, "markov_rank": 0}),
    (DFLASH, {"sample_from_anchor": False, "dspark_bonus_anchor": False, "dflash_config.shift_label": False}),
    (DFLASH, {"rope_is_neox_style": True, "is_neox_style": True, "dflash_config.use_swa": False}),
    (DFLASH, {"rope_theta": 77.0}),
    (PAIRS, {"is_neox_style": ..., "rope_is_neox_style": False}),
    (PAIRS, {"rope_parameters": ..., "rope_theta": 5000.0}),
    (PAIRS, {"rope_parameters": ..., "rope_theta": 7.0, "rope_scaling": {"type": "default", "rope_theta": 5000.0}}),
    (PAIRS, {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5000.0}),
    (PAIRS, {"rope_scaling": {"rope_type": "default"}}),
    (PAIRS, {"is_causal": False, "dflash_config.causal": False, "dflash_query_causal": False}),
    (FILL_IN, {"dflash_config.sample_from_anchor": ..., "sample_from_anchor": False}),
    (FILL_IN, {"dflash_config.sample_from_anchor": ..., "dspark_bonus_anchor": True}),
    (FILL_IN, {"dflash_config.markov_rank": ..., "dspark_markov_rank": 5, "dspark_fixup_head_type": "markov"}),
    (FILL_IN, {"dflash_config.markov_rank": ..., "dflash_config.markov_head_type": ...}),
    (FILL_IN, {"dflash_config.enable_confidence_head": ..., "dflash_config.confidence_head_with_markov": ...}),
    (FILL_IN, {"architectures": ["Lfm2DSparkDraftModel"], "dflash_config.projector_type": ...}),
    (FILL_IN, {"architectures": ["Qwen3DSparkModel"], "attention_mode": "gqa", "vocab_size": ...}),
    (DSPARK, {"sample_from_anchor": True, "dflash_config.shift_label": ...}),
    (DSPARK, {"architectures": ["DSparkDraftModel"], "num_key_value_heads": ..., "intermediate_size": ...}),
    (DOMINO, {"architectures": ["DFlashDraftModel"]}),
    (DOMINO, {"dflash_config.projector_type": ..., "emb_dim": ..., "vocab_size": ...}),
    (DOMINO, {"dflash_config.emb_dim": ..., "dflash_config.gru_hidden_dim": ..., "dspark_bonus_anchor": False}),
    (DOMINO, {"dflash_config.shift_label": ..., "sample_from_anchor": True}),
    ("deepspec_gemma4", {"rope_parameters.sliding_attention.rope_theta": 7.0, "head_dim": 4, "num_experts": 3}),
    ("deepspec_gemma4", {"num_key_value_heads": 4, "sliding_window": 3, "use_bidirectional_attention": "vision"}),
    (WINDOWS, {"sliding_window": ...}),
    (WINDOWS, {"dflash_config.swa_window_size": ..., "dflash_config.causal": ...}),
    (SPECULATORS, {"transformer_layer_config.use_cache": False, "speculators_config.algorithm": "x"}),
    (SPECULATORS, {"markov_rank": ..., "enable_confidence_head": ..., "confidence_head_with_markov": ...}),
    (SPECULATORS, {"draft_vocab_size": ..., "transformer_layer_config.is_neox_style": True}),
    (DEEPSPEC, {"ttt_length": 7, "mtp_num_hidden_layers": 1, "vision_config": {"a": 1}, "projector_type": "dspark"}),
    (DEEPSPEC, {"layer_types": ["linear_attention", "full_attention"], "use_sliding_window": True}),
]


def test_fields_that_change_nothing(edited):
    for name, fields in EQUAL:
        check_same(read(edited(name, fields)), read(DATA / name))


REFUSED = [
    (DFLASH, {"logit_scale": 2.0}, "logit_scale"),
    (DFLASH, {"attention_sink_bias": True}, "attention_sink_bias"),
    (DFLASH, {"dflash_config.log_snr_conditioning": True}, "log_snr_conditioning"),
    (DFLASH, {"rope_parameters.mrope_section": [1, 1, 2]}, "rope_parameters.mrope_section"),
    (DFLASH, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (DFLASH, {"quantization_config": {"quant_algo": "FP8"}}, "quantization_config"),
    (DFLASH, {"markov_rank": 6}, "markov_rank"),
    (DFLASH, {"dflash_config.rope_theta": 7.0}, "dflash_config.rope_theta"),
    (DFLASH, {"dflash_config.target_hidden_size": 64}, "target_hidden_size=64"),
    (DFLASH, {"num_aux_layers": 3}, "num_aux_layers=3"),
    (DFLASH, {"draft_vocab_size": 50}, "draft_vocab_size=50"),
    (DFLASH, {"dflash_config.projector_type": "domino"}, "projector_type='domino'"),
    (DFLASH, {"architectures": ["DFlashDraftModel", "DFlash2DraftModel"]}, "DFlash2DraftModel"),
    (DFLASH, {"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorrDraftModel"),
    (DFLASH, {"dflash_config.shift_label": True}, "shift_label.*pass sample_from_anchor="),
    (DFLASH, {"dflash_config.block_size": ...}, "pass block_size="),
    (DFLASH, {"layer_types": ..., "sliding_window": 9}, "use_sliding_window"),
    (DFLASH, {"num_key_value_heads": 2}, "num_key_value_heads=2.*1"),
    (DFLASH, {"intermediate_size": 63}, "intermediate_size=63.*64"),
    (DFLASH, {"attention_bias": True}, "attention_bias=True"),
    (DFLASH, {"is_causal": False, "dflash_query_causal": True}, "is_causal=False.*dflash_query_causal=True"),
    (DFLASH, {"pard_token": 91}, "mask_token_id=90.*pard_token=91"),
    (DFLASH, {"eagle_aux_hidden_state_layer_ids": [1, 4]}, "target_layer_ids.*eagle_aux_hidden_state_layer_ids"),
    (DFLASH, {"eagle_aux_hidden_state_layer_ids": "x"}, "eagle_aux_hidden_state_layer_ids='x'"),
    (PAIRS, {"rope_is_neox_style": True}, "rope_is_neox_style=True.*is_neox_style=False"),
    (PAIRS, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters.*rope_scaling"),
    (PAIRS, {"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    (FILL_IN, {"sample_from_anchor": True}, "sample_from_anchor=True.*dflash_config.sample_from_anchor=False"),
    (FILL_IN, {"dspark_bonus_anchor": False}, "sample_from_anchor=False.*dspark_bonus_anchor=False"),
    (FILL_IN, {"dflash_config.markov_rank": 6}, "markov_rank=6.*5"),
    (FILL_IN, {"dflash_config.markov_head_type": "gated"}, "markov_head_type='gated'"),
    (FILL_IN, {"dflash_config.confidence_head_with_markov": False}, "confidence_head_with_markov=False"),
    (FILL_IN, {"dspark_fixup_head_type": "gru"}, "dspark_fixup_head_type"),
    (FILL_IN, {"attention_mode": "mha"}, "attention_mode='mha'"),
    (DOMINO, {"emb_dim": 9}, "emb_dim=9"),
    (DOMINO, {"dflash_config.gru_hidden_dim": 8}, "gru_hidden_dim=8.*7"),
    (DOMINO, {"dflash_config.shift_label": False, "sample_from_anchor": True}, "shift_label=False"),
    (DOMINO, {"dflash_config.projector_type": "dspark"}, "projector_type='dspark'"),
    ("deepspec_gemma4", {"global_head_dim": ...}, "Gemma4DSparkModel.*global_head_dim"),
    ("deepspec_gemma4", {"global_head_dim": 8}, "head_dim=8.*16"),
    ("deepspec_gemma4", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256"),
    ("deepspec_gemma4", {"enable_moe_block": True}, "enable_moe_block"),
    ("deepspec_gemma4", {"rope_parameters.full_attention.rope_type": "x"}, "rope_type='x'"),
    (DSPARK, {"dflash_config.use_confidence_head": False}, "use_confidence_head=False"),
    (DSPARK, {"dflash_config.shift_label": False}, "shift_label.*pass sample_from_anchor="),
    (DSPARK, {"dflash_config.shift_label": False, "sample_from_anchor": True}, "shift_label=False"),
    (WINDOWS, {"sliding_window": 9}, "sliding_window=9.*swa_window_size=6"),
    (WINDOWS, {"sliding_window": 4, "dflash_config.swa_window_size": 4}, "swa_window_size.* 4, not 5"),
    (WINDOWS, {"sliding_window": ..., "dflash_config.swa_window_size": ...}, "swa_window_size"),
    (SPECULATORS, {"transformer_layer_config.query_pre_attn_scalar": 64}, "query_pre_attn_scalar=64"),
    (SPECULATORS, {"transformer_layer_config.is_neox_style": False}, "is_neox_style"),
    (SPECULATORS, {"speculators_config.depth": 3}, "speculators_config.depth"),
    (SPECULATORS, {"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
    (SPECULATORS, {"draft_vocab_size": 57}, "draft_vocab_size=57.*56"),
    (DEEPSPEC, COPIED, "partial_rotary_factor"),
    (DEEPSPEC, {"is_causal": True}, "is_causal"),
    (DEEPSPEC, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    *(
        (DEEPSPEC, {"architectures": [f"{each}DSparkModel"]}, f"{each}DSparkModel")
        for each in ("KimiK3", "Qwen35", "K3")
    ),
]


def test_fields_that_change_the_drafter_are_refused_by_name(edited):
    for name, fields, message in REFUSED:
        if "mrope_section" in fields.get("rope_parameters", {}):
            fields = fields | {"rope_parameters": fields["rope_parameters"] | {"rope_type": "linear", "factor": 2.0}}
        with pytest.raises(ValueError, match=message):
            BlockDrafter.from_pretrained(edited(name, fields))


LEVELS = {
    DFLASH: ("", "dflash_config.", "rope_parameters."),
    SPECULATORS: ("", "transformer_layer_config.", "transformer_layer_config.rope_parameters.", "speculators_config."),
    DEEPSPEC: ("", "rope_parameters."),
}


@pytest.mark.by_day(
    "zlab_llama-dflash_config.",
    "speculators_dspark-transformer_layer_config.rope_parameters.",
    "deepspec_dspark_gated-",
)
@pytest.mark.parametrize(("name", "level"), [(name, level) for name, levels in LEVELS.items() for level in levels])
def test_an_unknown_field_of_any_level_is_refused_unless_it_says_nothing_or_is_ignored(edited, name, level):
    path = f"{level}rope_of_2027"
    for value in (3, 0, 1, True, "x", [0], {"a": None}):
        folder = edited(name, {path: value})
        with pytest.raises(ValueError, match=r"rope_of_2027=.*ignore_fields=\['rope_of_2027'\]$"):
            BlockDrafter.from_pretrained(folder)
        check_same(read(folder, ignore_fields=["rope_of_2027"]), read(DATA / name))
    for value in (None, False, [], {}):
        check_same(read(edited(name, {path: value})), read(DATA / name))


def test_what_is_ignored_is_named_wherever_a_drafter_is(edited):
    folder = edited(DFLASH, {"dflash_config.new": 3, "quantization_config": {"quant_algo": "FP8"}})
    ignored = ["new", "quantization_config"]
    assert drafter_class(folder) is BlockDrafter
    assert read_drafter(folder, ignore_fields=ignored).read_with == {"ignore_fields": ignored}
    with pytest.raises(ValueError, match=r"\['quantization_config'\]$"):
        read_drafter(folder, ignore_fields=["new"])
    base = AutoModelForCausalLM.from_pretrained(DATA / "llama", dtype=torch.float32)
    for kind in ("auto", "block", "cascade"):
        assert named_method(f"{kind}:{folder}?ignore_fields={json.dumps(ignored)}", base).drafter is not None
    with pytest.raises(ValueError, match="quantization_config"):
        named_method(f"auto:{folder}", base)
    with pytest.raises(ValueError, match="block_size"):
        BlockDrafter.from_pretrained(folder, ignore_fields=["block_size"])
    with pytest.raises(ValueError, match=r"\['quantization_config'\]$"):
        BlockDrafter.from_pretrained(folder, ignore_fields="new")


def test_a_file_that_says_how_weights_are_packed_is_a_field(edited):
    folder = edited(DFLASH)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(ValueError, match=r"ignore_fields=\['hf_quant_config'\]$"):
        BlockDrafter.from_pretrained(folder)
    check_same(read(folder, ignore_fields=["hf_quant_config"]), read(DATA / DFLASH))


def test_fields_of_the_target_that_deepspec_copies_describe_the_target(edited):
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    check_same(
        read(edited(DEEPSPEC, COPIED)), read(edited(DEEPSPEC, plain | dict.fromkeys(COPIED.keys() - plain, ...)))
    )
    with pytest.raises(ValueError, match="is_neox_style.*partial_rotary_factor.*mrope_section"):
        BlockDrafter.from_pretrained(edited(DEEPSPEC, COPIED | {"rope_is_neox_style": False}))


def test_what_names_of_one_thing_say(edited):
    causal = {"dflash_config.causal": True}, {"dflash_query_causal": True}, {"dflash_config.causal_head": True}
    for fields in (*causal, {"is_causal": True}, {"is_causal": False, "dflash_config.causal": True}):
        config = BlockDrafter.from_pretrained(edited(DFLASH, fields)).config
        assert config.causal and config.sliding_causal
        shutil.rmtree(edited(DFLASH))
    config = BlockDrafter.from_pretrained(edited(DFLASH, {"is_causal": False})).config
    assert not config.causal and not config.sliding_causal
    config = BlockDrafter.from_pretrained(DATA / WINDOWS).config
    assert {*config.layer_types} == {"sliding_attention"} and config.sliding_window == 6 and not config.sliding_causal


def test_ways_out_of_what_a_config_does_not_say(edited):
    folder = edited(DFLASH, {"dflash_config.shift_label": True, "dflash_config.block_size": ...})
    drafter = BlockDrafter.from_pretrained(folder, block_size=5, sample_from_anchor=True)
    assert (drafter.block_size, drafter.num_drafts) == (5, 5)
    assert BlockDrafter.from_pretrained(folder, block_size=5, sample_from_anchor=False).num_drafts == 4


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        (
            DSPARK,
            lambda key: key.replace("markov_w", "markov_head.markov_w").replace("confidence_", "confidence_head."),
        ),
        (FILL_IN, lambda key: key.replace("markov_head.", "").replace("confidence_head.proj", "confidence_proj")),
    ],
)
def test_heads_have_plain_and_prefixed_names(edited, name, renamed):
    other = edited(name, tensors=lambda state: {renamed(key): tensor for key, tensor in state.items()})
    check_same(read(other), read(DATA / name))
    assert {*load_file(DATA / name / "model.safetensors")} != {*torch.load(other / "pytorch_model.bin")}


def test_a_dspark_within_a_model_is_named(edited):
    with pytest.raises(ValueError, match="dspark_block_size=5"):
        BlockDrafter.from_pretrained(edited("llama", {"dspark_block_size": 5}))
