"""What a layout of block drafters is: how to tell it, its fields, its names; and fields that all share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ....configuration.block import BlockDrafterConfig
from ....configuration.fields import refuse
from ....generation.tensors.tensor_files import Fields, count_of

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of the tensors, under this library's names."""


@dataclass(frozen=True)
class BlockLayout:
    """A layout of checkpoints.

    Attributes:
        name: `config.layout` of what is read; `"tokenahead"`: it is saved in this library's own.
        recognises: Whether a config.json is in it.
        read: From the name of a checkpoint, its config.json and shapes to fields of `BlockDrafterConfig`.
        write: From a configuration to a config.json.
        copies: Embeddings and unembedding are in the file, copies of the backbone's.
        renames: Beginnings of tensors' names, theirs and this library's.
    """

    name: str
    recognises: Callable[[Fields], bool]
    read: Callable[[object, Fields, Shapes], Fields]
    write: Callable[[BlockDrafterConfig], Fields]
    copies: bool = False
    renames: tuple[tuple[str, str], ...] = ()


_BODY = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings", "initializer_range"),
    *("attention_bias", "attention_dropout", "layer_types", "sliding_window", "dtype"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")


def body_fields(name: object, raw: Fields, shapes: Shapes) -> Fields:
    """Return the fields of the layers; sizes that are not stated are read off the tensors."""
    values = {key: raw[key] for key in (*_BODY, *_ROPE) if raw.get(key) is not None}
    if raw.get("torch_dtype") is not None:
        values.setdefault("dtype", raw["torch_dtype"])
    rope = values.get("rope_parameters") or {}
    missing = [key for key in ("hidden_size", "num_attention_heads") if key not in values]
    if not any("rope_theta" in each for each in (values, rope, *rope.values()) if isinstance(each, dict)):
        missing.append("rope_theta")  # any default would be wrong somewhere, and nothing but counts would tell
    if missing:
        raise ValueError(f"{name}: config.json has no {', '.join(missing)}")
    if isinstance(nested := rope.get("sliding_attention"), dict):  # one of these serves all layers
        values["rope_parameters"] = nested
    attention, heads = "layers.0.self_attn.{}_proj.weight", values["num_attention_heads"]
    head_dim = values.setdefault("head_dim", shapes.get(attention.format("q"), (0,))[0] // heads)
    shown = {
        "num_hidden_layers": count_of(
            name, {int(key.split(".")[1]) for key in shapes if key[:7] == "layers."}, "layer"
        ),
        "num_key_value_heads": shapes.get(attention.format("k"), (0,))[0] // max(head_dim, 1),
        "intermediate_size": shapes.get("layers.0.mlp.gate_proj.weight", (0,))[0],
    }
    return {key: size for key, size in shown.items() if size} | values


def parts_of(shapes: Shapes) -> Fields:
    """Return which parts of the backbone a checkpoint holds itself."""
    return {"own_embeddings": "embed_tokens.weight" in shapes, "own_unembedding": "lm_head.weight" in shapes}


def markov_fields(raw: Fields) -> Fields:
    """Return the law and the confidence head of DSpark."""
    rank = raw.get("markov_rank") or 0
    law: Fields = {"law": "markov", "law_options": {"kind": raw.get("markov_head_type") or "vanilla", "rank": rank}}
    confidence: Fields = {
        "has_confidence": bool(raw.get("enable_confidence_head")),
        "confidence_reads_token": bool(raw.get("confidence_head_with_markov")),
    }
    return (law if rank else {}) | confidence


def selector_fields(raw: Fields) -> Fields:
    """Return the convolutions and the law of DFlash 2."""
    options = {"rank": raw.get("selector_rank", 256), "top_k": raw.get("selector_top_k", 16)}
    sizes = {"conv_kernel_size": raw.get("conv_kernel_size", 2), "conv_group_size": raw.get("conv_group_size", 16)}
    return sizes | {"law": "selector", "law_options": options}


def written_law(config: BlockDrafterConfig, layout: str) -> Fields:
    """Return the fields of a law in layouts of others.

    Raises:
        ValueError: They have none for it.
    """
    options, kernel = config.law_options or {}, config.conv_kernel_size
    anchor = ", sample_from_anchor=False" if layout == "z-lab" else ""
    refuse(
        [
            (
                config.law not in ("independent", "markov", "selector"),
                f"layout={layout!r} cannot hold law={config.law!r}; save_pretrained can",
            ),
            (
                config.law == "selector" and kernel is None,
                f"layout={layout!r} has law='selector' with convolutions alone (conv_kernel_size=None): make the "
                f"drafter with from_backbone(..., conv_kernel_size=3{anchor})",
            ),
            (
                config.law != "selector" and kernel is not None,
                f"layout={layout!r} has convolutions with law='selector' alone: make a drafter with law={config.law!r} "
                f"without conv_kernel_size={kernel}",
            ),
            (config.mask_embedding, f"layout={layout!r} is not written with a mask_embedding; save_pretrained can"),
        ]
    )
    if config.law == "selector":
        sizes = {"conv_kernel_size": config.conv_kernel_size, "conv_group_size": config.conv_group_size}
        return sizes | {"selector_rank": options.get("rank", 256), "selector_top_k": options.get("top_k", 16)}
    if config.law == "independent" and not config.has_confidence:
        return {}
    kind = {"markov_head_type": options.get("kind", "vanilla")} if config.law == "markov" else {}
    return {
        "markov_rank": options.get("rank", 256) if config.law == "markov" else 0,
        **kind,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_reads_token and config.law == "markov",
    }


def written_body(config: BlockDrafterConfig) -> Fields:
    """Return the fields of the layers, those of a Qwen3 config."""
    values = config.to_dict()
    taken = {key: values[key] for key in (*_BODY, "rope_parameters", "max_window_layers") if key in values}
    return taken | {
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "use_sliding_window": config.use_sliding_window,
    }
