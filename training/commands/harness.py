"""`tokenahead lm-eval`: the evaluation harness of EleutherAI, whose generation tasks are written with drafts.

The arguments after `lm-eval` are lm-eval's own; the model `tokenahead` is its `hf` with one argument more:

    tokenahead lm-eval run --model tokenahead --model_args pretrained=DIRECTORY,drafter=heads:DIRECTORY --tasks gsm8k

`drafter` is a method of `tokenahead bench`: `ngram`, `heads:SOURCE`, ...; `own`, the default, for models that draft for
themselves; `plain` for none. Scores are those of plain decoding: greedy output is, in float32, the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..evaluation.decoding import PLAIN, methods_of
from ..utils import needs_extra

with needs_extra("eval", "tokenahead lm-eval"):
    # not by name: type checkers run where lm-eval is not installed
    _harness, _registry, _models = (
        import_module(f"lm_eval.{name}") for name in ("__main__", "api.registry", "models.huggingface")
    )


@_registry.register_model("tokenahead")
class DraftingLM(_models.HFLM):
    """lm-eval's model of transformers, with the drafts of a method of `tokenahead bench`."""

    def __init__(self, pretrained: str, drafter: str = "own", **options: Any) -> None:
        super().__init__(pretrained, **options)
        methods, refused = methods_of([drafter], self.model)
        if refused:
            raise ValueError(f"drafter={drafter!r}: {refused.popitem()[1]}")
        self.drafting = methods[0 if drafter == PLAIN else 1].options

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        return super()._model_generate(*args, **self.drafting | kwargs)


def main(argv: Sequence[str]) -> int:
    """Run lm-eval's own command line; return 0."""
    sys.argv = ["tokenahead lm-eval", *argv]
    _harness.cli_evaluate()
    return 0
