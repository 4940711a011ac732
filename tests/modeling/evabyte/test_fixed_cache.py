"""EvaByte's cache of a fixed size: cycles are replayed, and texts are those of the cache that grows."""

import pytest
import torch

from tests.fake_graphs import BlindGraph, FakeGraph
from tests.models import left_padded, tiny_model
from tokenahead.configuration.cache_names import CACHE
from tokenahead.generation import graphs as graphs_module

STATIC = dict(cache_implementation="static")
SAMPLED, NEW = dict(do_sample=True, top_k=0), 32
LENGTHS = 23, 60, 3  # of prompts, whose texts cross borders of windows of 32 bytes


def decoded(model, rows, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    batch = left_padded([torch.randint(64, 320, (length,), generator=generator) for length in LENGTHS[:rows]])
    torch.manual_seed(0)
    options = dict(max_new_tokens=NEW, eos_token_id=None, return_dict_in_generate=True, use_mtp=True) | options
    return model.generate(**batch, **options)


@pytest.mark.by_day("greedy-FakeGraph", "sampled-BlindGraph")
@pytest.mark.parametrize("fake", [FakeGraph, BlindGraph])
@pytest.mark.parametrize("options", [dict(do_sample=False), SAMPLED], ids=["greedy", "sampled"])
def test_cycles_across_windows_are_replayed(monkeypatch, fake, options):
    monkeypatch.setitem(graphs_module.GRAPHS, "cpu", fake)
    model = tiny_model(mtp_head=dict(head_type="hmm", rank=2, window=4), num_pred_heads=4).double()
    for rows in (1, 3):
        eager = decoded(model, rows, **options)
        for call in range(2):
            fixed = decoded(model, rows, **options, **STATIC)
            told = fixed.speculation.graphs
            if options is not SAMPLED:
                assert torch.equal(fixed.sequences, eager.sequences) and fixed.speculation == eager.speculation
            elif rows == 1:  # near the length limit eager drafts are shorter, and draw other numbers
                assert torch.equal(fixed.sequences[:, :-4], eager.sequences[:, :-4])
            assert told.recorded == 1 - call and not told.reasons
        assert told.replayed["cycle"] == fixed.speculation.backbone_calls - 1 and not told.buffers_made


def test_a_returned_cache_goes_on():
    model = tiny_model(num_pred_heads=4).double()
    fixed, eager = (decoded(model, 3, do_sample=False, **more) for more in (STATIC, {}))
    assert fixed[CACHE].lengths == eager[CACHE].lengths
    mask = torch.ones(3, fixed.sequences.shape[1], dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, : max(LENGTHS) - length] = 0
    options = dict(attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=None)
    texts = [model.generate(out.sequences, cache=out[CACHE], **options) for out in (fixed, eager)]
    assert torch.equal(*texts)


def test_trees_are_launched_on_the_cache_that_grows():
    model = tiny_model(num_pred_heads=4).double()
    tree = dict(draft_tree={"top_k": 2, "total_tokens": 5}, do_sample=False)
    fixed, eager = (decoded(model, 1, **tree, **more) for more in (STATIC, {}))
    assert torch.equal(fixed.sequences, eager.sequences)
    assert "trees" in fixed.speculation.graphs.reasons["cycle"]


def test_numbers_of_heads_that_are_none_leave_the_text_alone():
    model = tiny_model(mtp_head=dict(head_type="hmm", rank=2, window=4), num_pred_heads=4).double()
    text = decoded(model, 2, do_sample=False).sequences
    for parameter in model.mtp_head.parameters():
        parameter.data.fill_(float("nan"))
    assert torch.equal(decoded(model, 2, do_sample=False, **STATIC).sequences, text)
