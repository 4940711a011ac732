"""Records: one entry per token, what was not asked for is not kept, rows that ended early."""

from dataclasses import dataclass

import pytest
import torch
from transformers import GenerationConfig

from tokenahead.generation.call.records import Records
from tokenahead.generation.contract import TargetOutput

BATCH, V, LAYERS, WIDTH, PROMPT = 2, 5, 3, 4, 6
KEPT = [[1, 1], [3, 0], [2, 0]]
"""Tokens kept per row by the prefill and two cycles: the second row ends after its first token."""
ALL = dict(output_scores=True, output_logits=True, output_hidden_states=True)


@dataclass
class Call:
    """What one backbone call offers."""

    logits: torch.Tensor
    scores: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]
    kept: list[int]


def calls(kept: list[list[int]] = KEPT) -> list[Call]:
    made = []
    for index, counts in enumerate(kept):
        length = 1 if index == 0 else max(counts) + 1  # more positions than are kept
        columns = PROMPT if index == 0 else length
        states = tuple(torch.randn(BATCH, columns, WIDTH) for _ in range(LAYERS))
        made.append(Call(torch.randn(BATCH, length, V), torch.randn(BATCH, length, V), states, counts))
    return made


@pytest.mark.core
def test_steps_that_were_verified_and_not_kept_are_dropped():
    """A stop string inside a block: records take the block, and are cut afterwards."""
    records = Records(GenerationConfig(return_dict_in_generate=True, **ALL), BATCH)
    made = calls([[1, 1], [3, 3]])
    for index, call in enumerate(made):
        records.add(TargetOutput(call.logits, call.hidden_states), call.scores, call.kept, is_prefill=index == 0)
        records.cut([[1, 1], [4, 2]][index])
    scores, logits, hidden = records.per_token([4, 2], pad=3)
    assert len(scores) == len(logits) == len(hidden) == 4
    assert torch.equal(scores[1][1], made[1].scores[1, 0]) and torch.isneginf(scores[2][1]).any()
    assert all((layer[1] == 0).all() and layer[0].any() for layer in hidden[2])  # the last token has no state
    assert len(records.scores_of(3)) == 3
