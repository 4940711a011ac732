"""Accepted drafts, for `evaluate.load("model_cards/metrics/acceptance")`."""

from itertools import takewhile

import datasets
import evaluate

_DESCRIPTION = """
Drafted tokens that the backbone accepts, up to the first one that it does not: their mean over verifications, and the
share of verifications that accept at least 1, 2, ... of them.
"""
_INPUTS = """
Args:
    predictions: The drafted token ids of each verification.
    references: The token ids that were written from there on; further ones are not read.

Returns:
    accepted: Mean accepted drafts of a verification.
    by_position: Shares of verifications, up to the longest draft.

Examples:
    >>> metric = evaluate.load("model_cards/metrics/acceptance")
    >>> metric.compute(predictions=[[5, 6, 7], [8, 9]], references=[[5, 6, 1], [2, 9]])
    {'accepted': 1.0, 'by_position': [0.5, 0.5, 0.0]}
"""


class Acceptance(evaluate.Metric):
    """Accepted drafts by position."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        features = datasets.Features({"predictions": ids, "references": ids})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, float | list[float]]:
        pairs = [zip(drafts, written) for drafts, written in zip(predictions, references)]
        accepted = [len(list(takewhile(lambda pair: pair[0] == pair[1], each))) for each in pairs]
        longest = max(map(len, predictions))
        shares = [sum(count >= place for count in accepted) / len(accepted) for place in range(1, longest + 1)]
        return {"accepted": sum(accepted) / len(accepted), "by_position": shares}
