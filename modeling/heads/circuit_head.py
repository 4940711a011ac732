"""The families of MtPC: from a hidden state to the parameters of a distribution over the window.

They are independent heads (FF), as EvaByte's checkpoints hold them or on a shared unembedding, and circuits, of which
independent positions are the one without sums.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ...configuration.head_families import BTREE, CP, FF, HMM
from ...configuration.heads import MTPHeadConfig
from ...generation.backbone.wrapped_models import call
from ...generation.tensors.tensor_files import Fields, Tensors
from ..common.backbone_parts import output_embeddings, required
from .circuits import ChainDistribution, MixtureDistribution, TreeDistribution
from .context import LeafContext, context_of, resized
from .family import FAMILIES, Circuit, Directory, HeadFamily, HeadLayout, Parts, register
from .window_distribution import FactorisedDistribution, WindowDistribution, exact


class LeafHead(nn.Module):
    """N = `num_heads` independent heads over V = `vocab_size` tokens, and the tables of tokens that they read."""

    def __init__(self, vocab_size: int, num_heads: int) -> None:
        super().__init__()
        self.vocab_size, self.num_heads = vocab_size, num_heads
        self.context: LeafContext | None = None

    def resize(self, vocab_size: int, std: float | None) -> None:
        """Change the number of token ids; new rows of a head are drawn, or the mean of its rows (None)."""
        self.vocab_size = vocab_size
        if self.context is not None:
            self.context.resize(vocab_size, std)


class FFHead(LeafHead):
    """Independent linear heads in the released EvaByte parametrisation: one matrix, head-major.

    Rows h V .. (h + 1) V - 1 of `weight` [N V, D] belong to head h, which predicts x_{t+1+h}.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__(vocab_size, num_heads)
        self.weight = nn.Parameter(torch.empty(num_heads * vocab_size, hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as in `nn.Linear`, which peft would adapt in the wrong shape

    def forward(self, hidden_states: Tensor, backbone: Parts = None, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the logits [..., stop - start, V] of hidden states [..., D], in the dtype of the weights."""
        weight, stop = self.weight, self.num_heads if stop is None else stop
        if (start, stop) != (0, self.num_heads):
            weight = weight[start * self.vocab_size : stop * self.vocab_size]
        return nn.functional.linear(hidden_states, weight).unflatten(-1, (stop - start, self.vocab_size))

    def append(self, more: FFHead) -> None:
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), more.weight.detach()]))
        self.num_heads += more.num_heads

    @torch.no_grad()
    def resize(self, vocab_size: int, std: float | None) -> None:
        rows = resized(self.weight.unflatten(0, (self.num_heads, self.vocab_size)), vocab_size, std)  # [N, V', D]
        self.weight = nn.Parameter(rows.flatten(0, 1), self.weight.requires_grad)
        super().resize(vocab_size, std)

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        init.normal_(self.weight, std=std)


class SharedHead(LeafHead):
    """Independent heads on a shared, frozen unembedding W: logits of head i are W A_i h, with A_i = I at the start.

    Memory: N d^2 parameters, independent of the vocabulary.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__(vocab_size, num_heads)
        self.maps = nn.Parameter(torch.eye(hidden_size).repeat(num_heads, 1, 1))

    def forward(self, hidden_states: Tensor, backbone: Parts = None, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the logits [..., stop - start, V] of hidden states [..., d]."""
        maps = self.maps[start:stop]
        return required(backbone).unembed(torch.einsum("...d,nde->...ne", hidden_states.to(maps.dtype), maps))

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        init.copy_(self.maps, torch.eye(self.maps.shape[-1]).expand_as(self.maps))


def vllm_fields(config: MTPHeadConfig, **values: object) -> Fields:
    """Return the `config.json` of heads that vLLM runs with its own Medusa class."""
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_heads": config.num_drafts}
    options = {"truncated_vocab_size": config.vocab_size, "max_paths": 64, "topk": 10}
    return {"architectures": ["MedusaModel"], "model_type": "medusa"} | sizes | options | values


def check_vllm_unembedding(backbone: PreTrainedModel) -> Tensor:
    """Return the backbone's unembedding [V, d], for vLLM's heads."""
    unembedding = output_embeddings(backbone)
    if unembedding.bias is not None:
        raise ValueError(f"layout='vllm' has no bias, which the unembedding of {type(backbone).__name__} has")
    return unembedding.weight


def _write_vllm(config: MTPHeadConfig, tensors: Tensors, backbone: PreTrainedModel) -> Directory:
    """Return a matrix [V, d] per head from the second token on: its own rows, or W A_h before a shared unembedding."""
    if config.unembedding == "own":
        matrices = tensors["weight"].unflatten(0, (config.num_depths, -1))  # [n, V, d]
    else:
        unembedding = check_vllm_unembedding(backbone)
        matrices = torch.stack([unembedding @ matrix.T.to(unembedding) for matrix in tensors["maps"]])  # [n, V, d]
    named = {f"lm_heads.{k}.weight": matrices[k + 1] for k in range(config.num_drafts)}
    return vllm_fields(config, num_hidden_layers=0), named


def _read_vllm(directory: Path) -> Directory:
    raise ValueError(f"{directory}: heads written for vLLM lack the first one; load their original directory")


def factorised_distribution(
    head: nn.Module, config: MTPHeadConfig, features: Tensor, backbone: Parts, start: int = 0, stop: int | None = None
) -> WindowDistribution:
    """Return the distribution of a module whose forward returns logits [..., stop - start, V] of these positions."""
    run = partial(call, head) if torch.is_grad_enabled() else head  # without gradients, hooks of units do no harm
    logits = run(features, backbone, start, config.num_depths if stop is None else stop)
    return FactorisedDistribution(exact(logits.unsqueeze(-2)))  # [..., n, 1, V]


def _build(config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> nn.Module:
    head = (FFHead if config.unembedding == "own" else SharedHead)(hidden_size, vocab_size, config.num_depths)
    head.context = context_of(config, vocab_size)
    return head


_VLLM = HeadLayout(
    "vllm",
    lambda directory, fields: False,
    _read_vllm,
    lambda config: f"Medusa's heads read no tokens: context={config.context}" if config.context else None,
    _write_vllm,
)
_CIRCUIT = Circuit(FactorisedDistribution, ())
register(HeadFamily(FF, _build, factorised_distribution, is_independent=True, layouts=[_VLLM], circuit=_CIRCUIT))


class CircuitHead(nn.Module):
    """Parameters of a circuit (MtPC): one unembedding per position and state, and the weights of its sums.

    Memory in parameters: leaves n r V d (`unembedding="own"`) or n r d^2 (`"shared"`), with `leaf_size` n V d or n d^2,
    and n r L d + V L; sum weights z r d with z sums, where CP has z = 1, HMM 1 + (n - 1) r (1 + r if homogeneous) and
    BTree 1 + (n - 2) r; z r if not contextual.
    """

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.per_position = config.rank if config.leaf_size is None else 1
        self.context = context_of(config, vocab_size)
        count = config.num_depths * self.per_position
        self.leaf = (FFHead if config.unembedding == "own" else SharedHead)(hidden_size, vocab_size, count)
        self.state_leaves = None if config.leaf_size is None else StateLeaves(config, hidden_size, vocab_size)
        counts = self.circuit.sum_counts(config.num_depths)
        self.num_sum_matrices = counts[-1] if config.homogeneous else counts[0]  # [r, r] sums besides the root
        sums = config.rank * (1 + config.rank * self.num_sum_matrices)
        self.sum_bias = nn.Parameter(torch.zeros(sums))
        self.sum_weight = nn.Parameter(torch.zeros(sums, hidden_size)) if config.contextual else None

    @property
    def circuit(self) -> Circuit:
        return _circuit(self.config.head_type)

    def forward(self, hidden_states: Tensor, backbone: Parts = None, stop: int | None = None) -> dict[str, Tensor]:
        """Return the parameters of the distribution given hidden states [..., d], as `circuit_from_logits` takes them.

        With `stop`, only the leaves of so many first positions are computed, and the others are uniform, on which no
        distribution of earlier tokens depends.
        """
        rank = self.config.rank
        sums = self.sum_bias.expand(*hidden_states.shape[:-1], -1)
        if self.sum_weight is not None:
            sums = nn.functional.linear(hidden_states, self.sum_weight, self.sum_bias)  # [..., r (1 + z r)]
        window = self.config.num_depths
        count = window if stop is None else stop
        leaves = self.leaf(hidden_states, backbone, 0, count * self.per_position)
        leaves = leaves.unflatten(-2, (count, self.per_position))  # [..., count, r or 1, V]
        if self.state_leaves is not None:
            leaves = leaves + self.state_leaves(hidden_states, count)  # [..., count, r, V]
        if count < window:
            leaves = nn.functional.pad(leaves, (0, 0, 0, 0, 0, window - count))
        parameters = {"leaf_logits": leaves, "root_logits": sums[..., :rank]}
        if self.num_sum_matrices:
            name = self.circuit.parameters[1]
            parameters[name] = sums[..., rank:].unflatten(-1, (self.num_sum_matrices, rank, rank))  # [..., z, r, r]
        return parameters

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Draw sum weights whose logits vary over contexts (deviation 0.5): states differ."""
        if self.sum_weight is not None:
            init.normal_(self.sum_weight, std=0.5 * self.sum_weight.shape[1] ** -0.5)
        bias = torch.zeros_like(self.sum_bias) if self.config.contextual else torch.randn_like(self.sum_bias) * 0.5
        if self.circuit.persistent:
            rank, added = self.config.rank, self.config.identity_bias
            added = persistence(rank) if added is None else added
            bias[rank:].view(-1, rank, rank).diagonal(dim1=1, dim2=2).add_(added)
        init.copy_(self.sum_bias, bias)

    def resize(self, vocab_size: int, std: float | None) -> None:
        self.leaf.resize(vocab_size, std)
        for part in (self.state_leaves, self.context):
            if part is not None:
                part.resize(vocab_size, std)
        self.vocab_size = vocab_size

    @torch.no_grad()
    def copy_leaves(self, weights: Tensor) -> None:
        """Copy matrix i, or the last, of FF heads [heads, V, d] to all states of position i: q is theirs."""
        source = [min(i, len(weights) - 1) for i in range(self.config.num_depths) for _ in range(self.per_position)]
        cast(FFHead, self.leaf).weight.copy_(weights[source].flatten(0, 1))  # [n r V, d]


class StateLeaves(nn.Module):
    """What tells the leaves of a position's states apart (`leaf_size`): logits U A h, small maps A, one U for all."""

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        size = config.leaf_size or 1
        self.rank, self.size = config.rank, size
        self.maps = nn.Parameter(torch.zeros(config.num_depths * config.rank * size, hidden_size))  # [n r L, d]
        self.weight = nn.Parameter(torch.zeros(vocab_size, size))  # U
        self.reset_head(config.initializer_range)

    def forward(self, hidden_states: Tensor, count: int) -> Tensor:
        """Return the logits [..., count, r, V] of the first positions, of hidden states [..., d]."""
        maps = self.maps[: count * self.rank * self.size]
        inside = nn.functional.linear(hidden_states, maps).unflatten(-1, (count, self.rank, self.size))
        return nn.functional.linear(inside, self.weight)

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        init.normal_(self.maps, std=self.maps.shape[1] ** -0.5)
        init.zeros_(self.weight)

    def resize(self, vocab_size: int, std: float | None) -> None:
        self.weight = resized(self.weight, vocab_size, std)


def persistence(rank: int) -> float:
    """Return what, added to the diagonal of random logits [r, r] of deviation 0.5, makes their softmax's mean 0.85."""
    return math.log(0.85 / (1 - 0.85) * max(rank - 1, 1)) + 0.2  # of equal logits; noise takes 0.2 from that


def circuit_from_logits(
    head_type: str,
    *,
    leaf_logits: Tensor,
    root_logits: Tensor | None = None,
    trans_logits: Tensor | None = None,
    node_logits: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> WindowDistribution:
    """Build the distribution of a head family from unnormalised parameters; layouts in the docstring of `circuits`.

    Args:
        head_type: `"ff"` (leaves only, r = 1), `"cp"` (and root), `"hmm"` (root, trans) or `"btree"` (root, node).
        leaf_logits: [..., n, r, v].
        root_logits: [..., r].
        trans_logits: [..., n - 1 or 1, r, r].
        node_logits: [..., n - 2, r, r]; None for n = 2.
        dtype: Of the arithmetic and of what the distribution returns. Models use float32.

    Example:
        >>> distribution = circuit_from_logits("cp", root_logits=torch.zeros(3), leaf_logits=torch.zeros(4, 3, 10))
        >>> distribution.condition(torch.tensor(7)).window
        3
    """
    parameters = {"root_logits": root_logits, "trans_logits": trans_logits, "node_logits": node_logits}
    family, (window, rank) = _circuit(head_type), leaf_logits.shape[-3:-1]
    allowed = family.shapes(window, rank)
    for name, value in parameters.items():
        shapes, actual = allowed.get(name, []), () if value is None else tuple(value.shape)
        if not any(actual[-len(shape) :] == shape for shape in shapes) if shapes else actual:
            needed = " or ".join(map(str, shapes)) or "none"
            raise ValueError(f"{name} of shape {actual}: head_type={head_type!r} needs {needed} for this window")
    if not family.parameters and rank != 1:
        raise ValueError(f"leaf_logits: {head_type!r} has rank 1, got {tuple(leaf_logits.shape)}")
    inputs = [None if (value := parameters[name]) is None else value.to(dtype) for name in family.parameters]
    return family.distribution(*inputs, leaf_logits.to(dtype))


def _circuit(head_type: str) -> Circuit:
    circuits = {name: family.circuit for name, family in FAMILIES.items() if family.circuit is not None}
    if head_type not in circuits:
        raise ValueError(f"head_type={head_type!r} is unknown; choose one of {', '.join(circuits)}")
    return circuits[head_type]


def _circuit_distribution(
    head: nn.Module, config: MTPHeadConfig, features: Tensor, backbone: Parts, start: int = 0, stop: int | None = None
) -> WindowDistribution:
    parameters = call(head, features, backbone, stop)
    dtype = exact(parameters["leaf_logits"][..., :0]).dtype
    return circuit_from_logits(config.head_type, dtype=dtype, **parameters)


for facts, circuit in (
    (CP, Circuit(MixtureDistribution)),
    (HMM, Circuit(ChainDistribution, ("root_logits", "trans_logits"), lambda n: (n - 1, 1), True)),
    (BTREE, Circuit(TreeDistribution, ("root_logits", "node_logits"), lambda n: (max(n - 2, 0),))),
):
    register(HeadFamily(facts, CircuitHead, _circuit_distribution, circuit=circuit))
