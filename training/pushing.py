"""Cards and pushes of trainers: the library's card with data, recipe and log, and uploads without local paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub import CommitInfo, HfApi
from transformers import PreTrainedModel, Trainer
from transformers.modelcard import extract_hyperparameters_from_trainer, make_markdown_table, parse_log_history
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from transformers.utils.hub import PushInProgress

from .. import __version__
from ..generation.attach import AttachableDrafter
from ..modeling.common.loading import TRAVELLERS
from ..modeling.common.remote_code import add_code, code_when_pushed, handed
from ..modeling.heads.joint import JointMTPModel
from .utils import visible, without_directories

logger = logging.get_logger(__name__)
_FILE_READERS = {"csv", "json", "pandas", "parquet", "text", "generator"}  # what `datasets` calls files, not names
_OF_THE_RUN = ("metrics.json", *(f"{name}_results.json" for name in ("all", "train", "eval", "test")))
"""Files of a run directory that are pushed beside the model's: its log, and measured results."""
_OF_RESUMING = (
    *("trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth"),
    *("checksums.json", "loss_balance.json", "pytorch_model_fsdp.bin", "latest", "zero_to_fp32.py"),
    *("pytorch_model_fsdp_[0-9]*/**/*", "optimizer_[0-9]*/**/*", "global_step[0-9]*/**/*"),  # parts of processes
)
"""Files of whole checkpoints, but for arguments, which name paths of this machine, and the rollouts of users."""
_API = HfApi()
"""One for all: uploads in the background run one after the other."""
_TrainerBase = Trainer if TYPE_CHECKING else object


class TrainerPushMixin(_TrainerBase):
    """`create_model_card`, `push_to_hub` and pushes while training; to be placed before `Trainer`."""

    def create_model_card(
        self,
        language: str | list[str] | None = None,
        license: str | None = None,
        tags: str | Iterable[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
        dataset_name: str | list[str] | None = None,
    ) -> None:
        """Write README.md to `output_dir`; one that a person wrote or edited is left unchanged.

        Args:
            language: Codes of the languages that the model writes.
            license: Licence id of the weights.
            tags: Further tags.
            model_name: Title.
            finetuned_from: Hub id of the model that this one derives from; None takes it from the config.
            tasks: Not used: every model of this library writes text.
            dataset_tags: Hub ids of the data.
            dataset: Names of the data, for people; of a file of this machine, its bare name is shown.
            dataset_args: Configurations of the data, in the order of `dataset`.
            dataset_name: As `dataset` (TRL's word).

        Raises:
            ValueError: A value that is a path of this machine.
        """
        if not self.is_world_process_zero():
            return
        model = self._described()
        named = [without_directories(name) for name in _listed(dataset) or _listed(dataset_name)]
        described = [f"{name} ({args})" for name, args in zip(named, _listed(dataset_args))] or named
        builder = getattr(self.train_dataset, "builder_name", None)  # the name that `datasets` has for the data
        known = [] if builder in _FILE_READERS else _listed(builder)
        data_ids = [name for name in _listed(dataset_tags) or known if handed("push").hub_id(name)]
        of_trainer = getattr(self, "_tag_names", None)  # of TRL's trainers
        # a drafter that was read from the Hub derives from its backbone, which its config names
        origin = finetuned_from or (None if isinstance(model, AttachableDrafter) else model.config.name_or_path)
        try:
            card = handed("push").render_card(
                model,
                None,
                license=license,
                base_model=handed("push").hub_id(origin),
                model_name=model_name,
                repo_id=vars(self).get("hub_model_id") or self.args.hub_model_id,
                language=language,
                training_data=self._data_text(described or data_ids),
                training_description=self._recipe_text(model),
                hyperparameters=extract_hyperparameters_from_trainer(self),
                training_results=self._log_text(),
                metadata={"tags": [*_listed(tags), *_listed(of_trainer)], "datasets": data_ids or None},
            )
        except TypeError:  # a model around ours (peft's adapters), or one that drafts nothing: as the base class does
            super().create_model_card(model_name=model_name, tags=_listed(tags) or None)
            return
        try:
            handed("push").write_card(str(self.args.output_dir), card)
        except FileExistsError as error:
            logger.warning(str(error))

    def _data_text(self, names: list[str]) -> str | None:
        size = f"{len(self.train_dataset):,} rows" if isinstance(self.train_dataset, Sized) else ""
        names = [visible(" ".join(name.replace("`", "").split())) for name in names]
        title = ", ".join(f"`{name}`" for name in names) or (size and "Data that the run did not name")
        return f"{title}: {size}." if size else f"{title}." if title else None

    def _recipe_text(self, model: torch.nn.Module) -> str:
        learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        versions = f"tokenahead {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
        return (
            f"Trained by `{type(self).__name__}` for {self.state.global_step:,} steps ({learned:,} parameters learned, "
            f"of {sum(parameter.numel() for parameter in model.parameters()):,}), with {versions}."
        )

    def _log_text(self) -> str | None:
        _, lines, last = parse_log_history(self.state.log_history)
        table = make_markdown_table(lines) if lines else ""
        figures = [f"- {name}: {value}" for name, value in (last or {}).items()]
        return "\n\n".join(filter(None, (table.strip(), "\n".join(figures)))) or None

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As in `Trainer`, which does it at its start; a repository that holds another model is refused."""
        super().init_hf_repo(token=token, private=private)
        model = self._described()
        if self.is_world_process_zero() and isinstance(model, PreTrainedModel):  # adapters alone have no config
            handed("push").check_same_model(HfApi(token=token or self.args.hub_token), self.hub_model_id, model)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in `Trainer`, with the library's card; settings, paths and what only resuming needs are left out.

        Returns:
            The commit, or its `Future` without `blocking`; None on other processes than the first.

        Raises:
            ValueError: A card that would show a path of this machine, or a repository that holds another model.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        name = kwargs.pop("model_name", None) or self.args.hub_model_id or self._output().name
        tags = [*_listed(kwargs.pop("tags", None)), *_listed(getattr(self.model, "model_tags", None))]
        self.create_model_card(model_name=name.split("/")[-1], tags=list(dict.fromkeys(tags)), **kwargs)
        self._finish_current_push()
        upload = self._uploaded(self._output(), _OF_THE_RUN, commit_message, token=token, revision=revision)
        return upload() if blocking else _API.run_as_future(upload)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push while training: a checkpoint's model with its code, the card, and if requested the whole checkpoint."""
        args, checkpoint = self.args, Path(checkpoint_folder)
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if not args.hub_always_push and self.push_in_progress is not None and not self.push_in_progress.is_done():
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        message = f"Training in progress, step {self.state.global_step}"
        card = [file for file in [self._output() / "README.md"] if file.is_file()]
        uploads = [self._uploaded(checkpoint, (), message, card)]
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            name = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else checkpoint.name
            uploads.append(self._uploaded(checkpoint, _OF_RESUMING, f"{message}, checkpoint", path_in_repo=name))
        jobs = [_API.run_as_future(upload) for upload in uploads]
        if self.push_in_progress is None or self.push_in_progress.is_done():
            self.push_in_progress = PushInProgress()
        vars(self.push_in_progress)["jobs"].extend(jobs)  # annotated as one job, and a list

    def _described(self) -> PreTrainedModel:
        """Return the model that the card and config.json at the top are of."""
        model = self.accelerator.unwrap_model(self.model)
        return model.heads if isinstance(model, JointMTPModel) else model

    def _output(self) -> Path:
        return Path(str(self.args.output_dir)).absolute()

    def _uploaded(
        self,
        source: Path,
        besides: Sequence[str],
        message: str | None,
        also: Sequence[Path] = (),
        path_in_repo: str | None = None,
        token: str | None = None,
        revision: str | None = None,
    ) -> Callable[[], CommitInfo]:
        """Return the upload of a public copy of a directory, made at once: checkpoints are removed meanwhile.

        `besides` are names of files that go beside those of models.
        """
        # on the same disk, where a copy costs nothing
        copy = TemporaryDirectory(dir=self.args.output_dir, prefix=".pushing-")
        of_tokenizer = getattr(self.processing_class, "vocab_files_names", {}).values()
        allowed = (*handed("push").MODEL_FILES, *of_tokenizer, *besides)
        adapters = [*getattr(self.accelerator.unwrap_model(self.model), "peft_config", ())]
        handed("push").public_copy(source, Path(copy.name), allowed, adapters, also)
        for saved in (self.accelerator.unwrap_model(self.model), self.processing_class):
            if isinstance(saved, TRAVELLERS):
                add_code(saved, Path(copy.name), code_when_pushed(saved))

        def upload() -> CommitInfo:
            with copy:
                return _API.upload_folder(
                    repo_id=str(self.hub_model_id),
                    folder_path=copy.name,
                    path_in_repo=path_in_repo,
                    commit_message=message,
                    token=self.args.hub_token if token is None else token,
                    revision=self.args.hub_revision if revision is None else revision,
                    delete_patterns=handed("push").WEIGHTS,
                )

        return upload


def _listed(value: str | Iterable[str] | None) -> list[str]:
    """Return one name or several as a list."""
    return [value] if isinstance(value, str) else sorted(value) if isinstance(value, set) else list(value or ())
