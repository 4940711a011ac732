"""Saving a main model and its modules as one ordinary checkpoint under DeepSeek's names, and the names' conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...configuration.fields import field
from ...configuration.loss_options import ModuleLossOptions
from ...configuration.mtp_families import count_modules, family_of, num_layers, set_modules
from ...generation.tensors.tensor_files import Names, renamed
from ...generation.tensors.wrapped_models import whole_state
from ..common.draft_vocabulary import FILE, DraftVocabulary, TokenIds
from ..common.loading import StrictLoadingMixin
from .conversion import DeviceMap, load
from .modules import MTPModules

_PARTS = {"enorm.": "enorm.", "hnorm.": "hnorm.", "eh_proj.": "eh_proj."}
_PARTS |= {"{last}.": "norm.", "shared_head.output.": "head.", "embed_tokens.": "embed_tokens.", "": "block."}
"""Prefixes of the parts of a module, in DeepSeek-V3 and here."""
_OURS = "keys_to_ignore_at_inference"  # describes the outputs of this class, and is not saved


class OfficialCheckpointModel(StrictLoadingMixin, PreTrainedModel):
    """A main model and its modules, saved and restored in the official layout. See `DeepSeekMTP` for attributes."""

    main: PreTrainedModel
    mtp: MTPModules
    loss_options: ModuleLossOptions
    shared_copies: bool
    draft_vocabulary: DraftVocabulary | None = None
    _loaded_so_far: dict[str, Tensor] | None = None
    _optional_files = (FILE,)

    def set_draft_vocabulary(self, ids: TokenIds | None) -> None:
        """Restrict drafts of the modules to some tokens; drafting then computes only their logits.

        Output does not change, because the main model uses its whole vocabulary. The ids are saved with the weights.

        Args:
            ids: [U] distinct token ids, see `frequent_tokens`; None: all tokens again.

        Raises:
            ValueError: No ids, ids out of range, or a repeated id.
        """
        self.draft_vocabulary = None if ids is None else DraftVocabulary(ids, self.config.get_text_config().vocab_size)

    def _write_directory(
        self, directory: Path, is_main_process: bool, state_dict: dict[str, Tensor] | None, **kwargs: Any
    ) -> None:
        """Write one ordinary checkpoint that transformers, vLLM and SGLang read.

        It has the main model's `model_type` and `architectures`, and holds module k as `model.layers.{L + k}.*`,
        experts one by one, with copies of embeddings and head where the model was loaded with them.
        """
        if vars(self.main).get("hf_quantizer") is not None:
            raise ValueError("save_pretrained: a quantised main model; load it in full precision, or save adapters")
        state = self._official_tensors(whole_state(self) if state_dict is None else state_dict)
        self._save_main(directory, state, is_main_process, **kwargs)
        if is_main_process and self.draft_vocabulary is not None:
            self.draft_vocabulary.save(directory)

    def _official_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        layers, family = num_layers(self.config), family_of(self.config)
        state = renamed(state, _names(self.config, self.mtp.count), "this model", back=True)
        if self.shared_copies:
            embeddings = state[f"{family.stem}.embed_tokens.weight"]
            sources = {
                "embed_tokens.weight": embeddings,
                "shared_head.head.weight": state.get("lm_head.weight", embeddings),
            }
            for index in range(self.mtp.count):
                state |= {
                    f"{family.stem}.layers.{layers + index}.{name}": sources[name].clone() for name in family.copies
                }
        return {family.file_name(name, layers, self.mtp.count): tensor for name, tensor in state.items()}

    def _save_main(self, directory: Path, state: dict[str, Tensor], is_main_process: bool, **kwargs: Any) -> None:
        """Let the main model save all tensors as its own; changes of the configuration are undone afterwards."""
        config, options = self.main.config, self.loss_options.changed()
        before = {name: field(config, name) for name in ("dtype", "architectures", _OURS)}
        vars(config).pop(_OURS, None)
        set_modules(config, self.mtp.count)
        if options:
            config.mtp_loss = options
        else:
            vars(config).pop("mtp_loss", None)
        try:
            self.main.save_pretrained(directory, is_main_process=is_main_process, state_dict=state, **kwargs)
        finally:
            for name, value in before.items():
                setattr(config, name, value)

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Load this model's own names, or those of a saved checkpoint, which a resuming Trainer reads file by file.

        Experts may be spread over several files. With `strict=False` they are collected until all are there.
        """
        if all(name.startswith(("main.", "mtp.")) and not _is_official(name) for name in state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        config = self.main.config
        state_dict, self._loaded_so_far = (self._loaded_so_far or {}) | dict(state_dict), None
        if not strict and _size(state_dict, family_of(config).copies) < self._size_in_files():
            self._loaded_so_far = state_dict
            return super().load_state_dict({}, strict=False)
        main, modules, _ = load(None, config, False, state_dict=state_dict, dtype=self.main.dtype)
        parts = {"main": main, "mtp": modules}
        loaded = {f"{part}.{name}": tensor for part in parts for name, tensor in parts[part].state_dict().items()}
        return super().load_state_dict(loaded, strict, assign)

    def _size_in_files(self) -> int:
        """Return the number of weights in a saved checkpoint of this model, without copies."""
        return _size({str(tensor.data_ptr()): tensor for tensor in self.state_dict().values()}, ())


def _is_official(name: str) -> bool:
    """Return whether a name is a family's (`mtp.fc.weight`, `mtp.0.attn.`) and not ours (`mtp.0.eh_proj.weight`)."""
    first, index, part, *_ = name.split(".")
    return first == "mtp" and not (index.isdigit() and f"{part}." in _PARTS.values())


def _size(tensors: dict[str, Tensor], ignored: tuple[str, ...]) -> int:
    copies = {name for name in tensors if name.endswith(ignored) and name.count(".") > 2}
    return sum(tensor.numel() for name, tensor in tensors.items() if name not in copies)


def _names(config: PreTrainedConfig, count: int) -> Names:
    """Return DeepSeek-V3's names of a model with so many modules, and those of `DeepSeekMTP`."""
    family, layers = family_of(config), num_layers(config)
    indices = [(f"{family.stem}.layers.{layers + k}.", f"mtp.{k}.") for k in range(count)]
    parts = {part.format(last=family.last_part): own for part, own in _PARTS.items()}
    pairs = [(theirs + part, ours + own) for theirs, ours in indices for part, own in parts.items()] + indices
    return [(theirs + "{rest}", ours + "{rest}") for theirs, ours in (*pairs, ("", "main."), ("", ""))]


def own_device_map(devices: DeviceMap, config: PreTrainedConfig) -> DeviceMap:
    """Rename the device map of an extended main model to the names of a `DeepSeekMTP`."""
    if "" in devices:
        return devices
    names = _names(config, count_modules(config))
    result = renamed({f"{name}.": device for name, device in devices.items()}, names, "device_map")
    return {name.strip("."): device for name, device in result.items()}


def official_device_map(devices: DeviceMap, config: PreTrainedConfig) -> DeviceMap:
    """Revert `own_device_map`; entries that have the checkpoint's names already are unchanged.

    Args:
        devices: Devices by prefixes of names, as accelerate infers them from a `DeepSeekMTP`, or as in
            `hf_device_map`. `"main"` and `"mtp"` are for all parts without an entry.
        config: The main model's configuration.
    """
    count = count_modules(config)
    each = {part: device for part, device in devices.items() if part != "mtp"}
    if "mtp" in devices:
        each = {f"mtp.{k}": devices["mtp"] for k in range(count)} | each
    names = _names(config, count)
    result = renamed({f"{name}.": device for name, device in each.items()}, names, "device_map", back=True)
    return {name.strip("."): device for name, device in result.items()}
