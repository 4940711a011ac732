"""Directories for engines: what they will read, and what is refused because they would read it wrongly."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, Gemma4TextConfig

from tests.eagle_models import golden_case, teacher_forced, tiny_backbone
from tokenahead import EagleHead

AUX = "eagle_aux_hidden_state_layer_ids"
IDS = torch.randint(2, 64, (1, 9), generator=torch.Generator().manual_seed(1))


def exported(head, folder, layout):
    head.export(folder, layout=layout)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.core
def test_every_layout_of_version_3_comes_back(tmp_path):
    for layout in ["official", "specforge", "speculators", "vllm", "sglang"]:
        case = golden_case("eagle3_llama", aux_layers=[2, 4, 5])
        config, tensors = exported(case.head, tmp_path, layout)
        assert torch.equal(teacher_forced(golden_case("eagle3_llama", tmp_path))[2], teacher_forced(case)[2])
        assert tensors["d2t"].shape == (48,) and tensors["d2t"].dtype == torch.int64
        assert tensors["t2d"].dtype == torch.bool and int(tensors["t2d"].sum()) == 48
        first = "layers.0" if layout == "speculators" else "midlayer"
        assert tensors[f"{first}.self_attn.q_proj.weight"].shape == (32, 64)
        assert ("embed_tokens.weight" in tensors) == (layout == "speculators")
        assert config[AUX] == [2, 4, 5] and config["norm_before_residual"] is False
        if layout == "speculators":
            assert config["transformer_layer_config"]["head_dim"] == 8
        else:
            assert config["eagle_config"] == {"use_aux_hidden_state": True, AUX: [1, 3, 4]}
            expected = "LlamaForCausalLM" if layout == "official" else "LlamaForCausalLMEagle3"
            assert config["architectures"] == [expected] and config["model_type"] == "llama"


def test_a_map_of_the_whole_vocabulary_is_left_out_where_its_reader_stops_at_one(tmp_path):
    for layout in ["specforge", "vllm"]:
        head = EagleHead.from_backbone(tiny_backbone())
        _, tensors = exported(head, tmp_path, layout)
        assert head.config.draft_vocab_size == head.config.vocab_size and ("d2t" in tensors) == (layout != "vllm")


def test_every_layout_of_version_1_comes_back(tmp_path):
    for layout in ["official", "vllm", "sglang"]:
        base = tiny_backbone()
        head = EagleHead.from_backbone(base, version=1)
        config, tensors = exported(head, tmp_path, layout)
        assert config["architectures"] == ["LlamaForCausalLMEagle" if layout == "sglang" else "LlamaForCausalLM"]
        assert ("fc.bias" in tensors) == (layout == "sglang") and not any("input_layernorm" in name for name in tensors)
        again = EagleHead.from_pretrained(tmp_path).eval().attach(base)
        states = base(IDS, output_hidden_states=True).hidden_states
        assert torch.equal(again.step(again.fuse(states), IDS)[1], head.step(head.fuse(states), IDS)[1])


def test_options_come_back_from_the_layouts_that_know_them(tmp_path):
    for options, layouts in [
        (dict(fc_norm=True, norm_output=True), ["specforge", "speculators", "vllm", "sglang"]),
        (dict(norm_before_fc=True, norm_before_residual=True), ["speculators", "vllm"]),
        (dict(qk_norm=True, head_dim=16), ["speculators"]),
        (dict(use_aux_hidden_state=False), ["vllm", "sglang", "specforge"]),
        (dict(num_hidden_layers=2, attention_bias=True), ["speculators", "vllm"]),
        (
            dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, aux_layers=[3, 3]),
            ["official"],
        ),
        (dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}), ["sglang", "vllm"]),
    ]:
        base = tiny_backbone()
        head = EagleHead.from_backbone(base, **options).eval()
        states = base(IDS, output_hidden_states=True).hidden_states
        for layout in layouts:
            head.export(tmp_path / layout, layout=layout)
            again = EagleHead.from_pretrained(tmp_path / layout).eval().attach(base)
            assert torch.equal(again.step(again.fuse(states), IDS)[1], head.step(head.fuse(states), IDS)[1])


def test_what_a_reader_would_misread_is_refused(tmp_path):
    for options, layout, message in [
        (dict(norm_output=True), "official", "norm_output"),
        (dict(head_dim=16), "official", "head_dim.*16"),
        (dict(num_hidden_layers=2), "official", "num_hidden_layers=2"),
        (dict(use_aux_hidden_state=False), "official", "use_aux_hidden_state"),
        (dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}), "official", "10000"),
        (dict(qk_norm=True), "vllm", "'speculators'"),
        (dict(version=1, fc_bias=True), "vllm", "fc_bias"),
        (dict(version=1, attention_bias=True), "vllm", "attention_bias"),
        (dict(attention_bias=True), "sglang", "attention_bias"),
        (dict(norm_before_residual=True), "sglang", "norm_before_residual"),
        (dict(aux_layers=[1, 3, 4]), "sglang", "adds.*1"),
        (dict(version=1), "speculators", "version=1"),
        (dict(version=1, draft_vocab_size=9), "official", "draft_vocab_size"),
        (dict(version=1), "specforge", "version=1"),
        (dict(), "gguf", "layout='gguf'"),
    ]:
        head = EagleHead.from_backbone(tiny_backbone(), **options)
        with pytest.raises(ValueError, match=message):
            head.export(tmp_path / "folder", layout=layout)
        assert not (tmp_path / "folder").exists()


def test_ids_that_begin_with_1_come_back(tmp_path):
    for layout in ["official", "vllm", "speculators"]:
        EagleHead.from_backbone(tiny_backbone(), aux_layers=[1, 2]).export(tmp_path, layout=layout)
        assert EagleHead.from_pretrained(tmp_path).config.aux_layers == [1, 2]


@pytest.mark.core
def test_new_heads_for_backbones_whose_layers_differ():
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    per_layer = dict(vocab_size_per_layer_input=64, hidden_size_per_layer_input=4, head_dim=8)
    gemma3n = Gemma3nTextConfig(
        **sizes, **per_layer, intermediate_size=[48, 48], num_kv_shared_layers=0, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0, 0.0], layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    gemma4 = Gemma4TextConfig(
        **sizes, **per_layer, intermediate_size=48, global_head_dim=16, num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    with pytest.raises(ValueError, match="altup_num_inputs=2"):
        EagleHead.from_backbone(AutoModelForCausalLM.from_config(gemma3n))
    backbone, prompt = AutoModelForCausalLM.from_config(gemma4).eval(), torch.tensor([[5, 6, 7]])
    want = backbone.generate(prompt, max_new_tokens=6, do_sample=False, use_mtp=False)
    head = EagleHead.from_backbone(backbone, aux_layers=[1])
    assert torch.equal(backbone.generate(prompt, assistant_model=head, max_new_tokens=6, do_sample=False), want)


@pytest.mark.core
def test_options_of_the_loss_stay_with_a_foreign_folder(tmp_path):
    case = golden_case("eagle3_llama")
    case.head.loss_options.steps = 4
    case.head.save_pretrained(tmp_path)
    assert golden_case("eagle3_llama", tmp_path).head.loss_options.steps == 4
