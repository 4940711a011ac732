"""Drafts of EAGLE heads in the loop: lossless with any draft, and made from true features alone."""

import pytest
import torch

from tests.eagle_models import tiny_backbone
from tests.models import left_padded
from tokenahead import EagleHead
from tokenahead.modeling.eagle.session import EagleSession

GREEDY = dict(max_new_tokens=30, do_sample=False, pad_token_id=0)
CHOICES = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
DRAFTS = {
    "chain": dict(num_assistant_tokens=4),
    "tree": dict(draft_tree=dict(depth=3, top_k=3, total_tokens=12)),
    "static": dict(draft_tree=dict(choices=CHOICES)),
}


def trained_head(version):
    """A small backbone, and a head that was briefly trained on what it writes."""
    backbone = tiny_backbone(1)
    text = backbone.generate(torch.randint(2, 64, (16, 3)), max_new_tokens=40, do_sample=False, pad_token_id=0)
    head = EagleHead.from_backbone(backbone, version=version, loss_options={"steps": 3 if version == 3 else None})
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(25):
        head(text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.eval(), [row[:length] for row, length in zip(text[::4], (3, 9, 6, 12))]


@pytest.fixture(scope="module", params=[1, 3])
def trained_pair(request):
    torch.manual_seed(0)
    return trained_head(request.param)


class _Watched(EagleSession):
    """Compares what it goes on from with the head run afresh over every row's own text."""

    def propose(self, tokens, length):
        tree = super().propose(tokens, length)
        if length < 1:
            return tree
        assert torch.equal(self.layout.counts, self.view.counts)
        assert self.layout.lengths == [length - 1 for length in tokens.lengths]
        for row, (start, end) in enumerate(zip(self.starts, tokens.lengths)):
            if end == tokens.prompt_length + GREEDY["max_new_tokens"]:
                continue  # the row has ended, and its drafts do not matter
            ids = tokens.ids[row : row + 1, start:end]
            states = self.head.backbone(ids[:, :-1], output_hidden_states=True).hidden_states
            fresh = self.head.rows(self.head.fuse(states), ids[:, 1:])[:, -1:]
            torch.testing.assert_close(self.features[row : row + 1], fresh, atol=1e-4, rtol=1e-4)
        return tree


@pytest.mark.by_day("1-tree", "3-static")
@pytest.mark.parametrize("name", DRAFTS)
def test_between_cycles_it_knows_true_features_only(trained_pair, name, monkeypatch):
    head, prompts = trained_pair
    batch = left_padded(prompts)

    def watched(options):
        drafter = _Watched(head, options)
        drafter.starts = (batch["attention_mask"] == 0).sum(1).tolist()
        return drafter

    monkeypatch.setattr(head, "start", watched)
    options = GREEDY | DRAFTS[name] | dict(assistant_model=head, return_dict_in_generate=True)
    accepted = head.backbone.generate(**batch, **options).speculation.rows_accepted
    assert max(map(max, accepted)) > 1 and len(set(map(len, accepted))) > 1  # ragged: rows end in different cycles


def test_drafts_in_room_of_one_size_are_those_of_the_eager_loop(trained_pair):
    head, prompts = trained_pair
    options = GREEDY | left_padded(prompts) | dict(assistant_model=head, return_dict_in_generate=True)
    eager, fixed = (head.backbone.generate(**options, cache_implementation=kind) for kind in (None, "static"))
    assert eager.speculation == fixed.speculation
    assert {1, 2, 3} <= set().union(*eager.speculation.rows_accepted)


@pytest.mark.by_day("3")
@pytest.mark.core
@pytest.mark.parametrize("version", [1, 3])
def test_distributions_of_a_sampled_chain_are_warped_and_stay_in_the_draft_vocabulary(version):
    backbone = tiny_backbone(2)
    head = EagleHead.from_backbone(backbone, version=version, draft_ids=torch.arange(3, 60, 3)).eval()
    trees = []
    make = head.start

    def recorded(options):
        drafter = make(options)
        propose = drafter.propose
        drafter.propose = lambda tokens, length: trees.append(propose(tokens, length)) or trees[-1]
        return drafter

    head.start = recorded
    for drafting in (DRAFTS["chain"], DRAFTS["tree"]):
        trees.clear()
        prompt = torch.randint(2, 64, (2, 5))
        backbone.generate(
            prompt, assistant_model=head, do_sample=True, top_k=4, max_new_tokens=12, pad_token_id=0, **drafting
        )
        for tree in trees:
            if tree.tokens.shape[1]:
                assert set(tree.tokens.flatten().tolist()) <= set(range(3, 60, 3))
                inner = [sorted(set((row + 1).tolist())) for row in tree.parents]
                probs = torch.cat([distribution[places] for distribution, places in zip(tree.probs, inner)])
                assert (probs > 0).sum(-1).max() <= 4
                torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs)))
