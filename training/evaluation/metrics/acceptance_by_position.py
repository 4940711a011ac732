"""Metric: how far drafts are accepted."""

import datasets
import evaluate

from tokenahead.training.evaluation.figures import acceptance_by_position

_INPUTS = """
Args:
    predictions: Accepted drafts of every verification.
    references: Length of every draft.
Returns:
    acceptance_by_position: For draft positions 1, 2, ...: of the drafts at least that long, the share that was accepted
        up to and including that position.
    accepted: Accepted drafts per verification.
"""


class AcceptanceByPosition(evaluate.Metric):
    """Share of drafts that are accepted up to each position."""

    def _info(self) -> evaluate.MetricInfo:
        counts = datasets.Value("int64")
        features = datasets.Features({"predictions": counts, "references": counts})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, object]:
        return {
            "acceptance_by_position": acceptance_by_position(predictions, references),
            "accepted": sum(predictions) / len(predictions),
        }
