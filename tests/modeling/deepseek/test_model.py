"""Backbone and modules against float64 goldens, and everything about the directory they are read from and written
to."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.families import family_config, family_model, random_ids
from tokenahead import DeepSeekMTP

GOLDENS = Path(__file__).parents[2] / "data" / "deepseek_mtp"
CASES = sorted(path.name for path in GOLDENS.iterdir() if path.is_dir())


def folder_tensors(folder):
    files = [file for file in sorted(Path(folder).glob("*.safetensors")) if file.name != "golden.safetensors"]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def rewrite(folder, tensors=None, **fields):
    """A directory with other tensors, or other fields in its config.json."""
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def saved(tmp_path):
    family_model("deepseek_v3", num_nextn_predict_layers=2).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_goldens(case):
    model, gold = DeepSeekMTP.from_pretrained(GOLDENS / case), load_file(GOLDENS / case / "golden.safetensors")
    ids = gold["input_ids"]
    out = model(ids, labels=ids, output_hidden_states=-1)
    close = dict(atol=3e-4, rtol=0)
    torch.testing.assert_close(out.logits, gold["main_logits"], **close)
    torch.testing.assert_close(out.hidden_states[-1], gold["main_hidden_postnorm"], **close)
    assert len(out.mtp_logits) == model.num_modules == len(gold["losses_mean"]) - 1
    for k, logits in enumerate(out.mtp_logits, 1):
        torch.testing.assert_close(logits, gold[f"mtp{k}_logits"], **close)
    torch.testing.assert_close(out.head_losses, gold["losses_mean"], atol=1e-5, rtol=0)
    torch.testing.assert_close(out.loss, gold["total_loss_lambda0.3"].reshape(()), atol=1e-5, rtol=0)
    model.loss_options.normalization, model.mtp_loss_weight = "paper", 1.0
    over_t = gold["losses_over_T"]
    expected = over_t[0] + over_t[1:].mean()
    torch.testing.assert_close(model(ids, labels=ids).loss, expected, atol=1e-5, rtol=0)


@pytest.mark.by_day("dsv3_d2_trained", "qwen3_next_d1_trained")
@pytest.mark.parametrize("case", CASES)
def test_round_trip_keeps_every_byte_and_plain_transformers_reads_it(case, tmp_path):
    model = DeepSeekMTP.from_pretrained(GOLDENS / case)
    model.save_pretrained(tmp_path)
    original, saved = folder_tensors(GOLDENS / case), folder_tensors(tmp_path)
    assert original.keys() == saved.keys()
    assert all(torch.equal(original[name], saved[name]) for name in original)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (GOLDENS / case, tmp_path))
    kept = ("model_type", "architectures", "num_hidden_layers", "num_nextn_predict_layers")
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(1, 6)
    text = plain.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(text, model.generate(ids, use_mtp=False, max_new_tokens=8, do_sample=False, pad_token_id=0))
    assert not list(tmp_path.glob(".*")) and not list(tmp_path.parent.glob(f".{tmp_path.name}*"))


def test_shards_are_written_with_an_index_and_leave_none_of_an_earlier_save(saved):
    model = DeepSeekMTP.from_pretrained(saved)
    model.save_pretrained(saved, max_shard_size="50KB")
    shards = list(saved.glob("model-*.safetensors"))
    assert len(shards) > 1 and not (saved / "model.safetensors").exists()
    index = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(folder_tensors(saved)) and "model.layers.3.shared_head.head.weight" in index
    again = DeepSeekMTP.from_pretrained(saved)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    model.save_pretrained(saved)
    assert not list(saved.glob("model-*"))


def test_dtype_is_that_of_the_folder_unless_given(saved):
    DeepSeekMTP.from_pretrained(saved, dtype=torch.bfloat16).save_pretrained(saved)
    model = DeepSeekMTP.from_pretrained(saved)
    parts = [dict(part.named_parameters()) for part in (model.mtp, model.main)]
    for parameters in parts:  # routers stay in float32 from transformers 5.24 on
        assert {p.dtype for name, p in parameters.items() if not name.endswith("gate.weight")} == {torch.bfloat16}
    assert len({p.dtype for part in parts for name, p in part.items() if name.endswith("mlp.gate.weight")}) <= 1
    assert DeepSeekMTP.from_pretrained(saved, dtype="float32").mtp[0].eh_proj.weight.dtype == torch.float32


@torch.no_grad()
def test_without_modules_it_is_the_plain_model(saved):
    plain, model = AutoModelForCausalLM.from_pretrained(saved), DeepSeekMTP.from_pretrained(saved, inference_only=True)
    assert model.num_modules == 0 and type(model.main) is type(plain)
    own = {name.removeprefix("main."): value for name, value in model.state_dict().items()}
    assert own.keys() == plain.state_dict().keys()
    ids = random_ids()
    out = model(ids, labels=ids)
    assert torch.equal(out.logits, plain(ids).logits) and out.mtp_logits is None
    torch.testing.assert_close(out.loss, plain(ids, labels=ids).loss)
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_shared_copies_are_written_where_they_were_read(saved):
    tensors = folder_tensors(saved)
    copies = {name for name in tensors if name.startswith("model.layers.") and "embed_tokens" in name}
    assert copies == {f"model.layers.{layer}.embed_tokens.weight" for layer in (2, 3)}
    kept = {k: v for k, v in tensors.items() if "embed_tokens" not in k or k not in copies}
    rewrite(saved, {k: v for k, v in kept.items() if "shared_head.head" not in k})
    model = DeepSeekMTP.from_pretrained(saved)
    model.save_pretrained(saved)
    assert not any("shared_head.head" in name for name in folder_tensors(saved))


def test_module_logits_only_where_they_are_wanted():
    model, ids = family_model("llama"), random_ids()
    assert model(ids).mtp_logits is not None
    assert model(ids, use_cache=True).mtp_logits is None
    assert model(ids, output_mtp_logits=False).mtp_logits is None
    assert model.prepare_inputs_for_generation(ids, next_sequence_length=None)["output_mtp_logits"] is False
    model.train()
    assert model(ids, labels=ids).mtp_logits is None
    assert model(ids, output_mtp_logits=True).mtp_logits is not None
    cache = model.eval()(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="need whole sequences"):
        model(ids, past_key_values=cache, output_mtp_logits=True)


def test_sequences_shorter_than_the_chain():
    model = family_model("deepseek_v3", num_nextn_predict_layers=3)
    ids = random_ids(2, 2)
    out = model(ids, labels=ids)
    assert [logits.shape[1] for logits in out.mtp_logits] == [1, 0, 0]
    assert torch.isfinite(out.loss)


@torch.no_grad()
def test_left_padding_changes_nothing():
    model, ids = family_model("glm4_moe", num_nextn_predict_layers=2), random_ids(1, 10)
    padded = torch.nn.functional.pad(ids, (4, 0))
    out, shifted = model(ids), model(padded, attention_mask=(torch.arange(14) >= 4)[None].long())
    for plain, other in zip((out.logits, *out.mtp_logits), (shifted.logits, *shifted.mtp_logits)):
        torch.testing.assert_close(other[:, 4:], plain, atol=1e-5, rtol=0)


def test_a_folder_without_modules_is_refused(tmp_path):
    AutoModelForCausalLM.from_config(family_config("llama", num_nextn_predict_layers=0)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tensors of modules"):
        DeepSeekMTP.from_pretrained(tmp_path)


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_modules_is_refused(saved, count):
    rewrite(saved, num_nextn_predict_layers=count)
    with pytest.raises(ValueError, match=f"num_nextn_predict_layers={count}, .*2"):
        DeepSeekMTP.from_pretrained(saved)


def test_modules_are_counted_in_the_file_where_the_config_does_not_say(tmp_path):
    folder = GOLDENS / "qwen3_next_d1_trained"
    shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    assert DeepSeekMTP.from_pretrained(tmp_path / "copy").num_modules == 1
    assert DeepSeekMTP.from_pretrained(tmp_path / "copy", inference_only=True).num_modules == 0


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"mtp_loss_scaling_factor": 0.3, "mtp_gate": False, "new_rope_of_2027": 3, "logit_scale": 2.0}, None),
        ({"mtp_use_dedicated_embeddings": False, "mtp_hidden_states_first": True, "use_mtp": True}, None),
        ({"mtp_gate_of_2027": 3}, "mtp_gate_of_2027"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"mtp_transformer_layers": 2}, "mtp_transformer_layers"),
        ({"text_config": {"nextn_norm": "layer"}}, "nextn_norm"),
        ({"dspark_markov_rank": 4}, "dspark_markov_rank"),
    ],
    ids=str,
)
def test_of_the_config_only_fields_of_modules_are_judged(fields, refused, tmp_path):
    shutil.copytree(GOLDENS / "qwen3_next_d1_trained", tmp_path / "copy")
    rewrite(tmp_path / "copy", **fields)
    if refused is not None:
        with pytest.raises(ValueError, match=rf"{refused}=.*ignore_fields=\['{refused}'\]"):
            DeepSeekMTP.from_pretrained(tmp_path / "copy")
    if "text_config" in fields:
        return
    options = {} if refused is None else {"ignore_fields": [refused]}
    assert DeepSeekMTP.from_pretrained(tmp_path / "copy", **options).num_modules == 1


@pytest.mark.by_day("inferred")
@pytest.mark.parametrize("devices", ["inferred", {"main": "cpu", "mtp": "cpu"}, {"": "cpu"}])
def test_a_device_map_may_be_inferred_from_the_model(devices, saved):
    from accelerate import infer_auto_device_map

    model, ids = DeepSeekMTP.from_pretrained(saved), random_ids(1, 9)
    if devices == "inferred":
        keep, half = list(model._no_split_modules), sum(p.nbytes for p in model.parameters()) // 2
        inferred = infer_auto_device_map(model, {"cpu": half, "disk": 2 * half}, no_split_module_classes=keep)
        assert {"cpu", "disk"} == set(inferred.values()) and "main.lm_head" in inferred
        devices = dict.fromkeys(inferred, "cpu")
    again = DeepSeekMTP.from_pretrained(saved, device_map=devices)
    torch.testing.assert_close(again(ids).mtp_logits[1], model(ids).mtp_logits[1], atol=1e-6, rtol=0)


@pytest.mark.by_day("cpu-disk")
@pytest.mark.parametrize("main, mtp", [("cpu", "disk"), ("disk", "cpu")])
@torch.no_grad()
def test_parts_may_lie_on_different_devices(main, mtp, saved, tmp_path):
    model, ids = DeepSeekMTP.from_pretrained(saved), random_ids(1, 9)
    devices = {"main": main, "mtp": mtp}
    again = DeepSeekMTP.from_pretrained(saved, device_map=devices, offload_folder=tmp_path / "disk")
    assert {(name.split(".")[0], device) for name, device in again.hf_device_map.items()} == set(devices.items())
    torch.testing.assert_close(again(ids).mtp_logits[1], model(ids).mtp_logits[1], atol=1e-6, rtol=0)
    options = {"do_sample": False, "max_new_tokens": 6}
    assert torch.equal(again.generate(ids, **options), model.generate(ids, **options))


def test_modules_of_another_precision_say_what_to_do():
    model, ids = family_model("llama"), random_ids(1, 9)
    model.main.bfloat16()
    with pytest.raises(ValueError, match="torch.float32.*torch.bfloat16"):
        model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(ids, labels=ids).loss.isfinite()


def test_a_state_dict_loads_without_a_directory():
    model, ids = family_model("deepseek_v3", num_nextn_predict_layers=2), random_ids(1, 9)
    state = model.state_dict()
    again = DeepSeekMTP.from_pretrained(None, config=model.config, state_dict=state)
    assert torch.equal(again(ids).mtp_logits[1], model(ids).mtp_logits[1])
    del state["main.lm_head.weight"]
    for tensors, message in ((state, "main.lm_head.weight"), ({}, "state_dict")):
        with pytest.raises(ValueError, match=message):
            DeepSeekMTP.from_pretrained(None, config=model.config, state_dict=tensors)


@pytest.mark.by_day("deepseek_v3")
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
def test_a_model_made_on_the_meta_device_initialises_itself(name):
    config = family_config(name, 1)
    torch.manual_seed(0)
    expected = DeepSeekMTP(config)
    with torch.device("meta"):
        model = DeepSeekMTP(config)
    model.to_empty(device="cpu").init_weights()
    buffers = dict(expected.named_buffers())
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in model.named_buffers())
    stds = {key: tensor.std() for key, tensor in expected.state_dict().items() if tensor.ndim > 1}
    assert all(0.5 * stds[key] < model.state_dict()[key].std() < 2 * stds[key] for key in stds)
