"""`tokenahead evaluate MODEL DATA`: losses, accuracies and expected acceptance along a text, as JSON and a figure."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, set_seed

from ..checkpoints import base_of, has_adapters, holds_model
from ..completion import load_config
from ..evaluation import DraftMeasures, environment
from ..evaluation.drafts import has_probs
from ..utils import needs_extra, replace_picture, replace_text
from .figures import evaluation_figure
from .models import Trainee, build, with_moved_backbone
from .settings import EvaluationArguments, Settings, read_settings
from .train import make_trainer

with needs_extra("train", "tokenahead evaluate"):
    from datasets import Dataset, IterableDataset

FIGURES = "evaluation.json"
"""Everything that was measured."""
PICTURE = "evaluation.png"
_MEASURED = {FIGURES, PICTURE, "analysis.json", "analysis.png"}
_OUT_OF_TRAINING = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1000, "max_steps": 1,
                    "disable_tqdm": True}  # fmt: skip
_WITHOUT_TRAINING: dict[str, Any] = {"acceptance": False, "strategy": None}


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0."""
    settings = read_settings(named(argv), "evaluate", EvaluationArguments)
    figures = evaluate(settings)
    print(summary(figures))
    print(f"Wrote {FIGURES} in {settings.training.output_dir}", file=sys.stderr)
    return 0


def named(argv: Sequence[str]) -> list[str]:
    """Return the arguments with flags in place of `MODEL DATA`; a YAML file is left in its place."""
    words = list(argv)
    names = []
    while words and not words[0].startswith("-") and len(names) < 2:
        names.append(words.pop(0))
    if names and names[0].endswith((".yaml", ".yml")):
        return [names[0], *names[1:], *words]
    flags = ("--model_name_or_path", "--dataset_name")
    return [word for pair in zip(flags, names) for word in pair] + words


def evaluate(settings: Settings) -> dict[str, Any]:
    """Measure a drafter, and write what was found.

    Returns:
        What is written to `evaluation.json`.

    Raises:
        ValueError: Settings or data that cannot be used.
    """
    asked: EvaluationArguments = settings.extra
    settings, trainee, trainer = drafter_and_data(settings)
    metrics = trainer.evaluate()
    measures = DraftMeasures()
    if has_probs(trainee.model):
        for batch in trainer.get_eval_dataloader(first_rows(trainer.eval_dataset, asked.rows)):
            measures.add(trainee.model, batch)
    figures = {
        "model": settings.model.model_name_or_path,
        "adapters": settings.adapters,
        "drafter": settings.drafter.drafter_name_or_path,
        "data": settings.data.dataset_name,
        "losses": {name: value for name, value in metrics.items() if "loss" in name or "correct" in name},
        "depths": by_depth(measures),
        "held_out": along_held_out(measures),
        "environment": environment(),
    }
    replace_text(settings.output / FIGURES, json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    if figures["depths"]:
        replace_picture(settings.output / PICTURE, evaluation_figure(figures))
    return figures


def drafter_and_data(settings: Settings) -> tuple[Settings, Trainee, Any]:
    """Return what a measuring command starts from."""
    settings = settings_of_drafter(settings)
    set_seed(settings.training.seed)
    trainee = build(settings)
    return settings, trainee, evaluator(settings, trainee)


def settings_of_drafter(settings: Settings) -> Settings:
    """Return the settings with the drafter that is meant.

    A file for training means what that training has left in its `output_dir`; and where `model_name_or_path` names
    heads, an EAGLE head or adapters of PEFT, their directory names the backbone.
    """
    trained, settings = settings.output, with_moved_backbone(settings)
    if "file" in settings.given and _holds_training(trained):
        return _with_drafter(settings, str(trained))
    source = settings.model.model_name_or_path
    if not source:
        return settings
    if has_adapters(source):
        return _with_adapters(
            replace(settings, model=replace(settings.model, model_name_or_path=base_of(source))), source
        )
    config = load_config(source, "model_name_or_path")
    kind = {"mtp_heads": "heads", "eagle_head": "eagle"}.get(config.model_type)
    if kind is None:
        return settings
    if not config.base_model_name_or_path:
        raise ValueError(f"{source} does not say for which model it was trained: pass that model, and this as "
                         f"--drafter {kind} --drafter_name_or_path")  # fmt: skip
    model = replace(settings.model, model_name_or_path=config.base_model_name_or_path)
    return _with_drafter(replace(settings, model=model, drafter=replace(settings.drafter, drafter=kind)), source)


def _holds_training(folder: Path) -> bool:
    """Return whether a training has left a model in its directory; an unfinished training is refused."""
    if holds_model(folder) or has_adapters(folder):
        return True
    names = {entry.name for entry in folder.iterdir()} - _MEASURED if folder.is_dir() else set()
    if names:
        raise ValueError(
            f"output_dir={folder} holds {', '.join(sorted(names)[:3])} and no trained model: let the training come to "
            "its end (tokenahead train, --resume_from_checkpoint true), or choose another --output_dir to measure the "
            "model that it would begin with"
        )
    return False


def _with_drafter(settings: Settings, folder: str) -> Settings:
    """Return the settings with the drafter of a directory, or with the model that brings its own."""
    if has_adapters(folder):
        return _with_adapters(settings, folder)
    if settings.drafter.drafter in ("heads", "eagle"):
        drafter = replace(settings.drafter, drafter_name_or_path=folder, drafter_options=None)
        return with_moved_backbone(replace(settings, drafter=drafter))
    model = replace(settings.model, model_name_or_path=folder)
    return replace(settings, model=model, drafter=replace(settings.drafter, drafter="own", drafter_options=None))


def _with_adapters(settings: Settings, folder: str) -> Settings:
    """Return the settings with the model that a training with PEFT began with, and the adapters that it left."""
    if settings.drafter.drafter in ("heads", "eagle"):
        raise ValueError(f"{folder} holds adapters of PEFT for drafter={settings.drafter.drafter!r}, which cannot be "
                         "measured: train with `strategy: {train: lora}` in place of use_peft")  # fmt: skip
    return replace(settings, model=replace(settings.model, use_peft=False), adapters=folder)


def evaluator(settings: Settings, trainee: Trainee) -> Any:
    """Return a trainer for evaluation alone, which prepares the data as training does."""
    for name, value in _OUT_OF_TRAINING.items():
        setattr(settings.training, name, value)
    settings = replace(settings, drafter=replace(settings.drafter, **_WITHOUT_TRAINING))
    data = settings.data
    is_file = data.dataset_name is not None and Path(data.dataset_name).is_file()
    if is_file and settings.mixture.test_split_size is None:  # a file has one split
        data.dataset_test_split = data.dataset_train_split
    trainer = make_trainer(settings, trainee)
    trainer.remove_callback(PrinterCallback)
    return trainer


def first_rows(data: Dataset | IterableDataset, count: int) -> Dataset | IterableDataset:
    """Return the first rows of a dataset or a stream."""
    return data.select(range(min(count, len(data)))) if isinstance(data, Dataset) else data.take(count)


def by_depth(measures: DraftMeasures) -> list[dict[str, float]]:
    """Return losses and accuracies by depth; 2 is the first drafted token."""
    means = measures.means()
    return [{"depth": depth, **dict(zip(means, values))} for depth, values in enumerate(zip(*means.values()), 2)]


def along_held_out(measures: DraftMeasures) -> dict[str, Any]:
    """Return the tokens per call that are expected along held-out rows; empty where nothing is known."""
    if not measures.calls:
        return {}
    return {
        "text": "held-out rows, T = 1: an approximation, for they are not the model's own text",
        "draft_length": measures.calls["block"].drafts,
        "accepted_by_position": measures.calls["block"].by_position,
        **{f"tokens_per_call_{rule}": found.tokens_per_call for rule, found in measures.calls.items()},
    }


def summary(figures: dict[str, Any]) -> str:
    """Return a few lines for a person."""
    lines = [f"held-out loss {figures['losses'].get('eval_loss', math.nan):.3f} nats"]
    for row in figures["depths"]:
        shown = f"loss {row['loss']:.3f}, top-1 {row['top_1']:.3f}, top-5 {row['top_5']:.3f}"
        lines.append(f"depth {row['depth']}: {shown}")
    if held_out := figures["held_out"]:
        both = ", ".join(f"{rule} {held_out[f'tokens_per_call_{rule}']:.3f}" for rule in ("block", "token"))
        lines.append(f"expected per call along {held_out['text']}; drafts of {held_out['draft_length']}: {both}")
    return "\n".join(lines)
