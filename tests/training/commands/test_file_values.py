"""Values of a file of settings: for every key, what its field cannot hold is said by name, never by a traceback."""

import pytest
import yaml

from tokenahead.training.commands.settings import read_settings


def read(folder, **values):
    file = folder / "config.yaml"
    given = {"model_name_or_path": "model", "output_dir": str(folder / "run"), "use_cpu": True} | values
    file.write_text(yaml.safe_dump(given))
    return read_settings([str(file)])


@pytest.mark.parametrize("name", ["max_steps", "packing", "early_stopping_patience"])
@pytest.mark.parametrize("value", ["many", ""])
def test_a_value_of_another_type_is_named(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"--{name}.*value"):
        read(tmp_path, **{name: value})


SAID = {
    "no": ({"eval_strategy": False}, "select one of ['no', 'steps', 'epoch']"),
    "one of a few": ({"lr_scheduler_type": "cosin"}, "cosin"),
    "one of ours": ({"drafter": "medusa"}, "drafter='medusa': choose of own"),
    "half a step": ({"max_steps": 2.5}, "max_steps"),
    "a misspelt part": ({"datasets": [{"pth": "a"}]}, "'pth'"),
    "a number for a section": ({"acceptance": 3}, "acceptance="),
    "a key that does not exist": ({"learning_rte": 1}, "--learning_rte"),
}


@pytest.mark.parametrize(("values", "named"), SAID.values(), ids=SAID)
def test_what_would_be_right_is_said(values, named, tmp_path):
    with pytest.raises((ValueError, OSError)) as caught:
        read(tmp_path, **values)
    assert named in str(caught.value)


@pytest.mark.core
def test_what_a_parser_makes_of_text_is_taken(tmp_path):
    settings = read(
        tmp_path, learning_rate="1e-4", packing="true", lr_scheduler_kwargs='{"num_cycles": 2}', save_steps=0.5,
        lora_target_modules="all-linear", use_peft=True, resume_from_checkpoint=True, lr_scheduler_type="cosine",
        datasets=[{"path": "a", "columns": ["b"]}], max_length=None, accelerator_config={"even_batches": False},
        report_to="none", dtype="bfloat16", pad_to_multiple_of=8, model_revision=1234567,
    )  # fmt: skip
    assert (settings.training.learning_rate, settings.training.packing) == (1e-4, True)
    assert settings.model.model_revision == "1234567"
    files = ["data/*.jsonl", "data/a.parquet", ["a", "b"], {"train": "a"}]
    for given in files:
        settings = read(tmp_path, datasets=[{"path": "json", "data_files": given}])
        assert settings.mixture.datasets[0].data_files == given
    settings = read(
        tmp_path, datasets=[{"path": "a", "columns": ["b"]}], lora_target_modules="all-linear", use_peft=True
    )
    assert settings.mixture.datasets[0].columns == ["b"] and settings.model.lora_target_modules == "all-linear"


@pytest.mark.parametrize("value", [True, "full_shard auto_wrap"])
def test_fsdp_is_asked_for_as_transformers_says(value, tmp_path):
    """True is how it is meant today, names of parts how it was."""
    assert read(tmp_path, fsdp=value).training.fsdp
