"""Settings of TRL that this library would not follow, alone or beside others: said before anything is loaded."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import get_scheduler

from ..extras import needs_extra

with needs_extra("train", "tokenahead train"):
    from trl import ModelConfig, SFTConfig

if TYPE_CHECKING:
    from .settings import Settings

_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def check_settings(settings: Settings) -> None:
    """Refuses settings that would be ignored.

    Args:
        settings: Of a run.

    Raises:
        ValueError: There is one; the message names it and says what to do instead.
        FileNotFoundError: A template that is not there.
    """
    _check_model(settings.model)
    if settings.training.parallelism_config is not None:
        raise ValueError(
            f"parallelism_config={settings.training.parallelism_config!r} is an object of accelerate, which no file "
            "holds: leave it out, and use accelerate launch --config_file"
        )
    _check_adapters(settings)
    _check_schedule(settings.training)
    template = settings.training.chat_template_path
    if template and template.startswith((".", "/", "~")) and not Path(template).exists():
        raise FileNotFoundError(f"chat_template_path={template}: no such file or directory")
    if settings.mixture.datasets and settings.data.dataset_name:
        raise ValueError(
            f"dataset_name={settings.data.dataset_name} beside `datasets`: either one text or a mixture is read; leave "
            "one of them out"
        )


def _check_model(model: ModelConfig) -> None:
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, name):
            raise ValueError(f"{name}=True: backbones are not quantised here; leave it out, or set dtype: bfloat16")
    if model.dtype not in (None, *_DTYPES):
        raise ValueError(f"dtype={model.dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")


def _check_schedule(training: SFTConfig) -> None:
    """Refuses options that another schedule of learning rates has; a training would find out at its first step."""
    if not training.lr_scheduler_kwargs:
        return
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=training.learning_rate)
    try:
        get_scheduler(training.lr_scheduler_type, optimizer, 1, 10, training.lr_scheduler_kwargs)
    except TypeError as error:
        raise ValueError(
            f"lr_scheduler_kwargs={training.lr_scheduler_kwargs} do not fit "
            f"lr_scheduler_type={training.lr_scheduler_type.value}: {error}"
        ) from None


def _check_adapters(settings: Settings) -> None:
    model, drafter = settings.model, settings.drafter
    hint = "leave use_peft out, and set strategy: {train: lora}"
    if model.use_peft and drafter.drafter in ("heads", "eagle"):
        raise ValueError(
            f"use_peft=True with drafter={drafter.drafter!r} would put adapters on the drafter, not on its backbone; "
            + (hint if drafter.drafter == "heads" else "leave it out: an EAGLE head learns on a frozen backbone")
        )
    if model.use_peft and drafter.strategy:
        raise ValueError(
            f"strategy={drafter.strategy} beside use_peft=True: PEFT alone says then what learns; leave strategy out, "
            f"or {hint}"
        )
    for entry in fields(model):
        value = getattr(model, entry.name)
        if entry.name.startswith("lora_") and not model.use_peft and value != entry.default:
            raise ValueError(f"{entry.name}={value!r} is of use_peft=True; set it, or the fields of strategy: instead")
