"""Models whose weights lie elsewhere between calls (accelerate's hooks), on disk or in a state dict: the same texts."""

import pytest
import torch
from accelerate import Accelerator, cpu_offload, disk_offload
from accelerate.state import AcceleratorState

from tests.every_model import NAMES, every_model, llama, moved_heads, prompt_for, same_texts, texts
from tests.families import family_model
from tokenahead import DeepSeekMTP, MTPHeads

OFFLOADS = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
}


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("where", OFFLOADS)
@pytest.mark.parametrize("name", NAMES)
def test_offloaded_models_write_the_same_texts(name, where, tmp_path):
    model = every_model(name)
    expected = texts(model)
    OFFLOADS[where](model, tmp_path)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert same_texts(model, expected)


@pytest.mark.by_day(most=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_device_map_may_leave_weights_on_disk(name, tmp_path):
    model = every_model(name)
    model.save_pretrained(tmp_path / "model")
    half = sum(parameter.nbytes for parameter in model.parameters()) // 2
    again = type(model).from_pretrained(
        tmp_path / "model", device_map="auto", max_memory={"cpu": half}, offload_folder=tmp_path / "offloaded"
    )
    devices = {parameter.device.type for parameter in again.parameters()}
    assert "meta" in devices and "disk" in again.hf_device_map.values()
    assert same_texts(again.eval(), texts(model))


@pytest.mark.parametrize("unembedding", ["shared", "own"])
def test_heads_on_an_offloaded_backbone(unembedding):
    base = llama()
    ids, heads = prompt_for(base), moved_heads(base, unembedding).detach()
    expected = heads.attach(base)(ids, labels=ids).head_losses
    torch.manual_seed(0)
    offloaded = cpu_offload(llama(), execution_device="cpu")
    heads.detach().attach(offloaded)
    torch.testing.assert_close(heads(ids, labels=ids).head_losses, expected)
    fresh = MTPHeads.from_backbone(offloaded, window=3, unembedding=unembedding)
    assert {parameter.device.type for parameter in fresh.parameters()} == {"cpu"}
    fresh(ids, labels=ids).loss.backward()
    options = {"max_new_tokens": 9, "do_sample": False}
    text = offloaded.generate(ids, assistant_model=fresh, **options)
    assert torch.equal(text, llama().generate(ids, **options))


@pytest.mark.parametrize("devices", ["auto", {"main": "disk", "mtp": "disk"}])
def test_offloaded_modules_can_be_saved(devices, tmp_path):
    model = family_model("deepseek_v3", num_nextn_predict_layers=2)
    model.save_pretrained(tmp_path / "model")
    half = {"cpu": sum(parameter.nbytes for parameter in model.parameters()) // 2}
    options = {"device_map": devices, "max_memory": half, "offload_folder": tmp_path / "off"}
    again = DeepSeekMTP.from_pretrained(tmp_path / "model", **options)
    assert any(parameter.is_meta for parameter in again.parameters())
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()


@pytest.mark.by_day(most=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_accelerate_has_unwrapped_writes_the_same_texts(name):
    expected = texts(every_model(name))
    AcceleratorState._reset_state(True)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = accelerator.prepare(every_model(name))
        model(prompt_for(model))
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    finally:
        AcceleratorState._reset_state(True)
    assert all(torch.equal(*pair) for pair in zip(texts(model), expected))
