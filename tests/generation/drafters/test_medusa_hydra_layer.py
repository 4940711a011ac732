"""Drafts of Medusa, Hydra and layer heads in the loop: greedy equality, ragged rows, caches, sampling."""

import pytest
import torch
from transformers import MistralConfig

from tests.modeling.heads.backbones import KINDS, backbone, shaken
from tokenahead import MTPHeads
from tokenahead.modeling.heads.attached import AttendingHeadSession

PROMPT = torch.tensor([[0, 0, 0, 7, 9, 4], [0, 5, 8, 3, 6, 2], [11, 12, 13, 14, 15, 16]])
MASK = (PROMPT != 0).long()
GREEDY = dict(max_new_tokens=16, do_sample=False, pad_token_id=0)


def trained(kind, base, steps=30):
    """Heads that know some of what their backbone writes, so that rows accept different numbers of drafts."""
    heads = shaken(MTPHeads.from_backbone(base, window=4, **KINDS[kind]), 0.02)
    text = base.generate(torch.arange(2, 18)[:, None], max_new_tokens=24, do_sample=False, pad_token_id=0)
    optimizer = torch.optim.Adam(heads.parameters(), lr=5e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        heads(text, labels=text).loss.backward()
        optimizer.step()
    return heads.eval()


@pytest.mark.by_day("full-hydra++", "sliding-layer-weighted")
@pytest.mark.parametrize("kind", ["hydra++", "layer", "layer-weighted"])
@pytest.mark.parametrize("family", ["full", "sliding"])
def test_the_cache_of_heads_that_attend_gives_what_a_whole_pass_gives(kind, family, monkeypatch):
    """Every feature that a draft starts from, in a ragged batch with left padding, against a pass without a cache."""
    base = backbone() if family == "full" else backbone(MistralConfig, sliding_window=5)
    heads, seen = trained(kind, base), []
    propose = AttendingHeadSession.propose

    def watched(self, tokens, length):
        open_rows = [row for row, length in enumerate(tokens.lengths) if length < 18]  # others have ended
        for row, count in ((row, int(self.layout.counts[row])) for row in open_rows):
            text = tokens.ids[row, : tokens.lengths[row] - 1][-count:]
            features = heads.features(heads._run_backbone(text[None], None, None).hidden_states)[0, -1]
            seen.append((row, float((features - self.hidden[row]).abs().max())))
        assert torch.equal(self.layout.counts, self.view.counts) and self.layout.block_offset == 0
        return propose(self, tokens, length)

    monkeypatch.setattr(AttendingHeadSession, "propose", watched)
    base.generate(PROMPT, attention_mask=MASK, assistant_model=heads, **(GREEDY | {"max_new_tokens": 12}))
    assert {row for row, _ in seen} == {0, 1, 2} and max(error for _, error in seen) < 1e-4


def test_heads_that_attend_refuse_a_backbone_whose_cache_shows_no_columns():
    from tests.models import tiny_model

    base = tiny_model()
    heads = MTPHeads.from_backbone(base, window=3, head_type="hydra", arch="prefix-mlp")
    with pytest.raises(ValueError, match="transformers' own caches"):
        base.generate(PROMPT[2:] + 70, assistant_model=heads, max_new_tokens=4)
    heads.detach()
