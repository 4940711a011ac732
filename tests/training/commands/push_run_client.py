"""Run by test_pushing.py as a separate process, against a loopback Hub: trains tiny heads, and pushes them;
then lets the model write answers, pushes these as a data set, and trains on that by its name.

Usage: python push_run_client.py FOLDER. FOLDER has the models and `config.yaml`; `ended.json` is left there.
"""

import json
import sys
from pathlib import Path

import yaml
from transformers import AutoModelForCausalLM

from tokenahead import cli
from tokenahead.training import regenerate


def ended(folder: Path, name: str, **changes: object) -> dict:
    """Exit status of a run, and whether it took a step."""
    values = yaml.safe_load((folder / "config.yaml").read_text()) | {"output_dir": str(folder / name)} | changes
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    try:
        cli.main(["train", str(folder / f"{name}.yaml")])
    except SystemExit as end:
        return {"status": end.code, "stepped": (folder / name / "metrics.json").exists()}


def pushed_answers(folder: Path) -> str:
    """Name of a data set of answers, of 32 tokens each."""
    backbone = AutoModelForCausalLM.from_pretrained(folder / "llama")
    rows = regenerate(backbone, [[70 + row, 71] for row in range(8)], folder / "answers", max_new_tokens=32)
    rows.to_dataset().push_to_hub("me/answers")
    return "me/answers"


def main(folder: Path) -> None:
    eagle = {"drafter": "eagle", "drafter_options": {"version": 1}}
    found = {
        "heads": ended(folder, "heads", hub_model_id="me/heads"),
        "steps": ended(folder, "steps", hub_model_id="me/steps", save_strategy="steps", save_steps=1,
                       hub_strategy="all_checkpoints", hub_always_push=True, **eagle),
        "both": ended(folder, "both", hub_model_id="me/both", strategy={"train": "lora"}),
        "adapters": ended(folder, "adapters", hub_model_id="me/adapters", drafter="own", drafter_options=None,
                          model_name_or_path=str(folder / "evabyte"),
                          use_peft=True, lora_target_modules=["q_proj", "v_proj"]),
        "taught": ended(folder, "taught", hub_model_id="me/taught", dataset_name=pushed_answers(folder)),
        "another's": ended(folder, "another", hub_model_id="other/heads"),
    }  # fmt: skip
    (folder / "ended.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
