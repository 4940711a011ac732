"""What a layout of block drafters is: how to tell it, its fields, its names; and fields that all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ....configuration.block import BlockDrafterConfig
from ....configuration.foreign_fields import FieldTable, agreed, names, settled, stated
from ....generation.tensors.tensor_files import Fields, count_of
from ...common.drafter_configs import rope_of

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors, under this library's names."""


@dataclass(frozen=True)
class BlockLayout:
    """A layout of checkpoints.

    Attributes:
        name: `config.layout` of what is read; `"tokenahead"`: it is saved in this library's own.
        recognises: Whether a config.json is in it.
        table: From the name of a checkpoint and its config.json to the fields that may stand there.
        read: From the name of a checkpoint, its config.json and shapes to fields of `BlockDrafterConfig`.
        write: From a configuration to a config.json.
        copies: Embeddings and unembedding are in the file, copies of the backbone's.
        renames: Beginnings of tensors' names, theirs and this library's.
    """

    name: str
    recognises: Callable[[Fields], bool]
    table: Callable[[object, Fields], FieldTable]
    read: Callable[[object, Fields, Shapes], Fields]
    write: Callable[[BlockDrafterConfig], Fields]
    copies: bool = False
    renames: tuple[tuple[str, str], ...] = ()


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
_LAYERS = (*_SIZES, "hidden_act", "rms_norm_eps", "attention_bias", "layer_types", "sliding_window")
_BODY = (
    *(*_LAYERS, "initializer_range", "attention_dropout", "dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
)
BODY = names("use_sliding_window rope_theta").union(_LAYERS)
"""Fields of the layers."""
MARKOV = names(
    "markov_rank dspark_markov_rank markov_head_type enable_confidence_head use_confidence_head "
    "confidence_head_with_markov"
)
"""Fields of DSpark's law and confidence head."""
SELECTOR = names("conv_kernel_size conv_group_size selector_rank selector_top_k")
"""Fields of DFlash 2's convolutions and law."""


def body_fields(owner: object, raw: Fields, shapes: Shapes) -> Fields:
    """Return the fields of the layers; sizes that are not stated are read off the tensors."""
    values = {key: raw[key] for key in _BODY if raw.get(key) is not None}
    if raw.get("torch_dtype") is not None:
        values.setdefault("dtype", raw["torch_dtype"])
    if missing := [key for key in ("hidden_size", "num_attention_heads") if key not in values]:
        raise ValueError(f"{owner}: config.json has no {', '.join(missing)}")
    for key in _SIZES:
        if type(values.get(key, 1)) is not int or values.get(key, 1) < 1:
            raise ValueError(f"{owner}: config.json has {key}={values[key]!r}, which is no size")
    values["rope_parameters"] = rope_of(owner, raw)
    attention = "layers.0.self_attn.{}_proj.weight"
    rows = {each: shapes.get(attention.format(each), (0,))[0] for each in "qk"}
    tables = ("embed_tokens", "markov_head.markov_w1", "candidate_selector.predecessor_codebook")
    sizes = [shapes[key] for each in tables for key in (each, each + ".weight") if key in shapes]
    head_dim = rows["q"] // values["num_attention_heads"]
    shown = {
        "hidden_size": shapes.get("norm.weight", (0,))[0],
        "num_hidden_layers": count_of(
            owner, {int(key.split(".")[1]) for key in shapes if key[:7] == "layers."}, "layer"
        ),
        "head_dim": head_dim,
        "num_key_value_heads": rows["k"] // max(head_dim, 1),
        "intermediate_size": shapes.get("layers.0.mlp.gate_proj.weight", (0,))[0],
        "vocab_size": sizes[0][0] if sizes else 0,
    }
    values |= {key: settled(owner, key, values.get(key), size) for key, size in shown.items() if size}
    has_bias = "layers.0.self_attn.q_proj.bias" in shapes if rows["q"] else None
    values["attention_bias"] = bool(settled(owner, "attention_bias", values.get("attention_bias"), has_bias))
    if raw.get("use_sliding_window") and not values.get("layer_types"):
        raise ValueError(f"{owner}: config.json says use_sliding_window=True, and no layer_types: which layers?")
    return {"vocab_size": 0} | values


def parts_of(shapes: Shapes) -> Fields:
    """Return which parts of the backbone a checkpoint holds itself."""
    return {"own_embeddings": "embed_tokens.weight" in shapes, "own_unembedding": "lm_head.weight" in shapes}


def law_fields(kind: str, owner: object, raw: Fields, shapes: Shapes, width: int) -> Fields:
    """Return the law of a kind of drafter, `"dflash"`, `"dflash2"` or `"dspark"`, whose rows are so wide."""
    readers: Mapping[str, Callable[..., Fields]] = {"dflash2": _selector_fields, "dspark": _markov_fields}
    return readers[kind](owner, raw, shapes, width) if kind in readers else {}


def both(*fields: str) -> list[str]:
    """Return the places of fields that stand at the top or in `dflash_config`."""
    return [path for field in fields for path in (field, f"dflash_config.{field}")]


def said(owner: object, raw: Fields, *fields: str, **meanings: Callable[[Any], Any]) -> Any:
    """Return what names of one thing say, at the top and in `dflash_config`; see `agreed`."""
    return agreed(owner, raw, *both(*fields), meanings=meanings)


def _markov_fields(owner: object, raw: Fields, shapes: Shapes, width: int) -> Fields:
    """Return the law and the confidence head of DSpark, as tensors show them where the config is silent."""
    head, proj = "markov_head.{}.weight", shapes.get("confidence_head.proj.weight")
    kinds = {"gated": head.format("gate_proj"), "rnn": head.format("joint_proj")}
    shown = shapes.get(head.format("markov_w1"), (0, 0))[1]
    rank = settled(owner, "markov_rank", said(owner, raw, "markov_rank", "dspark_markov_rank"), shown)
    named = [kind for kind, key in kinds.items() if key in shapes]
    kind = settled(owner, "markov_head_type", said(owner, raw, "markov_head_type"), (named or ["vanilla"])[0])
    law: Fields = {"law": "markov", "law_options": {"kind": kind, "rank": rank}} if rank else {}
    switches = ("enable_confidence_head", "use_confidence_head")
    switch = next((each for each in switches for path in both(each) if stated(raw, path) is not None), switches[0])
    has_confidence = settled(owner, switch, said(owner, raw, *switches), proj is not None)
    reads, field = None if proj is None else proj[1] > width, "confidence_head_with_markov"
    reads = settled(owner, field, said(owner, raw, field) if has_confidence else None, reads)
    return law | {"has_confidence": has_confidence, "confidence_reads_token": bool(reads)}


def _selector_fields(owner: object, raw: Fields, shapes: Shapes, width: int) -> Fields:
    """Return the convolutions and the law of DFlash 2."""
    conv = "layers.0.attention_conv."
    taps = shapes.get(conv + "base_kernel", (0, 0, 0))[1]
    columns = shapes.get(conv + "kernel_projection.weight", (0,))[0]
    shown = {
        "conv_kernel_size": taps or None,
        "conv_group_size": 2 * taps * width // columns if columns else None,
        "selector_rank": shapes.get("candidate_selector.hidden_projection.weight", (None,))[0],
        "selector_top_k": None,
    }
    found = {key: settled(owner, key, said(owner, raw, key), each) for key, each in shown.items()}
    options = {"rank": found.pop("selector_rank") or 256, "top_k": found.pop("selector_top_k") or 16}
    return {key: each for key, each in found.items() if each} | {"law": "selector", "law_options": options}


def written_law(config: BlockDrafterConfig) -> Fields:
    """Return the fields of a law and a confidence head in layouts of others; see `refuse_lost`."""
    law, options = config.law, config.law_options or {}
    if law == "selector":
        if config.conv_kernel_size is None:
            raise ValueError("law='selector' with conv_kernel_size=None is no DFlash 2, which has convolutions")
        sizes = {"conv_kernel_size": config.conv_kernel_size, "conv_group_size": config.conv_group_size}
        return sizes | {"selector_rank": options.get("rank", 256), "selector_top_k": options.get("top_k", 16)}
    if law == "independent" and not config.has_confidence:
        return {}
    kind = {"markov_head_type": options.get("kind", "vanilla")} if law == "markov" else {}
    return {
        "markov_rank": options.get("rank", 256) if law == "markov" else 0,
        **kind,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_reads_token and law == "markov",
    }


_SHAPE_DRAFTS = (
    *("law", "sample_from_anchor", "block_size", "mask_token_id", "feature_layers", "target_hidden_size"),
    *("draft_vocab_size", "mask_embedding", "causal", "layer_types", "input_embedding_scale", "output_multiplier"),
    *("final_logit_softcapping", "conv_kernel_size", "has_confidence", "rope_parameters", "rms_norm_eps", "hidden_act"),
)


def refuse_lost(config: BlockDrafterConfig, layout: BlockLayout, fields: Fields, shapes: Shapes) -> None:
    """Refuse a layout whose reader would make another drafter of what is written.

    Args:
        config: The drafter's.
        layout: The other library's.
        fields: The config.json in it.
        shapes: Of the tensors.
    """
    read = layout.read(f"layout={layout.name!r}", fields, shapes)
    read.pop("is_interleaved", None)
    held, names = BlockDrafterConfig(**read), list(_SHAPE_DRAFTS)
    names += ["sliding_window", "sliding_causal"] if "sliding_attention" in (config.layer_types or ()) else []
    lost = [name for name in names if getattr(held, name) != getattr(config, name)]
    if lost:
        wanted, found = (", ".join(f"{name}={getattr(each, name)!r}" for name in lost) for each in (config, held))
        raise ValueError(f"layout={layout.name!r} cannot hold {wanted}: it holds {found}; save_pretrained holds all")


def written_body(config: BlockDrafterConfig) -> Fields:
    """Return the fields of the layers, those of a Qwen3 config."""
    values = config.to_dict()
    taken = {key: values[key] for key in (*_BODY, "rope_parameters", "max_window_layers") if key in values}
    return taken | {
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "use_sliding_window": config.use_sliding_window,
    }
