"""Recycled candidates against a plain table of what was verified, and what a drafter does with them in calls."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, Lfm2Config

from tests.backbones import backbone, prompts
from tests.models import left_padded
from tokenahead import RecyclingDrafter
from tokenahead.generation.lookups import recycling
from tokenahead.generation.trees import static_tree

OPTIONS = dict(max_new_tokens=24, do_sample=False, pad_token_id=0)


@pytest.fixture
def cycles(monkeypatch):
    """Every block that was drafted, and everything that was verified, by turns."""
    seen = []

    class Watched(recycling.RecyclingSession):
        def propose(self, tokens, length):
            tree = super().propose(tokens, length)
            seen.append((tokens.last().tolist(), tree.tokens.tolist()))
            return tree

        def advance(self, outputs, result):
            seen.append((*outputs.block, self.view.new_tokens.counts))
            super().advance(outputs, result)

    monkeypatch.setattr(recycling, "RecyclingSession", Watched)
    return seen


@pytest.mark.by_day("chain", "own")
@pytest.mark.parametrize(
    "tree", [None, {"top_k": 1}, [(0,), (2,), (2, 1), (0, 0), (0, 0, 2)]], ids=["usual", "chain", "own"]
)
def test_drafts_are_the_candidates_of_what_was_verified_last(cycles, tree):
    model = backbone(vocabulary=40).double()
    drafter = RecyclingDrafter(top_k=3, num_tokens=3, total_tokens=12).attach(model)
    shape = tree if isinstance(tree, list) else recycling._shape(6, 1, 6)[0] if tree else recycling._shape(3, 3, 11)[0]
    parents, ranks = (part.tolist() for part in static_tree(shape))
    table = {token: [0, 1, 2] for token in range(40)}
    batch = left_padded(prompts(5, vocabulary=40))
    plain = model.generate(**batch, **OPTIONS)
    for _ in range(2):  # the second call drafts from what the first one left
        cycles.clear()
        out = model.generate(**batch, **OPTIONS, assistant_model=drafter, draft_tree=tree, return_dict_in_generate=True)
        assert out.sequences.equal(plain) and any(map(any, out.speculation.rows_accepted))
        assert sum(len(drafts[0]) == len(parents) for _, drafts in cycles[::2]) > 3
        for (last, drafts), (block, logits, counts) in zip(cycles[::2], cycles[1::2]):
            for token, row in zip(last, drafts):
                for node, drafted in enumerate(row):  # near the end, of a smaller tree
                    if len(row) == len(parents):
                        assert drafted == table[token if parents[node] < 0 else row[parents[node]]][ranks[node]]
            assert block.tolist() == [[token, *row] for token, row in zip(last, drafts)]
            for ids, scores, count in zip(block.tolist(), logits, counts):
                if count:  # zeros come for sequences that had ended
                    table.update({token: each.topk(3).indices.tolist() for token, each in zip(ids, scores)})
    assert drafter.table[:-1].tolist() == list(table.values())


def test_a_table_lasts_until_it_is_forgotten():
    model, prompt = backbone(vocabulary=40), prompts(1, vocabulary=40)[0][None]
    drafter = RecyclingDrafter(top_k=3, total_tokens=12).attach(model)
    first = torch.arange(3).expand(41, -1)

    def drafts():
        options = OPTIONS | {"attention_mask": torch.ones_like(prompt), "return_dict_in_generate": True}
        return model.generate(prompt, assistant_model=drafter, **options).speculation.drafts

    with torch.inference_mode():  # other calls need not be in it
        fresh = drafts()
    known, restore, copied = drafter.table.clone(), drafter.restore_point(), copy.deepcopy(drafter)
    assert drafts() != fresh and not drafter.table.equal(known) and copied.table.equal(known)
    restore()
    assert drafter.table.equal(known)
    address = drafter.table.data_ptr()
    drafter.forget()
    assert drafter.table.equal(first) and drafter.table.data_ptr() == address and drafts() == fresh


SIZES = dict(vocab_size=40, hidden_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.3)
NO_TREES = {
    "ALiBi": BloomConfig(n_layer=2, n_head=4, **SIZES),
    "convolutions": Lfm2Config(
        num_hidden_layers=2, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["conv", "full_attention"], **SIZES,
    ),
}  # fmt: skip


def test_a_chain_is_drafted_where_the_backbone_takes_no_trees():
    for name in NO_TREES:
        torch.manual_seed(1)
        model, batch = AutoModelForCausalLM.from_config(NO_TREES[name]).eval(), left_padded(prompts(3, vocabulary=40))
        drafter = RecyclingDrafter(top_k=3).attach(model)
        out = model.generate(**batch, **OPTIONS, assistant_model=drafter, use_mtp=True, return_dict_in_generate=True)
        assert out.sequences.equal(model.generate(**batch, **OPTIONS))
        assert max(len(draft) for row in out.speculation.rows_drafts for draft in row) == 6
        assert any(map(any, out.speculation.rows_accepted))
