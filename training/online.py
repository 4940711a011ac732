"""Drafters that learn with the policy of a Trainer of transformers or TRL; saved and resumed with its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import cast

from safetensors.torch import load_file, save_file
from torch import Tensor, distributed
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..generation.tensors.saving import finish, whole_directory
from ..modeling.common.online import OnlineLearner, OwnLossMixin

ONLINE_DIRECTORY = "online_drafter"
"""Its name in a checkpoint."""
_COUNTS = ("tokens", "done_updates", "_learned_at", "_accepted", "_verified")
_FIRST = "counts-0.json"
_REPLACED = ("buffer-*.safetensors", "counts-*.json", "drafter/*")
"""Files that depend on the number of processes and on what learns."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class OnlineDrafterTraining(OnlineLearner, TrainerCallback):
    """Lets a drafter learn between the steps of a policy from what its rollouts verified.

    The drafter is attached to the policy with `default=True`, so that rollouts draft; verified tokens and states are
    recorded without a further forward. After each step of the policy the drafter takes small steps of its own. The
    policy's parameters, gradients and outputs are unchanged. On several processes the drafter is the same on all of
    them: each records its own rollouts, and gradients are averaged. Checkpoints of the trainer get a directory
    `online_drafter` with the drafter, its optimizer and the records, and a resumed run continues with them. The records
    are what users wrote: trainers of this library never push them, and a `Trainer` of transformers or TRL does only
    where `hub_strategy` asks for whole checkpoints.

    Without a trainer, call `update()` to learn, and `save` and `load`.

    Args:
        drafter: See `OnlineLearner`, as all that follows.
        learning_rate: Of AdamW.
        rows: Sequences of an update, on each process.
        updates: Steps of the optimizer each time.
        capacity: Tokens that are recorded, on each process.
        seed: Of the choice of sequences.
        every_steps: Learn after so many steps of the policy.

    Raises:
        TypeError: A drafter that does not learn from states.
        ValueError: A drafter that is frozen or learns online already, or a number out of range.

    Example:
        >>> head = EagleHead.from_pretrained("eagle").attach(model, default=True)
        >>> online = OnlineDrafterTraining(head)
        >>> GRPOTrainer(model, reward, config, train_dataset=data, callbacks=[online]).train()
        >>> head.save_pretrained("eagle-of-the-policy")
    """

    is_shared = True

    def __init__(
        self,
        drafter: OwnLossMixin,
        learning_rate: float = 1e-4,
        rows: int = 8,
        updates: int = 1,
        capacity: int = 2**14,
        seed: int = 0,
        every_steps: int = 1,
    ) -> None:
        if not isinstance(every_steps, int) or every_steps < 1:
            raise ValueError(f"every_steps={every_steps!r} must be a whole number of at least 1")
        rank = _rank()
        super().__init__(drafter, learning_rate, rows, updates, capacity, seed + rank)
        self.every_steps = every_steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Continue from the checkpoint that the run is resumed from.

        Raises:
            FileNotFoundError: It has no drafter, for example because the run was stopped before that was written.
        """
        if state.global_step == 0:
            return
        resumed = args.resume_from_checkpoint
        checkpoints = [Path(resumed)] if isinstance(resumed, str) and Path(resumed).is_dir() else []
        checkpoint = next(filter(_has_drafter, [*checkpoints, _checkpoint(args, state)]), None)
        if checkpoint is None:
            raise FileNotFoundError(f"{_checkpoint(args, state)} has no {ONLINE_DIRECTORY}: resume from another one")
        self.load(checkpoint)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Learn."""
        if state.global_step % self.every_steps == 0:
            self.update()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write the directory into the checkpoint that the trainer has written."""
        self.save(_checkpoint(args, state))

    def save(self, folder: str | PathLike) -> None:
        """Write drafter, optimizer and buffer to `folder/online_drafter`, whole or not at all.

        All processes must call it. `online_drafter/drafter` is a drafter for `from_pretrained`.
        """
        target, rank = Path(folder) / ONLINE_DIRECTORY, _rank()
        self.prepare()
        with whole_directory(target, replaced=_REPLACED) if rank == 0 else nullcontext() as own:
            temporary = _path_of_first(own)
            records = self.buffer.state_dict() | {"generator": self.generator.get_state()}
            save_file(records, temporary / f"buffer-{rank}.safetensors")
            counts = {"curve": self.curve, **{name: vars(self)[name] for name in _COUNTS}}
            (temporary / f"counts-{rank}.json").write_text(json.dumps(counts), encoding="utf-8")
            if rank == 0:
                if self.part is self.drafter:  # else the policy's own checkpoint has it
                    cast(PreTrainedModel, self.part).save_pretrained(temporary / "drafter")
                save_file(dict(self._optimized()), temporary / "optimizer.safetensors")
            _wait()
        _wait()

    def load(self, folder: str | PathLike) -> None:
        """Load what `save` wrote; a further process begins with an empty buffer.

        Raises:
            RuntimeError: The directory is of another drafter.
            ValueError: It is of a buffer of another capacity.
        """
        source, rank = finish(Path(folder) / ONLINE_DIRECTORY), _rank()
        if self.part is self.drafter:
            drafter = cast(PreTrainedModel, self.part)
            drafter.load_state_dict(type(drafter).from_pretrained(source / "drafter").state_dict())
        optimizer, tensors = self.prepare(), load_file(source / "optimizer.safetensors")
        for number, master in enumerate(self.masters):
            master.data.copy_(tensors[f"{number}.weight"])
            moments = {name: tensors[f"{number}.{name}"] for name in _MOMENTS if f"{number}.{name}" in tensors}
            if moments:
                moved = {name: each if name == "step" else each.to(master) for name, each in moments.items()}
                optimizer.state[master] = moved
        self.publish()
        if not (source / f"buffer-{rank}.safetensors").exists():
            rank = 0
        else:
            records = load_file(source / f"buffer-{rank}.safetensors")
            self.generator.set_state(records.pop("generator"))
            self.buffer.load_state_dict(records, self.parameters[0].device)
        counts = json.loads((source / f"counts-{rank}.json").read_text(encoding="utf-8"))
        self.curve = counts.pop("curve")
        self.__dict__.update(counts)

    def _optimized(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's weights and moments by name."""
        optimizer = self.prepare()
        for number, master in enumerate(self.masters):
            yield f"{number}.weight", master.detach().contiguous()
            for name in _MOMENTS:
                if name in optimizer.state[master]:
                    yield f"{number}.{name}", optimizer.state[master][name].contiguous()


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}")


def _has_drafter(checkpoint: Path) -> bool:
    return (finish(checkpoint / ONLINE_DIRECTORY) / _FIRST).is_file()


def _path_of_first(path: Path | None) -> Path:
    """Return the path that the first process has."""
    paths = [None if path is None else str(path)]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(paths)
    return Path(cast(str, paths[0]))


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _wait() -> None:
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
