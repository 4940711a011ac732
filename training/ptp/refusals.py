"""What a Trainer can be asked for and these trainers cannot do: said at the door."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments


def check_arguments(trainer: Any) -> None:
    """Refuses arguments that would be ignored.

    Args:
        trainer: An `UpdateTrainer`.

    Raises:
        ValueError: There is one; the message says what to do instead.
    """
    name, means = type(trainer).__name__, trainer._mean_names()
    if trainer.compute_metrics is not None:
        raise ValueError(
            f"compute_metrics= would be given logits of texts, and a step of {name} has those of rows behind them; the "
            f"log carries {means[0]} and eval_{means[0]}, and evaluate(...) returns them"
        )
    if trainer.args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor={trainer.args.label_smoothing_factor} is for losses of labels alone, and {name} "
            "has one of its own; set it to 0"
        )


def check_noise(args: TrainingArguments) -> None:
    """Refuses noise where a distribution is learned from the backbone itself.

    Raises:
        ValueError: NEFTune.
    """
    if args.neftune_noise_alpha:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha} would add noise to the embeddings that the teacher reads, "
            "too, and its distribution is what the slots learn; leave it out"
        )
