"""Loading that refuses what it cannot load: missing tensors, wrong shapes, damaged files. Knows no architecture."""

from __future__ import annotations

from os import PathLike
from typing import Any

from safetensors import SafetensorError


class StrictLoadingMixin:
    """`from_pretrained` that raises where transformers would warn and go on with random weights.

    To be placed before `PreTrainedModel` among the bases.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike | None, *args: Any, **kwargs: Any) -> Any:
        """Loads a model as `PreTrainedModel.from_pretrained` does.

        Raises:
            ValueError: Tensors that are missing or have another shape than the config says, or a damaged
                safetensors file.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        name = str(pretrained_model_name_or_path)
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(f"{name}: a safetensors file is damaged or cut short ({error}); fetch it again") from error
        except RuntimeError as error:
            if "mismatch" in str(error).lower():
                raise ValueError(f"{name}: tensors do not have the shapes that config.json says: {error}") from error
            raise
        if missing := sorted(info["missing_keys"]):
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise ValueError(f"{name}: the checkpoint lacks {len(missing)} tensors of {cls.__name__}: {shown}")
        return (model, info) if wants_info else model
