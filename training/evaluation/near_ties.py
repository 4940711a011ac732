"""Greedy texts that differ from plain decoding's: near-ties, where rounding decides, and real differences.

A block and a single token are rounded differently, so that two tokens of nearly equal logits may change places. The
difference of their logits in float32 says how near they are; it is a near-tie if it is at most twice the largest error
between logits of a block and of single tokens, which is measured on the same model, dtype and batch size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from .decoding import GREEDY, Method

_WIDTH, _BLOCKS = 6, 4  # tokens of a block, and blocks of a text
_TOP = 10  # likeliest tokens whose logits are compared
_TEXTS = 4  # along which the error is measured


class NearTies:
    """Looks at differences between greedy texts.

    Args:
        plain: The method without drafts.
    """

    def __init__(self, plain: Method) -> None:
        self.plain = plain
        self.errors: dict[int, list[float]] = {}

    @cached_property
    def exact(self) -> Method:
        """Plain decoding in float32; a copy of the model in other dtypes."""
        model = self.plain.model
        model = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
        return Method("float32", model, self.plain.options)

    def difference(
        self, prompt: torch.Tensor, expected: Sequence[int], got: Sequence[int], batch_size: int
    ) -> dict[str, Any] | None:
        """Return where two texts differ after a prompt [L]; None if they are equal.

        Returns:
            `index`, `expected` and `got` (tokens; None where a text has ended), `gap` of their logits in float32, and
            the `error` between block and single logits; a text that ended early has no gap.
        """
        if list(expected) == list(got):
            return None
        pairs = enumerate(zip(expected, got))
        index = next((i for i, (one, other) in pairs if one != other), min(len(expected), len(got)))
        found: dict[str, Any] = {"index": index, "expected": None, "got": None, "gap": None}
        if index < min(len(expected), len(got)):
            one, other = expected[index], got[index]
            ids = torch.cat([prompt, prompt.new_tensor(expected[:index])])[None]
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "output_scores": True}
            scores = self.exact.generate(input_ids=ids, **options, **GREEDY.options).scores[0][0]
            found |= {"expected": one, "got": other, "gap": abs(float(scores[one] - scores[other]))}
        return found | {"error": self._error(prompt, expected, batch_size)}

    def _error(self, prompt: torch.Tensor, text: Sequence[int], batch_size: int) -> float:
        errors = self.errors.setdefault(batch_size, [])
        if len(errors) < _TEXTS:
            errors.append(block_error(self.plain.model, prompt, prompt.new_tensor(text), batch_size))
        return max(errors)


@torch.no_grad()
def block_error(model: Any, prompt: torch.Tensor, text: torch.Tensor, batch_size: int = 1) -> float:
    """Return the largest difference between logits of a block and of single tokens, among each position's likeliest.

    Args:
        model: A causal language model.
        prompt: [L], what stands before.
        text: [T], fed as blocks and one by one.
        batch_size: Sequences at once, all alike.
    """
    prompt, text = (ids.expand(batch_size, -1) for ids in (prompt, text[: _WIDTH * _BLOCKS]))
    logits = []
    for width in (_WIDTH, 1):
        cache, parts = model(prompt, use_cache=True).past_key_values, []
        for part in text.split(width, 1):
            parts.append(model(part, past_key_values=cache, use_cache=True).logits.float())
        logits.append(torch.cat(parts, 1))
    blocks, singles = logits
    likeliest = singles.topk(min(_TOP, singles.shape[-1])).indices
    return float((blocks - singles).gather(-1, likeliest).abs().max())


def is_near_tie(difference: dict[str, Any], error: float) -> bool:
    """Return whether rounding of that error explains a difference."""
    return difference["gap"] is not None and difference["gap"] <= 2 * error
