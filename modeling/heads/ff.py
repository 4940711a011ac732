"""Independent heads (FF): with their own unembeddings, as EvaByte's checkpoints hold them, or with a shared one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init

from ...configuration.head_families import FF
from ...configuration.heads import MTPHeadConfig
from ...generation.tensors.shared_models import call
from ...generation.tensors.tensor_files import Fields, Tensors
from ..common.backbone_parts import BackboneParts, output_embeddings, required
from .context import LeafContext, context_of, resized
from .family import Circuit, Directory, HeadFamily, HeadLayout, register
from .official import MTPC
from .window_distribution import FactorisedDistribution, WindowDistribution, exact


class FFHead(nn.Module):
    """Independent linear heads in the released EvaByte parametrisation: one matrix, head-major.

    Rows h V .. (h + 1) V - 1 of `weight` [N V, D] belong to head h, which predicts x_{t+1+h}.

    Args:
        hidden_size: D.
        vocab_size: V.
        num_heads: N.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads * vocab_size, hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as in `nn.Linear`, which peft would adapt in the wrong shape
        self.vocab_size, self.num_heads = vocab_size, num_heads
        self.context: LeafContext | None = None

    def forward(
        self, hidden_states: Tensor, num_heads: int | None = None, backbone: BackboneParts | None = None, start: int = 0
    ) -> Tensor:
        """Return the logits [..., num_heads - start, V] of hidden states [..., D], in the dtype of the weights.

        The first `num_heads` heads are evaluated (all by default), without the first `start` (not in training). The
        backbone is not needed.
        """
        count = self.num_heads if num_heads is None else num_heads
        weight = self.weight
        if (start, count) != (0, self.num_heads):
            weight = weight[start * self.vocab_size : count * self.vocab_size]
        return nn.functional.linear(hidden_states, weight).unflatten(-1, (count - start, self.vocab_size))

    def append(self, more: FFHead) -> None:
        """Append other heads."""
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), more.weight.detach()]))
        self.num_heads += more.num_heads

    @torch.no_grad()
    def resize(self, vocab_size: int, std: float | None) -> None:
        """Change the number of token ids; new rows of a head are drawn, or the mean of its rows (None)."""
        rows = self.weight.unflatten(0, (self.num_heads, self.vocab_size))  # [N, V, D]
        rows = resized(rows, vocab_size, std).flatten(0, 1)  # [N V', D]
        self.weight, self.vocab_size = nn.Parameter(rows, self.weight.requires_grad), vocab_size
        if self.context is not None:
            self.context.resize(vocab_size, std)

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Draw the weights from N(0, std^2)."""
        init.normal_(self.weight, std=std)


class SharedHead(nn.Module):
    """Independent heads on a shared, frozen unembedding W: logits of head i are W A_i h, with A_i = I at the start.

    Memory: N d^2 parameters, independent of the vocabulary.

    Args:
        hidden_size: d.
        vocab_size: V.
        num_heads: N.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__()
        self.vocab_size, self.num_heads = vocab_size, num_heads
        self.context: LeafContext | None = None
        self.maps = nn.Parameter(torch.eye(hidden_size).repeat(num_heads, 1, 1))

    def forward(
        self, hidden_states: Tensor, num_heads: int | None = None, backbone: BackboneParts | None = None, start: int = 0
    ) -> Tensor:
        """Return the logits [..., num_heads - start, V] of hidden states [..., d]; see `FFHead.forward`."""
        maps = self.maps[start:num_heads]
        return required(backbone).unembed(torch.einsum("...d,nde->...ne", hidden_states.to(maps.dtype), maps))

    def resize(self, vocab_size: int, std: float | None) -> None:
        """Change the number of token ids, with the backbone's unembedding; maps have none."""
        self.vocab_size = vocab_size
        if self.context is not None:
            self.context.resize(vocab_size, std)

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Make every map the identity (`std` is not read): then every head is the backbone's own."""
        init.copy_(self.maps, torch.eye(self.maps.shape[-1]).expand_as(self.maps))


def vllm_fields(config: MTPHeadConfig, **values: Any) -> Fields:
    """Return the `config.json` of heads that vLLM runs with its own Medusa class."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_drafts,
        "max_paths": 64,
        "topk": 10,
        **values,
    }


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


def _distribution(
    head: nn.Module,
    config: MTPHeadConfig,
    features: Tensor,
    backbone: BackboneParts | None,
    start: int = 0,
    stop: int | None = None,
) -> WindowDistribution:
    run = partial(call, head) if torch.is_grad_enabled() else head  # without gradients, hooks of units do no harm
    logits = run(features, config.num_depths if stop is None else stop, backbone, start)
    return FactorisedDistribution(exact(logits.unsqueeze(-2)))  # [..., n, 1, V]


def factorised_distribution(
    head: nn.Module,
    config: MTPHeadConfig,
    features: Tensor,
    backbone: BackboneParts | None,
    start: int = 0,
    stop: int | None = None,
) -> WindowDistribution:
    """Return the distribution of a module whose forward returns `leaf_logits` of independent positions."""
    return FactorisedDistribution(exact(call(head, features, backbone, start, stop)["leaf_logits"]))


def _build(config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> nn.Module:
    head = (FFHead if config.unembedding == "own" else SharedHead)(hidden_size, vocab_size, config.num_depths)
    head.context = context_of(config, vocab_size)
    return head


def _vllm_refusal(config: MTPHeadConfig) -> str | None:
    return f"Medusa's heads read no tokens, and these have context={config.context}" if config.context else None


register(
    HeadFamily(
        FF,
        _build,
        _distribution,
        is_independent=True,
        layouts=[
            HeadLayout("vllm", lambda directory, fields: False, _read_vllm, _vllm_refusal, _write_vllm),
            MTPC,
        ],
        circuit=Circuit(FactorisedDistribution, ()),
    )
)
