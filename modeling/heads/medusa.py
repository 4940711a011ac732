"""Heads of blocks between the last hidden state and an unembedding: Medusa, blockwise parallel decoding, Hydra.

Hydra's heads read the tokens drafted before them, optionally after their own decoder layer (Hydra++). Directories of
Medusa's authors hold `{k}.{j}.linear.{weight, bias}` for head k and block j, and `{k}.{blocks}.weight`, its unembedding
(version 2 has none), merged models the same after `medusa_head.`; vLLM's `blocks.{k}.layers.{j}.*` and
`lm_heads.{k}.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...configuration.fields import field
from ...configuration.foreign_fields import FieldTable, names, settled
from ...configuration.head_families import HYDRA, MEDUSA
from ...configuration.heads import MTPHeadConfig
from ...generation.backbone.wrapped_models import input_embeddings
from ...generation.tensors.tensor_files import (
    Fields,
    Names,
    Tensors,
    below,
    count_of,
    names_in,
    read_json,
    read_tensors,
    renamed,
    tensor_names,
    weight_files,
)
from ..common.backbone_parts import BackboneParts, LayerSource, read_config, required
from .circuit_head import FFHead, check_vllm_unembedding, factorised_distribution, vllm_fields
from .family import Directory, HeadFamily, HeadLayout, Parts, register
from .layer import DecoderLayers
from .window_distribution import FactorisedDistribution, SequentialDistribution, WindowDistribution, exact


class Block(nn.Module):
    """B u + b + SiLU(A u + a): B is the identity (Medusa) or, of a wider u, learned (Hydra), and picks its beginning.

    At the start A and b are 0, and a is from +-1/sqrt(width of u).
    """

    def __init__(self, width: int, inputs: int | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs or width, width)
        self.res_connection = None if inputs is None else nn.Linear(inputs, width)

    def forward(self, states: Tensor) -> Tensor:
        kept = states if self.res_connection is None else self.res_connection(states)
        return kept + nn.functional.silu(self.linear(states))

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        init.zeros_(self.linear.weight)
        bound = self.linear.in_features**-0.5
        init.uniform_(self.linear.bias, -bound, bound)
        if self.res_connection is not None:
            init.copy_(self.res_connection.weight, torch.eye(*self.res_connection.weight.shape))
            init.zeros_(self.res_connection.bias)


class FeedForwardBlock(nn.Module):
    """u + C relu(A u + a) + c, with C = 0 and c = 0 at the start (Stern et al. 2018)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.down(nn.functional.relu(self.up(states)))

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        init.zeros_(self.down.weight)
        init.zeros_(self.down.bias)


class Repeated(nn.ModuleList):
    """`count` new blocks one after the other; `tied` ones are a single one."""

    def __init__(self, count: int, tied: bool, block: Callable[[], nn.Module]) -> None:
        super().__init__(block() for _ in range(min(count, 1) if tied else count))
        self.count = count

    def forward(self, states: Tensor) -> Tensor:
        for index in range(self.count):
            states = self[min(index, len(self) - 1)](states)
        return states


class OwnUnembeddings(nn.Module):
    """A matrix [V, d] per head, and optionally a bias [V]."""

    def __init__(self, count: int, hidden_size: int, vocab_size: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = nn.ModuleList(FFHead(hidden_size, vocab_size, 1) for _ in range(count))
        self.bias = nn.Parameter(torch.zeros(count, vocab_size)) if bias else None

    def forward(self, states: Tensor, index: int) -> Tensor:
        logits = self.heads[index](states)[..., 0, :]  # [..., V]
        return logits if self.bias is None else logits + self.bias[index]

    @torch.no_grad()
    def start_from(self, backbone: BackboneParts) -> None:
        """Copy the backbone's unembedding, in any form: its output for unit vectors."""
        for head in self.heads.children():
            weight = cast(Tensor, head.weight)
            unit = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)  # [d, d]
            weight.copy_(backbone.unembed(unit).T)  # [V, d]


class BlockHead(nn.Module):
    """What Medusa and Hydra heads share: position 1 is the backbone's own, `unembeddings` are of the others."""

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int, bias: bool = False) -> None:
        super().__init__()
        self.vocab_size, owns, count = vocab_size, config.unembedding == "own", config.num_drafts
        self.unembeddings = OwnUnembeddings(count, hidden_size, vocab_size, bias) if owns else None

    def unembed(self, states: Tensor, index: int, backbone: Parts) -> Tensor:
        """Return the logits [..., V] of head `index`, -1 being the backbone's own, at states [..., d]."""
        if index < 0 or self.unembeddings is None:
            return required(backbone).unembed(states)
        return self.unembeddings(states, index)

    def start_from(self, backbone: BackboneParts) -> None:
        if self.unembeddings is not None:
            self.unembeddings.start_from(backbone)


def untied(tensors: Tensors, heads: int, blocks: int) -> tuple[bool, Tensors]:
    """Return whether the blocks of every head are copies of one, and the tensors without the copies."""
    copies = _copies(heads, blocks)
    known = tensors.keys() >= {*copies, *copies.values()}
    if not copies or not known or not all(tensors[copy].equal(tensors[first]) for copy, first in copies.items()):
        return False, tensors
    return True, {name: tensor for name, tensor in tensors.items() if name not in copies}


def with_copies(tensors: Tensors, heads: int, blocks: int) -> Tensors:
    """Revert `untied`: return the tensors with a block for every j."""
    return {copy: tensors[first] for copy, first in _copies(heads, blocks).items() if first in tensors} | tensors


def _copies(heads: int, blocks: int) -> dict[str, str]:
    """Return the names of the blocks j > 0 of all heads k, and those of the first blocks."""
    indices = ((k, j, part) for k in range(heads) for j in range(1, blocks) for part in ("weight", "bias"))
    return {f"blocks.{k}.{j}.linear.{part}": f"blocks.{k}.0.linear.{part}" for k, j, part in indices}


class MedusaHead(BlockHead):
    """Head k = 1..n-1 predicts the token k + 1 ahead: W_k block(...block(h)); position 1 is the backbone's own."""

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size)
        inner = config.block_size or 4 * hidden_size
        is_residual, tied = config.block == "residual", config.tied_blocks
        block = partial(Block, hidden_size) if is_residual else partial(FeedForwardBlock, hidden_size, inner)
        self.blocks = nn.ModuleList(Repeated(config.num_blocks, tied, block) for _ in range(config.num_drafts))

    def forward(self, hidden_states: Tensor, backbone: Parts = None, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the logits [..., stop - start, V] of states [..., d]."""
        indices = range(-1, len(self.blocks))[start:stop]
        states = [hidden_states if index < 0 else self.blocks[index](hidden_states) for index in indices]
        if self.unembeddings is None:  # one product for all positions
            return required(backbone).unembed(torch.stack(states, -2))
        each = (self.unembed(state, index, backbone) for index, state in zip(indices, states))
        return torch.stack([exact(part) for part in each], -2)


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
    return _options(directory, values, ours)


def _write_official(config: MTPHeadConfig, tensors: Tensors, backbone: PreTrainedModel) -> Directory:
    """Return the fields and tensors of version 1, or of version 2 where the unembedding is the backbone's."""
    version = {"version": "2"} if config.unembedding == "shared" else {}
    fields = {"medusa_num_heads": config.num_drafts, "medusa_num_layers": config.num_blocks}
    return fields | version, _named(config, tensors, _OFFICIAL)


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


def _is_official(directory: Path, fields: Fields) -> bool:
    if any(directory.glob("medusa_lm_head.*")) or "medusa_num_heads" in fields:
        return True
    files = (names_in(file) for file in directory.glob("*.safetensors"))  # of a merged model that does not say so
    return any(name.startswith(_MERGED) for names in (tensor_names(directory), *files) for name in names)


def _options(directory: Path, values: Fields, ours: Tensors) -> Directory:
    """Return the options from the weights alone: released configs of the authors have 2 heads for 5."""
    indices = [tuple(map(int, name.split(".")[1:3])) for name in ours if name.endswith("linear.weight")]
    if not indices:
        if "unembeddings.heads.0.weight" in ours:
            raise ValueError(f"{directory}: 'ff' heads for vLLM lack the first one; load their original directory")
        raise ValueError(f"{directory}: no Medusa heads among its tensors")
    heads, blocks = (count_of(directory, numbers, what) for numbers, what in zip(zip(*indices), ("head", "block")))
    unembedding = ours.get("unembeddings.heads.0.weight")
    width = next(tensor.shape[1] for name, tensor in ours.items() if name.endswith("linear.weight"))
    rows = None if unembedding is None else len(unembedding)
    settled(directory, "truncated_vocab_size", values.get("truncated_vocab_size"), rows)
    if unembedding is not None and str(values.get("version")) == "2":
        raise ValueError(f"{directory}: version='2' has no unembeddings, which are among the tensors")
    tied, ours = untied(ours, heads, blocks)
    options = {"head_type": "medusa", "window": heads + 1, "num_blocks": blocks, "tied_blocks": tied}
    options |= {"unembedding": "shared" if unembedding is None else "own", "hidden_size": width}
    options |= {"vocab_size": rows or values.get("vocab_size")}
    return options | {"base_model_name_or_path": values.get("base_model_name_or_path")}, ours


_FIELDS = names("medusa_num_heads medusa_num_layers base_model_name_or_path hidden_size vocab_size")
_OF_VLLM = names("truncated_vocab_size num_heads num_hidden_layers medusa_fc_bias original_lm_head")
_OFFICIAL_FIELDS = FieldTable("medusa", {"": _FIELDS | {"version"}})
_UNREAD = names("max_paths topk max_seq_len num_lookahead_tokens")
_VLLM_FIELDS = FieldTable("vllm", {"": _FIELDS | _OF_VLLM}, {"": _UNREAD})
_AUTHORS = HeadLayout("medusa", _is_official, _read_official, _refusal, _write_official, "medusa_lm_head.safetensors")
_LAYOUTS = [
    HeadLayout(
        "vllm",
        lambda directory, fields: fields.get("model_type") == "medusa",
        _read_vllm,
        _refusal,
        _write_vllm,
        fields=_VLLM_FIELDS,
    ),
    replace(_AUTHORS, fields=_OFFICIAL_FIELDS),
]
register(HeadFamily(MEDUSA, MedusaHead, factorised_distribution, is_independent=True, layouts=_LAYOUTS))


EMBEDDING = "input_embed_fn.weight"
"""The backbone's embedding, which the authors' files repeat."""
_PREFIX = "prefix_embeding_layer."  # sic
_UNUSED = (_PREFIX + "embed_tokens.weight", _PREFIX + "layers.0.self_attn.rotary_emb.inv_freq")


class HydraHead(BlockHead):
    """Head k = 1..n-1 predicts x_{t+1+k} from [s; e(x_{t+1}); ..; e(x_{t+k})]; position 1 is the backbone's own.

    s is the state at t, or what a decoder layer over all states up to t makes of it (`arch="prefix-mlp"`).
    """

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size, vocab_size, bias=True)
        self.config, self.width, count = config, hidden_size, config.num_drafts
        self.prefix = PrefixLayer(config) if config.arch == "prefix-mlp" else None
        self.firsts = nn.ModuleList(
            Block(hidden_size, (k + 2) * hidden_size if config.grounded else None) for k in range(count)
        )
        later, block = config.num_blocks - 1, partial(Block, hidden_size)
        self.blocks = nn.ModuleList(Repeated(later, config.tied_blocks, block) for _ in range(count))

    def features(
        self,
        states: Sequence[Tensor],
        attention_mask: Tensor | None,
        position_ids: Tensor,
        backbone: Parts = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return h and s of every position, [B, T, 2 d], from the states that `hidden_layers` names."""
        state = states[0]
        if self.prefix is not None:
            state = self.prefix(state, attention_mask, position_ids, cache)
        return torch.cat([states[-1].to(state.dtype), state], -1)

    def drafted(self, k: int, features: Tensor, known: Tensor) -> Tensor:
        """Return the state [..., d] of head k (-1: h) at h and s [..., 2 d] (or s), after known [..., k + 1, d]."""
        if k < 0:
            return features[..., : self.width]
        block, inputs = cast(Block, self.firsts[k]), features[..., -self.width :]
        if self.config.grounded:
            inputs = torch.cat([inputs.expand(*known.shape[:-2], -1), known.flatten(-2)], -1)
        return self.blocks[k](block(inputs.to(block.linear.weight.dtype)))

    def together(self, features: Tensor, known: Tensor, bound: int, backbone: Parts) -> Tensor:
        """Return logits [..., m + 1 - bound, V] after the first `bound`, .., m of known [..., m, d]: one product."""
        states = [self.drafted(k - 1, features, known[..., :k, :]) for k in range(bound, known.shape[-2] + 1)]
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
        states = states.to(next(self.layers.parameters()).dtype)
        return self.layers.run([states], self.norm, self.rotary, attention_mask, position_ids, cache)[0]


def _layer_config(config: MTPHeadConfig, text: PreTrainedConfig) -> Fields | None:
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
    head: nn.Module, config: MTPHeadConfig, features: Tensor, backbone: Parts, start: int = 0, stop: int | None = None
) -> WindowDistribution:
    """Return the distribution at features [..., 2 d] or [..., d]; conditionals are computed on demand."""
    assert isinstance(head, HydraHead)
    known = features[..., None, : head.width][..., :0, :]  # [..., 0, d]

    def logits(k: int, prefix: Tensor) -> Tensor:
        return head.unembed(head.drafted(k, features, prefix), k, backbone)

    if config.grounded:
        together = None if head.unembeddings is not None else partial(head.together, features, backbone=backbone)
        embed = required(backbone).embed
        return SequentialDistribution(lambda p: logits(p.shape[-2] - 1, p), embed, config.num_depths, known, together)
    each = [exact(logits(k, known)) for k in range(-1, config.num_drafts)]
    return FactorisedDistribution(torch.stack(each, -2).unsqueeze(-2))  # [..., n, 1, V]


def _names(arch: str, blocks: int) -> Names:
    """Return the names of heads with `blocks` blocks each; `prefix-mlp` has a dropout before every block."""
    is_prefix = arch == "prefix-mlp"
    numbers = range(1, 2 * blocks, 2) if is_prefix else range(blocks)
    ours = ["firsts.{k}", *(f"blocks.{{k}}.{j}" for j in range(blocks - 1))]
    return [
        *((f"hydra_mlp.{{k}}.{number}.{{rest}}", f"{own}.{{rest}}") for number, own in zip(numbers, ours)),
        (f"hydra_lm_head.{{k}}.{'1.' if is_prefix else ''}{{part}}", "unembeddings.heads.{k}.{part}"),
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
    needed = [f"unembeddings.heads.{k}.{part}" for k in range(heads or 1) for part in ("weight", "bias")]
    if missing := [name for name in needed if name not in ours]:
        raise ValueError(f"{directory}: its tensors lack {missing[0]}")
    ours["unembeddings.bias"] = torch.stack([ours.pop(name) for name in needed[1::2]])
    tied, ours = untied(ours, heads, blocks - 1)
    vocab_size, width = ours["unembeddings.heads.0.weight"].shape
    options = {"head_type": "hydra", "window": heads + 1, "num_blocks": blocks, "tied_blocks": tied, "arch": arch}
    options |= {"grounded": values.get("grounded_heads", True), "state_offset": values.get("hidden_state_offset", 0)}
    options |= {"unembedding": "own", "hidden_size": width, "vocab_size": vocab_size}
    options |= {"base_model_name_or_path": values.get("base_model_name_or_path")}
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
    fields = {"hydra_num_heads": config.num_drafts, "hydra_num_layers": config.num_blocks}
    fields |= {"hydra_head_arch": config.arch, "grounded_heads": config.grounded}
    return fields | {"hidden_state_offset": config.state_offset}, named


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
_HYDRA_FIELDS = FieldTable(
    "hydra", {"": _READ | {"base_model_name_or_path"}}, {"": names("dropout_rate hidden_size vocab_size")}
)
_HYDRA = HeadLayout(
    "hydra",
    lambda directory, fields: any(directory.glob("hydra_lm_head.*")) or "hydra_num_heads" in fields,
    _read,
    lambda config: None if config.unembedding == "own" else "its unembedding is 'own', not 'shared'",
    _write,
    "hydra_lm_head.pt",  # the only form that their code reads
    fields=_HYDRA_FIELDS,
)
register(
    HeadFamily(
        HYDRA,
        HydraHead,
        _distribution,
        features=lambda head, *context: head.features(*context),
        hidden_layers=lambda config: [-1 - config.state_offset, -1],
        layer_config=_layer_config,
        fit=_take_epsilon,
        layouts=[_HYDRA],
    )
)
