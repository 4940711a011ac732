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


def recorded(made: list[Call], **options: bool) -> Records:
    records = Records(GenerationConfig(**({"return_dict_in_generate": True} | options)), BATCH)
    for index, call in enumerate(made):
        records.add(TargetOutput(call.logits, call.hidden_states), call.scores, call.kept, is_prefill=index == 0)
    return records


def kept_rows(made: list[Call], field: str, row: int) -> list[torch.Tensor]:
    return [entry for call in made for entry in getattr(call, field)[row, : call.kept[row]]]


def test_entries_follow_the_tokens():
    made = calls()
    scores, logits, _ = recorded(made, **ALL).per_token([6, 1], pad=3)
    assert len(scores) == len(logits) == 6
    for field, entries in (("scores", scores), ("logits", logits)):
        assert all(entry.shape == (BATCH, V) for entry in entries)
        long, short = (kept_rows(made, field, row) for row in range(2))
        assert all(torch.equal(entry[0], want) for entry, want in zip(entries, long, strict=True))
        assert torch.equal(entries[0][1], short[0])


def test_an_ended_row_is_certain_of_padding():
    scores, logits, hidden = recorded(calls(), **ALL).per_token([6, 1], pad=3)
    for entry in (*scores[1:], *logits[1:]):
        assert entry[1].softmax(-1).tolist() == [0, 0, 0, 1, 0]
    assert all((layer[1] == 0).all() for step in hidden[1:] for layer in step)


def test_hidden_states_are_shaped_like_transformers():
    """The prompt first, then one step per token but the last, whose state was never computed."""
    made = calls()
    hidden = recorded(made, **ALL).per_token([6, 1], pad=3)[2]
    assert len(hidden) == 6 and all(len(step) == LAYERS for step in hidden)
    assert all(torch.equal(a, b) for a, b in zip(hidden[0], made[0].hidden_states))
    for layer in range(LAYERS):
        want = torch.cat([call.hidden_states[layer][0, : call.kept[0]] for call in made[1:]])
        got = torch.cat([step[layer][:1] for step in hidden[1:]])
        assert got.shape == (5, 1, WIDTH)
        assert torch.equal(got[:, 0], want)


def test_only_what_was_asked_for():
    for wanted in ["output_scores", "output_logits", "output_hidden_states"]:
        records = recorded(calls(), **{wanted: True})
        order = ["output_scores", "output_logits", "output_hidden_states"]
        entries = dict(zip(order, records.per_token([6, 1], pad=0)))
        assert entries.pop(wanted) is not None
        assert all(value is None for value in entries.values())


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
    assert len(records.scores_of(3)) == 3
