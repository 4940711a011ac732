"""Values of a file of settings: for every key, what its field cannot hold is said by name, never by a traceback."""

from dataclasses import fields
from typing import get_type_hints

import pytest
import yaml

from tests.internals import _CLASSES, read_settings

FIELDS = {
    entry.name: (entry, str(get_type_hints(kind)[entry.name]))
    for kind in _CLASSES
    for entry in fields(kind)
    if entry.init
}


def read(folder, **values):
    file = folder / "config.yaml"
    given = {"model_name_or_path": "model", "output_dir": str(folder / "run"), "use_cpu": True} | values
    file.write_text(yaml.safe_dump(given))
    return read_settings([str(file)])


def may_be(name, value) -> bool:
    """Whether a field can hold a value, going by the words of its type."""
    entry, hint = FIELDS[name]
    if value is None:
        return entry.default is None or "None" in hint
    if isinstance(value, dict):
        return "dict" in hint and name != "accelerator_config"
    if value == [1]:
        return hint == "list[float]"
    return value == 3 and hint != "list[float]" and ("float" in hint or "int" in hint.replace("Interval", ""))


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_of_another_type_is_named(name, tmp_path):
    for value in (3, [1], {"a": 1}, None, ""):
        try:
            read(tmp_path, **{name: value})
        except (ValueError, OSError) as error:
            said = str(error)
            assert name in said, (value, said)
            assert may_be(name, value) or "is empty" in said or str(value).strip("[]") in said, (value, said)
        else:
            assert may_be(name, value), f"{name}={value!r} was taken"


SAID = {
    "a number": ({"dataset_name": 3}, "dataset_name=3"),
    "a revision that is a number": ({"model_revision": 1234567}, "model_revision=1234567"),
    "no": ({"eval_strategy": False}, "eval_strategy=False"),
    "one of a few": ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type='cosin'"),
    "one of a few words": ({"truncation_mode": "x"}, "truncation_mode='x'"),
    "a truth": ({"packing": "maybe"}, "packing='maybe'"),
    "a word for a number": ({"max_steps": "many"}, "max_steps='many'"),
    "nothing": ({"dataset_name": ""}, "dataset_name"),
    "null": ({"logging_steps": None}, "logging_steps=None"),
    "words in a list": ({"lora_target_modules": ["q_proj", 3]}, "lora_target_modules[1]=3"),
    "a mixture of names": ({"datasets": ["a"]}, "datasets[0]='a'"),
    "a part of a mixture": ({"datasets": [{"path": "a", "split": 3}]}, "split=3"),
    "a misspelt part": ({"datasets": [{"pth": "a"}]}, "datasets[0]={'pth': 'a'}"),
    "a file that is not there": ({"accelerator_config": "x"}, "accelerator_config='x'"),
    "a padding": ({"pad_to_multiple_of": "word"}, "pad_to_multiple_of='word'"),
    "the environment": ({"env": 3}, "env=3"),
}


@pytest.mark.parametrize(("values", "named"), SAID.values(), ids=SAID)
def test_what_would_be_right_is_said(values, named, tmp_path):
    with pytest.raises(ValueError) as caught:
        read(tmp_path, **values)
    assert named in str(caught.value)


def test_what_a_parser_makes_of_text_is_taken(tmp_path):
    settings = read(
        tmp_path, learning_rate="1e-4", packing="true", lr_scheduler_kwargs='{"num_cycles": 2}', save_steps=0.5,
        lora_target_modules="all-linear", use_peft=True, resume_from_checkpoint=True, lr_scheduler_type="cosine",
        datasets=[{"path": "a", "columns": ["b"]}], max_length=None, accelerator_config={"even_batches": False},
        report_to="none", dtype="float64", pad_to_multiple_of=8,
    )  # fmt: skip
    assert (settings.training.learning_rate, settings.training.packing) == (1e-4, True)
    files = ["data/*.jsonl", "data/a.parquet", ["a", "b"], {"train": "a"}]
    for given in files:
        settings = read(tmp_path, datasets=[{"path": "json", "data_files": given}])
        assert settings.mixture.datasets[0].data_files == given
    settings = read(
        tmp_path, datasets=[{"path": "a", "columns": ["b"]}], lora_target_modules="all-linear", use_peft=True
    )
    assert settings.mixture.datasets[0].columns == ["b"] and settings.model.lora_target_modules == "all-linear"


@pytest.mark.parametrize("value", [True, ["full_shard"], "full_shard auto_wrap"])
def test_fsdp_is_asked_for_as_transformers_says(value, tmp_path):
    """True is how it is meant today, names of parts how it was."""
    assert read(tmp_path, fsdp=value).training.fsdp


def test_a_schedule_is_tried_with_the_rate_of_the_run(tmp_path):
    options = dict(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 0.2})
    assert read(tmp_path, learning_rate=0.5, **options).training.learning_rate == 0.5
