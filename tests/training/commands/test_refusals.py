"""What `tokenahead train` refuses before the first step: one line that names the setting, and what would be right."""

import json
import re
import shutil
import sys

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tests.internals import build, ptp_options
from tests.internals import cli_module as cli
from tests.internals import commands_run_folder as run_folder
from tests.internals import commands_train as train
from tokenahead import PTPStudent


def error_of(tmp_path, capsys, *flags) -> str:
    before = {*tmp_path.iterdir()}
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(tmp_path / "config.yaml"), *map(str, flags)])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenahead")]
    assert ended.value.code == 1 and len(lines) == 1
    assert {*tmp_path.iterdir()} <= before | {tmp_path / "cache"}, "what is refused leaves nothing"
    return lines[0].removeprefix("tokenahead train: ")


WRONG = {
    "a key that does not exist": ({"learning_rte": 1}, "no setting 'learning_rte'; did you mean 'learning_rate'?"),
    "no model": ({"model_name_or_path": None}, "model_name_or_path is missing"),
    "a model that is not there": ({"model_name_or_path": "./nowhere"}, "model_name_or_path ./nowhere"),
    "no data": ({"dataset_name": None}, "dataset_name is missing"),
    "data that are not there": ({"dataset_name": "./nowhere"}, "dataset_name=./nowhere: no such file or directory"),
    "a split that is not there": (
        {"test_split_size": None, "eval_strategy": "steps", "eval_steps": 2},
        "dataset_test_split='test': the data have 'train'; or set test_split_size",
    ),
    "a model without a drafter": ({"drafter": "own"}, "brings nothing that drafts: set drafter"),
    "an unknown drafter": ({"drafter": "medusa"}, "drafter='medusa' is unknown; choose one of own, heads"),
    "an unknown option": ({"drafter_options": {"rang": 2}}, "has no option 'rang'"),
    "an unknown head": ({"drafter_options": {"head_type": "xx"}}, "head_type='xx' is unknown"),
    "an unknown field of a strategy": ({"strategy": {"trian": "all"}}, "TrainingStrategy has no field 'trian'"),
    "a loss that is not there": ({"loss_options": {"weight": 1}}, "the loss of a MTPHeads follows its drafter_options"),
    "wrapped packing": ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy='wrapped' joins documents"),
    "a loss of TRL": ({"loss_type": "dft"}, "loss_type='dft'"),
    "an unknown field of acceptance": (
        {"eval_strategy": "steps", "eval_steps": 2, "acceptance": {"row": 3}},
        "acceptance has no option 'row'; it has rows, generate_every,",
    ),
    "a metric that no evaluation has": (
        {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "expected_acepted"},
        "metric_for_best_model='expected_acepted' is in no evaluation of this run; choose loss, loss_head_1, ",
    ),
    "acceptance that nothing measures": ({"acceptance": {"rowz": 8}}, "acceptance has no option 'rowz'"),
    "acceptance that is a number": ({"acceptance": 3}, "acceptance=3 must be a mapping of options, or false"),
    "adapters of TRL on heads": ({"use_peft": True}, "leave use_peft out, and set strategy: {train: lora}"),
    "adapters of TRL on an EAGLE head": ({"use_peft": True, "drafter": "eagle"}, "use_peft=True with drafter='eagle'"),
    "adapters and a strategy": (
        {"use_peft": True, "drafter": "own", "strategy": {"train": "all"}},
        "strategy={'train': 'all'} beside use_peft=True",
    ),
    "features of a backbone that learns": (
        {"features": "f", "strategy": {"train": "all"}},
        "features=f keeps the states of a backbone that stands still",
    ),
    "text of nowhere": ({"regenerate": {"max_new_tokens": 4}}, "regenerate={'max_new_tokens': 4} needs folder="),
    "features of modules": ({"features": "f", "drafter": "modules"}, "or train heads or an EAGLE head apart"),
    "features of a stream": (
        {"features": "f", "dataset_streaming": True, "test_split_size": None},
        "a stream has no end: set dataset_streaming: false",
    ),
    "features of a mixed stream": (
        {"features": "f", "datasets": [{"path": "text"}], "streaming": True, "dataset_name": None},
        "a stream has no end: set streaming: false",
    ),
    "a warm-up of heads alone": ({"strategy": {"head_warmup": 3}}, "head_warmup=3 lets the head learn alone at first"),
    "a part of adapters": ({"lora_r": 4}, "lora_r=4 is of use_peft=True"),
    "quantised": ({"load_in_4bit": True}, "load_in_4bit=True: backbones are not quantised"),
    "an unknown dtype": ({"dtype": "float17"}, "dtype='float17' is unknown; choose one of auto, float32"),
    "a text and a mixture": ({"datasets": [{"path": "text"}]}, "beside `datasets`: either one text or a mixture"),
    "no steps": ({"max_steps": 0}, "max_steps=0 must be at least 1, or -1 for num_train_epochs"),
    "no epochs": ({"max_steps": -1, "num_train_epochs": 0}, "num_train_epochs=0 must be above 0"),
    "no rows to evaluate": ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size=0 must be at least 1"),
    "options of another scheduler": (
        {"lr_scheduler_kwargs": {"a": 1}}, "lr_scheduler_kwargs={'a': 1} do not fit lr_scheduler_type=linear: "
    ),
    "options of an optimizer": ({"optim_args": "x"}, "optim_args='x' must be name=value, or several with commas"),
    "a template that is not there": ({"chat_template_path": "./nope"}, "chat_template_path=./nope: no such file or"),
    "a folder that is a file": ({"output_dir": "config.yaml"}, "output_dir=config.yaml is a file: choose a directory"),
    "features in a file": ({"features": "config.yaml"}, "features=config.yaml is a file: choose a directory"),
    "text in a number": ({"regenerate": {"folder": 3}}, "regenerate={'folder': 3} needs folder="),
    "text in batches of none": ({"regenerate": {"folder": "f", "batch_size": 0}}, "batch_size=0 must be at least 1"),
    "no accumulation": ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be at least 1"),
    "steps in a list": ({"max_steps": [1]}, "max_steps=[1] must be a whole number"),
    "half a step": ({"max_steps": 2.5}, "max_steps=2.5 must be a whole number"),
    "a weight that is a word": ({"strategy": {"loss_weight": "much"}}, "strategy.loss_weight='much' must be a number"),
    "a weight that is no number": ({"strategy": {"loss_weight": float("nan")}}, "strategy.loss_weight=nan must be a"),
    "half a rank": ({"strategy": {"train": "lora", "lora_rank": 2.5}}, "strategy.lora_rank=2.5 must be a whole number"),
    "half a window": ({"drafter_options": {"window": 2.5}}, "drafter_options.window=2.5 must be a whole number"),
    "half a row": ({"acceptance": {"rows": "x"}}, "acceptance.rows='x' must be a whole number"),
    "half a completion": (
        {"drafter": "parallel", "loss_options": {"completions": 2.5}}, "loss_options.completions=2.5 must be a whole"
    ),
    "a file that is not there": ({"dataset_name": "nofile.jsonl"}, "dataset_name=nofile.jsonl"),
    "patience for nothing": ({"early_stopping_patience": 2}, "early_stopping_patience needs eval_strategy"),
    "DeepSpeed that is not installed": ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "pip install deepspeed"),
    "a column that is missing": ({"dataset_text_field": "body"}, "have the columns text; needed are 'body'"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_named(changes, message, settings_of, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as where it is not installed
    monkeypatch.chdir(tmp_path)
    settings_of(drafter="heads")
    file = tmp_path / "config.yaml"
    values = yaml.safe_load(file.read_text()) | changes
    file.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
    assert message in error_of(tmp_path, capsys)


def test_numbers_that_yaml_reads_as_text_are_numbers(settings_of):
    settings = settings_of(
        drafter="parallel", drafter_options={"num_slots": "3"}, loss_options={"gamma": "9e-1"},
        strategy={"train": "all", "loss_weight": "1e-1"},
    )  # fmt: skip
    assert settings.drafter.training_strategy().loss_weight == 0.1
    assert ptp_options(settings.drafter).gamma == 0.9 and build(settings).model.config.num_slots == 3


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


USER = {"role": "user", "content": "hi"}
ROWS = {
    "no rows": ([], "empty"),
    "a chat without an assistant": ([{"messages": [USER]}] * 3, "row 0 of the train data has no assistant turn"),
    "ids outside the vocabulary": ([{"input_ids": [70, 999]}] * 3, "input_ids of the train data hold 999"),
    "a late chat without an assistant": (
        [{"messages": [USER, {"role": "assistant", "content": "x"}]}] * 1100 + [{"messages": [USER]}],
        "row 1100 of the train data has no assistant turn",
    ),
    "turns without content": ([{"messages": [{"role": "user"}, {"role": "assistant"}]}] * 3, "turn 0 has no 'content'"),
    "a chat that is a text": ([{"messages": "hello"}] * 3, "'messages' of the train data must hold a list of turns"),
    "text that is null": ([{"text": None}] * 3, "'text' of the train data must hold text, and row 0 has None"),
    "some text that is null": ([{"text": "a"}, {"text": None}], "'text' of the train data is null in 1 row(s)"),
    "text that is a number": ([{"text": 3}] * 3, "'text' of the train data must hold text, and row 0 has 3"),
    "text and numbers": ([{"text": "a"}, {"text": 3}], "'text' of the train data must hold text, and row 1 has 3"),
    "a turn that is a number": (
        [{"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": 4}]}] * 3,
        "row 0 of the train data: the 'content' of turn 0 must be text, not 3",
    ),
    "a turn of parts": (
        [{"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}]}] * 3,
        "row 0 of the train data: the 'content' of turn 1 must be text, not [{'type': 'text'",
    ),
    "a prompt of parts": (
        [{"prompt": [USER | {"content": ["hi"]}], "completion": [{"role": "assistant", "content": "x"}]}] * 3,
        "row 0 of the train data: the 'content' of turn 0 must be text, not ['hi']",
    ),
    "ids that are a text": ([{"input_ids": "hello"}] * 3, "'input_ids' of the train data must hold a list of whole"),
    "ids that are no whole numbers": ([{"input_ids": [1.5, 2.5]}] * 3, "must hold a list of whole numbers"),
    "labels of another length": (
        [{"input_ids": [70, 71, 72], "labels": [70, 71, 72]}, {"input_ids": [70, 71, 72], "labels": [70]}],
        "row 1 of the train data has 3 input_ids and 1 labels",
    ),
    "rows of one token": ([{"input_ids": [70]}] * 3, "train_dataset has no targets"),
    "labels outside the vocabulary": (
        [{"input_ids": [70, 71], "labels": [-5, 71]}] * 3, "labels of the train data hold -5"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "message"), ROWS.values(), ids=ROWS)
def test_rows_that_cannot_be_learned_are_named(rows, message, settings_of, tmp_path, capsys):
    file = write(tmp_path / "rows.jsonl", rows)
    settings_of(drafter="heads", dataset_name=str(file), test_split_size=None)
    assert message in error_of(tmp_path, capsys)


STREAMS = {
    "a late id": ([{"input_ids": [70] * 9}] * 9 + [{"input_ids": [70, 999]}], "input_ids of the train data hold 999"),
    "late labels": (
        [{"input_ids": [70] * 9, "labels": [70] * 9}] * 9 + [{"input_ids": [70] * 9, "labels": [70]}],
        "a row of the train data has 9 input_ids and 1 labels",
    ),
    "a late number": (
        [{"text": "abc"}] * 9 + [{"text": 3}],
        "'text' of the train data must hold text, and a row has 3",
    ),
}


@pytest.mark.parametrize(("rows", "message"), STREAMS.values(), ids=STREAMS)
def test_a_stream_is_looked_at_as_it_comes(rows, message, settings_of, tmp_path):
    file = write(tmp_path / "rows.jsonl", rows)
    settings = settings_of(drafter="heads", dataset_name=str(file), test_split_size=None, dataset_streaming=True)
    with pytest.raises(ValueError, match=re.escape(message)):
        train(settings)


@pytest.mark.parametrize("text", ['{"text": "a"}\n{"text": \n', "\n\n\n"], ids=["a broken line", "blank lines"])
@pytest.mark.parametrize("streaming", [False, True])
def test_files_that_cannot_be_read_are_named(text, streaming, settings_of, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    settings_of(drafter="heads", dataset_name=str(file), test_split_size=None, dataset_streaming=streaming)
    said = error_of(tmp_path, capsys)
    assert f"dataset_name={file}: could not be read: " in said or f"{file} has no rows" in said


def test_a_missing_file_of_settings_is_named(tmp_path, capsys):
    assert error_of(tmp_path, capsys) == f"{tmp_path / 'config.yaml'}: no such file of settings"


def test_a_disk_that_is_too_small(settings_of, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    settings_of(drafter="heads")
    assert "has 0.00 GB left" in error_of(tmp_path, capsys)


def test_folders_of_earlier_runs(settings_of, tmp_path, capsys):
    train(settings_of(drafter="heads", save_strategy="steps", save_steps=2))

    def refused(*flags) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", str(tmp_path / "config.yaml"), *flags])
        assert ended.value.code == 1
        return capsys.readouterr().err

    assert "holds checkpoint-4 of an earlier run: go on from it with --resume_from_checkpoint true" in refused()
    other = ("--resume_from_checkpoint", "true", "--drafter_options", '{"head_type": "cp", "rank": 2}')
    assert "that run had head_type='ff', this one 'cp'" in refused(*other)
    assert "no such directory" in refused("--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-9"))


def test_models_that_a_run_would_write_over(settings_of, folders, tmp_path, capsys):
    backbone = shutil.copytree(folders / "llama", tmp_path / "copy")
    settings_of(drafter="heads")
    for changes, message in {
        ("--output_dir", backbone, "--model_name_or_path", backbone): f"written over model_name_or_path={backbone}",
        ("--output_dir", backbone): "holds a model that no run wrote",
    }.items():
        assert message in error_of(tmp_path, capsys, *changes)
    assert json.loads((backbone / "config.json").read_text())["model_type"] == "llama"
    once = dict(drafter="heads", max_steps=1)
    train(settings_of(**once))
    train(settings_of(**once))  # the same again
    with pytest.raises(ValueError, match="holds the model of a run with max_steps=1, and this one has 2"):
        train(settings_of(**once | {"max_steps": 2}))


def test_a_student_alone(settings_of, folders, tmp_path, capsys):
    backbone = AutoModelForCausalLM.from_pretrained(folders / "llama")
    PTPStudent.from_backbone(backbone, num_slots=2).save_pretrained(tmp_path / "student")
    settings_of()
    said = error_of(tmp_path, capsys, "--model_name_or_path", tmp_path / "student")
    assert "holds a student without its backbone: give the directory of the whole model" in said


BEFORE_TEXT = {
    "features": ({"features": "f", "strategy": {"train": "all"}}, "features=f keeps the states"),
    "strategy": ({"strategy": {"trian": "all"}}, "TrainingStrategy has no field 'trian'"),
    "acceptance": ({"acceptance": {"rowz": 8}}, "acceptance has no option 'rowz'"),
    "folder": ({"output_dir": "run"}, "holds the model of a run with regenerate=None, and this one has"),
}


@pytest.mark.parametrize(("changes", "message"), BEFORE_TEXT.values(), ids=BEFORE_TEXT)
def test_refusals_come_before_the_backbone_writes_text(changes, message, settings_of, tmp_path):
    train(settings_of(drafter="heads", max_steps=1))
    asked = {"folder": str(tmp_path / "own"), "max_new_tokens": 4}
    changes = changes | {"output_dir": str(tmp_path / changes.get("output_dir", "second"))}
    with pytest.raises(ValueError, match=re.escape(message)):
        train(settings_of(**{"drafter": "heads", "max_steps": 1, "regenerate": asked} | changes))
    assert not (tmp_path / "own").exists() and not (tmp_path / "second").exists()
