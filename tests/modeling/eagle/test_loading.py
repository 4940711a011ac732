"""Directories of others: every layout gives the same head, and what cannot be right is refused by name."""

import json
import logging

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file

from tests.eagle_models import CASES, DATA, foreign_folder, golden_case, teacher_forced, tiny_backbone
from tokenahead import EagleHead, EagleHeadConfig
from tokenahead.modeling.common.loading import drafter_class

OFFICIAL = DATA / "eagle3_llama" / "official"
AUX = "eagle_aux_hidden_state_layer_ids"


def rewritten(folder, config=None, tensors=None):
    """The golden EAGLE-3 directory with other fields (None: without them) and other tensors."""
    values = json.loads((OFFICIAL / "config.json").read_text()) | (config or {})
    state = torch.load(OFFICIAL / "pytorch_model.bin", weights_only=True) | (tensors or {})
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    save_file({k: v for k, v in state.items() if v is not None}, folder / "model.safetensors")
    return folder


def test_every_layout_is_the_same_head(tmp_path):
    for layout in ["specforge", "speculators"]:
        folder = foreign_folder(layout, tmp_path)
        case = golden_case("eagle3_llama", folder)
        assert case.head.config.layout == layout and case.head.config.aux_layers == [2, 4, 5]
        real = case.golden["attention_mask"].bool()[:, :-1]
        torch.testing.assert_close(teacher_forced(case)[2][real], case.golden["logits"][real], atol=1e-4, rtol=0)


def test_names_of_other_writers_are_understood(tmp_path):
    state = torch.load(OFFICIAL / "pytorch_model.bin", weights_only=True)
    renamed = {f"model.{name}": None if name == "d2t" else tensor for name, tensor in state.items()}
    renamed |= dict.fromkeys(state) | {"draft_id_to_target_id": state["d2t"]}
    case = golden_case("eagle3_llama", rewritten(tmp_path, tensors=renamed))
    assert torch.equal(teacher_forced(case)[2], teacher_forced(golden_case("eagle3_llama"))[2])


def test_an_official_folder_round_trips_in_its_layout(tmp_path):
    for name in CASES:
        case = golden_case(name)
        case.head.save_pretrained(tmp_path)
        official = DATA / name / "official"
        safe = official / "model.safetensors"
        before = load_file(safe) if safe.exists() else torch.load(official / "pytorch_model.bin", weights_only=True)
        after = load_file(tmp_path / "model.safetensors")
        assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
        again = golden_case(name, tmp_path)
        assert again.head.config.layout == "official"
        assert torch.equal(teacher_forced(again)[2], teacher_forced(case)[2])


def test_a_resumed_trainer_reads_the_folders_own_names(tmp_path):
    case = golden_case("eagle3_llama")
    case.head.save_pretrained(tmp_path)
    fresh = EagleHead(case.head.config)
    result = fresh.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert not result.missing_keys and not result.unexpected_keys
    assert all(torch.equal(value, case.head.state_dict()[name]) for name, value in fresh.state_dict().items())


def test_two_conventions_of_auxiliary_layers(tmp_path):
    for config, expected in [
        ({}, None),
        ({AUX: [1, 3, 4]}, [1, 3, 4]),
        ({"eagle_config": {AUX: [1, 3, 4]}}, [2, 4, 5]),
        ({"eagle_config": {AUX: [2, 4, 5]}}, [2, 4, 5]),
        ({AUX: [2, 4, 5], "eagle_config": {AUX: [1, 3, 4]}}, [2, 4, 5]),
    ]:
        head = EagleHead.from_pretrained(rewritten(tmp_path, config))
        assert head.config.aux_layers == expected
        assert EagleHead.from_pretrained(tmp_path, aux_layers=[3, 3, 6]).config.aux_layers == [3, 3, 6]


def test_rope_is_the_folders(tmp_path):
    for config, expected in [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
    ]:
        rope = EagleHead.from_pretrained(rewritten(tmp_path, config)).config.rope_parameters
        assert {name: rope[name] for name in expected} == expected


def test_what_a_missing_field_means_can_be_said(tmp_path):
    folder = rewritten(tmp_path, {"norm_output": True})
    assert EagleHead.from_pretrained(folder).config.norm_output
    head = EagleHead.from_pretrained(folder, norm_output=False, norm_before_residual=True)
    assert not head.config.norm_output and head.config.norm_before_residual


def test_a_head_on_the_last_state_has_no_fc(tmp_path):
    folder = rewritten(tmp_path, {"eagle_config": {"use_aux_hidden_state": False}}, {"fc.weight": None})
    assert EagleHead.from_pretrained(folder).config.num_aux == 0
    with pytest.raises(ValueError, match="last hidden state"):
        EagleHead.from_pretrained(folder, aux_layers=[2, 4, 5])


def test_further_layers_of_sglang_have_their_own_names(tmp_path):
    state = torch.load(OFFICIAL / "pytorch_model.bin", weights_only=True)
    second = {name.replace("midlayer", "additional_layers.0"): t for name, t in state.items() if "midlayer" in name}
    second = {
        name: t[:, :32].clone() if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else t.clone()
        for name, t in second.items()
        if "input_layernorm" not in name
    }
    head = EagleHead.from_pretrained(rewritten(tmp_path, tensors=second))
    assert head.config.num_hidden_layers == 2
    assert torch.equal(head.layers[1].input_layernorm.weight, state["midlayer.hidden_norm.weight"])


VOCABULARY = torch.zeros(96, dtype=torch.bool)
REFUSED = [
    ({}, {"midlayer.bottleneck.weight": torch.zeros(2)}, r"layers\.0\.bottleneck\.weight"),
    ({}, {"norm.weight": None}, r"lacks 1 tensors of EagleHead.*norm\.weight"),
    ({}, {"d2t": None, "t2d": None}, "lacks 1 tensors of EagleHead.*d2t"),
    ({}, {"lm_head.weight": torch.zeros(50, 32)}, "draft_vocab_size=48.*50"),
    ({"hidden_size": 64}, {}, "hidden_size=64.*32"),
    ({"fc_norm": True}, {}, "fc_norm=True"),
    ({"draft_vocab_size": 47}, {}, "draft_vocab_size=47.*48"),
    ({}, {"d2t": torch.full((48,), 60)}, r"d2t .*107.*95"),
    ({}, {"d2t": torch.full((48,), -1)}, r"d2t .*-1\b"),
    ({}, {"d2t": -torch.arange(48)}, "d2t .*once"),
    ({}, {"d2t": torch.arange(48.0)}, "d2t .*integers"),
    ({"hidden_size": None}, {}, "hidden_size"),
    ({}, {"t2d": VOCABULARY}, "t2d and d2t do not name the same tokens"),
    ({AUX: [2, 4]}, {}, r"fc\.weight .*96.*aux_layers=\[2, 4\]"),
    ({AUX: [2, 4, 5], "eagle_config": {AUX: [2, 3, 4]}}, {}, rf"{AUX}=\[2, 4, 5\] and eagle_config.{AUX}=\[2, 3, 4\]"),
    ({"target_hidden_size": 48}, {}, "columns"),
    ({"speculators_model_type": "eagle"}, {}, "speculators_model_type='eagle' is not supported"),
    ({}, {"midlayer.hidden_norm.weight": None}, "EAGLE head"),
]


def test_bad_folders_are_refused_by_name(tmp_path):
    for config, tensors, message in REFUSED:
        with pytest.raises(ValueError, match=message) as refusal:
            EagleHead.from_pretrained(rewritten(tmp_path, config, tensors))
        assert "None: " not in str(refusal.value)


LACKS_NORM = {"midlayer.hidden_norm.weight": None}
NAMED_SO = [
    ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None}, {"d2t": None, "t2d": None}),
    ({"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": None}, {"d2t": None, "t2d": None}),
    ({"architectures": ["LlamaForCausalLM"], AUX: [2, 4, 5], "draft_vocab_size": None}, {"d2t": None, "t2d": None}),
    ({"architectures": ["LlamaForCausalLM"], "eagle_config": {AUX: [2, 4, 5]}}, {"d2t": None, "t2d": None}),
    ({"architectures": ["LlamaForCausalLM"]}, {}),
]


def test_a_head_that_lacks_tensors_is_still_a_head(tmp_path):
    for config, tensors in NAMED_SO:
        folder = rewritten(tmp_path, {"model_type": "llama"} | config, LACKS_NORM | tensors)
        assert drafter_class(folder) is EagleHead


def test_bad_draft_vocabularies_of_our_own_layout_are_refused(tmp_path):
    for offsets, message in [(torch.full((48,), 60), "d2t .*107"), (-torch.arange(48), "d2t .*once")]:
        head = EagleHead.from_pretrained(OFFICIAL)
        head.config.layout = "tokenahead"
        head.d2t.copy_(offsets)
        head.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            EagleHead.from_pretrained(tmp_path)


SIZES = ("vocab_size", "draft_vocab_size", "intermediate_size", "num_key_value_heads")


def test_sizes_that_a_config_leaves_out_are_those_of_the_tensors(tmp_path):
    for unsaid in [*((name,) for name in SIZES), SIZES, (*SIZES, "num_attention_heads")]:
        fields = dict.fromkeys(unsaid) | ({"head_dim": 8} if "num_attention_heads" in unsaid else {})
        head, expected = EagleHead.from_pretrained(rewritten(tmp_path, fields)), EagleHead.from_pretrained(OFFICIAL)
        for name in (*SIZES, "num_attention_heads", "head_dim"):
            assert getattr(head.config, name) == getattr(expected.config, name), name
        assert all(torch.equal(value, head.state_dict()[name]) for name, value in expected.state_dict().items())


def test_sizes_that_no_tensor_shows_are_refused(tmp_path):
    for fields, tensors in (({"num_attention_heads": None}, {}), ({"vocab_size": None}, {"t2d": None})):
        with pytest.raises(ValueError, match=f"^{tmp_path}: config.json has no {[*fields][0]}"):
            EagleHead.from_pretrained(rewritten(tmp_path, fields, tensors))


def test_a_draft_vocabulary_without_its_map(tmp_path):
    for fields in [{}, {"draft_vocab_size": None}]:
        head = EagleHead.from_pretrained(rewritten(tmp_path, fields, {"d2t": None}))  # t2d names the tokens, too
        assert torch.equal(head.d2t, EagleHead.from_pretrained(OFFICIAL).d2t)
        with pytest.raises(ValueError, match=f"^{tmp_path}: .*d2t"):
            EagleHead.from_pretrained(rewritten(tmp_path, fields, {"d2t": None, "t2d": None}))


@pytest.mark.by_day("vllm")
@pytest.mark.parametrize("layout", ["official", "vllm", "speculators"])
def test_layers_that_no_config_names_are_said_and_can_be_passed(layout, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    base = tiny_backbone(num_hidden_layers=12)
    head = EagleHead.from_backbone(base)
    head.export(tmp_path, layout)
    values = json.loads((tmp_path / "config.json").read_text())
    for part in (values, values.get("eagle_config", {})):
        part.pop(AUX, None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    EagleHead.from_pretrained(tmp_path, aux_layers=[1, 2, 3]).attach(base).detach()
    assert "aux_layers" not in caplog.text
    EagleHead.from_pretrained(tmp_path).attach(base)
    assert "aux_layers=[2, 6, 9]" in caplog.text and str(tmp_path) in caplog.text


def test_contradictory_options_are_refused():
    for options, message in [
        ({"version": 2}, "version=2"),
        ({"version": 1, "fc_norm": True}, "fc_norm.*3"),
        ({"draft_vocab_size": 65}, "draft_vocab_size=65.*1..64"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"use_aux_hidden_state": False, "fc_norm": True}, "fc_norm"),
        ({"aux_layers": []}, "aux_layers"),
        ({"layout": "gguf"}, "layout='gguf'"),
    ]:
        with pytest.raises(StrictDataclassError, match=message):
            EagleHeadConfig(**(dict(hidden_size=32, num_attention_heads=4, vocab_size=64) | options))
