"""How many greedy texts are plain decoding's: equal, but for near-ties, where rounding decides, or different.

A block and a single token are rounded differently, so that two tokens of nearly equal logits may swap their order. A
difference is a near-tie if the gap of the two tokens' logits in float32, where the texts part, is at most twice the
largest error between logits of a block and of single tokens, which is measured on the same model, dtype and batch size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...configuration.cache_names import CACHE, cache_of
from ...generation.tensors.tensor_files import Fields

_WIDTH, _BLOCKS = 6, 4  # tokens of a block, and blocks of an output, along which the error of logits is measured
_TOP = 10  # likeliest tokens whose logits are compared
_OUTPUTS = 4  # along which the error is measured


@dataclass(frozen=True)
class GreedyTexts:
    """How many greedy texts were compared with plain decoding's, and what came out."""

    equal: int = 0
    near_ties: int = 0
    different: int = 0

    @classmethod
    def of(cls, differences: Sequence[Fields | None], error: float | None = None) -> Self:
        """Count what `Comparison.difference` returned; the error of logits is the largest of them, or a given one."""
        gaps = [each["gap"] for each in differences if each is not None]
        bound = 2 * (largest_error(differences) if error is None else error)
        ties = sum(gap is not None and gap <= bound for gap in gaps)
        return cls(len(differences) - len(gaps), ties, len(gaps) - ties)

    def __add__(self, other: GreedyTexts) -> GreedyTexts:
        return GreedyTexts(self.equal + other.equal, self.near_ties + other.near_ties, self.different + other.different)

    def __str__(self) -> str:
        return f"equal {self.equal}, near-ties {self.near_ties}, different {self.different}"


class Comparison:
    """Compares greedy texts of a model with plain ones.

    Args:
        model: Whose texts they are.
        generate: Decodes a model plainly: `(model, input_ids, **options of generate)` -> transformers' output.
    """

    def __init__(self, model: PreTrainedModel, generate: Callable[..., Any]) -> None:
        self.model, self.generate, self.errors = model, generate, dict[int, list[float]]()  # by batch size

    @cached_property
    def _exact(self) -> PreTrainedModel:
        """The model in float32 or float64; a copy of it where it has less."""
        return self.model if self.model.dtype.itemsize >= 4 else copy.deepcopy(self.model).float()

    def difference(
        self, prompt: Tensor, expected: Sequence[int], got: Sequence[int], batch_size: int = 1, **options: Any
    ) -> Fields | None:
        """Return where two texts differ after a prompt [L]: `index`, the `gap` of the two tokens' logits in float32
        (None where one text has ended), and the `error` between block and single logits; None if they are equal."""
        if list(expected) == list(got):
            return None
        shorter = min(len(expected), len(got))
        index, gap = next((i for i in range(shorter) if expected[i] != got[i]), shorter), None
        if index < shorter:
            ids = torch.cat([prompt, prompt.new_tensor(expected[:index])])[None]
            options |= {"max_new_tokens": 1, "min_new_tokens": None, "do_sample": False}
            options |= {"output_scores": True, "return_dict_in_generate": True}
            scores = self.generate(self._exact, ids, attention_mask=torch.ones_like(ids), **options).scores[0][0]
            gap = abs(float(scores[expected[index]] - scores[got[index]]))
        errors = self.errors.setdefault(batch_size, [])
        if len(errors) < _OUTPUTS:
            errors.append(block_error(self.model, prompt, prompt.new_tensor(expected), batch_size))
        return {"index": index, "gap": gap, "error": max(errors)}


@torch.no_grad()
def block_error(model: PreTrainedModel, prompt: Tensor, output: Tensor, batch_size: int = 1) -> float:
    """Return the largest difference between logits of a block and of single tokens, among each position's likeliest.

    The output [T] after a prompt [L] is passed as blocks and token by token, in `batch_size` equal sequences.
    """
    prompt, output = (ids.expand(batch_size, -1) for ids in (prompt, output[: _WIDTH * _BLOCKS]))
    logits = []
    for width in (_WIDTH, 1):
        cache, parts = cache_of(model(prompt, use_cache=True)), []
        for part in output.split(width, 1):
            parts.append(model(part, **{CACHE: cache}, use_cache=True).logits.double())
        logits.append(torch.cat(parts, 1))
    blocks, singles = logits
    likeliest = singles.topk(min(_TOP, singles.shape[-1])).indices
    return float((blocks - singles).gather(-1, likeliest).abs().max())


def largest_error(differences: Iterable[Fields | None]) -> float:
    """Return the largest error between logits of a block and of single tokens that was measured."""
    return max((each["error"] for each in differences if each is not None), default=0.0)
