"""Metric: how much of a text repeats itself."""

import datasets
import evaluate

from tokenahead.training.evaluation.figures import is_degenerate, repeated_share

_INPUTS = """
Args:
    predictions: Texts, as ids.
    gram: Ids of a passage that counts (16 if not given).
Returns:
    repeated_share: Share of each text that passages cover which stand in it more than once, mean over texts.
    degenerate: Whether that is more than half, so that no speed-up should be claimed.
"""


class Repetition(evaluate.Metric):
    """Share of text that is covered by repeated passages: texts that loop are drafted with ease."""

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[list[int]], gram: int = 16) -> dict[str, object]:
        share = sum(repeated_share(row, gram) for row in predictions) / len(predictions)
        return {"repeated_share": share, "degenerate": is_degenerate(share)}
