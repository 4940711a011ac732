"""Trees of drafts in the decoding loop: greedy output is the backbone's own, sampled output has its distribution."""

import pytest
import torch

from tests.backbones import backbone, plain_continuations, prompts
from tests.models import left_padded
from tests.tree_drafters import DEPTH, KnowingTrees
from tokenahead.generation.contract import DraftTree

NEW = 20
OPTIONS = dict(max_new_tokens=NEW, return_dict_in_generate=True)


def padded_texts(group, texts):
    """Prompts and what follows them, as rows of a left-padded batch."""
    return [[*row, *text.tolist()] for row, text in zip(left_padded(group)["input_ids"].tolist(), texts)]


def test_statistics_hold_real_nodes_only(monkeypatch):
    model, batch = backbone(), prompts(4)
    drafter = KnowingTrees(48).attach(model)
    drafter.texts, drafter.fewer = padded_texts(batch, plain_continuations(model, batch, NEW)), 1.0
    proposed = []

    def watch(tokens, parents, num_nodes, **options):
        proposed.append([row[:count] for row, count in zip(tokens.tolist(), num_nodes.tolist())])
        return DraftTree(tokens, parents, num_nodes=num_nodes, **options)

    watch.chain = DraftTree.chain
    monkeypatch.setattr("tests.tree_drafters.DraftTree", watch)
    out = model.generate(**left_padded(batch), assistant_model=drafter, do_sample=False, **OPTIONS)
    sizes = set()
    for row, drafts in enumerate(out.speculation.rows_drafts):
        assert [d for d in drafts if d] == [cycle[row] for cycle in proposed[: len(drafts)] if cycle[row]]
        sizes |= {len(draft) for draft in drafts}
    assert 0 in sizes and len(sizes) > 3
    shares = out.speculation.accepted_by_position
    assert len(shares) == DEPTH and all(0 < share < 1 for share in shares)


@pytest.mark.by_day("llama")
@pytest.mark.parametrize("name", ["llama", "mistral", "evabyte"])
def test_scores_logits_and_hidden_states_are_those_of_the_path(name):
    model, batch = backbone(name), prompts(4, seed=8)
    drafter, inputs = KnowingTrees(48).attach(model), left_padded(batch)
    drafter.texts = padded_texts(batch, plain_continuations(model, batch, NEW))
    wanted = dict(output_scores=True, output_logits=True, output_hidden_states=True, repetition_penalty=1.0)
    options = dict(do_sample=False, **inputs, **wanted, **OPTIONS)
    plain, ours = model.generate(**options), model.generate(assistant_model=drafter, **options)
    assert torch.equal(ours.sequences, plain.sequences) and ours.speculation.tokens_per_call > 1.5
    for kind in ("scores", "logits", "hidden_states"):
        assert len(getattr(ours, kind)) == len(getattr(plain, kind)) == NEW
    for kind in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(getattr(ours, kind)), torch.stack(getattr(plain, kind)))
    for one, other in zip(ours.hidden_states[1:], plain.hidden_states[1:]):
        torch.testing.assert_close(torch.stack(one), torch.stack(other), atol=1e-5, rtol=1e-4)
