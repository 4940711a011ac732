"""Run by several processes: every kind of model takes a few steps, and losses and weights are written down.

torchrun --nproc-per-node 2 -m tests.training.process_client FOLDER
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import TrainingArguments

from tests.every_model import llama
from tests.families import family_model
from tests.training.conftest import ragged_rows, small_model
from tokenahead import EagleHead, MTPHeads
from tokenahead.training.acceptance_callback import AcceptanceCallback
from tokenahead.training.strategy import TrainingStrategy
from tokenahead.training.trainer import MTPTrainer

ROWS = 8  # of an update, over all processes and micro-batches
HELD_OUT = 7  # no multiple of what all processes take at once


def circuit():
    model = small_model()
    model.set_head(head_type="cp", rank=2)
    model.train_only("drafter")
    return model


MAKERS = {
    "evabyte": small_model,
    "circuit": circuit,
    "heads": lambda: MTPHeads.from_backbone(llama(), window=3, leaf="full"),
    "joint": lambda: MTPHeads.from_backbone(llama(), window=3),
    "modules": lambda: family_model("llama", num_nextn_predict_layers=2),
    "eagle": lambda: EagleHead.from_backbone(llama(num_hidden_layers=4)),
}


def run(name: str, folder: Path, processes: int, size: int) -> None:
    """Three steps of one model, `size` rows per process and micro-batch; files `NAME.json` and `NAME.safetensors`."""
    torch.manual_seed(0)
    model = MAKERS[name]()
    rows = ragged_rows(2 * ROWS, 24, vocab_size=model.config.get_text_config().vocab_size)
    arguments = TrainingArguments(
        str(folder / name), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
        max_steps=3, optim="sgd", learning_rate=0.1, max_grad_norm=0.0, lr_scheduler_type="constant", seed=3,
        per_device_train_batch_size=size, gradient_accumulation_steps=ROWS // (size * processes),
        per_device_eval_batch_size=2, train_sampling_strategy="sequential", eval_strategy="steps", eval_steps=3,
        dataloader_pin_memory=False,
    )  # fmt: skip
    callbacks = [AcceptanceCallback(rows=None, generate_every=0)]
    strategy = {"strategy": TrainingStrategy(train="all")} if name == "joint" else {}
    trainer = MTPTrainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:HELD_OUT], callbacks=callbacks, **strategy
    )
    trainer.train()
    if trainer.is_world_process_zero():
        kept = ("loss", "eval_loss", "eval_expected_accepted", "loss_head_2", "eval_loss_head_2", "eval_loss_step_1")
        history = [{key: entry[key] for key in kept if key in entry} for entry in trainer.state.log_history]
        (folder / f"{name}.json").write_text(json.dumps(history))
        weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        save_file({key: value.clone().contiguous() for key, value in weights.items()}, folder / f"{name}.safetensors")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    processes = torch.distributed.get_world_size() if torch.distributed.is_initialized() else int(sys.argv[2])
    for name in MAKERS:
        run(name, folder, processes, size=2)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    # All files are written. Threads of gloo that outlive the interpreter were once seen to abort a process on a busy
    # machine, after its work was done; the destructors at exit are therefore left out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
