"""Tokens per call of a backbone, for `evaluate.load("model_cards/metrics/tokens_per_call")`."""

import datasets
import evaluate

from tokenahead.training.evaluation import repeated_share
from tokenahead.training.evaluation.drafts import ratio_of_sums
from tokenahead.training.results import DEGENERATE_SHARE

_DESCRIPTION = """
New tokens of a verification of drafts, a ratio of sums over texts: (new tokens - 1) / verifications, since the prompt's
own call gives the first token. Texts of which more than half repeats itself are left out, as of `tokenahead bench`.
"""
_INPUTS = """
Args:
    predictions: The new token ids of each text.
    references: The accepted drafts of each verification of that text (`speculation.rows_accepted`).

Returns:
    tokens_per_call: None where all texts loop.
    standard_error: Over texts; None of one.
    left_out: The share of texts that loop.

Examples:
    >>> metric = evaluate.load("model_cards/metrics/tokens_per_call")
    >>> metric.compute(predictions=[[5, 6, 7, 8, 9]], references=[[2, 0]])
    {'tokens_per_call': 2.0, 'standard_error': None, 'left_out': 0.0}
"""


class TokensPerCall(evaluate.Metric):
    """Tokens per call of texts that do not loop."""

    def _info(self) -> evaluate.MetricInfo:
        ids = datasets.Sequence(datasets.Value("int64"))
        features = datasets.Features({"predictions": ids, "references": ids})
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, float | None]:
        import torch

        texts = [(len(ids) - 1.0, float(len(accepted)), ids) for ids, accepted in zip(predictions, references)]
        kept = [(new, calls) for new, calls, ids in texts if calls and repeated_share(ids) <= DEGENERATE_SHARE]
        loops = sum(repeated_share(ids) > DEGENERATE_SHARE for *_, ids in texts)
        ratio, error = ratio_of_sums(*torch.tensor(kept, dtype=torch.float64).T) if kept else (None, None)
        return {"tokens_per_call": ratio, "standard_error": error, "left_out": loops / max(1, len(texts))}
