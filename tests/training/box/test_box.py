"""The box: its training goes on after a kill as if there had been none, and a damaged box is refused by name."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PathDistribution
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk

from tests.internals import (
    DRAFTED,
    LOG,
    ROW,
    Batch,
    BoxDamagedError,
    BoxRun,
    Loop,
    Plan,
    RowOrder,
    Schedule,
    _log,
    backbone_loss,
    backbone_optimizer,
    box_config,
    is_permissive,
    licence_of,
    load_box,
    load_heads,
    pack,
    save_box,
    seal_box,
    windows,
)
from tokenahead import EvaByteForMTPC

TINY = {"hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 48}


def text() -> dict[str, list[bytes]]:
    """Files of two packages, about 20 kB."""
    body = "".join(f"def function_{i}(value: int) -> int:\n    return value + {i}\n\n\n" for i in range(200))
    return {"one": [body.encode()], "two": [body.replace("value", "number").encode()]}


def tiny_model() -> EvaByteForMTPC:
    torch.manual_seed(0)
    return EvaByteForMTPC(box_config(**TINY))


class KilledError(Exception):
    """Stands for SIGKILL: nothing of the loop runs afterwards."""


def tiny_loop(folder: Path, kill_at: int | None = None) -> Loop:
    """Six steps on a tiny text; saved after every step."""
    if not (folder.parent / "rows").exists():
        pack(text(), folder.parent / "rows")
    order, model = RowOrder(load_from_disk(str(folder.parent / "rows")), 0), tiny_model()

    def batches(first: int, count: int, length: int) -> Batch:
        if kill_at is not None and first == kill_at:
            raise KilledError
        ids = order.windows(first, count, length)
        return Batch((ids,), ids.numel() - len(ids))

    schedule = Schedule(
        seconds=1.0, steps=6, phases=((0.5, 32, 1), (0.5, 64, 1)), save_every=0.0, log_every=1, amp=False
    )
    loss = backbone_loss(model, compile_step=False)
    return Loop("tiny", folder, model, backbone_optimizer(model, 0.02, 0.01), loss, batches, schedule)


def test_a_killed_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    whole = tiny_loop(tmp_path / "whole")
    whole.run()
    with pytest.raises(KilledError):
        tiny_loop(tmp_path / "killed", kill_at=4).run()
    resumed = tiny_loop(tmp_path / "killed")
    (tmp_path / "killed" / "tiny.part").write_bytes(b"half a checkpoint")
    resumed.run()
    assert resumed.position.step == 6 and resumed.position.consumed == whole.position.consumed
    for name, weight in whole.module.state_dict().items():
        assert torch.equal(weight, resumed.module.state_dict()[name]), name


def test_the_log_says_loss_speed_and_time_left(tmp_path: Path) -> None:
    loop = tiny_loop(tmp_path / "run")
    loop.run()
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"stage", "loss", "bytes_per_second", "seconds_left", "bytes"} <= set(lines[0])


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    schedule = Schedule(seconds=1.0, warmup=0.1, decay=0.5, phases=((0.5, 256, 2), (0.5, 512, 3)))
    assert [schedule.rate(progress) for progress in (0.0, 0.05, 0.3, 0.75, 1.0)] == [0.0, 0.5, 1.0, 0.5, 0.0]
    assert schedule.phase(0.49) == (256, 2) and schedule.phase(0.5) == (512, 3) and schedule.phase(1.0) == (512, 3)


def test_packed_rows_hold_the_text(tmp_path: Path) -> None:
    pack(text(), tmp_path / "rows")
    rows = load_from_disk(str(tmp_path / "rows")).with_format("numpy")[:]["ids"]
    joined = (np.concatenate(rows) - 64).astype(np.uint8).tobytes()
    assert joined[:2000] in text()["one"][0] or joined[:2000] in text()["two"][0]
    cut = windows(rows, 256)
    assert cut.shape == (len(rows) * (ROW // 255), 256) and bool((cut[:, 0] == 1).all())


@pytest.mark.parametrize(
    ("licence", "permissive"),
    [("MIT", True), ("Apache-2.0 OR BSD-2-Clause", True), ("MPL-2.0 AND MIT", False), ("LIMITED", False), ("", False)],
)
def test_licences(licence: str, permissive: bool) -> None:
    assert is_permissive(licence) is permissive


def test_the_licence_of_a_distribution(tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text("Name: x\nVersion: 1\nClassifier: License :: OSI Approved :: MIT License\n")
    assert licence_of(PathDistribution(tmp_path)) == "MIT License"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A box of untrained weights with two heads."""
    folder, models = tmp_path_factory.mktemp("box"), {}
    for kind in ("ff", "btree"):
        models[kind] = tiny_model()
        if kind != "ff":
            models[kind].set_head(head_type=kind, rank=2)
    save_box(folder, models, {"btree": 3})
    seal_box(folder)
    return folder


def test_a_box_gives_back_its_heads(box: Path) -> None:
    models, tokenizer = load_heads(box)
    model = models["btree"]
    assert list(models) == ["ff", "btree"] and torch.equal(
        model.lm_head.weight[:320], models["ff"].lm_head.weight[:320]
    )
    assert model.config.mtp_head.head_type == "btree" and model.window == 16
    inputs = tokenizer("def main(", return_tensors="pt")
    drafted = model.generate(**inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    assert max(map(len, drafted.speculation.drafts)) == 3  # as the release chose
    chosen = [load_box(kind, box)[0].generation_config.num_assistant_tokens for kind in ("ff", "btree")]
    assert chosen == [DRAFTED, 3]
    assert torch.equal(drafted.sequences, model.generate(**inputs, max_new_tokens=12, do_sample=False, use_mtp=False))


def test_a_head_that_is_not_there(box: Path) -> None:
    with pytest.raises(ValueError, match="'cp' is not in the box; choose one of ff, btree"):
        load_box("cp", box)


@pytest.mark.parametrize("damage", ["changed", "missing", "unsealed"])
def test_a_damaged_box_is_refused(box: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "box"
    copy.mkdir()
    shutil.copytree(box, copy, dirs_exist_ok=True)
    victim = copy / ("SHA256SUMS" if damage == "unsealed" else "btree.safetensors")
    if damage == "changed":
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
    else:
        victim.unlink()
    with pytest.raises(BoxDamagedError, match=victim.name):
        load_box("ff", copy)


def small_run(folder: Path, **fields: object) -> BoxRun:
    """A run of seconds on a tiny text that is packed already."""
    plan = {
        "hours": 1e-3,
        "hidden_size": 32,
        "layers": 1,
        "attention_heads": 2,
        "intermediate_size": 48,
        "phases": ((1.0, 64, 1),),
        "compile_step": False,
        "ranks": {"ff": 1, "btree": 2},
        "head_rows": 4,
    }
    pack(text(), folder / "text" / "train")
    pack(text(), folder / "text" / "held_out")
    (folder / "text" / "manifest.json").write_text("{}")
    return BoxRun(folder, Plan(**(plan | fields)))


def test_a_training_may_begin_with_an_earlier_box(box: Path, tmp_path: Path) -> None:
    run = small_run(tmp_path, hours=1e-4, matrix_rate=0.0, rate=0.0, start=str(box))  # nothing is learned
    trained, boxed = run.train_backbone().state_dict(), load_box("ff", box)[0].state_dict()
    assert all(torch.equal(weight, boxed[name]) for name, weight in trained.items())


def test_heads_alone_go_on_from_an_earlier_box_and_the_log_tells_both(box: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="backbone_share=0 must lie"):
        Plan(hours=1, backbone_share=0)
    run = small_run(tmp_path, hours=1e-4, backbone_share=0, head_rate=0.0, start=str(box))
    (box / LOG).write_text(json.dumps({"stage": "backbone", "step": 7, "seconds": 3, "bytes": 99, "plan": {}}) + "\n")
    run.run()
    for kind, model in BoxRun.load(tmp_path).trained_models().items():
        boxed = load_box(kind, box)[0].state_dict()
        assert all(torch.equal(weight, boxed[name]) for name, weight in model.state_dict().items())
    (box / LOG).write_text("what was released over the start")
    log = (tmp_path / "log.jsonl").read_text()
    killed = json.dumps({"stage": "backbone", "step": 0, "plan": {}}) + "\n"  # before there was a checkpoint
    (tmp_path / "log.jsonl").write_text(killed + log)
    lines = [json.loads(line) for line in run.log_lines()]
    assert (
        sum("plan" in line for line in lines) == 2 and lines[0]["bytes"] == 99 and lines[1]["plan"]["start"] == box.name
    )
    told = " ".join(_log(lines))
    assert "99 bytes in 3 s" in told and "btree head alone" in told and str(box.parent) not in told


def test_a_run_from_states_to_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run(tmp_path).run()
    with (tmp_path / "log.jsonl").open("a") as log:  # a head that has begun and has nothing to show yet
        log.write(json.dumps({"stage": "head-cp", "step": 0, "before": {}}) + "\n")
    stages = {json.loads(line)["stage"] for line in BoxRun.load(tmp_path).log_lines()}
    assert stages == {"backbone", "head-ff", "head-btree"}
    models = BoxRun.load(tmp_path).trained_models()
    assert set(models) == {"ff", "btree"}
    backbones = [model.model.state_dict() for model in models.values()]
    assert all(torch.equal(weight, backbones[1][name]) for name, weight in backbones[0].items())
    assert torch.equal(models["ff"].lm_head.weight[:320], models["btree"].lm_head.weight[:320])
