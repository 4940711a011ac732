"""Distributions of texts, enumerated, and chi-square tests of drawn ones against them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...generation.tensors.wrapped_models import untyped

Distribution = dict[tuple[int, ...], float]
"""Texts and their probabilities."""
_LEAST = 5
"""Expected number of draws of a cell; cells with fewer count as one."""


def chi_square(cells: Tensor, distribution: Tensor) -> float:
    """Return the p-value of drawn cell numbers [N] under `distribution` [C]; rare cells are counted as one.

    A cell that the distribution excludes and that was drawn gives 0.
    """
    seen = torch.bincount(cells, minlength=len(distribution)).double()
    if bool(seen[distribution == 0].any()):
        return 0.0
    expected = distribution.double() * len(cells)
    rare = expected < _LEAST
    seen, expected = (torch.cat([counts[~rare], counts[rare].sum()[None]]) for counts in (seen, expected))
    if expected[-1] < _LEAST:  # too few even together: they join the last frequent cell
        seen, expected = (torch.cat([counts[:-2], counts[-2:].sum()[None]]) for counts in (seen, expected))
    expected = expected * seen.sum() / expected.sum()
    statistic = ((seen - expected).square() / expected).sum()
    freedom = torch.tensor(len(seen) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2)) if freedom > 0 else 1.0


@torch.no_grad()
def continuation_distribution(model: Any, prompt: Tensor, length: int, **options: Any) -> Distribution:
    """Return the probability of every continuation of `length` tokens, one by one, with transformers' own processors.

    Args:
        model: A causal language model of few tokens.
        prompt: [1, L] int64.
        length: Tokens to continue by.
        **options: Of `generate`.
    """
    config, _ = untyped(model)._prepare_generation_config(None, do_sample=True, **options)
    untyped(model)._prepare_special_tokens(config, device=prompt.device)
    processors = untyped(model)._get_logits_processor(config, prompt.shape[1], prompt, None, [], device="cpu")
    distribution: Distribution = {(): 1.0}
    for _ in range(length):
        distribution = {text: p for text, p in distribution.items() if p > 0}
        texts = torch.tensor(list(distribution)).long().view(len(distribution), -1)
        ids = torch.cat([prompt.expand(len(distribution), -1), texts], dim=1)
        next_probs = processors(ids, model(ids, use_cache=False).logits[:, -1].double()).softmax(-1).tolist()
        distribution = {
            (*text, x): p * q for (text, p), row in zip(distribution.items(), next_probs) for x, q in enumerate(row)
        }
    return distribution


def continuation_p_value(samples: Tensor, distribution: Distribution) -> float:
    """Return the chi-square p-value of drawn continuations [N, length]; see `chi_square`."""
    number = {text: cell for cell, text in enumerate(distribution)}
    texts = [tuple(text) for text in samples.tolist()]
    if any(text not in number for text in texts):  # it continues what the distribution excludes
        return 0.0
    cells = torch.tensor([number[text] for text in texts])
    return chi_square(cells, torch.tensor(list(distribution.values()), dtype=torch.double))
