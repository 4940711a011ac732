"""Metric: cross-entropy of a text in bits per byte."""

import datasets
import evaluate

from tokenahead.training.evaluation.figures import bits_per_byte

_INPUTS = """
Args:
    predictions: -log p, in nats, of every token of a text.
    count: Bytes of the text; not given: a token is a byte.
Returns:
    bits_per_byte: Their sum in bits, per byte.
"""


class BitsPerByte(evaluate.Metric):
    """Cross-entropy in bits per byte, which does not depend on the tokenizer."""

    def _info(self) -> evaluate.MetricInfo:
        value = datasets.Value("float64")
        features = datasets.Features({"predictions": value})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[float], count: int | None = None) -> dict[str, float]:
        return {"bits_per_byte": bits_per_byte(predictions, count)}
