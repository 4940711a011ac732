"""What a Trainer can be asked for and `PTPTrainer` cannot do: said at the door."""

from __future__ import annotations

from transformers import Trainer


def check_arguments(trainer: Trainer) -> None:
    """Refuses arguments that would be ignored, or would spoil what the slots learn from.

    Raises:
        ValueError: There is one; the message says what to do instead.
    """
    if trainer.compute_metrics is not None:
        raise ValueError(
            "compute_metrics= would be given logits of texts, and a step of PTPTrainer has those of slots alone; the "
            "log carries num_correct and eval_num_correct, and evaluate(...) returns them"
        )
    args = trainer.args
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor={args.label_smoothing_factor} is for losses of labels: a slot learns the law or "
            "the token that decoding verifies; set it to 0"
        )
    if args.neftune_noise_alpha:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha} would add noise to the embeddings that the teacher reads, "
            "too, and its law is what the slots learn; leave it out"
        )
