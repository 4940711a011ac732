"""Directories that are saved whole, say which library reads them, and carry its code. Knows no architecture."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers.utils import CONFIG_NAME

from .. import __version__
from .folders import whole_folder
from .remote_code import TRAVELS, TravellingMixin, auto_map_set, write_code

LIBRARY = "tokenahead"
"""The name that directories carry in config.json (`library_name`), for those who find them without the package."""
_PUSH_OPTIONS = ("repo_id", "commit_message", "private", "create_pr", "revision", "commit_description")


class SavingMixin(TravellingMixin):
    """`save_pretrained` and `push_to_hub` of a model or drafter.

    A subclass that writes its tensors in its own way overrides `_write_folder`.
    """

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        *,
        remote_code: str | None = "auto",
        **kwargs: Any,
    ) -> None:
        """Save as `PreTrainedModel.save_pretrained` does, whole or not at all.

        Files are written beside their place and moved there when all of them are whole; weights of an earlier save
        that are not replaced are removed. config.json also names this library and its version.

        Args:
            save_directory: The directory; made if it is not there.
            is_main_process: Whether this process writes.
            state_dict: The tensors of this model, where they had to be gathered.
            push_to_hub: Upload afterwards; `repo_id` and so on as for `push_to_hub`.
            remote_code: What loads the directory where this library is not installed, with `trust_remote_code=True`:
                `"bundle"`, its code, in a directory of its own; `"package"`, one line that asks for the library; None,
                nothing. `"auto"` is None, but a model that was itself loaded from such code hands it on.
            **kwargs: As for transformers' `save_pretrained`.

        Raises:
            ValueError: An unknown `remote_code`, or a class that it cannot be had for.
            NotADirectoryError: `save_directory` is a file.
        """
        target = Path(save_directory)
        auto_map, files = self.code_for(remote_code)
        hub = {key: kwargs.pop(key) for key in _PUSH_OPTIONS if key in kwargs}
        self.config.library_name, self.config.library_version = LIBRARY, __version__
        # torch's distributed checkpoints are written by all processes into one directory
        spread = kwargs.get("distributed_checkpoint", False)
        with (
            nullcontext(target) if spread else whole_folder(target, kwargs.get("variant")) as folder,
            auto_map_set(self.config, auto_map),
        ):
            self._write_folder(folder, is_main_process, state_dict, **kwargs)
            if is_main_process and (folder / CONFIG_NAME).is_file():  # not where adapters of peft were saved alone
                write_code(folder, files)
        if push_to_hub and is_main_process:
            hub = {"repo_id": target.absolute().name, "remote_code": remote_code} | hub
            self.push_to_hub(**hub, **{key: kwargs[key] for key in ("token", "max_shard_size") if key in kwargs})

    def _write_folder(
        self, folder: Path, is_main_process: bool, state_dict: dict[str, torch.Tensor] | None, **kwargs: Any
    ) -> None:
        """Write everything but code into a directory."""
        super().save_pretrained(folder, is_main_process, state_dict, **kwargs)

    def push_to_hub(self, repo_id: str, *, remote_code: str | None = "auto", **kwargs: Any) -> Any:
        """Upload what `save_pretrained` writes, with a card; a card that is on the Hub already is kept.

        Args:
            repo_id: `"user/name"`; created if it does not exist.
            remote_code: As for `save_pretrained`, but `"auto"` is `"bundle"` for models, whose readers may not have
                this library; heads and other drafters carry no code unless it is asked for.
            **kwargs: As for transformers' `push_to_hub`.

        Returns:
            The commit.

        Raises:
            ValueError: No token, or a repository that holds another model: nothing is changed there.
            ConnectionError: The Hub cannot be reached.
        """
        if TRAVELS:  # without the package there is no renderer of cards
            if remote_code not in ("auto", "bundle"):
                raise ValueError(f"remote_code={remote_code!r}: needs the package tokenahead; leave it out")
            return super().push_to_hub(repo_id, **kwargs)
        push = import_module(f"{__package__.partition('.')[0]}.model_cards.push").push_model
        return push(self, repo_id, remote_code=remote_code, **kwargs)
