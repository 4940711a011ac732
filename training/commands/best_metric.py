"""Whether an evaluation will have what a run chooses its checkpoints by. Knows names, and computes nothing."""

from __future__ import annotations

from transformers import Trainer

from ..sft import NAMES, MTPSFTTrainer

_OF_TIME = ("runtime", "samples_per_second", "steps_per_second")


def check_best_metric(trainer: Trainer) -> None:
    """Refuses a `metric_for_best_model` that no evaluation has; `Trainer` would find out after the first one.

    Args:
        trainer: Of the run, with its callbacks.

    Raises:
        ValueError: An unknown name; those that there are are listed.
    """
    asked = trainer.args.metric_for_best_model
    if asked is None or trainer.args.eval_strategy == "no":
        return
    known = ["loss", *trainer._mean_names()]
    if isinstance(trainer, MTPSFTTrainer) and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        known += NAMES
    for callback in trainer.callback_handler.callbacks:
        known += callback.metric_names(trainer) if hasattr(callback, "metric_names") else ()
    if asked.removeprefix("eval_") not in (*known, *_OF_TIME):
        raise ValueError(f"metric_for_best_model={asked!r} is in no evaluation of this run; choose {', '.join(known)}")
