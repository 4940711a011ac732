"""Heads that read the tokens drafted before them (Hydra), optionally after their own decoder layer (Hydra++).

Directories of their authors, `hydra_lm_head.pt` and `config.json`, are read and written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...configuration.fields import field
from ...configuration.foreign_fields import FieldTable, names, settled
from ...configuration.head_families import HYDRA
from ...configuration.heads import MTPHeadConfig
from ...generation.tensors.tensor_files import (
    Fields,
    Names,
    Tensors,
    count_of,
    read_json,
    read_tensors,
    renamed,
)
from ...generation.tensors.wrapped_models import input_embeddings
from ..common.backbone_parts import BackboneParts, LayerSource, read_config, required
from .blocks import BlockHead, ConcatBlock, ResidualBlock, repeated, untied, with_copies
from .family import Directory, HeadFamily, HeadLayout, register
from .layer import DecoderLayers
from .window_distribution import FactorisedDistribution, SequentialDistribution, WindowDistribution, exact

EMBEDDING = "input_embed_fn.weight"
"""The backbone's embedding, which the authors' files repeat."""
_PREFIX = "prefix_embeding_layer."  # sic
_UNUSED = (_PREFIX + "embed_tokens.weight", _PREFIX + "layers.0.self_attn.rotary_emb.inv_freq")


class HydraHead(BlockHead):
    """Head k = 1..n-1 predicts x_{t+1+k} from [s; e(x_{t+1}); ..; e(x_{t+k})]; position 1 is the backbone's own
    distribution.

    s is the state at t, or what a decoder layer over all states up to t makes of it (`arch="prefix-mlp"`).

    Args:
        config: Head options: `window`, `num_blocks`, `tied_blocks`, `unembedding`, `arch`, `grounded`, `state_offset`.
        hidden_size: d.
        vocab_size: V.
    """

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size, bias=True)
        self.config, count = config, config.num_drafts
        self.prefix = PrefixLayer(config) if config.arch == "prefix-mlp" else None
        self.firsts = nn.ModuleList(
            ConcatBlock((k + 2) * hidden_size, hidden_size) if config.grounded else ResidualBlock(hidden_size)
            for k in range(count)
        )
        later = config.num_blocks - 1
        self.blocks = nn.ModuleList(repeated(later, config.tied_blocks, hidden_size) for _ in range(count))

    def features(
        self,
        states: Sequence[Tensor],
        attention_mask: Tensor | None,
        position_ids: Tensor,
        backbone: BackboneParts | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return h and s of every position, [B, T, 2 d], from the states that `hidden_layers` names, [B, T, d] each."""
        state = states[0]
        if self.prefix is not None:
            state = self.prefix(state, attention_mask, position_ids, cache)
        return torch.cat([states[-1].to(state.dtype), state], -1)

    def first(self, features: Tensor, backbone: BackboneParts | None) -> Tensor:
        """Return the logits [..., V] of position 1, the backbone's, at features [..., 2 d]; at [..., d], s is h."""
        return required(backbone).unembed(features[..., : self._width(features)])

    def state(self, features: Tensor) -> Tensor:
        """Return s, [..., d]."""
        return features[..., -self._width(features) :]

    def _width(self, features: Tensor) -> int:
        return self._first(0).linear.out_features if len(self.firsts) else features.shape[-1]

    def _first(self, k: int) -> ConcatBlock | ResidualBlock:
        return cast(ConcatBlock | ResidualBlock, self.firsts[k])

    def logits(self, k: int, state: Tensor, known: Tensor, backbone: BackboneParts | None) -> Tensor:
        """Return logits [..., V] of head k (from 0) given s [..., d] and embeddings of k + 1 tokens [..., k + 1, d]."""
        return self.unembed(self.drafted(k, state, known), k, backbone)

    def drafted(self, k: int, state: Tensor, known: Tensor) -> Tensor:
        """Return the state [..., d] that head k unembeds; arguments as for `logits`."""
        block = self._first(k)
        inputs = (
            torch.cat([state.expand(*known.shape[:-2], -1), known.flatten(-2)], -1) if self.config.grounded else state
        )
        return self.blocks[k](block(inputs.to(block.linear.weight.dtype)))

    def together(self, features: Tensor, known: Tensor, bound: int, backbone: BackboneParts | None) -> Tensor:
        """Return the logits [..., m + 1 - bound, V] after the first `bound`, .., m of m known tokens [..., m, d].

        They are one product with the unembedding that all heads share.
        """
        state, first = self.state(features), features[..., : self._width(features)]
        counts = range(bound, known.shape[-2] + 1)
        states = [self.drafted(k - 1, state, known[..., :k, :]) if k else first for k in counts]
        return required(backbone).unembed(torch.stack(torch.broadcast_tensors(*states), -2))


class PrefixLayer(nn.Module):
    """A decoder layer and a norm over the states of all verified tokens, as `backbone_config` describes."""

    def __init__(self, config: MTPHeadConfig) -> None:
        super().__init__()
        source = LayerSource(read_config(config.backbone_config))
        self.layers, self.rotary, self.norm = DecoderLayers(source, 1), source.rotary(), source.norm()

    def forward(
        self, states: Tensor, attention_mask: Tensor | None, position_ids: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Map [B, T, d] to [B, T, d]; see `layer_options`."""
        states = states.to(next(self.layers.parameters()).dtype)
        return self.layers.run([states], self.norm, self.rotary, attention_mask, position_ids, cache)[0]


def _hidden_layers(config: MTPHeadConfig) -> list[int]:
    """Return the states that Hydra heads read: one, and the last."""
    return [-1 - config.state_offset, -1]


def _layer_config(config: MTPHeadConfig, text: PreTrainedConfig) -> Fields | None:
    """Return the config of that layer, of the backbone's sizes."""
    if not HYDRA.attends(config):
        return None
    heads = text.num_attention_heads
    keys = field(text, "num_key_value_heads", default=heads)
    inner = field(text, "intermediate_size", default=4 * text.hidden_size)
    return _prefix_config(text.hidden_size, inner, heads, keys, field(text, "rms_norm_eps", default=1e-6))


def _prefix_config(hidden_size: int, intermediate_size: int, heads: int, key_heads: int, eps: float) -> Fields:
    """Return the config of a one-layer Llama; its rope base is 10000 for every backbone."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=hidden_size // heads,
        rms_norm_eps=eps,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    )
    return config.to_dict()


def _take_epsilon(head: HydraHead, config: MTPHeadConfig, backbone: PreTrainedModel) -> None:
    """Set the epsilon of the prefix layer's norms to the backbone's, which the authors' files lack."""
    epsilon = field(backbone.config.get_text_config(), "rms_norm_eps")
    if head.prefix is None or epsilon is None:
        return
    config.backbone_config = (config.backbone_config or {}) | {"rms_norm_eps": epsilon}
    for module in head.prefix.modules():
        if isinstance(module, LlamaRMSNorm):
            module.variance_epsilon = epsilon


def _distribution(
    head: nn.Module,
    config: MTPHeadConfig,
    features: Tensor,
    backbone: BackboneParts | None,
    start: int = 0,
    stop: int | None = None,
) -> WindowDistribution:
    """Return the distribution at features [..., 2 d] or [..., d]; conditionals are computed on demand."""
    assert isinstance(head, HydraHead)
    state = head.state(features)
    known = state[..., None, :][..., :0, :]  # [..., 0, d]

    def next_logits(prefix: Tensor) -> Tensor:
        count = prefix.shape[-2]
        return head.first(features, backbone) if count == 0 else head.logits(count - 1, state, prefix, backbone)

    if config.grounded:
        together = None if head.unembeddings is not None else partial(head.together, features, backbone=backbone)
        return SequentialDistribution(next_logits, required(backbone).embed, config.num_depths, known, together)
    logits = [next_logits(known), *(head.logits(k, state, known, backbone) for k in range(config.num_drafts))]
    return FactorisedDistribution(torch.stack([exact(part) for part in logits], -2).unsqueeze(-2))  # [..., n, 1, V]


def _names(arch: str, blocks: int) -> Names:
    """Return the names of heads with `blocks` blocks each; `prefix-mlp` has a dropout before every block."""
    prefix = arch == "prefix-mlp"
    numbers = range(1, 2 * blocks, 2) if prefix else range(blocks)
    ours = ["firsts.{k}", *(f"blocks.{{k}}.{j}" for j in range(blocks - 1))]
    return [
        *((f"hydra_mlp.{{k}}.{number}.{{rest}}", f"{own}.{{rest}}") for number, own in zip(numbers, ours)),
        (f"hydra_lm_head.{{k}}.{'1.' if prefix else ''}{{part}}", "unembeddings.heads.{k}.{part}"),
        (_PREFIX + "{rest}", "prefix.{rest}"),
    ]


def _read(directory: Path) -> Directory:
    """Return the options of the heads and their tensors; the backbone's embedding is among them under its own name."""
    values, files = read_json(directory / "config.json"), sorted(directory.glob("hydra_lm_head.*"))
    if not files:
        raise ValueError(f"{directory}: no weights; no hydra_lm_head.* exists")
    tensors = read_tensors(files[-1:])
    arch = values.get("hydra_head_arch", "mlp")
    if arch not in ("mlp", "prefix-mlp"):
        raise ValueError(f"{directory}: hydra_head_arch={arch!r} is not supported; 'mlp' and 'prefix-mlp' are")
    numbers = [name.split(".")[2] for name in tensors if name.startswith("hydra_mlp.")]
    if not all(map(str.isdigit, numbers)) or len(numbers) <= max(map(int, numbers), default=0):
        raise ValueError(f"{directory}: hydra_mlp.* of its tensors do not count their layers from 0")
    blocks = 1 + max(map(int, numbers), default=0)
    blocks = blocks // 2 if arch == "prefix-mlp" else blocks
    own = {name: tensor for name, tensor in tensors.items() if name not in (*_UNUSED, EMBEDDING)}
    ours = renamed(own, _names(arch, blocks), directory)
    heads = count_of(directory, (int(name.split(".")[2]) for name in ours if name.startswith("unembeddings.")), "head")
    for name, value in (("hydra_num_heads", heads), ("hydra_num_layers", blocks)):
        settled(directory, name, values.get(name), value)
    ends = [f"{k}.{part}" for k in range(heads) for part in ("weight", "bias")]
    if missing := [end for end in ends or ["0.weight"] if f"unembeddings.heads.{end}" not in ours]:
        raise ValueError(f"{directory}: its tensors lack hydra_lm_head.{missing[0]}")
    ours["unembeddings.bias"] = torch.stack([ours.pop(f"unembeddings.heads.{k}.bias") for k in range(heads)])
    tied, ours = untied(ours, heads, blocks - 1)
    vocab_size, width = ours["unembeddings.heads.0.weight"].shape
    options = {
        "head_type": "hydra",
        "window": heads + 1,
        "num_blocks": blocks,
        "tied_blocks": tied,
        "unembedding": "own",
        "arch": arch,
        "grounded": values.get("grounded_heads", True),
        "state_offset": values.get("hidden_state_offset", 0),
        "hidden_size": width,
        "vocab_size": vocab_size,
        "base_model_name_or_path": values.get("base_model_name_or_path"),
    }
    if arch == "prefix-mlp":
        options["backbone_config"] = _stored_layer_config(directory, tensors, vocab_size)
    return options, ours | ({EMBEDDING: tensors[EMBEDDING]} if EMBEDDING in tensors else {})


def _write(config: MTPHeadConfig, tensors: Tensors, backbone: PreTrainedModel) -> Directory:
    """Return the fields of config.json and tensors of `hydra_lm_head.pt`."""
    prefix, embedding = config.arch == "prefix-mlp", input_embeddings(backbone).weight
    every = with_copies(tensors, config.num_drafts, config.num_blocks - 1)
    biases = enumerate(every.pop("unembeddings.bias"))
    every |= {f"unembeddings.heads.{k}.bias": bias for k, bias in biases}
    names = _names(config.arch, config.num_blocks)
    named = renamed(every, names, "these heads", back=True) | {EMBEDDING: embedding}
    if prefix:  # their strict loader requires these unused tensors
        head_dim = (config.backbone_config or {})["head_dim"]
        named |= {_UNUSED[0]: embedding, _UNUSED[1]: 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)}
    fields = {
        "hydra_num_heads": config.num_drafts,
        "hydra_num_layers": config.num_blocks,
        "hydra_head_arch": config.arch,
        "grounded_heads": config.grounded,
        "hidden_state_offset": config.state_offset,
    }
    return fields, named


def _stored_layer_config(directory: Path, tensors: Tensors, vocab_size: int) -> Fields:
    """Return the config of the stored layer from its shapes; `_take_epsilon` sets the norm's."""
    frequencies = tensors.get(_UNUSED[1])
    if frequencies is None:
        raise ValueError(f"{directory}: without {_UNUSED[1]} the number of attention heads is unknown")
    head_dim = 2 * len(frequencies)
    inner, width = tensors[_PREFIX + "layers.0.mlp.gate_proj.weight"].shape
    keys = len(tensors[_PREFIX + "layers.0.self_attn.k_proj.weight"])
    return _prefix_config(width, inner, width // head_dim, keys // head_dim, eps=1e-6)


_READ = names("hydra_num_heads hydra_num_layers hydra_head_arch grounded_heads hidden_state_offset")
_FIELDS = FieldTable(
    "hydra", {"": _READ | {"base_model_name_or_path"}}, {"": names("dropout_rate hidden_size vocab_size")}
)
register(
    HeadFamily(
        HYDRA,
        HydraHead,
        _distribution,
        features=lambda head, *context: head.features(*context),
        hidden_layers=_hidden_layers,
        layer_config=_layer_config,
        fit=_take_epsilon,
        start_from=lambda head, backbone: head.start_from(backbone),
        layouts=[
            HeadLayout(
                "hydra",
                lambda directory, fields: any(directory.glob("hydra_lm_head.*")) or "hydra_num_heads" in fields,
                _read,
                lambda config: None if config.unembedding == "own" else "its unembedding is 'own', not 'shared'",
                _write,
                "hydra_lm_head.pt",  # the only form that their code reads
                fields=_FIELDS,
            )
        ],
    )
)
