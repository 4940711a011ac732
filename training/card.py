"""The card of what a trainer saves: the library's own, with the data, the recipe and the log of the run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from transformers.modelcard import extract_hyperparameters_from_trainer, make_markdown_table, parse_log_history
from transformers.utils import logging

from .. import __version__
from ..modeling.heads.joint import JointMTPModel

logger = logging.get_logger(__name__)
_FILE_READERS = {"csv", "json", "pandas", "parquet", "text", "generator"}  # what `datasets` calls files, not names


class TrainerCardMixin:
    """`create_model_card`, as `Trainer.push_to_hub` and TRL's trainers call it; to be placed before `Trainer`."""

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
        dataset_name: str | None = None,
    ) -> None:
        """Writes README.md beside the model; one that a person wrote or edited is kept.

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
        # cards import what is measured here, so that they are imported where one is made
        from ..model_cards import render_card, write_card
        from ..model_cards.facts import hub_id

        model = self.accelerator.unwrap_model(self.model)
        model = model.heads if isinstance(model, JointMTPModel) else model
        named = [_without_folders(name) for name in listed(dataset) or listed(dataset_name)]
        described = [f"{name} ({args})" for name, args in zip(named, listed(dataset_args))] or named
        data_ids = [name for name in listed(dataset_tags) or self._data_names() if hub_id(name)]
        try:
            card = render_card(
                model,
                None,
                license=license,
                base_model=hub_id(finetuned_from or model.config.name_or_path),
                model_name=model_name,
                repo_id=getattr(self, "hub_model_id", None) or self.args.hub_model_id,
                language=language,
                training_data=self._data_text(described or data_ids),
                training_description=self._recipe_text(model),
                hyperparameters=extract_hyperparameters_from_trainer(self),
                training_results=self._log_text(),
                metadata={"tags": listed(tags) + list(getattr(self, "_tag_names", ())), "datasets": data_ids or None},
            )
        except TypeError:  # a model around ours (peft's adapters), or one that drafts nothing: as the base class does
            names = {"model_name": model_name, "tags": listed(tags) or None}
            super().create_model_card(**names)
            return
        try:
            write_card(self.args.output_dir, card)
        except FileExistsError as error:
            logger.warning(str(error))

    def _data_names(self) -> list[str]:
        """What `datasets` knows of the name of the training data."""
        name = getattr(self.train_dataset, "builder_name", None)
        return [name] if name and name not in _FILE_READERS else []

    def _data_text(self, names: list[str]) -> str | None:
        sized = hasattr(self.train_dataset, "__len__")
        rows = f"{len(self.train_dataset):,} rows" if sized else ""
        text = ", ".join(f"`{name}`" for name in names)
        return f"{text}: {rows}." if text and rows else f"{text or rows}." if text or rows else None

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


def listed(value: str | Iterable[str] | None) -> list[str]:
    """One name or several, as a list."""
    return [value] if isinstance(value, str) else sorted(value) if isinstance(value, set) else list(value or ())


def _without_folders(name: str) -> str:
    """The name of data as a card shows it: of a path of this machine, what comes last."""
    path = Path(name).expanduser()
    is_here = path.is_absolute() or path.exists() or name.startswith(".")
    return path.name or path.resolve().name if is_here else name
