"""Cards and pushes of trainers: the library's card with data, recipe and log, and uploads without local paths."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence, Sized
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import transformers
from huggingface_hub import CommitInfo, HfApi
from transformers import Trainer
from transformers.modelcard import extract_hyperparameters_from_trainer, make_markdown_table, parse_log_history
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from transformers.utils.hub import PushInProgress

from .. import __version__
from ..generation.attach import AttachableDrafter
from ..modeling.common.remote_code import HANDED, add_code, code_when_pushed
from ..modeling.heads.joint import JointMTPModel
from .utils import visible, without_directories

logger = logging.get_logger(__name__)
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


class TrainerPushMixin(Trainer):
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

        As in `Trainer`; `tasks` is not used, `dataset_name` is TRL's word for `dataset`. Of a file of this machine the
        bare name is shown; another path of it is a ValueError.
        """
        if not self.is_world_process_zero():
            return
        cards, model = HANDED["card"](), self.accelerator.unwrap_model(self.model)
        model = model.heads if isinstance(model, JointMTPModel) else model
        names = [without_directories(name) for name in _listed(dataset or dataset_name)]
        ids = [name for name in (*_listed(dataset_tags), *names) if "/" in name and cards.hub_id(name)]
        names = [f"{name} ({part})" for name, part in zip(names, _listed(dataset_args))] or names
        # a drafter that was read from the Hub derives from its backbone, which its config names
        origin = None if isinstance(model, AttachableDrafter) else model.config.name_or_path
        try:
            card = cards.render_card(
                model,
                None,
                repo_id=vars(self).get("hub_model_id") or self.args.hub_model_id,
                training_data=self._data_text(names or ids),
                training_description=self._recipe_text(model),
                hyperparameters=extract_hyperparameters_from_trainer(self),
                training_results=self._log_text(),
                base_model=cards.hub_id(finetuned_from or origin),
                tags=[*_listed(tags), *_listed(getattr(self, "_tag_names", None))],  # the latter: TRL's
                datasets=ids or None,
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
        size = f": {len(self.train_dataset):,} rows" if isinstance(self.train_dataset, Sized) else ""
        names = [visible(" ".join(name.replace("`", "").split())) for name in names]
        title = ", ".join(f"`{name}`" for name in names) or (size and "Data that the run did not name")
        return f"{title}{size}." if title else None

    def _recipe_text(self, model: Any) -> str:
        sizes = [(each.numel(), each.numel() * each.requires_grad) for each in model.parameters()]
        total, learned = map(sum, zip(*sizes))
        trained = f"Trained by `{type(self).__name__}` for {self.state.global_step:,} steps"
        versions = f"tokenahead {__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
        return f"{trained} ({learned:,} parameters learned, of {total:,}), with {versions}."

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
        """As in `Trainer`, with the library's card, and without settings, paths and what only resuming needs.

        A card that would show a path of this machine, or a repository that holds another model, is a ValueError.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        kwargs["tags"] = [*_listed(kwargs.get("tags")), *_listed(getattr(self.model, "model_tags", None))]
        self.create_model_card(**{"model_name": str(self.hub_model_id).split("/")[-1]} | kwargs)
        self._finish_current_push()
        run = Path(str(self.args.output_dir))
        upload = self._uploaded(run, commit_message, _OF_THE_RUN, token=token, revision=revision)
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
        upload = self._uploaded(checkpoint, message, whole=names.get(HubStrategy(args.hub_strategy)))
        self.push_in_progress = PushInProgress(cast(Any, [_API.run_as_future(upload)]))  # behind those before it

    def _uploaded(
        self,
        source: Path,
        message: str | None,
        besides: Sequence[str] = (),
        whole: str | None = None,
        token: str | None = None,
        revision: str | None = None,
    ) -> Callable[[], CommitInfo]:
        """Return the upload of a public copy of a directory, made at once: checkpoints are removed meanwhile.

        `besides` are further patterns; `whole` is the name under which all that resuming needs is uploaded, too.
        """
        push, model, tokenizer = HANDED["push"](), self.accelerator.unwrap_model(self.model), self.processing_class
        output = Path(str(self.args.output_dir))
        copy = TemporaryDirectory(dir=output, prefix=".pushing-")  # on its disk, a copy costs nothing
        folder, card = Path(copy.name), output / "README.md"
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
        options = {"token": token or self.args.hub_token, "revision": revision or self.args.hub_revision}

        def upload() -> CommitInfo:
            with copy:
                return push.upload(_API, folder, str(self.hub_model_id), commit_message=message, **options)

        return upload


def _listed(value: _Names) -> list[str]:
    """Return one name or several as a list."""
    return [value] if isinstance(value, str) else sorted(value) if isinstance(value, set) else list(value or ())
