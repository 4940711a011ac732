"""Drafters that learn with the policy of a Trainer of transformers or TRL; saved and resumed with its checkpoints."""

from __future__ import annotations

import json
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load_file, save_file
from torch import Tensor, distributed
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..configuration.fields import check_values
from ..generation.tensors.saving import finish, whole_directory
from ..modeling.common.online import OnlineLearner, OwnLossMixin
from .checkpoints import checkpoint_of
from .parts import of_first

ONLINE_DIRECTORY = "online_drafter"
"""Its name in a checkpoint."""
_COUNTS = ("tokens", "done_updates", "_learned_at", "_accepted", "_verified")
_REPLACED = ("buffer-*.safetensors", "counts-*.json", "drafter/*")
"""Files that depend on the number of processes and on what learns."""


class OnlineDrafterTraining(OnlineLearner, TrainerCallback):
    """Lets a drafter learn between the steps of a policy from what its rollouts verified.

    The drafter is attached to the policy with `default=True`, so that rollouts draft; the policy's parameters,
    gradients and outputs are unchanged. On several processes the drafter is the same on all of them: each records its
    own rollouts, and gradients are averaged. Checkpoints get a directory `online_drafter`, from which a resumed run
    continues. Its records are what users wrote: trainers of this library never push them, and a `Trainer` of
    transformers or TRL does only where `hub_strategy` asks for whole checkpoints. Without a trainer, call `update()` to
    learn, and `save` and `load`.

    Args:
        drafter: See `OnlineLearner`.
        seed: Of the choice of sequences.
        every_steps: Learn after so many steps of the policy.
        options: Further arguments of `OnlineLearner`: `learning_rate`, `rows`, `updates`, `capacity`, of each process.

    Example:
        >>> head = EagleHead.from_pretrained("eagle").attach(model, default=True)
        >>> online = OnlineDrafterTraining(head)
        >>> GRPOTrainer(model, reward, config, train_dataset=data, callbacks=[online]).train()
        >>> head.save_pretrained("eagle-of-the-policy")
    """

    is_shared = True

    def __init__(self, drafter: OwnLossMixin, *, seed: int = 0, every_steps: int = 1, **options: Any) -> None:
        self.every_steps = every_steps
        check_values(self, {}, {"every_steps": "[1, inf)"})
        super().__init__(drafter, seed=seed + _rank(), **options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step:
            chosen = args.resume_from_checkpoint
            is_whole = isinstance(chosen, str) and Path(chosen, ONLINE_DIRECTORY).is_dir()
            self.load(chosen if isinstance(chosen, str) and is_whole else checkpoint_of(args, state))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if state.global_step % self.every_steps == 0:
            self.update()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.save(checkpoint_of(args, state))

    def save(self, folder: str | PathLike) -> None:
        """Write drafter, optimizer and buffer to `folder/online_drafter`, whole or not at all.

        All processes must call it. `online_drafter/drafter` is a drafter for `from_pretrained`.
        """
        rank, optimizer = _rank(), self.prepare()
        whole = whole_directory(Path(folder) / ONLINE_DIRECTORY, replaced=_REPLACED)
        with whole if rank == 0 else nullcontext() as own:
            temporary = Path(of_first(lambda: str(own)))
            records = self.buffer.state_dict() | {"generator": self.generator.get_state()}
            save_file(records, temporary / f"buffer-{rank}.safetensors")
            counts = {"curve": self.curve, **{name: vars(self)[name] for name in _COUNTS}}
            (temporary / f"counts-{rank}.json").write_text(json.dumps(counts), encoding="utf-8")
            if rank == 0:
                if self.part is self.drafter:  # else the policy's own checkpoint has it
                    cast(PreTrainedModel, self.part).save_pretrained(temporary / "drafter")
                state = optimizer.state_dict()["state"]
                tensors = {f"{key}.{name}": each for key in state for name, each in state[key].items()}
                tensors |= {f"{key}.weight": master.detach() for key, master in enumerate(self.masters)}
                save_file(tensors, temporary / "optimizer.safetensors")
            _wait()
        _wait()

    def load(self, folder: str | PathLike) -> None:
        """Load what `save` wrote, for the same drafter and capacity; a further process begins with an empty buffer."""
        source, rank = finish(Path(folder) / ONLINE_DIRECTORY), _rank()
        buffer = source / f"buffer-{rank}.safetensors"
        file = source / f"counts-{rank if buffer.exists() else 0}.json"
        counts = json.loads(file.read_text(encoding="utf-8"))  # there is none where a run was stopped before it
        if self.part is self.drafter:
            drafter = cast(PreTrainedModel, self.part)
            drafter.load_state_dict(type(drafter).from_pretrained(source / "drafter").state_dict())
        optimizer, tensors = self.prepare(), load_file(source / "optimizer.safetensors")
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            number, _, name = key.partition(".")
            if name == "weight":
                self.masters[int(number)].data.copy_(tensor)
            else:
                state.setdefault(int(number), {})[name] = tensor
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
        self.publish()
        if buffer.exists():
            records = load_file(buffer)
            self.generator.set_state(records.pop("generator"))
            self.buffer.load_state_dict(records, self.parameters[0].device)
        self.curve = counts.pop("curve")
        self.__dict__.update(counts)


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _wait() -> None:
    if distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
