"""Cards and pushes of trainers: the library's card with data, recipe and log, and uploads without local paths."""

from __future__ import annotations

import shutil
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
_Names = str | Iterable[str] | None
_TrainerBase = Trainer if TYPE_CHECKING else object


class TrainerPushMixin(_TrainerBase):
    """`create_model_card`, `push_to_hub` and pushes while training; to be placed before `Trainer`."""

    def create_model_card(
        self,
        language: _Names = None,
        license: str | None = None,
        tags: _Names = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: _Names = None,
        dataset_tags: _Names = None,
        dataset: _Names = None,
        dataset_args: _Names = None,
        dataset_name: _Names = None,
    ) -> None:
        """Write README.md to `output_dir`; one that a person wrote or edited is left unchanged.

        The arguments are those of `Trainer`; `tasks` is not used, `dataset_name` is TRL's word for `dataset`. Of a file
        of this machine the bare name is shown; another path of it is a ValueError.
        """
        if not self.is_world_process_zero():
            return
        cards, model = handed("card"), self._described()
        names = [without_directories(name) for name in _listed(dataset or dataset_name)]
        names = [f"{name} ({part})" for name, part in zip(names, _listed(dataset_args))] or names
        builder = getattr(self.train_dataset, "builder_name", None)  # the name that `datasets` has for the data
        known = [] if builder in _FILE_READERS else _listed(builder)
        data_ids = [name for name in _listed(dataset_tags) or known if cards.hub_id(name)]
        # a drafter that was read from the Hub derives from its backbone, which its config names
        origin = None if isinstance(model, AttachableDrafter) else model.config.name_or_path
        try:
            card = cards.render_card(
                model,
                None,
                repo_id=vars(self).get("hub_model_id") or self.args.hub_model_id,
                training_data=self._data_text(names or data_ids),
                training_description=self._recipe_text(model),
                hyperparameters=extract_hyperparameters_from_trainer(self),
                training_results=self._log_text(),
                base_model=cards.hub_id(finetuned_from or origin),
                tags=[*_listed(tags), *_listed(getattr(self, "_tag_names", None))],  # the latter: TRL's
                datasets=data_ids or None,
                language=language,
                license=license,
                model_name=model_name,
            )
            cards.write_card(str(self.args.output_dir), card)
        except TypeError:  # a model around ours (peft's adapters), or one that drafts nothing: as the base class does
            super().create_model_card(model_name=model_name, tags=_listed(tags) or None)
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
        figures = [f"- {name}: {value}" for name, value in (last or {}).items()]
        return "\n\n".join(filter(None, (make_markdown_table(lines or []), "\n".join(figures)))) or None

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
        self.create_model_card(model_name=name.split("/")[-1], tags=tags, **kwargs)
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
        names = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: checkpoint.name}
        message = f"Training in progress, step {self.state.global_step}"
        upload = self._uploaded(checkpoint, (), message, names.get(HubStrategy(args.hub_strategy)))
        jobs: Any = [] if self.push_in_progress is None else vars(self.push_in_progress)["jobs"]
        jobs.append(_API.run_as_future(upload))
        self.push_in_progress = PushInProgress(jobs)

    def _described(self) -> PreTrainedModel:
        """Return the model that the card and config.json at the top are of."""
        model = self.accelerator.unwrap_model(self.model)
        return model.heads if isinstance(model, JointMTPModel) else model

    def _output(self) -> Path:
        return Path(str(self.args.output_dir)).absolute()

    def _uploaded(
        self, source: Path, besides: Sequence[str], message: str | None, whole: str | None = None, **options: Any
    ) -> Callable[[], CommitInfo]:
        """Return the upload of a public copy of a directory, made at once: checkpoints are removed meanwhile.

        `besides`: further patterns of files; `whole`: the name under which all that resuming needs is uploaded, too.
        """
        push, model, tokenizer = handed("push"), self.accelerator.unwrap_model(self.model), self.processing_class
        copy = TemporaryDirectory(dir=self.args.output_dir, prefix=".pushing-")  # on its disk, a copy costs nothing
        folder, card = Path(copy.name), self._output() / "README.md"
        if card.is_file() and not card.is_symlink():
            shutil.copyfile(card, folder / card.name)
        besides = (*besides, *getattr(tokenizer, "vocab_files_names", {}).values())
        adapters = getattr(model, "peft_config", ())
        push.public_copy(source, folder, besides, adapters)
        if whole is not None:
            push.public_copy(source, folder / whole, (*besides, *_OF_RESUMING), adapters)
        for saved in (model, tokenizer):
            if hasattr(type(saved), "remote_classes"):
                add_code(saved, folder, code_when_pushed(saved))
        given = {name: value for name, value in options.items() if value is not None}
        options = {"token": self.args.hub_token, "revision": self.args.hub_revision} | given

        def upload() -> CommitInfo:
            with copy:
                return push.upload(_API, folder, str(self.hub_model_id), commit_message=message, **options)

        return upload


def _listed(value: _Names) -> list[str]:
    """Return one name or several as a list."""
    return [value] if isinstance(value, str) else sorted(value) if isinstance(value, set) else list(value or ())
