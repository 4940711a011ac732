"""Statistics of a call: shapes for one row and for several, shares by position, tokens per call."""

import pytest
import torch

from tests.every_model import llama
from tokenahead import NgramDrafter, Speculation


def test_rows_and_tokens_per_call():
    """One row is a plain list, and several are lists of lists."""
    one = Speculation([[2, 0, 1]], [[[5, 6], [7, 8], [9]]], backbone_calls=4, new_tokens=7)
    assert one.accepted == [2, 0, 1] and one.drafts == [[5, 6], [7, 8], [9]]
    assert one.tokens_per_call == pytest.approx(7 / 4)
    two = Speculation([[1], [0, 2]], [[[5, 6]], [[7, 8], [9, 9]]], backbone_calls=3, new_tokens=8)
    assert two.accepted == [[1], [0, 2]] and two.drafts == [[[5, 6]], [[7, 8], [9, 9]]]
    assert two.rows_calls == [2, 3] and two.tokens_per_call == pytest.approx(8 / 5)
    assert Speculation([[]], [[]]).tokens_per_call == 0


def test_shares_are_those_of_all_verifications_whatever_their_drafts():
    """Of the first case: 3 of 4, 2 of 4, and 1 of 4, though only two drafts had a third token."""
    for accepted, drafts, depths, shares in [
        ([[3, 0], [2, 1]], [[[1, 1, 1], [1, 1]], [[1, 1, 1], [1, 1]]], {}, [3 / 4, 2 / 4, 1 / 4]),
        ([[0, 0, 3]], [[[1], [1], [1, 1, 1]]], {}, [1 / 3] * 3),
        ([[2, 0]], [[[1, 2, 3, 4], [1, 2, 3]]], {"rows_depths": [[2, 2]]}, [1 / 2, 1 / 2]),  # of paths in trees
        ([[0]], [[[]]], {}, []),
        ([[]], [[]], {}, []),
    ]:
        assert Speculation(accepted, drafts, **depths).accepted_by_position == pytest.approx(shares)


def test_acceptance_by_hundreds_of_tokens():
    """A draft counts where its first token stands: token 1 follows the prompt's own, and 98 drafts reach token 100."""
    drafts = [[[7] * 98, [7] * 4, []], [[7, 7]]]
    rows = Speculation([[98, 3, 0], [1]], drafts)
    assert rows.by_hundreds == [
        {"verifications": 2, "drafted": 100, "accepted": 99},
        {"verifications": 2, "drafted": 4, "accepted": 3},
    ]
    tree = Speculation([[1] * 2 + [250, 0]], [[[7] * 9] * 4], rows_depths=[[3, 3, 250, 3]])
    assert [list(each.values()) for each in tree.by_hundreds] == [[3, 256, 252], [0, 0, 0], [1, 3, 0]]
    assert Speculation([[]], [[]]).by_hundreds == []


def test_ended_sequences_count_in_no_further_call():
    """Alone or together, a sequence that drafts its own tokens has the same tokens and calls; filling a returned cache
    up is nobody's call."""
    torch.manual_seed(2)
    model, prompt = llama(initializer_range=0.25), torch.randint(3, 64, (2, 4))
    model.generation_config.pad_token_id = 0
    drafter = NgramDrafter(longest=1, num_tokens=3).attach(model)
    asked = dict(max_new_tokens=24, output_scores=True, assistant_model=drafter, return_dict_in_generate=True)
    mask = torch.ones_like(prompt)
    plain = model.generate(prompt, attention_mask=mask, max_new_tokens=24)
    asked["eos_token_id"] = next(int(t) for t in plain[0, 9:] if t not in (*plain[0, 4:9], *plain[1, 4:]))
    alone = [model.generate(prompt[i : i + 1], attention_mask=mask[:1], **asked).speculation for i in (0, 1)]
    stats = model.generate(prompt, attention_mask=mask, **asked).speculation
    assert alone[0].new_tokens < alone[1].new_tokens == 24
    assert stats.rows_calls == [each.backbone_calls for each in alone]
    assert stats.tokens_per_call == sum(each.new_tokens for each in alone) / sum(each.backbone_calls for each in alone)
