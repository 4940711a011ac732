"""What drafts may look like: tests of every drafter, of the text by chains and trees, greedy and sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from tests.assisted import assisted_generate
from tests.backbones import plain_continuations
from tests.matrix.decoding import DICT, as_plain
from tests.matrix.models import Entry
from tests.models import left_padded
from tokenahead.testing import continuation_distribution, continuation_p_value

WARP = {"temperature": 1.5, "top_k": 3, "top_p": 1.0, "repetition_penalty": 1.2}


def follows_the_backbone(entry: Entry, **options: Any) -> None:
    """Asserts that sampled texts of two prompts, in one ragged batch by turns, are distributed as the backbone says."""
    inputs, rows = entry.inputs(2), 600
    width, drawn = inputs["input_ids"].shape[1], {name: value.repeat(rows, 1) for name, value in inputs.items()}
    out = entry.generate(drawn, do_sample=True, max_new_tokens=5, **WARP, **options, **DICT)
    assert len(set().union(*out.speculation.rows_accepted)) > 1
    for row, (ids, mask) in enumerate(zip(*inputs.values())):
        distribution = continuation_distribution(entry.model, ids[mask.bool()][None], 3, **WARP)
        assert continuation_p_value(out.sequences[row::2, width : width + 3], distribution) > 0.001


def accepted(entry: Entry, count: int, **options: Any) -> set[int]:
    """Return how many drafts are accepted, alone and in ragged batches of 4; the texts are those of plain decoding."""
    batch, seen = entry.prompts(count), set()
    options |= DICT | {"max_new_tokens": 20}
    plain = plain_continuations(entry.model, batch, 20, **({"use_mtp": False} if entry.drafter is None else {}))
    for size in (1, 4):
        for start in range(0, count, size):
            out = entry.generate(left_padded(batch[start : start + size]), **options)
            assert torch.equal(out.sequences[:, -20:], torch.stack(plain[start : start + size]))
            seen |= set().union(*out.speculation.rows_accepted)
    return seen


class DraftingConformance:
    """Chains, trees, fixed caches, and transformers' own loop."""

    def test_every_number_of_drafts_is_accepted(self, entry: Entry) -> None:
        """Alone and in ragged batches."""
        assert accepted(entry, 16) >= set(range(entry.longest + 1))

    def test_rows_draft_what_they_draft_alone(self, entry: Entry) -> None:
        """As long as the end of a text is far."""
        batch = entry.prompts(8)[4:]
        stats = entry.generate(left_padded(batch), **DICT).speculation
        for row, prompt in enumerate(batch):
            alone = entry.generate(left_padded([prompt]), **DICT).speculation
            assert stats.rows_drafts[row][:3] == alone.drafts[:3] and stats.rows_accepted[row][:2] == alone.accepted[:2]

    @pytest.mark.parametrize("rule", ["token", "block"])
    def test_distribution(self, entry: Entry, rule: str) -> None:
        """Of chains, by both rules."""
        follows_the_backbone(entry, verification=rule)

    def test_trees(self, entry: Entry) -> None:
        """Alone and in ragged batches; who drafts chains only says so."""
        if entry.tree is None:
            with pytest.raises(ValueError, match="draft_tree="):
                entry.generate(entry.inputs(1), draft_tree={"depth": 1, "top_k": 2, "total_tokens": 4})
            return
        assert len(accepted(entry, 8, draft_tree=entry.tree)) > 2

    @pytest.mark.parametrize("rule", ["token", "block"])
    def test_distribution_of_trees(self, entry: Entry, rule: str) -> None:
        """Where there are trees."""
        if entry.tree is not None:
            follows_the_backbone(entry, verification=rule, draft_tree=entry.tree)

    def test_confidence_threshold(self, entry: Entry) -> None:
        """Drafts end where they are unsure."""
        for threshold in (0.2, 0.9):
            as_plain(entry, entry.inputs(3), assistant_confidence_threshold=threshold)

    def test_static_cache(self, entry: Entry) -> None:
        """Blocks are verified in room of one size."""
        out = entry.generate(entry.inputs(4), cache_implementation="static", **DICT)
        assert torch.equal(out.sequences, entry.text(4)) and any(map(any, out.speculation.rows_accepted))

    def test_assisted_loop_of_transformers(self, entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
        """It takes the drafts of one row, past our patch."""
        for prompt in entry.prompts(4):
            inputs = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt)[None]}
            options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
            if entry.drafter is not None:
                mask = inputs["attention_mask"]
                out = assisted_generate(entry.model, prompt[None], entry.drafter, attention_mask=mask, **options)
            else:
                kind = type(entry.model)
                monkeypatch.setattr(kind, "_assisted_decoding", GenerationMixin._assisted_decoding)
                out = entry.model.generate(**inputs, **options)
                monkeypatch.undo()
            assert torch.equal(out, entry.plain(inputs, max_new_tokens=12))
