"""Modules that draft over a part of the vocabulary: the same output, smaller drafts, kept in the directory."""

import copy
import json
from pathlib import Path

import pytest
import torch

from tests.distributions import enumerate_outcomes
from tests.families import family_model, random_ids
from tests.models import left_padded
from tokenahead import DeepSeekMTP
from tokenahead.configuration.loss_options import ModuleLossOptions
from tokenahead.modeling.common.backbone_parts import part_logits
from tokenahead.modeling.common.draft_vocabulary import DraftVocabulary, frequent_tokens
from tokenahead.testing import chi_square

TRAINED = Path(__file__).parents[2] / "data" / "deepseek_mtp" / "dsv3_d2_trained"
GREEDY = {"do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True, "pad_token_id": 0}
BLOCK = {"target": "teacher", "divergence": "block"}


@pytest.fixture(scope="module")
def model():
    model = DeepSeekMTP.from_pretrained(TRAINED, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def rows():
    generator = torch.Generator().manual_seed(3)
    return left_padded([torch.randint(1, 128, (length,), generator=generator) for length in (12, 3, 30, 7)])


@pytest.mark.by_day("0.3")
@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_greedy_text_is_the_same_and_drafts_stay_inside(model, threshold):
    plain = model.generate(**rows(), use_mtp=False, **GREEDY).sequences
    written = plain[:, -24:].flatten().tolist()
    # the commonest tokens are left out, so that at some positions the most likely one cannot be drafted
    kept = sorted(set(range(128)) - {max(set(written), key=written.count), written[0]})
    options = GREEDY | {"num_assistant_tokens": 3, "assistant_confidence_threshold": threshold}
    full = model.generate(**rows(), **options).speculation
    out = model.generate(**rows(), draft_vocabulary=kept, **options)
    assert torch.equal(out.sequences, plain)
    drafted = {token for row in out.speculation.rows_drafts for draft in row for token in draft}
    assert drafted <= set(kept) and len(drafted) > 3
    assert out.speculation.vocabulary_coverage == pytest.approx(sum(t in kept for t in written) / len(written))
    assert full.vocabulary_coverage is None and model.draft_vocabulary is None
    assert set().union(*out.speculation.rows_accepted) >= {0, 1}


@pytest.mark.by_day("block")
@pytest.mark.parametrize("rule", ["token", "block"])
def test_samples_follow_the_target(model, rule):
    """The most likely outcomes need tokens that cannot be drafted."""
    prompt, warp = torch.arange(30, 42)[None], {"do_sample": True, "temperature": 2.0, "top_k": 3}
    outcomes, distribution = enumerate_outcomes(model, prompt)
    kept = sorted(set(range(128)) - set(outcomes[distribution.argmax()][1:3].tolist()))
    torch.manual_seed(5)
    batch = prompt.expand(1500, -1)
    options = {"max_new_tokens": 4, "num_assistant_tokens": 2, "verification": rule, "draft_vocabulary": kept}
    out = model.generate(batch, attention_mask=torch.ones_like(batch), **warp, **options)[:, -4:]
    cells = (out[:, None] == outcomes).all(-1)
    assert cells.any(1).all() and chi_square(cells.long().argmax(1), distribution) > 0.001


@pytest.mark.core
@torch.no_grad()
def test_logits_are_the_head_s_of_those_rows_also_once_it_was_trained():
    model, ids = family_model("gemma"), torch.tensor([7, 2, 90, 33])
    vocabulary, states = DraftVocabulary(ids, 96), torch.randn(2, 32)
    for _ in range(2):
        want = model.readout(states)[:, ids.sort().values]
        got = model.readout.finish(part_logits(vocabulary, model.readout.head, states))
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
        model.get_output_embeddings().weight.add_(0.1)
    quantised = copy.deepcopy(model)
    quantised.main.lm_head = torch.nn.Sequential(quantised.main.lm_head)  # a head whose weights are not read
    got = quantised.readout.finish(part_logits(vocabulary, quantised.readout.head, states))
    torch.testing.assert_close(got, model.readout(states)[:, vocabulary.ids])


@pytest.mark.core
def test_the_folder_keeps_it_and_forgets_it(tmp_path):
    model, ids = family_model("llama"), random_ids()
    model.set_draft_vocabulary([5, 1, 9])
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "draft_vocabulary.json").read_text()) == [1, 5, 9]
    again = DeepSeekMTP.from_pretrained(tmp_path)
    assert again.draft_vocabulary.ids.tolist() == [1, 5, 9]
    out = again.generate(ids, **GREEDY)
    assert {token for row in out.speculation.rows_drafts for draft in row for token in draft} <= {1, 5, 9}
    assert copy.deepcopy(again).draft_vocabulary.ids.tolist() == [1, 5, 9]
    assert DeepSeekMTP.from_pretrained(tmp_path, draft_vocabulary=[2]).draft_vocabulary.ids.tolist() == [2]
    again.set_draft_vocabulary(None)
    again.save_pretrained(tmp_path)
    assert not (tmp_path / "draft_vocabulary.json").exists()
    assert DeepSeekMTP.from_pretrained(tmp_path).draft_vocabulary is None


def test_frequent_tokens_keep_what_every_text_needs():
    from tokenahead import EvaByteTokenizer

    assert frequent_tokens([[5, 5, 7, 9, 9, 9]], 2).tolist() == [5, 9]
    tokenizer = EvaByteTokenizer()
    digits = {tokenizer.encode(digit, add_special_tokens=False)[-1] for digit in "07"}
    kept = frequent_tokens([[200, 200, 201]], 120, tokenizer)
    assert {200, 201, *digits, *tokenizer.all_special_ids} <= set(kept.tolist()) and len(kept) <= 120
    with pytest.raises(ValueError, match="size=1"):
        frequent_tokens([[200]], 1, tokenizer)


def test_ids_that_cannot_be_meant():
    for ids, reason in [([], "is empty"), ([3, 96], "3 to 96"), ([-1], "-1 to -1"), ([4, 4], "each once")]:
        with pytest.raises(ValueError, match=reason):
            family_model("llama").set_draft_vocabulary(ids)
        with pytest.raises(ValueError, match=reason):
            family_model("llama").generate(random_ids(), draft_vocabulary=ids, **GREEDY)


@pytest.mark.parametrize("options", [{}, {"target": "teacher"}, {"target": "teacher", "divergence": "tv"}, BLOCK])
def test_modules_beside_a_frozen_head_learn_over_it_alone(options):
    ids, kept = torch.randint(1, 96, (2, 16), generator=torch.Generator().manual_seed(3)), list(range(0, 90, 3))
    model = DeepSeekMTP.from_backbone(family_model("llama").main, draft_vocabulary=kept)
    model.loss_options = ModuleLossOptions(**options)
    whole = model(ids, labels=ids, output_mtp_logits=True)
    model.train_only("drafter")
    out, columns = model(ids, labels=ids), torch.tensor(kept)
    torch.testing.assert_close(out.head_losses[0], whole.head_losses[0])
    q = whole.mtp_logits[0][..., :-1, kept].log_softmax(-1)
    p = whole.logits[:, 1:-1].log_softmax(-1)[..., kept]
    inside, at = torch.isin(ids[:, 2:], columns), torch.searchsorted(columns, ids[:, 2:]).clamp(max=29)[..., None]
    if not options:
        terms = -q.gather(-1, at)[..., 0]
    elif "divergence" not in options:
        terms = -(p.log_softmax(-1).exp() * q).sum(-1)
    elif options["divergence"] == "tv":
        terms = 1 - torch.minimum(p, q).exp().sum(-1)
    else:
        terms = -(q - p).gather(-1, at)[..., 0].clamp(max=0).exp()
    torch.testing.assert_close(out.head_losses[1], torch.where(inside, terms, 0.0).mean().detach())
    out.loss.backward()
    assert all(p.grad is None for p in model.main.parameters()) and any(p.grad is not None for p in model.parameters())
