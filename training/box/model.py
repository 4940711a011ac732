"""The model in the box: its size, the loss of its backbone and of its heads, and its figures on held-out text."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from ...configuration import EvaByteConfig
from ...modeling import EvaByteForMTPC
from ..muon import JointOptimizer, Muon

WINDOW = 16
"""n: bytes that every head of the box covers."""
_AHEAD_EVERY = 8  # the bytes beyond the next are scored at one position of so many
_AHEAD_WEIGHT, _AHEAD_GAMMA = 0.5, 0.8
StepLoss = Callable[[torch.Tensor], torch.Tensor]


def box_config(hidden_size: int = 256, layers: int = 4, heads: int = 4, intermediate_size: int = 704) -> EvaByteConfig:
    """A byte-level EvaByte whose attention window and chunk stand to each other as the official ones."""
    return EvaByteConfig(
        vocab_size=320,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        window_size=256,
        chunk_size=2,
        num_pred_heads=WINDOW,
        max_position_embeddings=4096,
        norm_add_unit_offset=True,
        initializer_range=0.04,
        rope_theta=1e5,
        pad_token_id=0,
        mtp_head={"gamma": 0.9},
    )


def backbone_optimizer(model: EvaByteForMTPC, matrix_rate: float, rate: float) -> torch.optim.Optimizer:
    """Muon for the matrices of the layers and AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    known = {id(parameter) for parameter in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return JointOptimizer([Muon(matrices, lr=matrix_rate), adam])


def backbone_loss(model: EvaByteForMTPC, compile_step: bool) -> StepLoss:
    """Cross-entropy of the next byte everywhere, and of the bytes beyond it at some positions, discounted by depth."""
    vocab, depths = model.config.vocab_size, WINDOW - 1
    weights = _AHEAD_GAMMA ** torch.arange(depths)
    weights = _AHEAD_WEIGHT * weights / weights.sum()

    def loss(ids: torch.Tensor, chosen: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        hidden = model.model(ids, use_cache=False).last_hidden_state
        weight = model.lm_head.weight
        first = linear(hidden[:, :-1], weight[:vocab]).float().flatten(0, 1)
        rest = linear(hidden[:, chosen], weight[vocab:]).float().view(-1, vocab)
        terms = cross_entropy(rest, ahead.flatten(), reduction="none").view(-1, depths).mean(0)
        return cross_entropy(first, ids[:, 1:].flatten()) + (terms * weights).sum()

    compiled = torch.compile(loss, dynamic=False) if compile_step else loss

    def step(ids: torch.Tensor) -> torch.Tensor:
        count = (ids.shape[1] - WINDOW) // _AHEAD_EVERY
        chosen = torch.arange(count) * _AHEAD_EVERY + torch.randint(_AHEAD_EVERY, (count,))
        ahead = torch.stack([ids[:, chosen + depth] for depth in range(2, WINDOW + 1)], dim=-1)
        return compiled(ids, chosen, ahead)

    return step


def can_compile() -> bool:
    """Whether this machine has the C++ compiler that `torch.compile` needs."""
    return any(map(shutil.which, ("g++", "clang++")))


@torch.no_grad()
def held_out_bits(model: nn.Module, ids: torch.Tensor, batch: int = 8) -> dict[str, float]:
    """Bits per byte of the next byte, given windows [B, L] that begin with `<bos>`."""
    total = 0.0
    for part in ids.split(batch):
        logits = model(part, use_cache=False).logits[:, :-1].float()
        total += float(cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return {"bits_per_byte": total / (ids.numel() - len(ids)) / math.log(2)}
