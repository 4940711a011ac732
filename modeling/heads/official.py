"""Public directories of parallel heads, read and written: which layout a directory has, and what `MTPHeads` makes of
it."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from ...configuration import MTPHeadConfig
from ..tensor_files import read_json, write_json
from . import gloeckle_layout, hydra_layout, medusa_layouts

Reading = tuple[dict[str, Any], dict[str, torch.Tensor]]
LAYOUTS = ("medusa", "vllm", "hydra", "gloeckle")
"""What `MTPHeads.export` writes."""


class OfficialLayoutsMixin:
    """`from_official`, `backbone_from_official` and `export`, for `MTPHeads`."""

    _expected_embedding: torch.Tensor | None = None  # until heads that came with one are attached

    @classmethod
    def from_official(cls, folder: str | PathLike, **options: Any) -> Any:
        """Heads from a directory of their authors: Medusa (version 1, 2, merged, vLLM's), Hydra, Gloeckle et al.

        Args:
            folder: A local directory; its layout is found by its files.
            **options: Fields of `MTPHeadConfig` that the directory does not say (`vocab_size` for Medusa's version 2),
                or that should differ, as `loss_weights`.

        Returns:
            The heads, in the dtype of their tensors, not attached.

        Raises:
            ValueError: An unknown layout, unknown or missing tensors, or a pickle of more than tensors.
        """
        found, tensors = _reader(Path(folder))(Path(folder))
        embedding = tensors.pop(hydra_layout.EMBEDDING, None)
        heads = cls(MTPHeadConfig(**(found | options)))
        try:
            result = heads.head.load_state_dict(tensors, strict=False)
        except RuntimeError as error:  # torch's word for another shape
            raise ValueError(f"{folder}: its tensors do not make {found['head_type']!r} heads: {error}") from error
        if wrong := [*result.missing_keys, *result.unexpected_keys]:
            raise ValueError(f"{folder}: its tensors do not make {found['head_type']!r} heads: {', '.join(wrong[:5])}")
        heads = heads.to(next(iter(tensors.values())).dtype)
        heads._expected_embedding = embedding
        return heads.eval()

    @classmethod
    def backbone_from_official(cls, folder: str | PathLike) -> PreTrainedModel:
        """The backbone in a directory that holds it beside its heads (merged Medusa-2, Gloeckle et al.).

        Raises:
            ValueError: A directory of heads alone.
        """
        folder = Path(folder)
        if (folder / gloeckle_layout.PARAMS).is_file():
            config, tensors = gloeckle_layout.read_backbone(folder)
            config.dtype = next(iter(tensors.values())).dtype
            model = LlamaForCausalLM(config).to(config.dtype)
            model.load_state_dict(tensors)
            return model.eval()
        if "architectures" not in read_json(folder / "config.json") or list(folder.glob("medusa_lm_head.*")):
            raise ValueError(f"{folder} holds heads alone; load their backbone by its own name")
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")

    def export(self, folder: str | PathLike, layout: str) -> None:
        """Writes the heads as their authors' tools, or an engine, will read them.

        Args:
            folder: Made if it is not there.
            layout: `"medusa"` (safetensors), `"vllm"` (Medusa, and independent heads as Medusa without blocks),
                `"hydra"`, or `"gloeckle"` (with the backbone).

        Raises:
            ValueError: An unknown layout, or heads that it cannot hold.
            RuntimeError: The heads are not attached: some layouts repeat tensors of the backbone.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
        folder, tensors = Path(folder), self.head.state_dict()
        fields, named = _written(layout, self.config, tensors, self.backbone)
        folder.mkdir(parents=True, exist_ok=True)
        named = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}
        if layout == "gloeckle":
            write_json(folder / gloeckle_layout.PARAMS, fields)
            torch.save(named, folder / gloeckle_layout.FILE)  # the only form that their code reads
            return
        write_json(folder / "config.json", fields | {"base_model_name_or_path": self.config.base_model_name_or_path})
        if layout == "hydra":
            torch.save(named, folder / "hydra_lm_head.pt")  # the only form that their code reads
            return
        save_file(named, folder / ("medusa_lm_head.safetensors" if layout == "medusa" else "model.safetensors"))

    def check_embedding(self, backbone: PreTrainedModel) -> None:
        """Hydra's directories repeat the embedding of their backbone, which tells a wrong one.

        Raises:
            ValueError: Another embedding.
        """
        expected, weight = self._expected_embedding, backbone.get_input_embeddings().weight
        if expected is None or weight.is_meta:
            return
        if expected.shape != weight.shape or not torch.allclose(expected.to(weight), weight, atol=1e-3):
            raise ValueError(
                f"{type(backbone).__name__} has other embeddings than the backbone that these heads were trained on"
            )


def _reader(folder: Path) -> Callable[[Path], Reading]:
    """How to read a directory.

    Raises:
        ValueError: No known layout.
    """
    values = read_json(folder / "config.json")
    if (folder / gloeckle_layout.PARAMS).is_file():
        return gloeckle_layout.read
    if list(folder.glob("hydra_lm_head.*")):
        return hydra_layout.read
    if values.get("model_type") == "medusa":
        return medusa_layouts.read_vllm
    if list(folder.glob("medusa_lm_head.*")) or "medusa_num_heads" in values:
        return medusa_layouts.read_official
    if values.get("model_type") == MTPHeadConfig.model_type:
        raise ValueError(f"{folder} is in this library's own layout: load it with MTPHeads.from_pretrained")
    raise ValueError(
        f"{folder}: no known layout of heads: neither medusa_lm_head.*, model_type 'medusa', medusa_num_heads, "
        "hydra_lm_head.* nor params.json with consolidated.pth"
    )


def _written(layout: str, config: MTPHeadConfig, tensors: dict[str, torch.Tensor], base: PreTrainedModel) -> Reading:
    if layout == "gloeckle":
        return gloeckle_layout.write(config, tensors, base.state_dict())
    if layout == "hydra":
        return hydra_layout.write(config, tensors, base.get_input_embeddings().weight)
    write = medusa_layouts.write_official if layout == "medusa" else medusa_layouts.write_vllm
    unembedding = base.get_output_embeddings()
    is_shared = (config.leaf if config.head_type == "ff" else config.unembed) == "shared"
    if layout == "vllm" and is_shared and getattr(unembedding, "bias", None) is not None:
        raise ValueError(f"layout='vllm': the unembedding of {type(base).__name__} has a bias, which vLLM's heads lack")
    return write(config, tensors, unembedding.weight)
