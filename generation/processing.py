"""Logits processors over several positions of ragged rows. Knows neither drafts nor models.

transformers' processors take the ids so far [B, L] and the scores of one position [B, v]. Here a row has scores for k
positions, and rows have different lengths. Processors that look at scores only run once over all of them; as soon as
one of the list reads ids, the list runs position by position, and sees each row's own ids and nothing else.
"""

from __future__ import annotations

import copy

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as library

from .tokens import TokenRows

_POINTWISE = (
    library.TemperatureLogitsWarper,
    library.TopKLogitsWarper,
    library.TopPLogitsWarper,
    library.MinPLogitsWarper,
    library.TypicalLogitsWarper,
    library.EpsilonLogitsWarper,
    library.EtaLogitsWarper,
    library.LogitNormalization,
    library.InfNanRemoveLogitsProcessor,
    library.SuppressTokensLogitsProcessor,
)

STATEFUL = (
    library.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    library.SynthIDTextWatermarkLogitsProcessor,
)
"""Processors that count their own calls: they cannot be asked about tokens that may be rejected."""


class Processing:
    """Applies a list of logits processors in its order.

    Args:
        processors: The list that transformers prepared for this call of `generate`.
    """

    def __init__(self, processors: LogitsProcessorList) -> None:
        self.processors = list(processors)
        self.pointwise = [p for p in self.processors if type(p) in _POINTWISE]

    def __call__(self, tokens: TokenRows, logits: torch.Tensor, done: list[bool]) -> torch.Tensor:
        """Scores of the target.

        Args:
            tokens: The rows; the drafts whose scores follow are written behind them (`TokenRows.write`).
            logits: [B, k, v] float32; position i of row b comes after `lengths[b] + i` ids.
            done: Rows that have ended; their scores are arbitrary.

        Returns:
            [B, k, v] processed scores.
        """
        if len(self.pointwise) < len(self.processors):
            return self._by_position(tokens, logits, done)
        flat = logits.flatten(0, 1)
        for processor in self.processors:
            flat = processor(tokens.ids[:, :0], flat)
        return flat.view(logits.shape)

    def _by_position(self, tokens: TokenRows, logits: torch.Tensor, done: list[bool]) -> torch.Tensor:
        """The whole list at one position after the other, until the draft meets a token that is excluded in the end.

        What follows such a token is never used, and a constraint need not know what to say of it.
        """
        output = logits.clone()
        for rows, length in tokens.groups(done):
            for position in range(logits.shape[1]):
                prefix, scores = tokens.prefix(rows, length + position), logits[rows, position]
                for processor in self.processors:
                    scores = _for_rows(processor, rows, len(done))(prefix, scores)
                output[rows, position] = scores
                if position + 1 == logits.shape[1]:
                    break
                drafted = tokens.prefix(rows, length + position + 1)[:, -1:]
                possible = (scores.softmax(-1).gather(-1, drafted)[:, 0] > 0).tolist()
                rows = [row for row, kept in zip(rows, possible) if kept]  # noqa: PLW2901
                if not rows:
                    break
        return output

    def warp(self, probs: torch.Tensor) -> torch.Tensor:
        """Draft laws [..., v] after the processors that look at scores alone; probabilities in, probabilities out.

        A draft's law may be any law, so the processors that read prefixes are left out.
        """
        flat = probs.flatten(0, -2).log()
        for processor in self.pointwise:
            flat = processor(None, flat)
        return flat.softmax(-1).view(probs.shape)


def _for_rows(processor: LogitsProcessor, rows: list[int], batch: int) -> LogitsProcessor:
    """The processor for some rows of the batch: those that count rows must still find their own."""
    if len(rows) == batch:
        return processor
    if isinstance(processor, library.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return library.PrefixConstrainedLogitsProcessor(lambda index, ids: allowed(rows[index], ids), 1)
    clone = copy.copy(processor)
    if isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor):
        clone.prompt_ignore_length = processor.prompt_ignore_length[rows]
    elif isinstance(processor, library.EncoderRepetitionPenaltyLogitsProcessor):
        clone.encoder_input_ids = processor.encoder_input_ids[rows]
    elif isinstance(processor, library.EncoderNoRepeatNGramLogitsProcessor):
        clone.generated_ngrams = [processor.generated_ngrams[row] for row in rows]
        clone.batch_size = len(rows)
    else:
        return processor
    return clone
