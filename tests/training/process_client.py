"""Run by several processes: every kind of model takes a few steps, and losses and weights are written down.

accelerate launch --config_file examples/accelerate/fsdp2.yaml -m tests.training.process_client FOLDER NAME...

With this config the model is sharded, and one run goes on from a sharded checkpoint.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from transformers import TrainingArguments

from tests.every_model import llama
from tests.families import family_model
from tests.ptp_models import Places, backbone, student
from tests.training.conftest import ragged_rows, small_model
from tokenahead import EagleHead, MTPHeads
from tokenahead.training.acceptance_callback import AcceptanceCallback
from tokenahead.training.ptp import trainer as ptp
from tokenahead.training.ptp.trainer import PTPTrainer
from tokenahead.training.strategy import TrainingStrategy
from tokenahead.training.trainer import MTPTrainer

ROWS = 8  # of an update, over all processes and micro-batches
HELD_OUT = 7  # no multiple of what all processes take at once
LENGTH = 48  # so that the last of the ragged rows has targets, too
KEPT = ("loss", "eval_loss", "eval_expected_accepted", "loss_head_2", "eval_loss_head_2", "eval_loss_step_1",
        "num_correct", "eval_num_correct")  # fmt: skip


def circuit():
    model = small_model()
    model.set_head(head_type="cp", rank=2)
    model.train_only("drafter")
    return model


MAKERS = {
    "evabyte": small_model,
    "circuit": circuit,
    "heads": lambda: MTPHeads.from_backbone(llama(), window=3, unembedding="own"),
    "joint": lambda: MTPHeads.from_backbone(llama(), window=3),
    "joint_layers": lambda: MTPHeads.from_backbone(llama(), window=3, head_type="layer"),
    "draft_layers": lambda: MTPHeads.from_backbone(llama(), window=3, draft_layers=1),
    "modules": lambda: family_model("llama", num_nextn_predict_layers=2),
    "eagle": lambda: EagleHead.from_backbone(llama(num_hidden_layers=4)),
    "parallel": lambda: student(base=backbone()),
    "masks": lambda: student("mask", base=backbone()),
    "budget": lambda: MTPHeads.from_backbone(llama(), window=3, unembedding="own"),
    "empty": lambda: EagleHead.from_backbone(llama(), version=1, loss_options={"noise": 0.0}),
}


def make_trainer(name: str, folder: Path, processes: int, size: int, **options):
    """A trainer of three steps, `size` rows per process and micro-batch."""
    torch.manual_seed(0)
    model = MAKERS[name]()
    rows = ragged_rows(2 * ROWS, LENGTH, vocab_size=model.config.get_text_config().vocab_size)
    defaults = dict(
        output_dir=str(folder / f"{name}_run"), use_cpu=not _shards(), report_to="none", disable_tqdm=True,
        save_strategy="no", logging_steps=1, max_steps=3, optim="sgd", learning_rate=0.1, max_grad_norm=0.0,
        lr_scheduler_type="constant", seed=3, per_device_train_batch_size=size, per_device_eval_batch_size=2,
        gradient_accumulation_steps=ROWS // (size * processes), train_sampling_strategy="sequential",
        eval_strategy="steps", eval_steps=3, dataloader_pin_memory=False,
    )  # fmt: skip
    given = {}
    if name == "budget":  # an update is an epoch, however many batches it has
        defaults |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1000}
        given["tokens_per_batch"] = 100
    arguments = TrainingArguments(**(defaults | options))
    if name == "empty":  # of two processes, the second has no target
        rows = [{key: column[: None if n // size % 2 == 0 else 2] for key, column in row.items()}
                for n, row in enumerate(rows)]  # fmt: skip
    given |= dict(train_dataset=rows, eval_dataset=rows[:HELD_OUT])
    if name in ("parallel", "masks"):
        return PTPTrainer(model, arguments, **given)
    if name.startswith("joint"):
        given["strategy"] = TrainingStrategy(train="all")
    return MTPTrainer(model, arguments, callbacks=[AcceptanceCallback(rows=None, generate_every=0)], **given)


def run(name: str, folder: Path, processes: int, size: int) -> None:
    """Three steps of one model; files `NAME.json` and `NAME.safetensors`, and, of shards, the directory
    `NAME_whole`."""
    drawn, ptp.RandomDraws = ptp.RandomDraws, lambda _: Places()  # what a step draws must not depend on the rank
    try:
        trainer = make_trainer(name, folder, processes, size, **({"save_steps": 2} if _shards() else {}),
                               save_strategy="steps" if _shards() else "no")  # fmt: skip
        trainer.train()
        if _shards():
            trainer.save_model(folder / f"{name}_whole")
            trainer = make_trainer(name, folder, processes, size)
            trainer.train(resume_from_checkpoint=str(folder / f"{name}_run" / "checkpoint-2"))
    finally:
        ptp.RandomDraws = drawn
    weights = trainer.accelerator.get_state_dict(trainer.model)  # all processes take part in it
    if trainer.is_world_process_zero():
        history = [{key: entry[key] for key in KEPT if key in entry} for entry in trainer.state.log_history]
        (folder / f"{name}.json").write_text(json.dumps(history))
        save_file({key: value.clone().contiguous() for key, value in weights.items()}, folder / f"{name}.safetensors")


def _shards() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def shard_on_cpus() -> None:
    """Lets accelerate take processes of a CPU for accelerators: by itself it shards over those alone."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)


def join(rank: int, port: int, folder: Path, names: list[str]) -> None:
    """Be one of two processes that no launcher has started."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    main(folder, names)


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    if _shards():
        shard_on_cpus()
    for name in names:
        run(name, folder, int(os.environ["WORLD_SIZE"]), size=2)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # All files are written. Threads of gloo that outlive the interpreter were once seen to abort a process on a busy
    # machine, after its work was done; the destructors at exit are therefore left out.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
