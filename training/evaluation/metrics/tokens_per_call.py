"""Metric: new tokens per call of the backbone."""

import datasets
import evaluate

from tokenahead.training.evaluation.figures import tokens_per_call

_INPUTS = """
Args:
    predictions: For every text, the accepted drafts of each verification (`Speculation.rows_accepted`).
Returns:
    tokens_per_call: New tokens over calls, the prompt passes included, over all texts.
    lowest, highest: The spread over texts.
"""


class TokensPerCall(evaluate.Metric):
    """New tokens per call; plain decoding has 1."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[list[int]]) -> dict[str, float]:
        rates = [tokens_per_call(row) for row in predictions]
        calls = [1 + len(row) for row in predictions]
        mean = sum(rate * count for rate, count in zip(rates, calls)) / sum(calls)
        return {"tokens_per_call": mean, "lowest": min(rates), "highest": max(rates)}
