"""One ordinary directory for main model and modules: written under DeepSeek's names, and read back by a Trainer."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ...configuration.mtp_families import family_of, num_layers, set_modules
from ..saving import SavingMixin
from .checkpoint import load, official_names, own_names
from .checkpoint_files import COPIES
from .draft_vocabulary import FILE

_OURS = "keys_to_ignore_at_inference"  # says what this class returns, and is nothing to save


class OfficialFolderMixin(SavingMixin):
    """Directories of a model with `main`, `mtp`, `shared_copies`, `loss_options` and `draft_vocabulary`."""

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves as `SavingMixin.save_pretrained` does; a draft vocabulary of an earlier save does not stay behind."""
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if is_main_process and self.draft_vocabulary is None:
            (Path(save_directory) / FILE).unlink(missing_ok=True)

    def _write_folder(
        self, folder: Path, is_main_process: bool, state_dict: dict[str, torch.Tensor] | None, **kwargs: Any
    ) -> None:
        """Writes one ordinary directory that transformers, vLLM and SGLang read.

        It keeps the main model's `model_type` and `architectures`, and holds module k as `model.layers.{L + k}.*`,
        experts one by one, with copies of embeddings and head where the model was loaded with them.

        Raises:
            ValueError: A main model that is still quantised.
        """
        if getattr(self.main, "hf_quantizer", None) is not None:
            raise ValueError(
                "a quantised main model cannot be saved with its modules; load it in full precision (float8: "
                "quantization_config=FineGrainedFP8Config(dequantize=True)), or save adapters"
            )
        state = self._folder_tensors(self.state_dict() if state_dict is None else state_dict)
        self._save_main(folder, state, is_main_process, **kwargs)
        if is_main_process and self.draft_vocabulary is not None:
            self.draft_vocabulary.save(folder)

    def _folder_tensors(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        layers, family = num_layers(self.config), family_of(self.config)
        state = official_names(state, layers)
        if self.shared_copies:
            sources = self.get_input_embeddings().weight, self.get_output_embeddings().weight
            for index in range(self.num_modules):
                for name in family.copies:
                    source = sources[name != "embed_tokens.weight"]
                    state[f"model.layers.{layers + index}.{name}"] = source.detach().clone()
        return {family.file_name(name, layers, self.num_modules): tensor for name, tensor in state.items()}

    def _save_main(self, folder: Path, state: dict[str, torch.Tensor], is_main_process: bool, **kwargs: Any) -> None:
        """Lets the main model save all tensors as its own; what that changes in the configuration is undone."""
        config, options = self.main.config, self.loss_options.changed()
        kept = {name: getattr(config, name, None) for name in ("dtype", "architectures", _OURS)}
        vars(config).pop(_OURS, None)
        set_modules(config, self.num_modules)
        if options:
            config.mtp_loss = options
        else:
            vars(config).pop("mtp_loss", None)
        try:
            self.main.save_pretrained(folder, is_main_process=is_main_process, state_dict=state, **kwargs)
        finally:
            for name, value in kept.items():
                setattr(config, name, value)

    def load_state_dict(self, state_dict: dict[str, torch.Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Takes this model's own names, or a saved directory's (a Trainer that resumes reads the directory's files).

        A directory in several files comes file by file, with `strict=False`; experts may be spread over them. They are
        kept until all are there, and then loaded.

        Raises:
            ValueError: A directory's tensors that are not complete.
        """
        if all(name.startswith(("main.", "mtp.")) and not _is_official(name) for name in state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        config = self.main.config
        state_dict = vars(self).pop("_files_so_far", {}) | dict(state_dict)
        if not strict and _size(state_dict) < self._size_in_files():
            self._files_so_far = state_dict
            return super().load_state_dict({}, strict=False)
        main, modules, _ = load(None, config, False, state_dict=state_dict, dtype=self.main.dtype)
        official = official_names({f"main.{n}": t for n, t in main.state_dict().items()}, num_layers(config))
        loaded = own_names(official, num_layers(config))
        loaded |= {f"mtp.{name}": tensor for name, tensor in modules.state_dict().items()}
        return super().load_state_dict(loaded, strict, assign)

    def _size_in_files(self) -> int:
        """Numbers that a saved directory of this model holds, copies left out."""
        return _size({str(tensor.data_ptr()): tensor for tensor in self.state_dict().values()})


def _is_official(name: str) -> bool:
    """Whether a name that begins like our own is a family's: `mtp.fc.weight`, not `mtp.0.eh_proj.weight`."""
    return name.startswith("mtp.") and not name.split(".")[1].isdigit()


def _size(tensors: dict[str, torch.Tensor]) -> int:
    return sum(
        tensor.numel() for name, tensor in tensors.items() if not (name.endswith(COPIES) and name.count(".") > 2)
    )
