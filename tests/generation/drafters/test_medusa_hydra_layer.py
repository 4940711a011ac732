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


@pytest.mark.parametrize("kind", ["hydra++", "layer-weighted"])
def test_greedy_output_is_the_backbones_own_alone_and_in_ragged_batches(kind):
    base = backbone()
    heads = trained(kind, base)
    want = base.generate(PROMPT, attention_mask=MASK, **GREEDY)
    out = base.generate(PROMPT, attention_mask=MASK, assistant_model=heads, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(out.sequences, want)
    accepted = {count for row in out.speculation.rows_accepted for count in row}
    assert len(accepted) > 1
    for row, mask in enumerate(MASK):
        alone = PROMPT[row : row + 1, mask.bool()]
        single = base.generate(alone, assistant_model=heads, return_dict_in_generate=True, **GREEDY)
        assert single.sequences[0, alone.shape[1] :].tolist() == want[row, 6:].tolist()
        both = out.speculation.rows_drafts[row], single.speculation.rows_drafts[0]
        assert all(mine[: len(own)] == own or own[: len(mine)] == mine for mine, own in zip(*both))


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


@pytest.mark.parametrize("kind", ["hydra++"])
def test_samples_have_the_backbones_distribution(kind):
    """Two tokens of top-k 3 at temperature 1.3: chi-square over nine outcomes."""
    base = backbone()
    heads = shaken(MTPHeads.from_backbone(base, window=3, **KINDS[kind]), 0.05)
    count, prompt, distribution = 600, PROMPT[2:], {}
    with torch.no_grad():
        first = (base(prompt).logits[0, -1] / 1.3).topk(3)
        for token, chance in zip(first.indices, first.values.softmax(-1)):
            second = (base(torch.cat([prompt, token.view(1, 1)], 1)).logits[0, -1] / 1.3).topk(3)
            for other, then in zip(second.indices, second.values.softmax(-1)):
                distribution[int(token), int(other)] = float(chance * then)
    torch.manual_seed(0)
    out = base.generate(prompt.expand(count, -1), max_new_tokens=3, do_sample=True, top_k=3, temperature=1.3,
                        pad_token_id=0, assistant_model=heads)  # fmt: skip
    seen = [tuple(row) for row in out[:, 6:8].tolist()]
    assert set(seen) <= distribution.keys()
    square = sum((seen.count(pair) - count * chance) ** 2 / (count * chance) for pair, chance in distribution.items())
    assert (square - 8) / 16**0.5 < 5


def test_heads_that_attend_refuse_a_backbone_whose_cache_shows_no_columns():
    from tests.models import tiny_model

    base = tiny_model()
    heads = MTPHeads.from_backbone(base, window=3, head_type="hydra", arch="prefix-mlp")
    with pytest.raises(ValueError, match="transformers' own caches"):
        base.generate(PROMPT[2:] + 70, assistant_model=heads, max_new_tokens=4)
    heads.detach()
