"""Reading and writing of heads in directories of other tools: the layouts that the records of families name."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from ...configuration import MTPHeadConfig
from ...generation.tensors.tensor_files import Fields, read_json, write_json
from .family import FAMILIES, HeadLayout
from .hydra import EMBEDDING
from .layer import PARAMS, read_backbone


class OfficialLayoutsMixin:
    """`from_official`, `backbone_from_official` and `export`, for `MTPHeads`."""

    config: MTPHeadConfig
    head: nn.Module
    backbone: PreTrainedModel
    _expected_embedding: Tensor | None = None  # until heads that came with one are attached

    @classmethod
    def from_official(cls, folder: str | PathLike, **options: Any) -> Any:
        """Load heads from a directory of their authors: Medusa (version 1, 2, merged, vLLM's), Hydra, Gloeckle et al.

        Args:
            folder: A local directory, whose files determine its layout.
            **options: Fields of `MTPHeadConfig` that the directory lacks (`vocab_size` for Medusa's version 2), or that
                should differ, as `loss_weights`.

        Returns:
            The heads, in the dtype of their tensors, not attached.

        Raises:
            ValueError: An unknown layout, unknown or missing tensors, or a pickle of more than tensors.
        """
        folder = Path(folder)
        layout, own = published_layout(folder), read_json(folder / "config.json").get("model_type")
        if own == MTPHeadConfig.model_type:
            raise ValueError(f"{folder} is in this library's own layout: load it with MTPHeads.from_pretrained")
        if layout is None:
            names = "medusa_lm_head.*, hydra_lm_head.*, params.json, medusa_head.* among the tensors, ..."
            raise ValueError(f"{folder}: no known layout of heads ({names})")
        fields, tensors = layout.read(folder)
        embedding = tensors.pop(EMBEDDING, None)
        heads = cls(MTPHeadConfig(**(fields | options)))
        wrong = f"{folder}: its tensors do not make {fields['head_type']!r} heads"
        try:
            result = heads.head.load_state_dict(tensors, strict=False)
        except RuntimeError as error:  # another shape
            raise ValueError(f"{wrong}: {error}") from error
        if names := [*result.missing_keys, *result.unexpected_keys]:
            raise ValueError(f"{wrong}: {', '.join(names[:5])}")
        heads = heads.to(next(iter(tensors.values())).dtype)
        heads._expected_embedding = embedding
        return heads.eval()

    @classmethod
    def check_model_type(
        cls, name: str | PathLike | None, config: str | PathLike | PreTrainedConfig | None = None, **hub: Any
    ) -> None:
        """Refuse a directory that `from_official` reads, with that name, and others as every class does."""
        folder = Path(str(name))
        fields = read_json(folder / "config.json")
        is_own = fields.get("model_type") == MTPHeadConfig.model_type or config is not None or not folder.is_dir()
        layout = None if is_own else published_layout(folder, fields)
        if layout is not None:
            raise ValueError(
                f"{name} has the layout {layout.name!r} of other tools: load it with {cls.__name__}.from_official"
            )
        cast(Any, super()).check_model_type(name, config, **hub)

    @classmethod
    def backbone_from_official(cls, folder: str | PathLike) -> PreTrainedModel:
        """Return the backbone in a directory that holds it with its heads (merged Medusa-2, Gloeckle et al.).

        Raises:
            ValueError: A directory of heads alone.
        """
        folder = Path(folder)
        if (folder / PARAMS).is_file():
            config, tensors = read_backbone(folder)
            config.dtype = next(iter(tensors.values())).dtype
            model = LlamaForCausalLM(config).to(dtype=config.dtype)
            model.load_state_dict(tensors)
            return model.eval()
        if not holds_backbone(folder, read_json(folder / "config.json")):
            raise ValueError(f"{folder} holds heads alone; load their backbone by its own name")
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")

    def export(self, folder: str | PathLike, layout: str) -> None:
        """Write the heads as their authors' tools, or an engine, will read them.

        Args:
            folder: The directory, which is created.
            layout: `"medusa"` (safetensors), `"vllm"` (Medusa, and independent heads as Medusa without blocks),
                `"hydra"`, or `"gloeckle"` (with the backbone).

        Raises:
            ValueError: A layout that cannot hold these heads.
            RuntimeError: The heads are not attached: some layouts repeat tensors of the backbone.
        """
        family = FAMILIES[self.config.head_type]
        chosen = next((known for known in family.layouts if known.name == layout), None)
        if chosen is None:
            names = ", ".join(known.name for known in family.layouts) or "none"
            raise ValueError(f"layout={layout!r} holds no head_type={self.config.head_type!r}; choose one of: {names}")
        if reason := chosen.refusal(self.config) or (self.config.draft_layers and "it holds no draft layers"):
            raise ValueError(f"layout={layout!r}: {reason}")
        if self.config.draft_vocab_size is not None:
            raise ValueError(f"layout={layout!r} holds no draft_vocab_size={self.config.draft_vocab_size}")
        fields, named = chosen.write(self.config, self.head.state_dict(), self.backbone)
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        named = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}
        if chosen.fields_file == "config.json":
            fields = fields | {"base_model_name_or_path": self.config.base_model_name_or_path}
        write_json(folder / chosen.fields_file, fields)
        if chosen.tensors_file.endswith(".safetensors"):
            save_file(named, folder / chosen.tensors_file)
        else:
            torch.save(named, folder / chosen.tensors_file)

    def check_embedding(self, backbone: PreTrainedModel) -> None:
        """Refuse a backbone with other embeddings than those that Hydra's directories repeat."""
        expected = self._expected_embedding
        weight = cast(Tensor, backbone.get_input_embeddings().weight)
        if expected is None or weight.is_meta:
            return
        if expected.shape != weight.shape or not torch.allclose(expected.to(weight), weight, atol=1e-3):
            raise ValueError(f"{type(backbone).__name__} has other embeddings than these heads were trained on")


def published_layout(directory: Path, fields: Fields | None = None) -> HeadLayout | None:
    """Return the layout of other tools that a directory of heads has, if any; `fields` are those of its config.json."""
    fields = read_json(directory / "config.json") if fields is None else fields
    layouts = (layout for family in FAMILIES.values() for layout in family.layouts)
    return next((layout for layout in layouts if layout.recognises(directory, fields)), None)


def holds_backbone(directory: Path, fields: Fields) -> bool:
    """Return whether a directory of heads in a published layout holds a model of transformers, too."""
    return "architectures" in fields and fields.get("model_type") != "medusa" and not any(directory.glob("*_lm_head.*"))
