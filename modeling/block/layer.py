"""A layer of a block drafter: Qwen3's, over context and block, and the convolutions of DFlash 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from ...configuration.block import BlockDrafterConfig
from ...generation.tensors.wrapped_models import untyped


class BlockLayer(Qwen3DecoderLayer):
    """A layer over the rows of blocks; keys and values of the context are in the cache before it is called."""

    def __init__(self, config: BlockDrafterConfig, index: int) -> None:
        super().__init__(untyped(config), index)
        self.self_attn.is_causal = False  # without a mask a row sees all of the block
        if config.conv_kernel_size is not None:
            self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Map rows [B, R, d] to [B, R, d]; `options` are keyword arguments of the attention."""
        if self.self_attn.config.conv_kernel_size is None:
            return super().forward(hidden_states, **options)

        def attend(rows: Tensor) -> Tensor:
            return self.self_attn(hidden_states=rows, **options)[0]

        hidden = hidden_states + self.attention_conv(self.input_layernorm(hidden_states), attend)  # [B, R, d]
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)


class BlockConvolution(nn.Module):
    """Causal convolutions along a block, before and after a sublayer; the kernels depend on the row.

    Channel c of row t becomes the sum over taps s of (base_s,c + delta_t,s,group(c)) times that of row t - s; there is
    nothing before row 0. Both kernels come from the sublayer's normed input.
    """

    def __init__(self, config: BlockDrafterConfig) -> None:
        super().__init__()
        self.taps, self.block, width = config.conv_kernel_size or 1, config.block_size, config.hidden_size
        self.groups = width // config.conv_group_size
        base = torch.zeros(2, self.taps, width)
        base[:, 0] = 1  # the identity
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(width, 2 * self.taps * self.groups, bias=False)

    def forward(self, normed: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what is added to the residual, [B, R, d], from normed rows of blocks that follow each other."""
        blocks = normed.unflatten(1, (-1, self.block))  # [B, A, S, d]
        varied = self.kernel_projection(blocks).unflatten(-1, (2, self.taps, self.groups, 1))  # [B, A, S, 2, T, G, 1]
        base = self.base_kernel.unflatten(-1, (self.groups, -1))  # [2, T, G, g]
        before, after = (base + varied).flatten(-2).unbind(-3)  # [B, A, S, T, d] twice
        inner = sublayer(self._mixed(blocks, before).flatten(1, 2))  # [B, R, d]
        return self._mixed(inner.unflatten(1, (-1, self.block)), after).flatten(1, 2)

    def _mixed(self, blocks: Tensor, kernels: Tensor) -> Tensor:
        """Return blocks [B, A, S, d] mixed along S by kernels [B, A, S, T, d]."""
        padded = nn.functional.pad(blocks, (0, 0, self.taps - 1, 0))  # [B, A, T - 1 + S, d]
        windows = padded.unfold(2, self.taps, 1).flip(-1)  # [B, A, S, d, T], the row itself first
        return (windows.transpose(-1, -2) * kernels).sum(-2)
