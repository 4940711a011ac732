"""Independent heads of residual blocks on the last hidden state (Medusa; blockwise parallel decoding).

Directories that are read and written: the authors' (version 1, 2, merged into a model) and vLLM's. Authors':
`{k}.{j}.linear.{weight, bias}` for head k and block j, `{k}.{blocks}.weight` its unembedding (version 2 has none).
Merged: the same after `medusa_head.` in a model's files. vLLM: `blocks.{k}.layers.{j}.*` and `lm_heads.{k}.weight`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...configuration.foreign_fields import FieldTable, names, settled
from ...configuration.head_families import MEDUSA
from ...configuration.heads import MTPHeadConfig
from ...generation.tensors.tensor_files import (
    Fields,
    Names,
    Tensors,
    below,
    count_of,
    read_json,
    read_tensors,
    renamed,
    tensor_names,
    unlisted_file,
    weight_files,
)
from ..common.backbone_parts import BackboneParts, required
from .blocks import BlockHead, FeedForwardBlock, Repeated, repeated, untied, with_copies
from .family import Directory, HeadFamily, HeadLayout, register
from .ff import check_vllm_unembedding, factorised_distribution, vllm_fields
from .window_distribution import exact


class MedusaHead(BlockHead):
    """Head k = 1..n-1 predicts the token k + 1 ahead: W_k block(...block(h)); position 1 is the backbone's own
    distribution.

    Args:
        config: Head options: `window`, `num_blocks`, `tied_blocks`, `unembedding`, `block`, `block_size`.
        hidden_size: d.
        vocab_size: V.
    """

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size)
        self.blocks = nn.ModuleList(_blocks(config, hidden_size) for _ in range(config.num_drafts))

    def forward(
        self, hidden_states: Tensor, backbone: BackboneParts | None = None, start: int = 0, stop: int | None = None
    ) -> dict[str, Tensor]:
        """Return `leaf_logits` [..., n, 1, V] of states [..., d], or those of positions start .. stop - 1."""
        positions = range(len(self.blocks) + 1)[start:stop]
        if self.unembeddings is None:  # one product for all positions
            states = [self.blocks[position - 1](hidden_states) if position else hidden_states for position in positions]
            return {"leaf_logits": exact(required(backbone).unembed(torch.stack(states, -2))).unsqueeze(-2)}
        logits = [self._logits(position, hidden_states, backbone) for position in positions]
        return {"leaf_logits": torch.stack([exact(part) for part in logits], -2).unsqueeze(-2)}  # [..., n, 1, V]

    def _logits(self, position: int, hidden_states: Tensor, backbone: BackboneParts | None) -> Tensor:
        if position == 0:
            return required(backbone).unembed(hidden_states)
        return self.unembed(self.blocks[position - 1](hidden_states), position - 1, backbone)


def _blocks(config: MTPHeadConfig, hidden_size: int) -> Repeated:
    if config.block == "residual":
        return repeated(config.num_blocks, config.tied_blocks, hidden_size)
    inner = config.block_size or 4 * hidden_size
    return Repeated([FeedForwardBlock(hidden_size, inner) for _ in range(config.num_blocks)], config.num_blocks)


_MERGED = "medusa_head."
_OFFICIAL = (
    ("{k}.{j}.linear.{part}", "blocks.{k}.{j}.linear.{part}"),
    ("{k}.{j}.weight", "unembeddings.heads.{k}.weight"),
)
_VLLM = (
    ("blocks.{k}.layers.{j}.{part}", "blocks.{k}.{j}.linear.{part}"),
    ("lm_heads.{k}.weight", "unembeddings.heads.{k}.weight"),
)


def _read_official(directory: Path) -> Directory:
    """Return the options of the heads and their tensors, from `medusa_lm_head.*` or the files of a merged model."""
    values = read_json(directory / "config.json")
    if files := sorted(directory.glob("medusa_lm_head.*")):
        tensors = read_tensors(files[-1:])  # safetensors rather than a pickle
        tensors = below(tensors, _MERGED) or tensors
    else:
        tensors = read_tensors(sorted(directory.glob("*.safetensors")), _MERGED)
        tensors = tensors or read_tensors(sorted(directory.glob("pytorch_model*.bin")), _MERGED)
    return _options(directory, values, renamed(tensors, _OFFICIAL, directory))


def _read_vllm(directory: Path) -> Directory:
    """Return the options of the heads and their tensors, from a directory that vLLM serves."""
    values = read_json(directory / "config.json")
    tensors = read_tensors(weight_files(directory, pickles=True))
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    if "token_map" in tensors:
        raise ValueError(f"{directory}: token_map of {len(tensors['token_map'])} tokens is not supported")
    if values.get("original_lm_head"):
        tensors.pop("lm_heads.0.weight", None)
    ours = renamed(tensors, _VLLM, directory)
    has_bias = any(name.endswith("linear.bias") for name in ours)
    settled(directory, "medusa_fc_bias", values.get("medusa_fc_bias"), has_bias)
    for name, tensor in list(ours.items()):
        if name.endswith("linear.weight"):
            ours.setdefault(name.removesuffix("weight") + "bias", tensor.new_zeros(len(tensor)))
    return _options(directory, values, ours, of_heads=True)


def _write_official(config: MTPHeadConfig, tensors: Tensors, backbone: PreTrainedModel) -> Directory:
    """Return the fields and tensors of version 1, or of version 2 where the unembedding is the backbone's."""
    fields: Fields = {"medusa_num_heads": config.num_drafts, "medusa_num_layers": config.num_blocks}
    if config.unembedding == "shared":
        fields["version"] = "2"
    return fields, _named(config, tensors, _OFFICIAL)


def _write_vllm(config: MTPHeadConfig, tensors: Tensors, backbone: PreTrainedModel) -> Directory:
    """Return fields and tensors for vLLM; biases are announced, which it would else drop silently."""
    fields = vllm_fields(config, num_hidden_layers=config.num_blocks, medusa_fc_bias=True)
    if config.unembedding == "own":
        return fields, _named(config, tensors, _VLLM)
    shared = {"lm_heads.0.weight": check_vllm_unembedding(backbone)}
    return fields | {"original_lm_head": True}, shared | _named(config, tensors, _VLLM)


def _named(config: MTPHeadConfig, tensors: Tensors, names: Names) -> Tensors:
    every = with_copies(tensors, config.num_drafts, config.num_blocks)
    return renamed(every, names, "these heads", back=True, j=config.num_blocks)


def _refusal(config: MTPHeadConfig) -> str | None:
    return None if config.block == "residual" else f"it holds block='residual', not block={config.block!r}"


def _is_vllm(directory: Path, fields: Fields) -> bool:
    return fields.get("model_type") == "medusa"


def _is_official(directory: Path, fields: Fields) -> bool:
    if any(directory.glob("medusa_lm_head.*")) or "medusa_num_heads" in fields:
        return True
    names = tensor_names(directory)  # of a merged model that does not say so
    is_unlisted = bool(names) and unlisted_file(directory, lambda name: name.startswith(_MERGED)) is not None
    return is_unlisted or any(name.startswith(_MERGED) for name in names)


def _options(directory: Path, values: Fields, ours: Tensors, of_heads: bool = False) -> Directory:
    """Return the options from the weights alone: released configs of the authors have 2 heads for 5.

    With `of_heads`, the config is vLLM's, whose sizes are those of the heads.
    """
    indices = [tuple(map(int, name.split(".")[1:3])) for name in ours if name.endswith("linear.weight")]
    if not indices:
        if "unembeddings.heads.0.weight" in ours:
            raise ValueError(f"{directory}: 'ff' heads for vLLM lack the first one; load their original directory")
        raise ValueError(f"{directory}: no Medusa heads among its tensors")
    heads, blocks = (count_of(directory, numbers, what) for numbers, what in zip(zip(*indices), ("head", "block")))
    unembedding = ours.get("unembeddings.heads.0.weight")
    width = next(tensor.shape[1] for name, tensor in ours.items() if name.endswith("linear.weight"))
    rows, version = None if unembedding is None else len(unembedding), values.get("version")
    shown: Fields = {"medusa_num_layers": blocks, "hidden_size": width, "vocab_size": rows}
    if of_heads:
        shown |= {"num_heads": heads, "num_hidden_layers": blocks, "truncated_vocab_size": rows}
    for name, value in shown.items():
        settled(directory, name, values.get(name), value)
    if version is not None and (str(version) == "2") != (unembedding is None):
        raise ValueError(f"{directory}: version={version!r}: heads without unembeddings are version '2'")
    tied, ours = untied(ours, heads, blocks)
    options = {
        "head_type": "medusa",
        "window": heads + 1,
        "num_blocks": blocks,
        "tied_blocks": tied,
        "unembedding": "shared" if unembedding is None else "own",
        "hidden_size": width,
        "vocab_size": rows or values.get("vocab_size"),
        "base_model_name_or_path": values.get("base_model_name_or_path"),
    }
    return options, ours


_FIELDS = names("medusa_num_heads medusa_num_layers base_model_name_or_path hidden_size vocab_size")
_OF_VLLM = names("truncated_vocab_size num_heads num_hidden_layers medusa_fc_bias original_lm_head")
_OFFICIAL_FIELDS = FieldTable("medusa", {"": _FIELDS | {"version"}})
_VLLM_FIELDS = FieldTable(
    "vllm", {"": _FIELDS | _OF_VLLM}, {"": names("max_paths topk max_seq_len num_lookahead_tokens")}
)
register(
    HeadFamily(
        MEDUSA,
        MedusaHead,
        factorised_distribution,
        start_from=lambda head, backbone: head.start_from(backbone),
        is_independent=True,
        layouts=[
            HeadLayout("vllm", _is_vllm, _read_vllm, _refusal, _write_vllm, fields=_VLLM_FIELDS),
            HeadLayout(
                "medusa",
                _is_official,
                _read_official,
                _refusal,
                _write_official,
                "medusa_lm_head.safetensors",
                fields=_OFFICIAL_FIELDS,
            ),
        ],
    )
)
