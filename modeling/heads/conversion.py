"""Reading and writing of heads in directories of other tools: the layouts that the records of families name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from ...configuration.fields import check_counts, field
from ...configuration.foreign_fields import refuse_unread
from ...configuration.heads import MTPHeadConfig
from ...generation.tensors.tensor_files import (
    Fields,
    Tensors,
    below,
    check_index,
    read_json,
    write_json,
)
from ...generation.tensors.wrapped_models import input_embeddings, untyped
from .family import FAMILIES, HeadLayout
from .layer import PARAMS, DraftLayers, read_backbone
from .medusa import EMBEDDING
from .official import LAYERS, with_backbone

Heads = TypeVar("Heads", bound=PreTrainedModel)


def heads_from_official(
    kind: type[Heads], folder: Path, fields: Fields, backbone: PreTrainedModel | None, ignored: Sequence[str] = ()
) -> tuple[Heads, Tensor | None]:
    """Return heads from a directory of their authors, and the embedding that Hydra's repeat; see `from_official`.

    `fields` are those that the directory lacks, or that should differ; `ignored` are names that are passed over.
    """
    layout, own = published_layout(folder), read_json(folder / "config.json").get("model_type")
    if own == MTPHeadConfig.model_type:
        raise ValueError(f"{folder} is in this library's own layout: load it with MTPHeads.from_pretrained")
    if layout is None:
        names = "medusa_lm_head.*, hydra_lm_head.*, params.json, model@N.pt, medusa_head.* among the tensors, ..."
        raise ValueError(f"{folder}: no known layout of heads ({names})")
    if layout.fields is not None:
        refuse_unread(folder, _of_heads(read_json(folder / layout.fields_file)), layout.fields, ignored)
    found, tensors = layout.read(folder)
    check_counts(folder, found, len(tensors))
    embedding, adapters = tensors.pop(EMBEDDING, None), below(tensors, LAYERS)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYERS)}
    if adapters:
        found = with_backbone(folder, found, backbone)
    config = MTPHeadConfig(**(found | fields))
    what = f"{folder}: its tensors do not make {config.head_type!r} heads"
    is_circuit = FAMILIES[config.head_type].circuit is not None  # whose tensors are all there: nothing is drawn first
    with torch.device("meta") if is_circuit else nullcontext():
        heads = kind(config)
    head = heads.get_submodule("head")
    load_tensors(head, tensors, what, assign=is_circuit)
    untyped(head).to(dtype=next(iter(tensors.values())).dtype)
    if adapters:
        heads.draft_layers = layers = DraftLayers(config)
        load_tensors(layers, adapters, what)
    return heads.eval(), embedding


def _of_heads(raw: Fields) -> Fields:
    """Return the fields of heads: of a whole model's config.json, the others are transformers' business."""
    is_models = "architectures" in raw and raw.get("model_type") != "medusa"
    return {key: value for key, value in raw.items() if not is_models or key.startswith(("medusa_", "hydra_"))}


def load_tensors(head: nn.Module, tensors: Tensors, what: str, assign: bool = False) -> None:
    """Load all tensors of a head and no others; `what` begins the message of an error.

    With `assign` they become the parameters themselves, in their own dtype.
    """
    try:
        result = head.load_state_dict(tensors, strict=False, assign=assign)
    except RuntimeError as error:  # another shape
        raise ValueError(f"{what}: {error}") from error
    if names := [*result.missing_keys, *result.unexpected_keys]:
        raise ValueError(f"{what}: {', '.join(names[:5])}")


def refuse_published(name: str | PathLike | None, kind: type) -> None:
    """Refuse a directory that `from_official` of a class reads, with that name."""
    folder = Path(str(name))
    fields = read_json(folder / "config.json")
    is_own = fields.get("model_type") == MTPHeadConfig.model_type or not folder.is_dir()
    layout = None if is_own else published_layout(folder, fields)
    if layout is not None:
        raise ValueError(
            f"{name} has the layout {layout.name!r} of other tools: load it with {kind.__name__}.from_official"
        )


def backbone_from_official(folder: Path) -> PreTrainedModel:
    """Return the backbone in a directory that holds it with its heads; see `MTPHeads.backbone_from_official`."""
    if (folder / PARAMS).is_file():
        config, tensors = read_backbone(folder)
        config.dtype = next(iter(tensors.values())).dtype
        model = untyped(LlamaForCausalLM(config)).to(dtype=config.dtype)
        model.load_state_dict(tensors)
        return model.eval()
    if not holds_backbone(folder, read_json(folder / "config.json")):
        raise ValueError(f"{folder} holds heads alone; load their backbone by its own name")
    check_index(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def export_head(
    config: MTPHeadConfig, tensors: Tensors, backbone: Callable[[], PreTrainedModel], folder: Path, layout: str
) -> None:
    """Write a head in the layout of another tool; see `MTPHeads.export`. `backbone` raises where there is none."""
    family = FAMILIES[config.head_type]
    chosen = next((known for known in family.layouts if known.name == layout), None)
    if chosen is None:
        names = ", ".join(known.name for known in family.layouts) or "none"
        raise ValueError(f"layout={layout!r} holds no head_type={config.head_type!r}; choose one of: {names}")
    if reason := chosen.refusal(config) or (config.draft_layers and "it holds no draft layers"):
        raise ValueError(f"layout={layout!r}: {reason}")
    if config.draft_vocab_size is not None:
        raise ValueError(f"layout={layout!r} holds no draft_vocab_size={config.draft_vocab_size}")
    fields, named = chosen.write(config, tensors, backbone())
    named = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in named.items()}
    if chosen.fields_file == "config.json":
        fields = fields | {"base_model_name_or_path": config.base_model_name_or_path}
    write_json(folder / chosen.fields_file, fields)
    if chosen.tensors_file.endswith(".safetensors"):
        save_file(named, folder / chosen.tensors_file)
    else:
        torch.save(named, folder / chosen.tensors_file)


def engine_layout(config: MTPHeadConfig, engine: str) -> HeadLayout | None:
    """Return the layout in which an engine runs heads; None: as they are saved, by a class of its user's.

    Raises:
        ValueError: An engine that cannot run them.
    """
    if engine != "vllm":
        raise ValueError(f"engine={engine!r} runs no heads of this kind; choose 'vllm'")
    family = FAMILIES[config.head_type]
    if more := family.reads_besides(config):
        raise ValueError(
            f"vllm cannot run heads of head_type={config.head_type!r}: they read {more}, and it passes the last "
            "hidden state alone"
        )
    if config.draft_vocab_size is not None:
        raise ValueError(f"vllm cannot run heads of draft_vocab_size={config.draft_vocab_size}: it drafts every token")
    return next((layout for layout in family.layouts if layout.name == engine and layout.refusal(config) is None), None)


def check_fit(expected: Tensor | None, layers: list[int], backbone: PreTrainedModel) -> None:
    """Refuse a backbone with other embeddings than the expected ones, or without the hidden states that heads read."""
    count = field(backbone.config.get_text_config(), "num_hidden_layers")
    if count is not None and not all(-1 - count <= index <= count for index in layers):
        raise ValueError(f"{type(backbone).__name__} has {count} layers, and these heads read states {layers}")
    weight = input_embeddings(backbone).weight
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
