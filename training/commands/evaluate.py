"""`tokenahead evaluate MODEL DATA`: losses, accuracies, acceptance and speed-up, as JSON and a figure."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, set_seed

from ... import __version__
from ..byte_text import is_byte_level
from ..checkpoints import base_of, has_adapters, holds_model
from ..completion import load_config
from ..evaluation import GREEDY, Comparison, DraftMeasures, Measurement, environment, hardware, sampled
from ..evaluation.drafts import has_probs, usual_drafts
from ..results import MeasuredResults
from ..utils import needs_extra, replace_picture, replace_text
from .figures import evaluation_figure
from .models import Trainee, build, with_moved_backbone
from .settings import EvaluationArguments, Settings, read_settings
from .train import make_trainer

with needs_extra("train", "tokenahead evaluate"):
    from datasets import Dataset, IterableDataset

FIGURES = "evaluation.json"
"""Everything that was measured."""
RESULTS = "results.json"
"""What a model card is made from."""
PICTURE = "evaluation.png"
_MEASURED = {FIGURES, RESULTS, PICTURE, "analysis.json", "analysis.png"}
_OUT_OF_TRAINING = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1000, "max_steps": 1,
                    "disable_tqdm": True}  # fmt: skip
_WITHOUT_TRAINING: dict[str, Any] = {"acceptance": False, "strategy": None}


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 where greedy texts are those of plain decoding."""
    settings = read_settings(named(argv), "evaluate", EvaluationArguments)
    figures = evaluate(settings)
    print(summary(figures))
    print(f"Wrote {FIGURES}, {RESULTS} and {PICTURE} in {settings.training.output_dir}", file=sys.stderr)
    return 0 if all(row["identical"] is not False for row in figures["decoding"]) else 1


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
    comparisons = decode(trainee, prompts(trainer, trainee, asked), asked, settings.training.seed)
    length = max(each.result.draft_length or 0 for each in comparisons) or None
    measures = DraftMeasures(length=length)
    if has_probs(trainee.model):
        measures.depths = max(length or 0, usual_drafts(trainee.model))
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
        "decoding": [
            asdict(each.result) | {"tokens_per_call": each.result.tokens_per_call, "speed_up": each.result.speed_up}
            for each in comparisons
        ],
        "environment": environment(),
    }
    folder = settings.output
    replace_text(folder / FIGURES, json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    _results(settings, trainee, comparisons, asked).to_json(folder / RESULTS)
    replace_picture(folder / PICTURE, evaluation_figure(figures))
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


def prompts(trainer: Any, trainee: Trainee, asked: EvaluationArguments) -> list[str]:
    """Return the beginnings of held-out rows."""
    rows = list(first_rows(trainer.eval_dataset, asked.prompts))
    return [
        str(trainee.tokenizer.decode(row["input_ids"][: asked.prompt_tokens], skip_special_tokens=True)) for row in rows
    ]


@torch.no_grad()
def decode(trainee: Trainee, texts: list[str], asked: EvaluationArguments, seed: int) -> list[Comparison]:
    """Decode plainly and with drafts, by turns: greedily, and sampled at the requested temperatures."""
    trainee.backbone.eval()
    model: Any = trainee.model.eval()
    modes = [GREEDY if temperature == 0 else sampled(temperature) for temperature in asked.temperatures]
    measurement = Measurement(texts, asked.new_tokens, seed=seed, seconds=asked.seconds)
    return measurement.compare({"it": model}, trainee.tokenizer, modes)["it"]


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
    for row in figures["decoding"]:
        same = {None: "", True: ", same text", False: ", NOT the same text"}[row["identical"]]
        counted = f"{row['tokens_per_call']:.3f} per call, {row['speed_up']:.2f} x plain{same}"
        if (expected := row["expected_tokens_per_call"]) is not None:
            drafts = f"drafts of {row['draft_length']}"
            counted += f"; {row['tokens_per_verification']:.3f} per verification, expected {expected:.3f} ({drafts})"
        lines.append(f"{row['name']}: {counted}")
    return "\n".join(lines)


def _results(
    settings: Settings,
    trainee: Trainee,
    comparisons: list[Comparison],
    asked: EvaluationArguments,
) -> MeasuredResults:
    name = Path(settings.data.dataset_name or "mixture").name
    return MeasuredResults(
        results=[each.result for each in comparisons],
        dataset_name=name,
        dataset_description=f"beginnings of {len(comparisons[0].completions)} held-out rows, up to "
        f"{asked.prompt_tokens} tokens each, continued with {asked.new_tokens}",
        hardware=hardware(),
        dtype=str(trainee.backbone.dtype).removeprefix("torch."),
        command=" ".join(["tokenahead", *sys.argv[1:]]),
        library_version=__version__,
        unit="byte" if is_byte_level(trainee.tokenizer) else "token",
        accepted_by_position=comparisons[0].result.accepted_by_position,
        environment=environment(),
    )
