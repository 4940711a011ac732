"""`tokenahead regenerate` and `tokenahead features`: what `tokenahead train` prepares, alone, with its settings."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import set_seed
from transformers.utils import logging

from ..trainer_base import check_kernels
from .models import Trainee, build, draft_frequent_tokens, store_features, with_own_text
from .settings import Settings, read_settings
from .train import leave_processes, make_trainer, remove_empty_dir


def write_answers(argv: Sequence[str]) -> int:
    """Run `tokenahead regenerate`; return 0 when all rows are answered."""
    settings, trainee = _begun("regenerate", argv)
    with_own_text(settings, trainee)
    leave_processes()
    return 0


def write_states(argv: Sequence[str]) -> int:
    """Run `tokenahead features`; return 0 when the states of all rows are stored."""
    settings, trainee = _begun("features", argv)
    with remove_empty_dir(settings.output):
        trainer = make_trainer(with_own_text(settings, trainee), trainee)
        draft_frequent_tokens(trainer, trainee, settings)
        store_features(trainer, settings)
    leave_processes()
    return 0


def _begun(section: str, argv: Sequence[str]) -> tuple[Settings, Trainee]:
    """Return settings, which have a section of that name, and the model."""
    settings = read_settings(argv, section)
    if getattr(settings.drafter, section) is None:
        raise ValueError(f"{section} is missing: tokenahead {section} writes what this setting of a training names")
    if settings.training.disable_tqdm:
        logging.disable_progress_bar()
    check_kernels(settings.training)
    set_seed(settings.training.seed)
    return settings, build(settings)
