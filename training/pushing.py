"""What a trainer pushes: its model with card and log, and nothing that says how this machine is laid out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress

from ..modeling.remote_code import TravellingMixin
from .card import TrainerCardMixin, listed

_OF_THE_RUN = (
    *("run.json", "config.yaml", "training_args.bin", "evaluation.json", "analysis.json", "results.json"),
    *("checkpoint-*", "_*", ".*"),
)
"""Files of a run directory that name paths and commands, and what `Trainer` leaves behind, too."""
_OF_RESUMING = (
    *("training_args.bin", "trainer_state.json", "optimizer*", "scheduler.pt", "scaler.pt", "rng_state*"),
    *("pytorch_model_fsdp*", "global_step*", "latest", "zero_to_fp32.py", "*.distcp", ".*"),
)
"""Files of a checkpoint that are no part of the model."""

_API = HfApi()
"""One for all: uploads in the background come one after the other."""


class TrainerPushMixin(TrainerCardMixin):
    """`push_to_hub` and pushes while training, through the filter of every push; to be placed before `Trainer`."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As in `Trainer`, which calls it before the first step.

        Raises:
            ValueError: No token.
            ConnectionError: The Hub cannot be reached.
        """
        # what pushes is imported where it is needed, because it imports what is measured here
        from ..model_cards.hub import check_token, reachable

        if self.is_world_process_zero():
            check_token(token if token is not None else self.args.hub_token)
        with reachable(self.args.hub_model_id or Path(self.args.output_dir).absolute().name):
            super().init_hf_repo(token, private)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves the model, writes its card and uploads `output_dir`; settings and paths of this machine stay here.

        Args:
            commit_message: First line of the commit.
            blocking: Wait for the upload.
            token: Access token; None takes `hub_token`, or the one of this machine.
            revision: Branch; None takes `hub_revision`.
            private: Whether a new repository is private; None takes `hub_private_repo`.
            **kwargs: As for `create_model_card`.

        Returns:
            The commit, or its `Future` without `blocking`; None on other processes than the first.

        Raises:
            ValueError: No token, or a card that would show a path of this machine.
            ConnectionError: The Hub cannot be reached.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        name = kwargs.pop("model_name", None) or (self.args.hub_model_id or Path(self.args.output_dir).absolute().name)
        tags = [*listed(kwargs.pop("tags", None)), *listed(getattr(self.model, "model_tags", None))]
        self.create_model_card(model_name=name.split("/")[-1], tags=list(dict.fromkeys(tags)), **kwargs)
        self._finish_current_push()
        return self._uploaded(
            self.args.output_dir,
            _OF_THE_RUN,
            blocking=blocking,
            commit_message=commit_message,
            token=token if token is not None else self.args.hub_token,
            revision=revision if revision is not None else self.args.hub_revision,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes while training: the model of a checkpoint with its code, and the card; and all of it, if asked for."""
        args = self.args
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if not args.hub_always_push and self.push_in_progress is not None and not self.push_in_progress.is_done():
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        said = f"Training in progress, step {self.state.global_step}"
        given = {"blocking": False, "token": args.hub_token, "revision": args.hub_revision}
        card = [file for file in [Path(args.output_dir) / "README.md"] if file.is_file()]
        jobs = [self._uploaded(checkpoint_folder, _OF_RESUMING, card, commit_message=said, **given)]
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_last = args.hub_strategy == HubStrategy.CHECKPOINT
            place = "last-checkpoint" if is_last else Path(checkpoint_folder).name
            said = {"commit_message": f"{said}, checkpoint", "path_in_repo": place}
            jobs.append(self._uploaded(checkpoint_folder, ("training_args.bin", ".*"), **said, **given))
        if self.push_in_progress is None or self.push_in_progress.is_done():
            self.push_in_progress = PushInProgress(jobs)
        else:
            self.push_in_progress.jobs.extend(jobs)

    def _uploaded(
        self, folder: str, left_out: Sequence[str], also: Sequence[Path] = (), *, blocking: bool, **options: Any
    ) -> Any:
        """Uploads a public copy of a directory, which is made at once: checkpoints are removed while uploads run."""
        from ..model_cards.hub import reachable
        from ..model_cards.public_copy import public_copy
        from ..model_cards.push import WEIGHTS

        # on the same disk, where a copy costs nothing
        copy = TemporaryDirectory(dir=self.args.output_dir, prefix=".pushing-")
        public_copy(Path(folder), Path(copy.name), left_out, also)
        for thing in (self.accelerator.unwrap_model(self.model), self.processing_class):
            if isinstance(thing, TravellingMixin):
                thing.add_code_of_push(Path(copy.name))
        repo = self.hub_model_id

        def upload() -> Any:
            with copy, reachable(repo):
                return _API.upload_folder(repo_id=repo, folder_path=copy.name, delete_patterns=WEIGHTS, **options)

        return upload() if blocking else _API.run_as_future(upload)
