"""The measures of `benchmarks/analysis.py` of a checkout, under their former name."""

from benchmarks.analysis import layer_divergences, marginal_log_probs, next_token_spread

__all__ = ["layer_divergences", "marginal_log_probs", "next_token_spread"]
