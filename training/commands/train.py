"""`tokenahead train`: settings to a trained model in a run directory. Only the order of things is written here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ...configuration import EvaByteConfig, MTPHeadConfig
from ..acceptance_callback import AcceptanceCallback
from ..byte_text import is_byte_level
from ..checkpoints import best_or_last, is_finished
from ..trainer_base import BaseTrainer
from ..trl_trainers import MTPSFTTrainer, PTPSFTTrainer
from ..utils import needs_extra
from .data import load_data
from .figures import draw_learning
from .models import (
    Trainee,
    build,
    check_features,
    is_parallel,
    keep_features,
    note_backbone,
    ptp_options,
    with_moved_backbone,
    with_own_text,
)
from .run_directory import (
    RunWriter,
    check_nothing_is_lost,
    check_own_folder,
    check_space,
    checkpoint_to_resume,
    nothing_left_of_a_refusal,
    write_metrics,
    write_run,
)
from .settings import Settings, read_settings
from .typed import typed_options

with needs_extra("train", "tokenahead train"):
    from trl import get_peft_config
with needs_extra("demo", "the progress bar"):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

_SECONDS_BETWEEN_LINES = 20.0  # where there is no terminal to draw a bar on

_STATES_OF_ADAM = 2
_OF_TIME = ("runtime", "samples_per_second", "steps_per_second")


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when the training is complete."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    settings = read_settings(argv, "train")
    train(settings)
    if torch.distributed.is_initialized():
        # Threads of a process group that is left to the destructors at exit may abort a process whose work is done,
        # and torchrun would call the run failed.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


def train(settings: Settings, callbacks: Sequence[TrainerCallback] = ()) -> Trainer:
    """Train what the settings say, and write model, log, figure and the facts of the run to `output_dir`.

    Returns:
        The trainer, after its training.

    Raises:
        ValueError: See `main`.
        OSError: See `main`.
    """
    folder = settings.output
    check_own_folder(folder, settings)
    set_seed(settings.training.seed)
    with nothing_left_of_a_refusal(folder):
        return _train(folder, settings, callbacks)


def _train(folder: Path, asked: Settings, callbacks: Sequence[TrainerCallback]) -> Trainer:
    settings = with_moved_backbone(asked)
    trainee = build(settings)
    note_backbone(trainee, asked, settings)
    facts = facts_of(trainee, settings)
    resumed = checkpoint_to_resume(folder, settings.training.resume_from_checkpoint, facts)
    if resumed is None:
        check_nothing_is_lost(folder, asked)
    _check_before_text(settings, trainee)
    settings = with_own_text(settings, trainee)
    trainer = make_trainer(settings, trainee, [*callbacks, RunWriter(folder, asked, facts)])
    check_best_metric(trainer)
    trainer.remove_callback(PrinterCallback)  # every entry is in the file of metrics, and the bar shows the last
    check_space(folder, checkpoint_bytes(trainer), _kept(settings, trainer))
    pushes = settings.training.push_to_hub
    if pushes:  # what no card may show is said before the first step
        trainer.create_model_card(dataset=asked.data.dataset_name)
    try:
        if is_finished(resumed, settings.training.max_steps):
            _take_over(trainer, str(resumed))
            if trainer.is_world_process_zero():
                write_run(folder, asked, facts)
        else:
            keep_features(trainer, settings)
            trainer.train(resume_from_checkpoint=resumed)
        with _no_push(settings):
            trainer.save_model()
    finally:
        if trainer.is_world_process_zero() and trainer.state.log_history:
            write_metrics(folder, trainer.state.log_history)
            draw_learning(trainer.state.log_history, folder)
    if pushes:
        trainer.push_to_hub(dataset_name=asked.data.dataset_name)
    return trainer


def _check_before_text(settings: Settings, trainee: Trainee) -> None:
    """Refuse settings that need no data to be checked, before the backbone writes any."""
    settings.drafter.training_strategy()
    check_features(settings, trainee.model)
    _callbacks(settings, trainee, settings.training.eval_strategy != "no")


def _take_over(trainer: Trainer, checkpoint: str) -> None:
    """Restore the end of a training: the machine may have failed between it and the saving of the model."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(f"resume_from_checkpoint={checkpoint}: all steps of max_steps are made, raise max_steps")
    trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    trainer._load_from_checkpoint(best_or_last(checkpoint, trainer.args.load_best_model_at_end))


@contextmanager
def _no_push(settings: Settings) -> Iterator[None]:
    """Let `save_model` save alone: the push comes once, with the log and its figure."""
    training = settings.training
    asked, training.push_to_hub = training.push_to_hub, False
    try:
        yield
    finally:
        training.push_to_hub = asked


def make_trainer(settings: Settings, trainee: Trainee, callbacks: Sequence[TrainerCallback] = ()) -> Trainer:
    """Return the trainer of a run, with its data and callbacks."""
    training = settings.training
    with_evaluation = training.eval_strategy != "no"
    vocab_size = trainee.backbone.config.get_text_config().vocab_size
    data = load_data(settings, with_evaluation, trainee.tokenizer, vocab_size)
    given: dict[str, Any] = {
        "train_dataset": data["train"],
        "eval_dataset": data.get("eval"),
        "processing_class": trainee.tokenizer,
        "callbacks": [*_callbacks(settings, trainee, with_evaluation), *callbacks],
        "peft_config": get_peft_config(settings.model),
    }
    if is_parallel(trainee.model):
        if settings.drafter.strategy:
            raise ValueError(f"strategy={settings.drafter.strategy}: a PTPForCausalLM has loss_options instead")
        return PTPSFTTrainer(trainee.model, training, options=ptp_options(settings.drafter), **given)
    strategy = None if settings.model.use_peft else settings.drafter.training_strategy()
    return MTPSFTTrainer(trainee.model, training, strategy=strategy, **given)


def _callbacks(settings: Settings, trainee: Trainee, with_evaluation: bool) -> list[TrainerCallback]:
    chosen: list[TrainerCallback] = [RunProgress("byte" if is_byte_level(trainee.tokenizer) else "token")]
    drafter = settings.drafter
    # a misspelt option is refused also where nothing is evaluated
    options = typed_options("acceptance", drafter.options("acceptance"), AcceptanceCallback)
    if with_evaluation and drafter.acceptance is not False:
        chosen.append(AcceptanceCallback(**options))
    if drafter.early_stopping_patience is not None:
        if not (with_evaluation and settings.training.metric_for_best_model):
            raise ValueError("early_stopping_patience needs eval_strategy and metric_for_best_model")
        chosen.append(EarlyStoppingCallback(drafter.early_stopping_patience))
    return chosen


def facts_of(trainee: Trainee, settings: Settings) -> dict[str, Any]:
    """Return what a run that is resumed must agree with."""
    model = trainee.model
    config = model.config
    head = config.mtp_head if isinstance(config, EvaByteConfig) else config
    return {
        "class": type(model).__name__,
        "backbone": type(trainee.backbone).__name__,
        "model_name_or_path": settings.model.model_name_or_path,
        "adapters": settings.adapters,
        "head_type": head.head_type if isinstance(head, MTPHeadConfig) else None,
        "window": getattr(model, "window", None),
        "trained_parameters": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "parameters": model.num_parameters(),
    }


def checkpoint_bytes(trainer: Trainer) -> int:
    """Return about how many bytes a checkpoint has: the saved tensors, and two numbers of Adam per trained one."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    sizes = [(p.numel(), p.element_size(), p.requires_grad) for p in model.parameters()]
    saved = sum(count * size for count, size, _ in sizes)
    states = 0 if trainer.args.save_only_model else sum(count for count, _, learns in sizes if learns)
    return saved + _STATES_OF_ADAM * 4 * states


def _kept(settings: Settings, trainer: Trainer) -> int:
    """Return how many checkpoints lie on the disk at a time, with the one being written and the final model."""
    if settings.training.save_strategy == "no":
        return 1
    limit = settings.training.save_total_limit
    return 2 if limit is None else limit + 2


def check_best_metric(trainer: Trainer) -> None:
    """Refuse a `metric_for_best_model` that no evaluation has; `Trainer` refuses it after the first one."""
    asked = trainer.args.metric_for_best_model
    if asked is None or trainer.args.eval_strategy == "no":
        return
    known = ["loss", *(trainer._mean_names() if isinstance(trainer, BaseTrainer) else ())]
    for callback in trainer.callback_handler.callbacks:
        known += callback.metric_names(trainer) if hasattr(callback, "metric_names") else ()
    if asked.removeprefix("eval_") not in (*known, *_OF_TIME):
        raise ValueError(f"metric_for_best_model={asked!r} is in no evaluation of this run; choose {', '.join(known)}")


_SHOWN = {
    "loss": "loss",
    "eval_loss": "held-out loss",
    "eval_expected_accepted": "accepted drafts",
    "num_correct": "slots right",
}


class RunProgress(TrainerCallback):
    """Shows how far a run is; on one process of all.

    Args:
        unit: What a token is: `"byte"` or `"token"`.
        console: Where to draw; without a terminal a line is printed now and then.
    """

    def __init__(self, unit: str = "token", console: Console | None = None) -> None:
        self.unit, self.console = unit, console or Console(stderr=True, highlight=False)
        self.figures: dict[str, float] = {}
        self.progress: Progress | None = None
        self._tokens_at_start: float | None = None
        self._speed = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, and the bar where there is a terminal."""
        self._started, self._first_step, self._last_line = time.perf_counter(), state.global_step, 0.0
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        columns = SpinnerColumn(), TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=None)
        self.progress = Progress(*columns, TextColumn("{task.fields[figures]}"), console=self.console, expand=True)
        self.task = self.progress.add_task("", total=state.max_steps, completed=state.global_step, figures="")
        self.progress.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note figures and speed."""
        logs = logs or {}
        self.figures |= {name: logs[name] for name in _SHOWN if name in logs}
        if "num_tokens" in logs and "loss" in logs:
            elapsed = time.perf_counter() - self._started
            if self._tokens_at_start is None:  # the steps up to the first entry set things up
                self._tokens_at_start, self._started_counting = logs["num_tokens"], elapsed
                self._speed = logs["num_tokens"] / elapsed
            else:
                passed = max(elapsed - self._started_counting, 1e-9)
                self._speed = (logs["num_tokens"] - self._tokens_at_start) / passed

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        if not state.is_world_process_zero:
            return
        if self.progress is not None:
            self.progress.update(self.task, completed=state.global_step, figures=self.line(state))
            return
        elapsed = time.perf_counter() - self._started
        if elapsed - self._last_line > _SECONDS_BETWEEN_LINES or state.global_step == state.max_steps:
            self._last_line = elapsed
            text = f"step {state.global_step}/{state.max_steps}  {self.line(state)}"
            self.console.print(text, markup=False, soft_wrap=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the bar."""
        if self.progress is not None:
            self.progress.stop()

    def line(self, state: TrainerState) -> str:
        """Return figures, speed and time left."""
        done = state.global_step - self._first_step
        left = (time.perf_counter() - self._started) / max(done, 1) * (state.max_steps - state.global_step)
        parts = [f"{_SHOWN[name]} {value:.3f}" for name, value in self.figures.items()]
        if self._speed:
            parts.append(f"{self._speed:,.0f} {self.unit}s/s")
        return "  ".join([*parts, f"{int(left) // 60}:{int(left) % 60:02d} left"])
