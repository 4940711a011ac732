"""`tokenahead lm-eval`: the evaluation harness of EleutherAI, whose generation tasks are written with drafts.

The arguments after `lm-eval` are lm-eval's own; the model `tokenahead` is its `hf` with one argument more:

    tokenahead lm-eval run --model tokenahead --model_args pretrained=DIRECTORY,drafter=heads:DIRECTORY --tasks gsm8k

`drafter` is a method of `tokenahead bench`: `ngram`, `heads:SOURCE`, ...; `own`, the default, for models that draft for
themselves; `plain` for none. Scores are those of plain decoding: greedy output is, in float32, the same. The first
`compare` greedy texts (8; 0: none) are written plainly, too, and what came out is shown and in the file of results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch

from ...generation.tensors.tensor_files import Fields
from ..evaluation.decoding import PLAIN, methods_of
from ..evaluation.lossless import Comparison, counts_of, in_words
from ..utils import eos_ids, needs_extra, until_end

with needs_extra("eval", "tokenahead lm-eval"):
    # not by name: type checkers run where lm-eval is not installed
    _harness, _registry, _models = (
        import_module(f"lm_eval.{name}") for name in ("__main__", "api.registry", "models.huggingface")
    )


@_registry.register_model("tokenahead")
class DraftingLM(_models.HFLM):
    """lm-eval's model of transformers, with the drafts of a method of `tokenahead bench`."""

    differences: ClassVar[list[Fields | None]] = []  # of all texts of the process that were compared

    def __init__(self, pretrained: str, drafter: str = "own", compare: int = 8, **options: Any) -> None:
        super().__init__(pretrained, **options)
        methods, refused = methods_of([drafter], self.model)
        if refused:
            raise ValueError(f"drafter={drafter!r}: {refused.popitem()[1]}")
        self.drafting = methods[0 if drafter == PLAIN else 1].options
        self.compare = 0 if drafter == PLAIN else compare
        self.comparison = Comparison(methods[0])

    def _model_generate(self, context: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        written = super()._model_generate(context, *args, **self.drafting | kwargs)
        if len(self.differences) < self.compare and not kwargs.get("do_sample") and not kwargs.get("temperature"):
            plain = super()._model_generate(context, *args, **self.comparison.plain.options | kwargs)
            mask = kwargs.get("attention_mask", torch.ones_like(context)).bool()  # [B, L]
            for ids, is_real, *texts in zip(context, mask, plain, written):
                old, new = (until_end(text[len(ids) :].tolist(), eos_ids(self.model)) for text in texts)
                try:
                    self.differences.append(self.comparison.difference(ids[is_real], old, new, len(context)))
                except torch.OutOfMemoryError:
                    self.compare = 0
                    print("No memory for the model in float32: greedy texts are not compared any further.")
        return written

    def get_model_info(self) -> dict[str, object]:
        """Return what the file of results says of the model."""
        return super().get_model_info() | {"greedy_texts": in_words(*counts_of(self.differences))}


def main(argv: Sequence[str]) -> int:
    """Run lm-eval's own command line; return 1 where a greedy text differs from plain decoding's, else 0."""
    sys.argv = ["tokenahead lm-eval", *argv]
    _harness.cli_evaluate()
    texts, differing, near_ties = counts_of(DraftingLM.differences)
    print(f"Greedy texts: {in_words(texts, differing, near_ties)}{' NOT LOSSLESS' * (differing > near_ties)}")
    return int(differing > near_ties)
