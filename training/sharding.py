"""Models whose parameters are sharded over processes: what is saved of them, and which shards heads cannot take."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..configuration.transformers_names import TRAINER, check_names

check_names(TRAINER)

_WHOLE = "FULL_STATE_DICT"


class WholeModelMixin:
    """Whole models are written, and read, also where their parameters are sharded; to be placed before `Trainer`.

    `save_model` always leaves a directory for `from_pretrained`. A trainer's `_owner` that consists of several
    directories has `load_checkpoint`, which reads them; a sharded checkpoint is read by the library.
    """

    _owner: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`; of a model that FSDP sharded, too, whatever `fsdp_state_dict_type` says of checkpoints."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None or _internal_call:
            super().save_model(output_dir, _internal_call)
            return
        of_checkpoints = plugin.state_dict_type
        plugin.set_state_dict_type(_WHOLE)
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            plugin.set_state_dict_type(of_checkpoints)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As in `Trainer`, or by the model itself."""
        if hasattr(self._owner, "load_checkpoint") and not self.is_fsdp_enabled:
            self._owner.load_checkpoint(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """See `_load_from_checkpoint`."""
        if hasattr(self._owner, "load_checkpoint") and not self.is_fsdp_enabled:
            self._owner.load_checkpoint(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()


def plugin_of_deepspeed(trainer: Any) -> Any:
    """What DeepSpeed is asked for; None where it is not used."""
    return trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None


def check_shards(trainer: Any) -> None:
    """Refuses a way of sharding that heads cannot follow.

    Args:
        trainer: A `Trainer`.

    Raises:
        ValueError: Stage 3 of DeepSpeed.
    """
    plugin = plugin_of_deepspeed(trainer)
    if plugin is not None and plugin.zero_stage == 3:
        raise ValueError(
            "zero_stage=3 of DeepSpeed leaves no parameter whole outside its module's forward, and heads read the "
            "backbone's unembedding there: use stage 1 or 2, or FSDP2 (examples/accelerate/fsdp2.yaml)"
        )
