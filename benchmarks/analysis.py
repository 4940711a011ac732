"""What a model already knows of tokens further ahead: marginals by enumeration, the logit lens, the spread of its
distribution.

Marginals (Mehra et al. 2025, Eq. 6): p_k(x | X) = sum over s of p(s | X) p(x | X, s) over all continuations s of k - 1
tokens. Heads that do not see the tokens between cannot predict better. They are exact, or have a known bound.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from tokenahead.configuration.cache_names import CACHE
from tokenahead.generation.contract import requested_states
from tokenahead.modeling import EvaByteForMTPC
from tokenahead.modeling.common.backbone_parts import BackboneParts


@dataclass
class Marginals:
    """Distributions of the next k tokens, each without knowing the ones between.

    Attributes:
        log_probs: [B, P, k, V] float64; entry 0 is the ordinary next-token distribution.
        missing: [B, P, k] mass of the continuations that were left out, m. Renormalised as they are, the distributions
            are within m of the exact ones in total variation; exp(log_probs) (1 - m) is at most m below them.
        branches: [B, P, k] int64, continuations that were looked at.
    """

    log_probs: torch.Tensor
    missing: torch.Tensor
    branches: torch.Tensor


@torch.no_grad()
def marginal_log_probs(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    k: int = 2,
    *,
    attention_mask: torch.Tensor | None = None,
    positions: Sequence[int] | None = None,
    mass: float = 0.99,
    max_branches: int | None = None,
    batch_size: int = 64,
) -> Marginals:
    """Return the marginals of the next k tokens by enumerating the tokens between.

    At every step the smallest set of tokens whose probability reaches `mass` is followed. The continuations of one
    position are computed together after copies of its prefix.

    Args:
        model: A causal language model with a cache that holds the whole past.
        input_ids: [B, T] int64.
        k: Tokens ahead.
        attention_mask: [B, T], 0 for padding.
        positions: Columns whose next k tokens are predicted; None: the last one before padding.
        mass: In (0, 1]; 1 enumerates everything.
        max_branches: Continuations to follow per step, at most; the most likely are taken.
        batch_size: Continuations per model call.

    Raises:
        ValueError: A position in padding, or a model without such a cache.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = []
    for ids, real in zip(input_ids, mask.bool()):
        columns = [int(real.nonzero()[-1])] if positions is None else positions
        if not all(bool(real[column]) for column in columns):
            raise ValueError(f"positions={list(columns)} must not be padding")
        prefixes = [ids[: column + 1][real[: column + 1]] for column in (column % len(ids) for column in columns)]
        rows.append([_of_prefix(model, prefix, k, mass, max_branches, batch_size) for prefix in prefixes])
    shape = len(rows), len(rows[0])
    fields = zip(*(entry for row in rows for entry in row))
    return Marginals(*(torch.stack(field).unflatten(0, shape) for field in fields))


def _of_prefix(
    model: PreTrainedModel, prefix: torch.Tensor, k: int, mass: float, max_branches: int | None, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return marginals [k, V], missing mass [k] and branches [k] after a prefix [T]."""
    if getattr(model, "_is_stateful", False) or isinstance(model, EvaByteForMTPC):
        raise ValueError(f"{type(model).__name__} has a cache that cannot branch")
    cache = DynamicCache()
    if len(prefix) > 1:
        model(prefix[None, :-1], **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    paths, weights = prefix.new_zeros(1, 0), torch.ones(1, dtype=torch.float64, device=prefix.device)
    log_probs, missing, counts = [], [], []
    for step in range(k):
        total, children = 0.0, []
        for start in range(0, len(paths), batch_size):
            part, weight = paths[start : start + batch_size], weights[start : start + batch_size]
            distribution = _next_probs(model, prefix[-1:], cache, part)
            total = total + weight @ distribution
            if step + 1 < k:
                children.append(_children(part, weight, distribution, mass))
        mass_left = weights.sum()
        log_probs.append((total / mass_left).log())
        missing.append((1 - mass_left).clamp(min=0))
        counts.append(torch.tensor(len(paths), device=prefix.device))
        if children:
            paths, weights = (torch.cat(field) for field in zip(*children))
            if max_branches is not None and len(paths) > max_branches:
                best = weights.topk(max_branches).indices
                paths, weights = paths[best], weights[best]
    return torch.stack(log_probs), torch.stack(missing), torch.stack(counts)


def _children(
    paths: torch.Tensor, weights: torch.Tensor, distribution: torch.Tensor, mass: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the most likely continuations of paths [N, j] by a token: paths [M, j + 1] and their weights [M]."""
    probs, tokens = distribution.sort(-1, descending=True)
    before = probs.cumsum(-1) - probs
    node, rank = ((before < mass) if mass < 1 else torch.ones_like(before, dtype=torch.bool)).nonzero(as_tuple=True)
    return torch.cat([paths[node], tokens[node, rank, None]], 1), weights[node] * probs[node, rank]


@torch.no_grad()
def _next_probs(model: PreTrainedModel, last: torch.Tensor, cache: DynamicCache, paths: torch.Tensor) -> torch.Tensor:
    """Return the next-token distributions [N, V] float64 after a cached prefix, its last token and paths [N, j]."""
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(len(paths))
    ids = torch.cat([last.expand(len(paths), 1), paths], 1)
    return model(ids, **{CACHE: cache}, use_cache=True).logits[:, -1].float().softmax(-1).double()


@torch.no_grad()
def layer_divergences(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Return KL(p_l || p) in nats (logit lens), with p_l the norm and unembedding of the output of layer l.

    Args:
        model: A causal language model.
        input_ids: [B, T] int64.
        attention_mask: [B, T], 0 for padding.

    Returns:
        [L - 1, B, T] float32, layers 1 to L - 1; one layer's logits exist at a time.
    """
    parts, layers = BackboneParts(model), model.config.get_text_config().num_hidden_layers
    outputs = _run(model, input_ids, attention_mask, [*range(1, layers), -1])
    final = parts.unembed(outputs.hidden_states[-1]).float().log_softmax(-1)
    rows = []
    for layer in range(1, layers):
        seen = parts.unembed(parts.norm(outputs.hidden_states[layer])).float().log_softmax(-1)
        rows.append((seen.exp() * (seen - final)).sum(-1))
    return torch.stack(rows)


@torch.no_grad()
def next_token_spread(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    masses: Sequence[float] = (0.9, 0.99),
) -> tuple[torch.Tensor, dict[float, torch.Tensor]]:
    """Return how far the next-token distribution is spread.

    Args:
        model: A causal language model.
        input_ids: [B, T] int64.
        attention_mask: [B, T], 0 for padding.
        masses: Probabilities to reach.

    Returns:
        Entropy [B, T] in nats; and for every mass the size of the smallest set of tokens that reaches it, [B, T] int64.
    """
    probs = _run(model, input_ids, attention_mask, [-1], logits=0).logits.float().softmax(-1)
    entropy = torch.special.entr(probs).sum(-1)
    before = probs.sort(-1, descending=True).values.double()
    before = before.cumsum(-1) - before
    return entropy, {mass: (before < mass).sum(-1) for mass in masses}


def _run(model: Any, ids: torch.Tensor, mask: torch.Tensor | None, layers: list[int], logits: int = 1) -> Any:
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    how = {"use_cache": False, "logits_to_keep": logits, "output_hidden_states": requested_states(layers)}
    return model(ids, attention_mask=mask, position_ids=positions, **how)
