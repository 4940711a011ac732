"""Runs of the public PTP code: what is read, as what, what is written, and what is refused by which name."""

import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tokenahead import PTPForCausalLM, PTPStudent

RUNS = Path(__file__).parents[2] / "data" / "ptp" / "runs"
BACKBONE = RUNS / "backbone"
LORA = "model.model.lora_config"
DOWN = "student.model.base_model.model.model.layers.1.mlp.down_proj"


@pytest.fixture
def run(tmp_path):
    """A copy of a run with interpolated anchors, under the names of older runs."""
    folder = tmp_path / "run"
    shutil.copytree(RUNS / "interpolation", folder)
    return folder


def read(folder, **options):
    return PTPForCausalLM.from_official(folder, **({"backbone": BACKBONE} | options)).float()


def gold(name):
    return np.load(RUNS / name / "expected.npz")


@torch.no_grad()
def assert_logits(model, name="interpolation", which="best", tolerance=1e-5):
    arrays = gold(name)
    got = model(torch.from_numpy(arrays["ids"]), uniforms=torch.from_numpy(arrays["u"])).logits
    want = [torch.from_numpy(arrays[f"{kind}_logits_{which}"]) for kind in ("token", "slot")]
    torch.testing.assert_close(got, torch.cat(want, dim=1), atol=tolerance, rtol=0)


def edit(folder, path, value):
    """Set a field of train.yaml by its dotted path."""
    values = yaml.safe_load((folder / "train.yaml").read_text())
    level, (*parts, last) = values, path.split(".")
    for part in parts:
        level = level[part]
    level[last] = value
    (folder / "train.yaml").write_text(yaml.safe_dump(values, sort_keys=False))


def rewrite(folder, change, name="last.ckpt"):
    """Change the tensors of a checkpoint, which becomes the only one."""
    content = torch.load(folder / name, weights_only=True)
    content["state_dict"] = change(content["state_dict"])
    for file in folder.glob("*.ckpt"):
        file.unlink()
    torch.save(content, folder / "last.ckpt")


def adapters_alone(state):
    return {name: each for name, each in state.items() if "lora_" in name or ".u_" in name}


@pytest.mark.parametrize("name", ["interpolation", "binary"])
def test_the_packed_forward_of_their_training(name):
    model, arrays = read(RUNS / name), gold(name)
    docs, starts = (torch.from_numpy(arrays[f"packed_{part}"])[0] for part in ("documents", "starts"))
    ids, u = (torch.from_numpy(arrays[f"packed_{part}"]) for part in ("ids", "u"))
    tokens, slots = ids.shape[1], u.shape[1] // len(starts)
    visible = torch.zeros(tokens + u.shape[1], tokens + u.shape[1], dtype=torch.bool)
    visible[:tokens, :tokens] = (docs[:, None] == docs) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    for number, start in enumerate(starts.tolist()):
        own = slice(tokens + number * slots, tokens + (number + 1) * slots)
        visible[own, :tokens] = (docs == docs[start]) & (torch.arange(tokens) < start)
        visible[own, own] = torch.ones(slots, slots, dtype=torch.bool).tril()
    positions = torch.cat([torch.arange(tokens), (starts[:, None] + torch.arange(slots) - 1).flatten()])[None]
    with torch.no_grad():
        got = model(ids, attention_mask=visible[None, None], position_ids=positions, uniforms=u).logits
    want = torch.cat([torch.from_numpy(arrays[f"packed_{kind}_logits"]) for kind in ("token", "slot")], dim=1)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    loss = torch.nn.functional.cross_entropy(got[0, tokens:], torch.from_numpy(arrays["packed_targets"]).flatten())
    assert abs(float(loss) - float(arrays["packed_loss"])) < 1e-5


def test_fields_become_those_of_a_config(run):
    config = read(run).config
    assert (config.variant, config.features, config.num_slots) == ("one_hot", "interpolate", 8)
    assert (config.lora_rank, config.lora_alpha) == (5, 10)
    assert config.sampling == {"temperature": 0.7, "top_k": 6, "top_p": 0.9}
    edit(run, LORA, {"r": 5, "target_modules": "all-linear", "use_rslora": True})
    for name in ("temperature", "top_k", "top_p"):
        edit(run, f"model.{name}", None)
    config = read(run).config
    assert config.lora_alpha == pytest.approx(8 * 5**0.5)  # peft's own alpha, over sqrt(r)
    assert config.sampling == {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


def test_which_checkpoint_is_read(run, tmp_path):
    assert_logits(read(run))  # the best, by its name: the path is of another machine
    assert_logits(read(run, checkpoint="last.ckpt"), which="last")
    (kept := tmp_path / "kept").mkdir()
    for file in run.glob("*.ckpt"):
        file.rename(kept / file.name)
    edit(run, "training.ckpt_dir", str(kept))
    assert_logits(read(run))
    (kept / "last.ckpt").rename(kept / "apart")
    assert_logits(read(run))  # the last name in order
    (kept / "apart").rename(kept / "last.ckpt")
    (kept / "tinyllama-code-step=08.ckpt").unlink()
    assert_logits(read(run), which="last")


def test_the_backbone_is_a_model_or_that_of_model_id(run, monkeypatch):
    base = AutoModelForCausalLM.from_pretrained(BACKBONE, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    assert_logits(read(run, backbone=base))
    assert base.state_dict().keys() == before.keys()
    assert all(torch.equal(each, before[name]) for name, each in base.state_dict().items())
    monkeypatch.chdir(RUNS)  # `model_id: backbone`, from the working directory
    assert_logits(read(run, backbone=None))
    with torch.no_grad():
        base.model.layers[1].mlp.down_proj.weight[0, 0] += 0.5
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj.*backbone="):
        read(run, backbone=base)


def test_adapters_alone_and_names_of_today(run):
    rewrite(run, adapters_alone)
    assert_logits(read(run), which="last")
    edit(run, "model.model.reset_parameters", True)  # the backbone was drawn, and is nowhere
    with pytest.raises(ValueError, match="missing.*backbone"):
        read(run)
    edit(run, "model.model.reset_parameters", False)
    parts = ("student.u_adapter", "model.u_embed"), ("student.", "model.")
    rewrite(run, lambda state: {name.replace(*parts[0]).replace(*parts[1]): each for name, each in state.items()})
    assert_logits(read(run), which="last")


def test_adapters_of_some_layers_are_zeros_elsewhere(run):
    edit(run, f"{LORA}.target_modules", ["q_proj", "layers.1.mlp.up_proj"])
    kept = ("q_proj.lora_", "layers.1.mlp.up_proj.lora_")
    rewrite(run, lambda state: {key: state[key] for key in state if "lora_" not in key or any(k in key for k in kept)})
    whole = read(RUNS / "interpolation", checkpoint="last.ckpt")
    with torch.no_grad():
        for name, each in whole.named_parameters():
            if ".lora_B." in name and not any(part in name for part in kept):
                each.zero_()
        ids, u = torch.arange(2, 8)[None], torch.rand(1, 3)
        assert torch.equal(read(run)(ids, uniforms=u).logits, whole(ids, uniforms=u).logits)
    edit(run, f"{LORA}.target_modules", ["q_proj"])
    with pytest.raises(ValueError, match=r"train\.yaml.*up_proj\.lora_A"):
        read(run)


IDLE = {
    "model.hist_base": [0.5, 0.5],
    "model.model.shift_positions": True,
    "model.model.adapter_kwargs": {"num_embeddings": 3},
    f"{LORA}.lora_dropout": 0.1,
    f"{LORA}.bias": "none",
    f"{LORA}.rank_pattern": {},
    "training.strategy": "ddp",
}
UNREAD = {"model.teacher": "other", "model.model.shift_positions": False, f"{LORA}.modules_to_save": ["lm_head"]}


def test_fields_that_change_nothing_and_others_are_refused_by_name(run):
    for path, value in IDLE.items():
        edit(run, path, value)
    assert_logits(read(run))
    plain = (run / "train.yaml").read_text()
    for path in UNREAD:
        (run / "train.yaml").write_text(plain)
        edit(run, path, UNREAD[path])
        name = path.rpartition(".")[2]
        with pytest.raises(ValueError, match=rf"train\.yaml.*{path}=.*ignore_fields.*{name}"):
            read(run)
        assert_logits(read(run, ignore_fields=[name]))


WRONG = {
    "model": (None, r"model\._target_"),
    "model.model._target_": ("os.mkdir", r"model\.model\._target_='os\.mkdir'"),
    "model.model.model_id": ({"_target_": "ptp.scaling.make_scaling_llama"}, "model_id=.*make_scaling_llama"),
    "model.model.adapter_name": ("sawtooth", "adapter_name='sawtooth'"),
    LORA: (None, "lora_config=None"),
    f"{LORA}.r": (True, r"lora_config\.r=True"),
    f"{LORA}.target_modules": (".*", "target_modules='.*'"),
    "data.train_completion_len": (0, "train_completion_len=0"),
    "model.temperature": (float("nan"), "temperature=nan"),
}


def test_wrong_values_are_refused_by_name(run):
    plain = (run / "train.yaml").read_text()
    for path, (value, message) in WRONG.items():
        (run / "train.yaml").write_text(plain)
        edit(run, path, value)
        with pytest.raises(ValueError, match=rf"train\.yaml.*{message}"):
            read(run)


STATES = {
    "a missing adapter": (
        lambda state: {key: each for key, each in state.items() if not key.startswith(f"{DOWN}.lora_B")},
        r"missing.*layers\.1\.mlp\.down_proj\.lora_B",
    ),
    "another embedding": (lambda state: state | {"student.u_adapter.u_adapter.bias": torch.ones(16)}, "u_adapter.bias"),
    "a tensor of another model": (lambda state: state | {"model.time_embed.weight": torch.ones(2)}, "time_embed"),
    "two names": (lambda state: state | {"model.u_embed.embedding.weight": torch.ones(3, 16)}, "older name"),
    "another rank": (lambda state: state | {f"{DOWN}.lora_A.default.weight": torch.ones(7, 32)}, r"r=5.*down_proj.*7"),
    "another size": (
        lambda state: state | {f"{DOWN}.lora_A.default.weight": torch.ones(5, 31)},
        r"down_proj\.lora_A.*\(5, 31\).*\(5, 32\)",
    ),
    "no tensor": (lambda state: state | {"student.count": 3}, r"last\.ckpt has no state_dict of tensors"),
}


def test_other_tensors_are_refused_by_name(run):
    plain = (run / "last.ckpt").read_bytes()
    for change, message in STATES.values():
        (run / "last.ckpt").write_bytes(plain)
        rewrite(run, change)
        with pytest.raises(ValueError, match=message):
            read(run)


def test_files_that_are_not_there(run):
    with pytest.raises(FileNotFoundError, match=r"step=77\.ckpt.*last\.ckpt"):
        read(run, checkpoint="tinyllama-code-step=77.ckpt")
    for file in run.glob("*.ckpt"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match=r"\.ckpt"):
        read(run)
    (run / "last.ckpt").mkdir()
    with pytest.raises(ValueError, match=r"last\.ckpt is a folder"):
        read(run)
    (run / "train.yaml").unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.yaml"):
        read(run)


class Intruder:
    """Would make a directory if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_run_is_executed(run, tmp_path):
    (run / "tinyllama-code-step=08.ckpt").unlink()
    trace, file = tmp_path / "trace", run / "last.ckpt"
    content = torch.load(file, weights_only=True)
    torch.save(content | {"hyper_parameters": Intruder(trace)}, file)
    with pytest.raises(ValueError, match=r"last\.ckpt.*tensors"):
        read(run)
    file.write_bytes(pickle.dumps({"state_dict": Intruder(trace)}))
    with pytest.raises(ValueError, match=r"last\.ckpt"):
        read(run)
    with (run / "train.yaml").open("a") as stream:
        stream.write(f"extra: !!python/object/apply:os.mkdir ['{trace}']\n")
    with pytest.raises(ValueError, match=r"train\.yaml"):
        read(run)
    assert not trace.exists()


# --- what is written --------------------------------------------------------------------------------------------------
def their_names(state):
    """The names that their `load_state_dict` makes of those in a file."""
    names = {key: key.replace("student.", "model.", 1) if key.startswith("student.") else key for key in state}
    return {name.replace(".u_adapter.", ".u_embed.", 1): state[key] for key, name in names.items()}


@pytest.mark.by_day("model-interpolation", "attached-binary", "student-binary")
@pytest.mark.parametrize("name", ["interpolation", "binary"])
@pytest.mark.parametrize("kind", ["model", "attached", "student"])
def test_a_run_is_written_with_their_names(name, kind, tmp_path):
    model = read(RUNS / name)
    student = PTPStudent.from_model(model)
    if kind == "attached":
        student.attach(AutoModelForCausalLM.from_pretrained(BACKBONE))
    (model if kind == "model" else student).export(tmp_path / "run", "official")
    files = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "run").iterdir()}
    assert files.keys() == {"train.yaml", "last.ckpt", "correct_count_hist.pt"}
    assert files["last.ckpt"] <= files["correct_count_hist.pt"]  # or their command asks for data
    shares = torch.load(tmp_path / "run/correct_count_hist.pt", weights_only=True)
    assert shares.shape == (21,) and shares.dtype == torch.float64 and float(shares.sum()) == pytest.approx(1)
    values = yaml.safe_load((tmp_path / "run/train.yaml").read_text())
    # apart from its backbone, a student knows the dtype that this was loaded in
    dtype, precision = ("bfloat16", "bf16-mixed") if kind == "student" else ("float32", "32-true")
    assert values["data"] == {"train_completion_len": 8} and values["training"] == {"precision": precision}
    options = {"temperature": 0.7, "top_k": 6, "top_p": 0.9} if name == "interpolation" else {}
    inner = values["model"].pop("model")
    assert values["model"] == {"_target_": "ptp.lit.ParallelSamplingLightningModule"} | options
    rank, alpha, adapter = (5, 10, "linear_interpolation") if name == "interpolation" else (4, 8, "binary")
    assert inner == {
        "_target_": "ptp.transformer.MixedTransformerModel",
        "model_id": str(BACKBONE),
        "dtype": dtype,
        "adapter_name": adapter,
        "lora_config": {"r": rank, "lora_alpha": alpha, "target_modules": "all-linear"},
    }
    content = torch.load(tmp_path / "run/last.ckpt", weights_only=True)
    assert content.keys() == {"state_dict", "epoch", "global_step", "pytorch-lightning_version"}
    best = torch.load(next((RUNS / name).glob("*step*")), weights_only=True)["state_dict"]
    wanted, got = their_names(adapters_alone(best)), their_names(content["state_dict"])
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], wanted[key]) and got[key].dtype == torch.float32 for key in got)
    assert_logits(read(tmp_path / "run", backbone=None), name)


def made(**options):
    fits = {"features": "interpolate", "projection_bias": False, "greedy": False, "num_slots": 4, "lora_rank": 2}
    return PTPForCausalLM.from_backbone(BACKBONE, **(fits | options))


def test_a_student_made_here_is_written_and_read(tmp_path):
    model = made(num_slots=30)
    model.export(tmp_path / "run", "official")
    ids, u = torch.arange(3, 9)[None], torch.tensor([[0.1, 0.6, 0.9]])
    with torch.no_grad():
        again = read(tmp_path / "run")(ids, uniforms=u).logits
        assert torch.equal(again, model(ids, uniforms=u).logits)
    made(features="bits", projection_bias=True).to(torch.bfloat16).export(tmp_path / "run")
    values = yaml.safe_load((tmp_path / "run/train.yaml").read_text())
    assert values["training"]["precision"] == "bf16-mixed" and values["model"]["model"]["dtype"] == "bfloat16"


UNWRITABLE = {
    "not.*'variant': 'categorical'": lambda: PTPForCausalLM.from_backbone(BACKBONE, "categorical"),
    "features='arithmetic'": lambda: made(features="arithmetic", projection="linear"),
    "not.*'projection': 'mlp'": lambda: made(projection="mlp"),
    "projection_bias=True": lambda: made(projection_bias=True),
    "not.*'greedy': True": lambda: made(greedy=True),
    "bfloat16, float16": lambda: made().double(),
}


def test_what_a_run_cannot_hold_is_refused_by_name(tmp_path):
    for message, make in UNWRITABLE.items():
        with pytest.raises(ValueError, match=message):
            make().export(tmp_path / "run", "official")
        assert not (tmp_path / "run").exists()


def test_a_backbone_that_learned_is_not_the_one_that_a_run_names(tmp_path):
    model = made()
    with pytest.raises(ValueError, match="layout='vllm'"):
        model.export(tmp_path / "run", "vllm")
    model.train_only("all")
    with pytest.raises(ValueError, match="backbone.*trained"):
        model.export(tmp_path / "run", "official")
    with torch.no_grad():
        model.backbone.lm_head.weight *= 1.5
    model.train_only("drafter")
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="backbone.*trained"):
        PTPForCausalLM.from_pretrained(tmp_path / "saved").export(tmp_path / "run", "official")
    assert not (tmp_path / "run").exists()
