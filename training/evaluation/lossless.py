"""Whether a greedy text is plain decoding's, or a near-tie, where rounding decides, or different.

A block and a single token are rounded differently, so that two tokens of nearly equal logits may swap their order. A
difference is a near-tie if the gap of the two tokens' logits in float32, where the texts part, is at most twice the
largest error between logits of a block and of single tokens, which is measured on the same model, dtype and batch size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...configuration.cache_names import CACHE, cache_of
from ...generation.tensors.tensor_files import Fields
from .decoding import GREEDY, Method

_WIDTH, _BLOCKS = 6, 4  # tokens of a block, and blocks of an output, along which the error of logits is measured
_OUTPUTS, _TOP = 4, 10  # such outputs, and the likeliest tokens of a position, whose logits are compared


def counts_of(differences: Sequence[Fields | None], error: float | None = None) -> tuple[int, int, int]:
    """Return how many texts were compared (`Comparison.difference`), how many differ, and how many by a near-tie; the
    `error` of logits is that of a whole run, or the largest of the differences."""
    found = [each for each in differences if each is not None]
    bound = 2 * (max((each["error"] for each in found), default=0.0) if error is None else error)
    ties = sum(each["gap"] is not None and each["gap"] <= bound for each in found)
    return len(differences), len(found), ties


def in_words(texts: int, differing: int, near_ties: int) -> str:
    """Return such counts in words."""
    return f"equal {texts - differing}, near-ties {near_ties}, different {differing - near_ties}"


class Comparison:
    """Compares greedy texts with those of plain decoding."""

    def __init__(self, plain: Method) -> None:
        self.plain, self.errors = plain, dict[int, list[float]]()  # of logits of blocks, by batch size

    @cached_property
    def _exact(self) -> Method:
        """Plain decoding in float32 or float64; a copy of the model in other dtypes."""
        model = self.plain.model
        return self.plain if model.dtype.itemsize >= 4 else replace(self.plain, model=copy.deepcopy(model).float())

    def difference(
        self, prompt: Tensor, expected: Sequence[int], got: Sequence[int], batch_size: int = 1, **options: Any
    ) -> Fields | None:
        """Return where two texts differ after a prompt [L]: `index`, the `gap` of the two tokens' logits in float32
        (None where one text has ended), and the `error` between block and single logits; None if they are equal."""
        pairs, gap = enumerate(zip_longest(expected, got)), None
        index = next((index for index, (one, other) in pairs if one != other), None)
        if index is None:
            return None
        if index < min(len(expected), len(got)):
            ids = torch.cat([prompt, prompt.new_tensor(expected[:index])])[None]
            options |= {"attention_mask": torch.ones_like(ids), "min_new_tokens": None, "max_new_tokens": 1}
            scores = self._exact.generate(input_ids=ids, output_scores=True, **options | GREEDY.options).scores[0][0]
            gap = abs(float(scores[expected[index]] - scores[got[index]]))
        errors = self.errors.setdefault(batch_size, [])
        if len(errors) < _OUTPUTS:
            errors.append(block_error(self.plain.model, prompt, prompt.new_tensor(expected), batch_size))
        return {"index": index, "gap": gap, "error": max(errors)}


@torch.no_grad()
def block_error(model: PreTrainedModel, prompt: Tensor, output: Tensor, batch_size: int = 1) -> float:
    """Return the largest difference between logits of a block and of single tokens, among each position's likeliest.

    The output [T] after a prompt [L] is passed as blocks and token by token, in `batch_size` equal sequences.
    """
    prompt, output = (ids.expand(batch_size, -1) for ids in (prompt, output[: _WIDTH * _BLOCKS]))

    def logits(width: int) -> Tensor:  # [B, T, V]
        cache = cache_of(model(prompt, use_cache=True))
        parts = (model(part, **{CACHE: cache}, use_cache=True).logits.double() for part in output.split(width, 1))
        return torch.cat([*parts], 1)

    blocks, singles = logits(_WIDTH), logits(1)
    likeliest = singles.topk(min(_TOP, singles.shape[-1])).indices
    return float((blocks - singles).gather(-1, likeliest).abs().max())
