"""`assistant_confidence_threshold`: drafts of heads end where no row is sure."""

import pytest
import torch

from tests.every_model import llama
from tests.modeling.heads.backbones import KINDS, shaken
from tests.models import left_padded, tiny_model
from tokenahead import MTPHeads
from tokenahead.generation.call.options import DraftOptions
from tokenahead.modeling.heads.attached import HeadSession

PROMPT = torch.tensor([[1, 3, 2, 4, 3]])
GREEDY = dict(max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
CIRCUITS = ["ff", "cp", "hmm", "btree"]
APART = {kind: KINDS[kind] for kind in ("hydra", "hydra++", "layer")} | {
    "ff": {"unembedding": "own"},
    "draft layers": {"draft_layers": 1},
}


def evabyte(name, **changes):
    head = {} if name == "ff" else {"mtp_head": {"head_type": name, "window": 6, "rank": 2}}
    return tiny_model(3, **{"num_pred_heads": 6} | head | changes)


def speculating(name):
    """A model, and what its calls need to speculate."""
    if name in CIRCUITS:
        return evabyte(name), {}
    if name == "evabyte draft layers":
        model = evabyte("ff")
        shaken(model.add_draft_layers(2).draft_layers)
        return model, {}
    model = llama()
    heads = shaken(MTPHeads.from_backbone(model, window=6, **APART[name.removeprefix("apart ")]))
    return model, {"assistant_model": heads.attach(model)}


NAMES = [*CIRCUITS, "evabyte draft layers", *(f"apart {name}" for name in APART)]


@pytest.mark.by_day("hmm", "apart layer")
@pytest.mark.parametrize("name", NAMES)
def test_drafts_end_with_the_first_token_of_which_no_row_was_sure(name, monkeypatch):
    """What is verified is the beginning of what is drafted without a threshold; the text is the same."""
    model, extra = speculating(name)
    batch = left_padded([torch.tensor([5, 6, 7, 8, 5, 6, 7]), torch.tensor([9, 10, 11])])
    plain = model.generate(**batch, **GREEDY, use_mtp=None if extra else False).sequences
    chances, ends = [], []
    whole = HeadSession._chain

    def watched(drafter, distribution, length, masks):
        draft_probs = distribution.draft(lambda probs: (probs.argmax(-1), probs), length)[1]
        chances.append(draft_probs.amax(-1).amax(0).tolist())
        draft, q = whole(drafter, distribution, length, masks)
        ends.append(draft.shape[1])
        return draft, q

    monkeypatch.setattr(HeadSession, "_chain", watched)
    model.generate(**batch, **GREEDY, **extra)
    threshold = sorted(row[0] for row in chances)[len(chances) // 2]  # half of the first tokens are sure
    assert set(ends[:2]) == {5}
    chances.clear(), ends.clear()
    out = model.generate(**batch, **GREEDY, **extra, assistant_confidence_threshold=threshold)
    assert torch.equal(out.sequences, plain)
    wanted = [[*(chance < threshold for chance in row[:-1]), True].index(True) + 1 for row in chances]
    assert ends == wanted and 1 in ends and max(ends) > 1


@pytest.mark.parametrize("threshold", [None, 0.0, 0.5])
def test_the_host_waits_once_more_in_a_cycle_and_never_without_a_threshold(threshold, monkeypatch):
    model, asked = evabyte("ff"), []
    count = DraftOptions.sure_length
    monkeypatch.setattr(DraftOptions, "sure_length", lambda *args: asked.append(args) or count(*args))
    out = model.generate(PROMPT, **GREEDY, assistant_confidence_threshold=threshold)
    drafts = [draft for draft in out.speculation.drafts if draft]
    assert len(asked) == (len(drafts) if threshold else 0)
