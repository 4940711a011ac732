"""A student from a backbone in one command: the backbone writes texts, and slots learn what uniforms pick in them.

    python -m tokenahead.training.ptp.distil --backbone FOLDER --text prompts.txt --output student

A run that was cut off resumes where it stopped: with the next batch of texts, or with the last checkpoint. Slots draft
text of the backbone, and learn less from other text (PTP paper, Table 4).
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainingArguments

from ...configuration.ptp import SAMPLING, VARIANTS
from ...modeling.ptp.model import PTPForCausalLM
from ..checkpoints import best_or_last, is_finished, last_whole_checkpoint
from ..regeneration import RegeneratedText, regenerate
from .forwards import verified_sampling
from .losses import PTPOptions
from .trainer import PTPTrainer


def distil(
    backbone: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    folder: str | os.PathLike,
    *,
    student: dict[str, Any] | None = None,
    options: PTPOptions | None = None,
    arguments: TrainingArguments | None = None,
    **texts: Any,
) -> PTPForCausalLM:
    """Write texts with a backbone, and train a student of it on them; both resume where they were cut off.

    Args:
        backbone: The backbone; unchanged.
        prompts: Ids that the texts begin with; none may be empty.
        folder: Output directory, with `texts/`, `checkpoints/` and `student/`.
        student: Arguments of `PTPForCausalLM.from_backbone`.
        options: Options of `PTPTrainer`; None: `"kl"` for slots that predict distributions, `"ce"` for those that
            predict tokens.
        arguments: Training arguments; None: one epoch, a checkpoint every 500 steps. Their directory is not used.
        **texts: Arguments of `write_texts`: `max_new_tokens`, `per_prompt`, `batch_size`, `seed`.

    Returns:
        The student, which is saved in `folder/student`.

    Raises:
        ValueError: A directory with texts of other settings.
    """
    folder = Path(folder)
    model = PTPForCausalLM.from_backbone(backbone, **(student or {}))
    written = write_texts(model, prompts, folder / "texts", **texts)
    checkpoints = str(folder / "checkpoints")
    if arguments is None:
        arguments = TrainingArguments(checkpoints, num_train_epochs=1, save_steps=500, save_total_limit=1, report_to=[])
    arguments = copy.copy(arguments)
    arguments.output_dir = checkpoints
    options = options or PTPOptions(loss="ce" if model.config.predicts_tokens else "kl")
    trainer = PTPTrainer(model, arguments, options=options, train_dataset=written)
    last = last_whole_checkpoint(checkpoints)
    if last is not None and is_finished(last, arguments.max_steps):
        trainer._load_from_checkpoint(best_or_last(last, arguments.load_best_model_at_end))
    else:
        trainer.train(resume_from_checkpoint=last)
    model.save_pretrained(folder / "student")
    return model.eval()


def write_texts(
    teacher: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    folder: str | os.PathLike,
    *,
    max_new_tokens: int = 256,
    per_prompt: int = 1,
    batch_size: int = 8,
    seed: int = 0,
    sampling: dict[str, Any] | None = None,
) -> RegeneratedText:
    """Let a teacher continue prompts, as `regenerate` does: a run that was cut off ends with the same texts.

    Args:
        teacher: A causal language model of transformers, or a `PTPForCausalLM`.
        prompts: Ids of the prompts; none may be empty.
        folder: Directory of the texts.
        max_new_tokens: Tokens per text, at most.
        per_prompt: Texts per prompt.
        batch_size: Texts per call; part of what the samples depend on.
        seed: Of all texts.
        sampling: `temperature`, `top_k` and `top_p`; None: the distribution that a `PTPForCausalLM` verifies, else the
            whole distribution.

    Returns:
        The texts, with `input_ids` and `labels` (-100 on prompts).

    Raises:
        ValueError: An empty prompt, or a directory with texts of other settings, other prompts or another teacher.
    """
    own = teacher.config.sampling if isinstance(teacher, PTPForCausalLM) else None
    how = verified_sampling(teacher, SAMPLING | (sampling or own or {}), max_new_tokens)
    repeated = [prompt for prompt in prompts for _ in range(per_prompt)]
    return regenerate(teacher, repeated, Path(folder), max_new_tokens, batch_size, seed, generation_config=how)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; see the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backbone", required=True, help="directory or name of a causal language model")
    parser.add_argument("--text", type=Path, required=True, help="a file; its pieces are prompts")
    parser.add_argument("--output", type=Path, required=True, help="directory of texts, checkpoints and student")
    parser.add_argument("--variant", choices=VARIANTS, default="categorical")
    parser.add_argument("--slots", type=_positive, default=8, help="N")
    parser.add_argument("--prompt-tokens", type=_positive, default=32, help="length of a prompt")
    parser.add_argument("--new-tokens", type=_positive, default=256, help="that the backbone writes after each")
    parser.add_argument("--max-prompts", type=_positive, default=4096)
    parser.add_argument("--max-steps", type=int, default=-1, help="of training; by default one epoch")
    parser.add_argument("--batch-size", type=_positive, default=8)
    given = parser.parse_args(words)
    if not given.text.is_file():
        parser.error(f"argument --text: {given.text}: no such file")
    if given.max_steps == 0 or given.max_steps < -1:
        parser.error(f"argument --max-steps: {given.max_steps} must be at least 1, or -1 for one epoch")
    try:
        _distil(parser, given)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))


def _distil(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(given.backbone)
        backbone = AutoModelForCausalLM.from_pretrained(given.backbone).eval()
    except (ValueError, OSError) as error:
        parser.error(f"argument --backbone: {given.backbone}: {' '.join(str(error).split())}")
    ids = tokenizer(given.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    size = given.prompt_tokens
    prompts = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)][: given.max_prompts]
    if not prompts:
        parser.error(f"argument --text: {given.text} has {len(ids)} tokens, less than a prompt of {size}")
    arguments = TrainingArguments(
        str(given.output), num_train_epochs=1, max_steps=given.max_steps, save_steps=500, save_total_limit=1,
        per_device_train_batch_size=given.batch_size, report_to=[],
    )  # fmt: skip
    how = {"variant": given.variant, "num_slots": given.slots}
    distil(backbone, prompts, given.output, student=how, arguments=arguments, max_new_tokens=given.new_tokens)
    tokenizer.save_pretrained(given.output / "student")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    main()
