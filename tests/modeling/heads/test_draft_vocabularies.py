"""Heads that draft a part of the vocabulary: the same output, losses over that part, kept in the directory."""

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

from tests.modeling.heads.backbones import backbone
from tests.models import left_padded
from tokenahead import MTPHeads
from tokenahead.model_cards.card import describe
from tokenahead.model_cards.export import export
from tokenahead.modeling.heads.joint import JointMTPModel
from tokenahead.testing import continuation_distribution, continuation_p_value
from tokenahead.training.evaluation.drafts import drafted_probs

TYPES = {
    "ff": {},
    "ff-full": {"unembedding": "own"},
    "cp": {"head_type": "cp", "rank": 3},
    "hmm": {"head_type": "hmm", "rank": 2, "unembedding": "own"},
    "btree": {"head_type": "btree", "rank": 2},
    "medusa": {"head_type": "medusa"},
    "medusa-own": {"head_type": "medusa", "unembedding": "own"},
    "hydra": {"head_type": "hydra"},
    "hydra-own": {"head_type": "hydra", "unembedding": "own"},
    "hydra++": {"head_type": "hydra", "arch": "prefix-mlp"},
    "layer": {"head_type": "layer"},
    "draft-layers": {"head_type": "cp", "rank": 2, "draft_layers": 1},
}
KEPT = [2, 5, 7, *range(9, 60, 2)]
GREEDY = {"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True}


def made(name, ids=KEPT, base=None):
    base = backbone() if base is None else base
    heads = MTPHeads.from_backbone(base, window=4, draft_ids=ids, **TYPES[name]).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return base, heads


def rows():
    generator = torch.Generator().manual_seed(3)
    return left_padded([torch.randint(1, 64, (length,), generator=generator) for length in (9, 3, 12)])


@pytest.mark.by_day("ff-tree1", "btree-None", "medusa-tree1", "hydra-own-None", "layer-tree1")
@pytest.mark.parametrize("tree", [None, {"depth": 2, "top_k": 3, "total_tokens": 8}])
@pytest.mark.parametrize("name", TYPES)
def test_greedy_text_is_the_same_and_drafts_stay_inside(name, tree):
    base, heads = made(name)
    plain = base.generate(**rows(), **GREEDY).sequences
    out = base.generate(**rows(), assistant_model=heads, draft_tree=tree, **GREEDY)
    assert torch.equal(out.sequences, plain)
    drafted = {token for row in out.speculation.rows_drafts for draft in row for token in draft}
    written = plain[:, -16:].flatten().tolist()
    assert drafted <= set(KEPT) and len(drafted) > 3
    assert out.speculation.vocabulary_coverage == pytest.approx(sum(t in KEPT for t in written) / len(written))


@pytest.mark.by_day("hmm-None", "hydra-tree1")
@pytest.mark.parametrize("tree", [None, {"depth": 2, "top_k": 2, "total_tokens": 5}])
@pytest.mark.parametrize("name", ["cp", "hmm", "btree", "hydra", "medusa"])
def test_samples_follow_the_target(name, tree):
    """Tokens that cannot be drafted begin cycles and end them."""
    base = backbone(vocab_size=5, initializer_range=0.3)
    _, heads = made(name, [0, 2, 3], base)
    prompt, options = torch.tensor([[1, 3, 2, 4, 3]]), {"temperature": 0.8, "top_k": 4}
    out = base.generate(
        prompt, do_sample=True, max_new_tokens=5, num_return_sequences=2500, assistant_model=heads,
        return_dict_in_generate=True, draft_tree=tree, **options,
    )  # fmt: skip
    assert {count for row in out.speculation.accepted for count in row} >= {0, 1, 2}
    distribution = continuation_distribution(base, prompt, 3, **options)
    assert continuation_p_value(out.sequences[:, 5:8], distribution) > 0.001


def test_processors_that_leave_nothing_to_draft():
    base, heads = made("cp", [3, 4, 5])
    options = {"do_sample": True, "max_new_tokens": 8, "suppress_tokens": [3, 4, 5], "return_dict_in_generate": True}
    out = base.generate(torch.arange(20, 30)[None], assistant_model=heads, **options)
    assert not set(out.sequences[0, 10:].tolist()) & {3, 4, 5} and set(out.speculation.accepted) == {0}


@torch.no_grad()
def test_distributions_are_over_all_ids_and_sum_to_one():
    for name in TYPES:
        _, heads = made(name)
        ids = torch.arange(3, 15)[None]
        whole = heads.distribution(ids)
        features = heads.features(heads._run_backbone(ids, None, None).hidden_states)[:, -1]
        outside = sorted(set(range(64)) - set(KEPT))
        for first in (KEPT[3], outside[4]):
            after = heads.distribution_after(features, torch.tensor([first]), 3)
            drafted, probs = after.sample_with_probs(3)
            text = torch.nn.functional.pad(drafted, (0, after.window - 3))
            exact = after.conditional_log_probs(text)[:, :3].exp()
            torch.testing.assert_close(probs, exact, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(exact.sum(-1), torch.ones(1, 3))
            assert exact[..., outside].count_nonzero() == 0 and probs.shape == (1, 3, 64)
        text = torch.tensor([KEPT[0], outside[0], KEPT[2], KEPT[1]]).expand(1, 12, -1)
        assert whole.token_log_probs(text)[..., [0, 2, 3]].isfinite().all()
        assert whole.prefix_log_prob(text).isinf().all((0, 1)).tolist() == [False, True, True, True]


@torch.no_grad()
def test_a_first_token_without_a_column_says_nothing_of_a_circuit():
    _, heads = made("cp")
    features, outside = torch.randn(2, 32), torch.tensor([0, 1])
    after = heads.distribution_after(features, outside, 3)
    whole = heads.distribution_of_features(features).inner
    windows = torch.zeros(2, 4, dtype=torch.long)
    unknown = torch.tensor([True, False, False, False])
    windows[:, 1:] = torch.tensor([4, 1, 8])
    want = whole.prefix_log_prob(windows, unknown)[:, 1:]
    torch.testing.assert_close(after.prefix_log_prob(torch.tensor(KEPT)[windows[:, 1:]]), want)
    text = torch.cat([outside[:, None], torch.tensor(KEPT)[windows[:, 1:]]], dim=1)  # nobody asks what is unknown
    torch.testing.assert_close(heads.distribution_of_features(features).prefix_log_prob(text, unknown)[:, 1:], want)


def test_losses_are_those_of_the_drafted_targets():
    for name in TYPES:
        base, heads = made(name)
        heads.config.loss_target = "labels"
        ids = torch.randint(1, 64, (2, 14), generator=torch.Generator().manual_seed(2))
        out = heads(ids, labels=ids)
        whole = heads.distribution(ids)
        windows = torch.nn.functional.pad(ids, (0, 4)).unfold(1, 14, 1)[:, 1:].transpose(1, 2)
        terms = -whole.token_log_probs(windows)
        real = torch.arange(14)[:, None] + torch.arange(1, 5) < 14
        terms = torch.where(real & torch.isin(windows, torch.tensor(KEPT)), terms, 0.0)
        means = terms.sum((0, 1)) / (2 * real.sum(0))
        torch.testing.assert_close(out.head_losses, means.detach(), atol=1e-5, rtol=1e-4)
        assert heads.loss_counts(ids).tolist() == [26, 24, 22, 20]
        out.loss.backward()
        assert all(parameter.grad is None for parameter in base.parameters())


def test_a_teacher_is_renormalised_where_it_is_imitated_and_not_where_it_verifies():
    for kind in ["cross_entropy", "tv"]:
        base, heads = made("hydra")
        heads.config.loss_target, heads.config.loss_divergence = "teacher", kind
        ids = torch.randint(1, 64, (2, 14), generator=torch.Generator().manual_seed(2))
        found = heads(ids, labels=ids)
        kept = torch.tensor(KEPT)
        p = base(ids).logits[:, 1:-1].log_softmax(-1)[..., kept]  # of the second token after positions 0 .. 11
        p = p.log_softmax(-1) if kind == "cross_entropy" else p
        windows = torch.nn.functional.pad(ids, (0, 4)).unfold(1, 14, 1)[:, 1:].transpose(1, 2)
        q = heads.distribution(ids).conditional_log_probs(windows)[:, :12, 1][..., kept]
        terms = -(p.exp() * q).sum(-1) if kind == "cross_entropy" else 1 - torch.minimum(p, q).exp().sum(-1)
        terms = torch.where(torch.isin(ids[:, 2:], kept), terms, 0.0)
        torch.testing.assert_close(found.head_losses[1], terms.mean().detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.by_day("hydra-own")
@pytest.mark.parametrize("name", ["cp", "hydra-own", "layer"])
def test_the_directory_keeps_it(name, tmp_path):
    base, heads = made(name)
    heads.save_pretrained(tmp_path)
    again = MTPHeads.from_pretrained(tmp_path).attach(base)
    assert again.draft_ids.tolist() == KEPT and again.config.draft_vocab_size == len(KEPT)
    outputs = [base.generate(**rows(), assistant_model=each, **GREEDY).speculation for each in (heads, again)]
    assert outputs[0].rows_drafts == outputs[1].rows_drafts
    assert copy.deepcopy(again).draft_ids.tolist() == KEPT


@torch.no_grad()
def test_unembeddings_of_their_own_start_as_rows_of_the_backbone_s():
    base = backbone()
    heads = MTPHeads.from_backbone(base, window=3, head_type="medusa", unembedding="own", draft_ids=KEPT)
    torch.testing.assert_close(heads.head.unembeddings.heads[0].weight, base.lm_head.weight[KEPT], atol=1e-6, rtol=0)
    assert MTPHeads.from_backbone(base, draft_vocab_size=9).draft_ids.tolist() == list(range(9))


def test_ids_that_cannot_be_meant():
    for wrong in [[], [3, 64], [-1], [4, 4]]:
        with pytest.raises(ValueError, match="draft_ids"):
            MTPHeads.from_backbone(backbone(), draft_ids=wrong)
        with pytest.raises(StrictDataclassClassValidationError, match="draft_vocab_size=65"):
            MTPHeads.from_backbone(backbone(), draft_vocab_size=65)


@torch.no_grad()
def test_measures_of_drafts_are_over_all_ids():
    for name in ["btree", "hydra", "layer"]:
        _, heads = made(name)
        ids = torch.randint(1, 64, (2, 10), generator=torch.Generator().manual_seed(2))
        outside = sorted(set(range(64)) - set(KEPT))
        for part in drafted_probs(heads, {"input_ids": ids, "labels": ids}):
            assert part.draft.shape == part.target.shape and part.draft[..., outside].isinf().all()
            torch.testing.assert_close(part.draft.exp().sum(-1), torch.ones(part.tokens.shape))


def test_heads_and_backbone_learn_together():
    base, heads = made("hydra")
    model = JointMTPModel(heads)
    ids = torch.randint(1, 64, (2, 14), generator=torch.Generator().manual_seed(2))
    found = model(ids, labels=ids)
    own = torch.nn.functional.cross_entropy(base(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(found.backbone_loss, own.detach())
    found.loss.backward()
    assert base.lm_head.weight.grad.any() and heads.head.firsts[0].linear.weight.grad.any()


def test_layouts_of_whole_vocabularies_are_refused(tmp_path):
    for layout in ["medusa", "vllm"]:
        _, heads = made("medusa-own")
        with pytest.raises(ValueError, match=f"draft_vocab_size={len(KEPT)}"):
            heads.export(tmp_path / "heads", layout)
        with pytest.raises(ValueError, match=f"draft_vocab_size={len(KEPT)}"):
            export(heads, tmp_path / "engine", "vllm")
        assert f"{len(KEPT)} of 64 token ids" in str(describe(heads))
