"""Heads: modules from a hidden state to the parameters of a law over the next n tokens. They know no backbone."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn
from transformers import initialization as init

from ...configuration import MTPHeadConfig
from .chunks import SummedLinear, WeightTotal
from .circuits import circuit_from_logits
from .losses import IGNORE, depth_means, discounted_mtp_loss, tokens_ahead, window_terms
from .window_law import WindowLaw


class FFHead(nn.Linear):
    """Independent linear heads in the released EvaByte parametrisation: one matrix, head-major.

    Rows h V .. (h + 1) V - 1 of `weight` [N V, D] belong to head h, which predicts x_{t+1+h}.

    Args:
        hidden_size: D.
        vocab_size: V.
        num_heads: N.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__(hidden_size, num_heads * vocab_size, bias=False)
        self.vocab_size, self.num_heads = vocab_size, num_heads
        self.target_frozen = False
        self.weight_total: WeightTotal | None = None

    def forward(self, hidden_states: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """Logits of the first `num_heads` heads (all by default).

        Args:
            hidden_states: [..., D].
            num_heads: How many heads to evaluate; 1 costs what an ordinary `lm_head` costs.

        Returns:
            [..., num_heads, V], in the dtype of the weights.
        """
        count = self.num_heads if num_heads is None else num_heads
        weight = self.weight[: count * self.vocab_size]
        if self.weight_total is not None:
            total, skip = self.weight_total, self.vocab_size if self.target_frozen else 0
            logits = SummedLinear.apply(hidden_states, weight.detach(), total.total, total.anchor, skip)
            return logits.unflatten(-1, (count, self.vocab_size))
        if self.target_frozen and torch.is_grad_enabled():
            weight = torch.cat([weight[: self.vocab_size].detach(), weight[self.vocab_size :]])
        return nn.functional.linear(hidden_states, weight).unflatten(-1, (count, self.vocab_size))

    def extend(self, num_heads: int, std: float) -> None:
        """Appends heads, drawn from N(0, std^2), until there are `num_heads`; the old ones stay as they are."""
        missing = num_heads - self.num_heads
        if missing <= 0:
            return
        new = torch.randn(missing * self.vocab_size, self.in_features, device=self.weight.device) * std
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), new.to(self.weight.dtype)]))
        self.num_heads, self.out_features = num_heads, num_heads * self.vocab_size


class SharedHead(nn.Module):
    """Independent heads on a shared, frozen unembedding W: logits of head i are W A_i h, with A_i = I at the start.

    Memory: N d^2 parameters, whatever the vocabulary.

    Args:
        hidden_size: d.
        vocab_size: V.
        num_heads: N.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__()
        self.vocab_size, self.num_heads = vocab_size, num_heads
        self.maps = nn.Parameter(torch.eye(hidden_size).repeat(num_heads, 1, 1))
        self.unembed: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, hidden_states: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """Logits [..., num_heads, V] of hidden states [..., d].

        Raises:
            RuntimeError: No unembedding was given (the model that owns the heads gives its own, `MTPHeads.attach` the
                backbone's).
        """
        if self.unembed is None:
            raise RuntimeError("these heads share their backbone's unembedding: call attach(base) first")
        return self.unembed(torch.einsum("...d,nde->...ne", hidden_states, self.maps[:num_heads]))

    @torch.no_grad()
    def reset(self) -> None:
        """Makes every map the identity."""
        init.copy_(self.maps, torch.eye(self.maps.shape[-1]).expand_as(self.maps))


class CircuitHead(nn.Module):
    """Parameters of a circuit (MtPC): one leaf unembedding per position and state, and the weights of its sums.

    Memory in parameters: leaves n r V d (`leaf="full"`) or n r d^2 (`"shared"`); sum weights z r d with z sums, where
    CP has z = 1, HMM 1 + (n - 1) r (1 + r if homogeneous) and BTree 1 + (n - 2) r; z r if not contextual.

    Args:
        config: Head options.
        hidden_size: d.
        vocab_size: V.

    Raises:
        ValueError: A full leaf tensor larger than this machine's memory.
    """

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.num_heads = config.window * config.rank
        if config.leaf == "full":
            _check_memory(config, hidden_size, vocab_size)
        self.leaf = (FFHead if config.leaf == "full" else SharedHead)(hidden_size, vocab_size, self.num_heads)
        sums = config.rank * (1 + config.rank * self.num_sum_matrices)
        self.sum_bias = nn.Parameter(torch.zeros(sums))
        self.sum_weight = nn.Parameter(torch.zeros(sums, hidden_size)) if config.contextual else None

    @property
    def num_sum_matrices(self) -> int:
        """[r, r] sums beside the root: transitions of an HMM, inner nodes of a BTree."""
        window = self.config.window
        return {
            "cp": 0,
            "hmm": 1 if self.config.homogeneous else window - 1,
            "btree": max(window - 2, 0),
        }[self.config.head_type]

    def forward(self, hidden_states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Parameters of the law given hidden states [..., d].

        Returns:
            `leaf_logits` [..., n, r, V], `root_logits` [..., r] and what else the family has (`circuit_from_logits`).
        """
        rank = self.config.rank
        sums = self.sum_bias.expand(*hidden_states.shape[:-1], -1)
        if self.sum_weight is not None:
            sums = nn.functional.linear(hidden_states, self.sum_weight, self.sum_bias)
        leaves = self.leaf(hidden_states).unflatten(-2, (self.config.window, rank))
        parameters = {"leaf_logits": leaves, "root_logits": sums[..., :rank]}
        if self.num_sum_matrices:
            name = {"hmm": "trans_logits", "btree": "node_logits"}[self.config.head_type]
            parameters[name] = sums[..., rank:].unflatten(-1, (self.num_sum_matrices, rank, rank))
        return parameters

    @torch.no_grad()
    def reset(self) -> None:
        """Random sum weights whose logits vary over contexts (deviation about 0.5), so that states can separate."""
        if self.sum_weight is not None:
            init.normal_(self.sum_weight, std=0.5 * self.sum_weight.shape[1] ** -0.5)
        bias = torch.zeros_like(self.sum_bias) if self.config.contextual else torch.randn_like(self.sum_bias) * 0.5
        if self.config.head_type == "hmm":
            rank = self.config.rank
            bias[rank:].view(-1, rank, rank).diagonal(dim1=1, dim2=2).add_(self.config.identity_bias)
        init.copy_(self.sum_bias, bias)

    @torch.no_grad()
    def copy_leaves(self, heads: FFHead) -> None:
        """Gives all states of position i the weights of FF head i (of the last head, beyond it): then q is FF's law."""
        rows = heads.weight.unflatten(0, (heads.num_heads, heads.vocab_size))
        source = [min(i, heads.num_heads - 1) for i in range(self.config.window) for _ in range(self.config.rank)]
        self.leaf.weight.copy_(rows[source].flatten(0, 1))


def build_head(config: MTPHeadConfig, hidden_size: int, vocab_size: int, num_heads: int | None = None) -> nn.Module:
    """The head module that `config` describes; `num_heads` may exceed the window (released FF heads keep all rows)."""
    if config.head_type != "ff":
        return CircuitHead(config, hidden_size, vocab_size)
    family = FFHead if config.leaf == "full" else SharedHead
    return family(hidden_size, vocab_size, num_heads or config.window)


def window_law(head: nn.Module, config: MTPHeadConfig, hidden_states: torch.Tensor) -> WindowLaw:
    """The law of the next `config.window` tokens given hidden states [..., d], in float32 (float64 kept)."""
    if isinstance(head, CircuitHead):
        parameters = head(hidden_states)
    else:
        parameters = {"leaf_logits": head(hidden_states, config.window).unsqueeze(-2)}
    dtype = torch.promote_types(parameters["leaf_logits"].dtype, torch.float32)
    return circuit_from_logits(config.head_type, dtype=dtype, **parameters)


def head_loss(
    head: nn.Module,
    config: MTPHeadConfig,
    hidden_states: torch.Tensor,
    targets: torch.Tensor,
    input_ids: torch.Tensor | None,
    counts: torch.Tensor | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The discounted loss of a head over all windows of a batch.

    Args:
        head: The head.
        config: Its options; `gamma` and `masked_tokens` are read here.
        hidden_states: [B, L, d].
        targets: [B, L, n] int64, -100 where nothing is scored.
        input_ids: [B, L] int64, to observe the tokens that are not scored; None sums them out.
        counts: Targets per depth over all micro-batches, [n] or one number.

    Returns:
        The loss (a scalar, in nats), and the detached mean per depth [n].
    """
    window, scored = targets.shape[-1], targets != IGNORE
    observe = input_ids is not None and config.masked_tokens == "observe"
    tokens = tokens_ahead(input_ids, window, 0) if observe else targets.clamp(min=0)
    terms = window_terms(
        lambda hidden: window_law(head, config, hidden),
        head,
        hidden_states,
        tokens,
        logits_per_position=window * config.rank * head.vocab_size,
        unknown=None if observe or config.head_type == "ff" else ~scored,
    )
    return discounted_mtp_loss(terms, scored, config.gamma, "tokens", counts), depth_means(terms, scored)


def init_head(module: nn.Module) -> None:
    """Initialises a head's own parameters, for a model's `_init_weights`; tensors that were loaded stay."""
    if isinstance(module, (SharedHead, CircuitHead)):
        module.reset()


def frozen_unembedding(weight: Callable[[], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """W as a function of hidden states that gives W no gradient; `weight` looks it up, so that changes are followed."""
    return lambda hidden_states: nn.functional.linear(hidden_states, weight().detach())


def _check_memory(config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
    needed = 4 * config.window * config.rank * hidden_size * vocab_size
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise ValueError(
            f"leaf='full' with window={config.window}, rank={config.rank}, hidden_size={hidden_size} and "
            f"vocab_size={vocab_size} needs {needed / 2**30:.0f} GiB in float32, and this machine has "
            f"{available / 2**30:.0f} GiB; use leaf='shared', or a smaller rank or window"
        )
