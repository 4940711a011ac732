"""What `tokenahead train` refuses before the first step: one line that names the setting."""

import json
import re
import shutil

import pytest
import yaml
from transformers import AutoModelForCausalLM

from tokenahead import PTPStudent, cli
from tokenahead.training.commands.settings import filled, read_settings
from tokenahead.training.commands.train import build, train
from tokenahead.training.ptp.losses import PTPOptions


def error_of(tmp_path, capsys, *flags) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(tmp_path / "config.yaml"), *map(str, flags)])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenahead")]
    assert ended.value.code == 1 and len(lines) == 1
    return lines[0].removeprefix("tokenahead train: ")


WRONG = {
    "no model": ({"model_name_or_path": None}, "model_name_or_path"),
    "data that are not there": ({"dataset_name": "./nowhere"}, "nowhere"),
    "a split that is not there": (
        {"test_split_size": None, "eval_strategy": "steps", "eval_steps": 2}, "dataset_test_split='test'"
    ),
    "a model without a drafter": ({"drafter": "own"}, "drafter"),
    "an unknown option": ({"drafter_options": {"rang": 2}}, "'rang'"),
    "an unknown field of a strategy": ({"strategy": {"trian": "all"}}, "'trian'"),
    "an unknown loss option": ({"drafter": "parallel", "loss_options": {"weight": 1}}, "no option 'weight'"),
    "a compiled step": ({"torch_compile": True}, "torch_compile=True"),
    "wrapped packing": ({"packing": True, "packing_strategy": "wrapped"}, "packing_strategy='wrapped'"),
    "a loss of TRL": ({"loss_type": "dft"}, "loss_type='dft'"),
    "acceptance that nothing measures": ({"acceptance": {"rowz": 8}}, "'rowz'"),
    "adapters of TRL on heads": ({"use_peft": True}, "no setting use_peft for drafter=heads"),
    "a part of adapters on heads": ({"lora_r": 4}, "no setting lora_r for drafter=heads"),
    "a part of no adapters": ({"drafter": "modules", "lora_r": 4}, "lora_r: options of use_peft=True"),
    "adapters and a strategy": (
        {"use_peft": True, "drafter": "own", "strategy": {"train": "all"}},
        "strategy={'train': 'all'} beside use_peft=True",
    ),
    "features of a backbone that learns": ({"features": "f", "strategy": {"train": "all"}}, "features=f"),
    "features of modules": ({"features": "f", "drafter": "modules"}, "features for drafter=modules"),
    "features of a stream": (
        {"features": "f", "dataset_streaming": True, "test_split_size": None}, "streaming: false"
    ),
    "text of nowhere": ({"regenerate": {"max_new_tokens": 4}}, "regenerate={'max_new_tokens': 4}"),
    "a server's field": ({"regenerate": {"folder": "f", "engine": {"url": "http://a", "triez": 1}}}, "'triez'"),
    "quantised, own": ({"drafter": "own", "load_in_4bit": True}, "no setting load_in_4bit for drafter=own"),
    "a text and a mixture": ({"datasets": [{"path": "text"}]}, "beside `datasets`"),
    "a folder that is a file": ({"output_dir": "config.yaml"}, "config.yaml"),
    "a weight that is a word": ({"strategy": {"loss_weight": "much"}}, "strategy: "),
    "half a completion": (
        {"drafter": "parallel", "loss_options": {"completions": 2.5}}, "loss_options: argument --completions"
    ),
    "a strategy of slots": ({"drafter": "parallel", "strategy": {"train": "all"}}, "shard_backbone alone"),
    "no": ({"eval_strategy": False}, "select one of ['no', 'steps', 'epoch']"),
    "one of a few": ({"lr_scheduler_type": "cosin"}, "cosin"),
    "one of ours": ({"drafter": "medusa"}, "drafter='medusa': choose of own"),
    "half a step": ({"max_steps": 2.5}, "max_steps"),
    "a word for a number": ({"max_steps": "many"}, "--max_steps"),
    "nothing for a flag": ({"packing": ""}, "--packing"),
    "nothing for a number": ({"early_stopping_patience": ""}, "--early_stopping_patience"),
    "a misspelt part": ({"datasets": [{"pth": "a"}]}, "'pth'"),
    "a number for a section": ({"acceptance": 3}, "acceptance="),
    "a key that does not exist": ({"learning_rte": 1}, "--learning_rte"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_named(changes, message, settings_of, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings_of(drafter="heads")
    file = tmp_path / "config.yaml"
    values = yaml.safe_load(file.read_text()) | changes
    file.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
    assert message in error_of(tmp_path, capsys)


def test_numbers_that_yaml_reads_as_text_are_numbers(settings_of, tmp_path):
    settings_of(drafter="parallel", drafter_options={"num_slots": 3})
    file = tmp_path / "config.yaml"
    file.write_text(file.read_text() + "loss_options: {gamma: 9e-1}\nweight_decay: 1e-2\n")
    settings = read_settings([str(file)])
    assert filled("loss_options", settings.drafter.options("loss_options"), PTPOptions).gamma == 0.9
    assert settings.training.weight_decay == 0.01
    assert build(settings).model.config.num_slots == 3


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        ({"input_ids": [70, 999]}, {}, "input_ids hold 999"),
        ({"input_ids": [70, 71, 72], "labels": [70, 71, 72]}, {"labels": [70]}, "3 input_ids and 1 labels"),
        ({"input_ids": [70]}, {}, "train_dataset"),
        ({"input_ids": [70, 71], "labels": [-5, 71]}, {}, "labels hold -5"),
    ],
)
def test_rows_that_cannot_be_learned_are_named(first, last, message, settings_of, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in [first] * 5 + [first | last]))
    for streaming in (False, True) if "labels" in message else (False,):
        settings = settings_of(
            drafter="heads", dataset_name=str(file), test_split_size=None, dataset_streaming=streaming
        )
        with pytest.raises(ValueError, match=message):
            train(settings)


def test_folders_of_earlier_runs(settings_of, tmp_path, capsys):
    train(settings_of(drafter="heads", save_strategy="steps", save_steps=2))

    def refused(*flags) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", str(tmp_path / "config.yaml"), *flags])
        assert ended.value.code == 1
        return capsys.readouterr().err

    assert "holds checkpoint-4 of an earlier run" in refused()
    other = ("--resume_from_checkpoint", "true", "--drafter_options", '{"head_type": "cp", "rank": 2}')
    assert "head_type='ff', and this model 'cp'" in refused(*other)
    assert "checkpoint-9" in refused("--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-9"))


def test_models_that_a_run_would_write_over(settings_of, folders, tmp_path, capsys):
    backbone = shutil.copytree(folders / "llama", tmp_path / "copy")
    settings_of(drafter="heads")
    for changes, message in {
        ("--output_dir", backbone, "--model_name_or_path", backbone): f"written over {backbone}",
        ("--output_dir", backbone): f"output_dir={backbone}",
    }.items():
        assert message in error_of(tmp_path, capsys, *changes)
    assert json.loads((backbone / "config.json").read_text())["model_type"] == "llama"
    once = dict(drafter="heads", max_steps=1)
    train(settings_of(**once))
    train(settings_of(**once))  # the same again
    with pytest.raises(ValueError, match="max_steps=1"):
        train(settings_of(**once | {"max_steps": 2}))


def test_a_student_alone_and_a_model_without_a_tokenizer(settings_of, folders, tmp_path, capsys):
    backbone = AutoModelForCausalLM.from_pretrained(folders / "llama")
    PTPStudent.from_backbone(backbone, num_slots=2).save_pretrained(tmp_path / "student")
    settings_of()
    said = error_of(tmp_path, capsys, "--model_name_or_path", tmp_path / "student")
    assert f"model_name_or_path={tmp_path / 'student'}" in said
    backbone.save_pretrained(tmp_path / "bare")
    settings_of(drafter="heads")
    said = error_of(tmp_path, capsys, "--model_name_or_path", tmp_path / "bare")
    assert str(tmp_path / "bare") in said or "tokenizer" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"features": "f", "strategy": {"train": "all"}}, "features=f"), ({"output_dir": "run"}, "regenerate=None")],
)
def test_refusals_come_before_the_backbone_writes_text(changes, message, settings_of, tmp_path):
    train(settings_of(drafter="heads", max_steps=1))
    asked = {"folder": str(tmp_path / "own"), "max_new_tokens": 4}
    changes = changes | {"output_dir": str(tmp_path / changes.get("output_dir", "second"))}
    with pytest.raises(ValueError, match=re.escape(message)):
        train(settings_of(**{"drafter": "heads", "max_steps": 1, "regenerate": asked} | changes))
    assert not (tmp_path / "own").exists() and not (tmp_path / "second").exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path, capsys):
    missing, cases = "config.yaml: No such file", {"- 1\n": "config.yaml.*mapping", "a: [\n": "config.yaml"}
    for text, words in {None: missing, **cases}.items():
        if text is not None:
            (tmp_path / "config.yaml").write_text(text)
        found = error_of(tmp_path, capsys)
        assert re.search(words, found) and "Errno" not in found and "quotes" not in found


def read(folder, **values):
    file = folder / "config.yaml"
    given = {"model_name_or_path": "model", "output_dir": str(folder / "run"), "use_cpu": True} | values
    file.write_text(yaml.safe_dump(given))
    return read_settings([str(file)])


@pytest.mark.core
def test_what_a_parser_makes_of_text_is_taken(tmp_path):
    settings = read(
        tmp_path, learning_rate="1e-4", packing="true", lr_scheduler_kwargs='{"num_cycles": 2}', save_steps=0.5,
        lora_target_modules="all-linear", use_peft=True, resume_from_checkpoint=True, lr_scheduler_type="cosine",
        datasets=[{"path": "a", "columns": ["b"]}], max_length=None, accelerator_config={"even_batches": False},
        report_to="none", dtype="bfloat16", pad_to_multiple_of=8, model_revision=1234567,
    )  # fmt: skip
    assert (settings.training.learning_rate, settings.training.packing) == (1e-4, True)
    assert settings.model.model_revision == "1234567" and settings.model.lora_target_modules == "all-linear"
    assert settings.mixture.datasets[0].columns == ["b"] and settings.training.activation_checkpointing is False
    for given in ("data/*.jsonl", "data/a.parquet", ["a", "b"], {"train": "a"}):
        settings = read(tmp_path, datasets=[{"path": "json", "data_files": given}])
        assert settings.mixture.datasets[0].data_files == given
    for value in (True, "full_shard auto_wrap"):  # as it is meant today, and as it was
        assert read(tmp_path, fsdp=value).training.fsdp
    assert read(tmp_path, gradient_checkpointing=True).training.activation_checkpointing is True
