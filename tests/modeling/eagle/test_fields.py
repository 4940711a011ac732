"""Fields of config.json in other libraries' layouts: read, known to change nothing, or refused by their names."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.eagle_models import foreign_folder, golden_case, teacher_forced, tiny_backbone
from tests.modeling.eagle.test_loading import AUX, OFFICIAL, rewritten
from tokenahead import EagleHead
from tokenahead.modeling.common.loading import drafter_class

DEEPSPEC = {"architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "target_layer_ids": [1, 2, 3, 5, 6]}
DEEPSPEC |= {"ttt_length": 7, "step_loss_decay": 0.8, "num_target_layers": 8, "draft_num_hidden_layers": 1}
PEAGLE = {"architectures": ["PEagleDraftModel"], "model_type": "llama", "rope_scaling": None}
SLIDING = {"layer_types": ["sliding_attention"], "sliding_window": 4}


def edited(folder, **changes):
    """The directory with other fields; a dotted name is one of an object."""
    values = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        *levels, last = path.split("__")
        part = values
        for level in levels:
            part = part.setdefault(level, {})
        part[last] = value
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def made(folder, fields, **options):
    """A new head, and its tensors in a directory whose config.json has its sizes and further `fields`."""
    torch.manual_seed(0)
    head = EagleHead.from_backbone(tiny_backbone(), **options)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    values = {key: value for key, value in head.config.to_dict().items() if key in SIZES}
    (folder / "config.json").write_text(json.dumps(values | {"rope_theta": 5000.0} | fields))
    save_file(head.state_dict(), folder / "model.safetensors")
    return head


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
SIZES += ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "hidden_act", "attention_bias")


def same(head, other):
    state = other.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in head.state_dict().items()) and len(state)


def test_deepspecs_heads_name_the_layers_whose_outputs_they_read(tmp_path):
    head = made(tmp_path, DEEPSPEC, aux_layers=[2, 3, 4, 6, 7], qk_norm=True)
    found = EagleHead.from_pretrained(tmp_path)
    assert found.config.aux_layers == [2, 3, 4, 6, 7] and found.config.qk_norm
    assert found.config.rope_parameters["rope_theta"] == 5000.0 and drafter_class(tmp_path) is EagleHead
    same(head, found)
    found.save_pretrained(tmp_path / "again")
    same(found, again := EagleHead.from_pretrained(tmp_path / "again"))
    assert again.config.aux_layers == [2, 3, 4, 6, 7]


def test_what_describes_deepspecs_target_changes_nothing(tmp_path):
    for changes in [
        {AUX: [2, 3, 4, 6, 7]},
        {"sliding_window": 4, "use_sliding_window": False, "layer_types": ["full_attention"]},
        {"partial_rotary_factor": 0.25, "attn_output_gate": True, "rope_parameters": {"mrope_section": [1, 1, 2]}},
        {"rope_theta": 77.0, "rope_scaling": {"rope_type": "default", "rope_theta": 5000.0}},
    ]:
        made(tmp_path, DEEPSPEC, aux_layers=[2, 3, 4, 6, 7])
        config = EagleHead.from_pretrained(edited(tmp_path, **changes)).config
        assert config.aux_layers == [2, 3, 4, 6, 7]
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}


def test_what_deepspecs_config_must_not_say(tmp_path):
    for changes, names in [
        ({AUX: [1, 2, 3, 5, 6]}, rf"{AUX}.*target_layer_ids"),
        ({"rope_theta": None}, "rope_theta"),
        ({"architectures": ["Gemma4Eagle3Model"]}, "Gemma4Eagle3Model"),
        (SLIDING, "layer_types.*sliding_window"),
        ({"sliding_window": 4, "use_sliding_window": True}, "sliding_window"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2.*1"),
        ({"attention_bias": True}, "attention_bias=True"),
    ]:
        made(tmp_path, DEEPSPEC, aux_layers=[2, 3, 4, 6, 7])
        with pytest.raises(ValueError, match=names):
            EagleHead.from_pretrained(edited(tmp_path, **changes))


def test_the_mask_token_of_specforges_p_eagle_is_passed(tmp_path):
    head = made(tmp_path, PEAGLE, mask_token_id=5, num_hidden_layers=2)
    with pytest.raises(ValueError, match="mask_token_id="):
        EagleHead.from_pretrained(tmp_path)
    found = EagleHead.from_pretrained(tmp_path, mask_token_id=5)
    assert found.config.mask_token_id == 5 and found.config.num_hidden_layers == 2
    same(head, found)
    found.save_pretrained(tmp_path / "again")
    assert EagleHead.from_pretrained(tmp_path / "again").config.mask_token_id == 5
    for name in ("pard_token", "ptd_token_id", "mask_token_id", "dflash_config__mask_token_id"):
        made(tmp_path, PEAGLE, mask_token_id=5, num_hidden_layers=2)
        assert EagleHead.from_pretrained(edited(tmp_path, **{name: 7})).config.mask_token_id == 7
    for changes, names in (
        ({"pard_token": 8, "mask_token_id": 7}, "mask_token_id.*pard_token"),
        ({"pard_token": 7, "mask_token_id": None, "parallel_drafting": False}, "parallel_drafting"),
        ({"parallel_drafting": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear'"),
    ):
        with pytest.raises(ValueError, match=names):
            EagleHead.from_pretrained(edited(tmp_path, **changes))


def test_rows_at_once_need_their_learned_state(tmp_path):
    for changes in [{"mask_token_id": 3}, {"parallel_drafting": True}, {"architectures": ["PEagleDraftModel"]}]:
        with pytest.raises(ValueError, match="mask_hidden"):
            EagleHead.from_pretrained(rewritten(tmp_path, {"rope_theta": 1e4} | changes))


def test_nemos_config_is_a_copy_of_the_targets(tmp_path):
    copied = {"num_hidden_layers": 36, "layer_types": ["full_attention"] * 36, "resid_pdrop": 0.0}
    copied |= {"norm_topk_prob": True}
    nemo = {"architectures": ["LlamaEagle3DraftModel"], "target_hidden_size": 32, "parallel_drafting": False} | copied
    found = EagleHead.from_pretrained(rewritten(tmp_path, nemo | {"rope_theta": 5e5}))
    assert found.config.rope_parameters["rope_theta"] == 5e5 and found.config.num_hidden_layers == 1
    for changes, names in (({}, "rope_theta"), ({"rope_theta": 5e5, "partial_rotary_factor": 0.5}, "partial_rotary")):
        with pytest.raises(ValueError, match=names):
            EagleHead.from_pretrained(rewritten(tmp_path, nemo | changes))


HARMLESS = [
    {"rope_theta": 10000.0},
    {"logit_scale": 1.0, "mlp_bias": False, "attention_bias": False, "partial_rotary_factor": 1.0},
    {"qkv_bias": True, "sliding_window": 4, "max_window_layers": 28, "num_target_layers": 8, "max_sequence_length": 64},
    {"rope_is_neox_style": True, "is_neox_style": True, "has_lm_head": True, "num_aux_hidden_states": 3},
    {"eagle_config": {"use_last_layernorm": True, "use_mtp_layernorm": False, "parallel_draft_step": 1}},
    {"architectures": None}, {"architectures": ["Eagle3Qwen2_5vlForCausalLM"]}, {"quantization_config": None},
]  # fmt: skip


def test_fields_that_change_nothing(tmp_path):
    for changes in HARMLESS:
        found = EagleHead.from_pretrained(rewritten(tmp_path, changes))
        assert found.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
        same(EagleHead.from_pretrained(OFFICIAL), found)


REFUSED = [
    {"rope_is_neox_style": False}, {"is_neox_style": False}, {"final_logit_softcapping": 3.0},
    {"scale_emb": 3.0}, {"logit_scale": 2.0}, {"mlp_bias": True}, {"attention_bias": True},
    {"sample_from_anchor": True}, {"partial_rotary_factor": 0.25}, {"attention_sink_bias": True},
    {"rope_parameters": {"partial_rotary_factor": 0.25}},
    {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, {"quantization_config": {"quant_method": "fp8"}},
    {"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"intermediate_size": 48}, {"num_aux_hidden_states": 4},
    {"use_last_layernorm": False}, {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
    {"eagle_config": {"parallel_draft_step": 2}}, {"eagle_config": {"new_norm": 3}}, {"use_aux_hidden_state": False},
    {"norm_output": True, "eagle_config": {"norm_output": False}}, {"num_experts": 8}, {"projector_type": "domino"},
    {"architectures": ["KimiK3Eagle3Model"]}, {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
    {"architectures": ["Gemma3ForCausalLM"]},
]  # fmt: skip


def last_name(changes):
    value = [*changes.values()][-1]
    return last_name(value) if isinstance(value, dict) and "quantization_config" not in changes else [*changes][-1]


def test_fields_that_may_change_the_network_are_refused_by_name(tmp_path):
    for changes in REFUSED:
        with pytest.raises(ValueError, match=changes.get("architectures", [last_name(changes)])[0]):
            EagleHead.from_pretrained(rewritten(tmp_path, changes))


@pytest.mark.parametrize("level", ["", "transformer_layer_config__", "speculators_config__"])
def test_an_unknown_field_is_passed_over_on_request(level, tmp_path):
    folder = edited(foreign_folder("speculators", tmp_path), **{f"{level}new_rope_of_2027": 3})
    with pytest.raises(ValueError, match=r"new_rope_of_2027=3.*ignore_fields=\['new_rope_of_2027'\]"):
        EagleHead.from_pretrained(folder)
    case = golden_case("eagle3_llama", folder, ignore_fields=["new_rope_of_2027"])
    assert torch.equal(teacher_forced(case)[2], teacher_forced(golden_case("eagle3_llama"))[2])
    with pytest.raises(ValueError, match="ignore_fields.*norm_output"):
        EagleHead.from_pretrained(folder, ignore_fields=["norm_output"])
