"""`tokenahead train`: from settings to a trained model in a run directory; the steps are defined elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    EarlyStoppingCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ...generation.tensors.tensor_files import Fields
from ..acceptance_callback import AcceptanceCallback
from ..checkpoints import best_or_last, is_finished
from ..parts import of_first
from ..trainer_base import BaseTrainer, check_kernels, without_peft
from ..trl_trainers import MTPSFTTrainer, PTPSFTTrainer
from ..utils import needs_extra, replace_file
from .data import load_data
from .models import (
    Trainee,
    build,
    check_features,
    draft_frequent_tokens,
    is_parallel,
    learning_parts,
    note_backbone,
    ptp_options,
    store_features,
    with_moved_backbone,
    with_own_text,
)
from .run_directory import (
    METRICS,
    RunWriter,
    check_nothing_is_lost,
    check_output,
    checkpoint_to_resume,
    remove_empty_dir,
    write_run,
)
from .settings import Settings, read_settings

with needs_extra("train", "tokenahead train"):
    from jinja2 import TemplateError
    from trl.trainer.utils import get_peft_config


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when the training is complete."""
    settings = read_settings(argv)
    if settings.training.disable_tqdm:
        logging.disable_progress_bar()
    train(settings)
    leave_processes()
    return 0


def leave_processes() -> None:
    """End the process group of a command whose work is done.

    Threads of a group that is left to the destructors at exit may abort a process, and torchrun would call the run
    failed.
    """
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def train(settings: Settings, callbacks: Sequence[TrainerCallback] = ()) -> Trainer:
    """Train with settings, write model, log and the facts of the run to `output_dir`, and return the trainer."""
    directory = settings.output
    check_output(directory, settings)
    set_seed(settings.training.seed)
    with remove_empty_dir(directory):
        return _train(directory, settings, callbacks)


def _train(directory: Path, requested: Settings, callbacks: Sequence[TrainerCallback]) -> Trainer:
    settings = with_moved_backbone(requested)
    trainee = build(settings)
    note_backbone(trainee, requested, settings)
    facts = facts_of(trainee, settings)
    resumed = of_first(lambda: checkpoint_to_resume(directory, settings.training.resume_from_checkpoint))
    if resumed is None:
        check_nothing_is_lost(directory, requested)
    # settings that need no data are checked before the backbone writes any
    check_kernels(settings.training)
    settings.drafter.training_strategy()
    check_features(settings, trainee.model)
    _callbacks(settings)
    settings = with_own_text(settings, trainee)
    trainer = make_trainer(settings, trainee, [*callbacks, RunWriter(directory, requested, facts)])
    for callback in trainer.callback_handler.callbacks:  # acceptance alone would choose the worst backbone
        if isinstance(callback, AcceptanceCallback):
            callback.metric_names(trainer)
    draft_frequent_tokens(trainer, trainee, settings)
    pushes = settings.training.push_to_hub
    if pushes:  # a value that no card may show is refused before the first step
        trainer.create_model_card(dataset=_data_names(requested))
    try:
        if is_finished(resumed, settings.training.max_steps):
            _take_over(trainer, str(resumed))
            if trainer.is_world_process_zero():
                write_run(directory, requested, facts)
        else:
            store_features(trainer, settings)
            trainer.train(resume_from_checkpoint=resumed)
        settings.training.push_to_hub = False  # the push comes once, at the end
        is_cast = not (trainer.is_fsdp_enabled or settings.model.use_peft)  # adapters are saved in float32
        for part in learning_parts(trainee.model) if is_cast else []:
            part.to(trainee.backbone.dtype)
        trainer.save_model()
    finally:
        progress = trainer.pop_callback(ProgressCallback)
        if isinstance(progress, ProgressCallback) and progress.training_bar is not None:
            progress.training_bar.close()  # so that an error gets a line of its own
        if trainer.is_world_process_zero() and trainer.state.log_history:
            replace_file(directory / METRICS, json.dumps(trainer.state.log_history, indent=1) + "\n")
    if pushes:
        trainer.push_to_hub(dataset_name=_data_names(requested))
    return trainer


def _data_names(requested: Settings) -> list[str]:
    name = requested.data.dataset_name
    return [each.path for each in requested.mixture.datasets] if name is None else [name]


def _take_over(trainer: Trainer, checkpoint: str) -> None:
    """Restore the end of a training: the machine may have failed between it and the saving of the model."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(f"resume_from_checkpoint={checkpoint}: all steps of max_steps are done, raise max_steps")
    trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    trainer._load_from_checkpoint(best_or_last(checkpoint, trainer.args.load_best_model_at_end))


def make_trainer(settings: Settings, trainee: Trainee, callbacks: Sequence[TrainerCallback] = ()) -> BaseTrainer:
    """Return the trainer of a run, with its data and callbacks."""
    training = settings.training
    with_evaluation = training.eval_strategy != "no"
    vocab_size = trainee.backbone.config.get_text_config().vocab_size
    data = load_data(settings, with_evaluation, vocab_size)
    options: Fields = {
        "train_dataset": data["train"],
        "eval_dataset": data.get("eval"),
        "processing_class": trainee.tokenizer,
        "callbacks": [*_callbacks(settings), *callbacks],
        "tokens_per_batch": settings.tokens_per_batch,
        "peft_config": get_peft_config(settings.model),
    }
    if is_parallel(trainee.model):
        strategy = settings.drafter.options("strategy")
        options["shard_backbone"] = settings.drafter.training_strategy().shard_backbone
        if strategy.keys() - {"shard_backbone"}:
            raise ValueError(f"strategy={strategy}: a PTPForCausalLM has loss_options and shard_backbone alone")
        trainer_class, options["options"] = PTPSFTTrainer, ptp_options(settings.drafter)
    else:
        trainer_class = MTPSFTTrainer
        options["strategy"] = None if settings.model.use_peft else settings.drafter.training_strategy()
    try:
        return trainer_class(trainee.model, training, **options)
    except (TypeError, KeyError, AttributeError, TemplateError) as error:  # of a row that TRL cannot prepare
        raise ValueError(
            f"dataset_name={settings.data.dataset_name}: could not be prepared: {error} (texts must be text, turns of "
            "chats have a 'role' and a 'content')"
        ) from error


def _callbacks(settings: Settings) -> list[TrainerCallback]:
    chosen: list[TrainerCallback] = []
    drafter, with_evaluation = settings.drafter, settings.training.eval_strategy != "no"
    try:
        acceptance = AcceptanceCallback(**drafter.options("acceptance"))
    except TypeError as error:  # a misspelt option is refused even without evaluation
        raise ValueError(f"acceptance: {error}") from None
    if with_evaluation and drafter.acceptance is not False:
        chosen.append(acceptance)
    if drafter.early_stopping_patience is not None:
        chosen.append(EarlyStoppingCallback(drafter.early_stopping_patience))
    return chosen


def facts_of(trainee: Trainee, settings: Settings) -> Fields:
    """Return the facts of a model for `run.json`."""
    model, head = trainee.model, without_peft(trainee.model).head_config
    return {
        "class": type(model).__name__,
        "backbone": type(trainee.backbone).__name__,
        "model_name_or_path": settings.model.model_name_or_path,
        "adapters": settings.adapters,
        "head_type": None if head is None else head.head_type,
        "window": getattr(model, "window", None),
        "trained_parameters": sum(each.numel() for each in model.parameters() if each.requires_grad),
        "parameters": model.num_parameters(),
    }
