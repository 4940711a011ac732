"""The backbone that learned together with the heads that a run goes on from. Loads no model."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from ...generation.attach import AttachableDrafter
from ..completion import load_config
from ..parts import base_of, has_adapters, named_base, trained_backbone
from .models import Trainee
from .settings import Settings


def with_moved_backbone(settings: Settings) -> Settings:
    """The same settings with the backbone that learned together with the heads of `drafter_name_or_path`, if one did.

    `model_name_or_path` may name that backbone, or the one that it was before, or nothing. Adapters go on any backbone
    that is named, for a directory may have been moved.

    Args:
        settings: Of a run.

    Raises:
        ValueError: A whole backbone learned, and another one is named.
    """
    heads, named = settings.drafter.drafter_name_or_path, settings.model.model_name_or_path
    folder = trained_backbone(heads) if heads else None
    if folder is None:
        return settings
    named = None if _is_same(named, folder) else named
    if has_adapters(folder):
        if named is not None and not _is_same(named, before := named_base(folder)):
            warnings.warn(f"the adapters of {folder} were trained for {before}, and go on {named}", stacklevel=2)
        return _on(settings, named or base_of(folder), adapters=str(folder))
    if named is not None and not _is_same(named, load_config(heads, "drafter_name_or_path").base_model_name_or_path):
        raise ValueError(
            f"model_name_or_path={named}: the backbone of {heads} learned with these heads; name {folder}, or leave "
            "model_name_or_path out"
        )
    return _on(settings, str(folder))


def note_backbone(trainee: Trainee, asked: Settings, settings: Settings) -> None:
    """Has a drafter that goes on say which backbone it is for now, as one says that is made new.

    Args:
        trainee: What is trained.
        asked: Settings as they were given.
        settings: The same with the backbone that is meant (`with_moved_backbone`).

    Raises:
        ValueError: A backbone with adapters that stays as it is: saved would be heads without these adapters.
    """
    if not isinstance(trainee.model, AttachableDrafter) or settings.drafter.drafter_name_or_path is None:
        return
    is_frozen = settings.drafter.training_strategy().train == "drafter"
    if is_frozen and settings.adapters is not None:
        raise ValueError(
            f"drafter_name_or_path={settings.drafter.drafter_name_or_path}: these heads learned with the adapters of "
            f"{settings.adapters}, which heads alone would not save; set strategy: {{train: lora}}, or merge them into "
            "the backbone, and name the merged one"
        )
    # a backbone that learns lies beside the heads, and comes from the one that was asked for
    name = (settings if is_frozen else asked).model.model_name_or_path
    trainee.model.config.base_model_name_or_path = name or trainee.model.config.base_model_name_or_path


def _on(settings: Settings, backbone: str, adapters: str | None = None) -> Settings:
    return replace(settings, model=replace(settings.model, model_name_or_path=backbone), adapters=adapters)


def _is_same(name: str | None, other: str | Path | None) -> bool:
    return name is not None and other is not None and Path(name).resolve() == Path(other).resolve()
