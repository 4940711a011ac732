"""Metric: expected accepted drafts along a given text, without drawing any draft."""

import datasets
import evaluate
import torch

from tokenahead.training.evaluation.expected import expected_from_log_probs

_INPUTS = """
Args:
    predictions: For every place of a text, log q_i of its tokens under the distributions that drafts are drawn from.
    references: For every place, log p_i of the same tokens under the target.
    rule: "block" (the default) or "token".
Returns:
    expected_by_position: For draft positions 1, 2, ...: the probability that drafts are accepted up to there.
    expected_tokens_per_call: Their sum, and the token that verification adds.
"""


class ExpectedAcceptance(evaluate.Metric):
    """Expected acceptance of drafts by block or token verification, from the log-probabilities of a text's tokens.

    The text stands for samples of the target: E_p[min over j <= k of Q_j / P_j] for blocks, and
    E_p[prod over j <= k of min(1, q_j / p_j)] for single tokens.
    """

    def _info(self) -> evaluate.MetricInfo:
        row = datasets.Sequence(datasets.Value("float64"))
        features = datasets.Features({"predictions": row, "references": row})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description=_INPUTS, features=features)

    def _compute(
        self, predictions: list[list[float]], references: list[list[float]], rule: str = "block"
    ) -> dict[str, object]:
        q, p = (torch.tensor(rows, dtype=torch.float64) for rows in (predictions, references))
        found = expected_from_log_probs(q, p, rule).mean(0)
        return {"expected_by_position": found.tolist(), "expected_tokens_per_call": 1.0 + float(found.sum())}
