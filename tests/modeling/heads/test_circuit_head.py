"""Circuit heads: what the config builds, how they start, what they learn, and what is refused."""

import pytest
import torch

from tests.models import TRAINED, tiny_model
from tokenahead import EvaByteForMTPC, MTPHeadConfig, MTPHeads
from tokenahead.modeling.heads.circuit_head import CircuitHead
from tokenahead.modeling.heads.family import build_head, window_distribution

CIRCUITS = ["cp", "hmm", "btree"]
VARIANTS = [
    *({"head_type": kind} for kind in CIRCUITS),
    {"head_type": "hmm", "homogeneous": True},
    {"head_type": "hmm", "contextual": False},
    {"head_type": "btree", "contextual": False},
    {"head_type": "btree", "unembedding": "shared"},
    {"head_type": "hmm", "leaf_size": 8},
    {"head_type": "cp", "unembedding": "shared", "leaf_size": 8},
]
TOKENS = torch.randint(64, 320, (2, 60), generator=torch.Generator().manual_seed(2))


def name(options):
    return "-".join(str(value) for value in options.values())


def test_a_circuit_starts_as_the_distribution_of_the_ff_heads():
    for kind in CIRCUITS:
        for leaf_size in [None, 8]:
            for window in [2, 3, 6, 8]:
                model = tiny_model()
                hidden = torch.randn(5, 32)
                tokens = torch.randint(0, 320, (5, window))
                model.set_head(head_type="ff", window=window)
                expected = model.window_distribution(hidden).conditional_log_probs(tokens)
                model.set_head(head_type=kind, window=window, rank=4, leaf_size=leaf_size)
                torch.testing.assert_close(
                    model.window_distribution(hidden).conditional_log_probs(tokens), expected, atol=1e-5, rtol=0
                )


def test_small_leaves_are_one_unembedding_and_a_product_through_their_width():
    config = MTPHeadConfig(head_type="cp", window=3, rank=2, leaf_size=4)
    head, hidden = build_head(config, 6, 10), torch.randn(5, 6)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    maps = head.state_leaves.maps.view(3, 2, 4, 6)
    own = torch.einsum("vl,nrld,bd->bnrv", head.state_leaves.weight, maps, hidden)
    base = torch.einsum("nvd,bd->bnv", head.leaf.weight.view(3, 10, 6), hidden)
    torch.testing.assert_close(head(hidden)["leaf_logits"], base[:, :, None] + own)
    torch.testing.assert_close(head(hidden, stop=2)["leaf_logits"][:, :2], (base[:, :, None] + own)[:, :2])
    head.resize(12, None)
    assert head(hidden)["leaf_logits"].shape == (5, 3, 2, 12)
    with pytest.raises(Exception, match="leaf_size=4.*ff"):
        MTPHeadConfig(head_type="ff", window=3, leaf_size=4)
    with pytest.raises(Exception, match="leaf_size=0"):
        MTPHeadConfig(head_type="cp", window=3, leaf_size=0)


def mean_diagonal(**options):
    """The mean diagonal of a new HMM's transitions, over contexts."""
    torch.manual_seed(0)
    head = build_head(MTPHeadConfig(head_type="hmm", window=4, **options), 64, 8)
    head.reset_head(0.02)
    transitions = head(torch.randn(200, 64))["trans_logits"].detach().softmax(-1)
    return float(transitions.diagonal(dim1=-2, dim2=-1).mean())


def test_states_of_a_new_chain_persist_at_any_rank():
    for rank in [2, 4, 8, 32, 128]:
        for more in [{}, {"homogeneous": True}, {"contextual": False}]:
            if more.get("contextual", True):
                assert mean_diagonal(rank=rank, **more) == pytest.approx(0.85, abs=0.015)
            else:  # a few draws are what there is to average
                assert mean_diagonal(rank=rank, **more) == pytest.approx(0.85, abs=0.1)


def test_a_number_stays_possible_as_identity_bias_and_in_saved_configs():
    saved = {"head_type": "hmm", "window": 4, "rank": 32, "identity_bias": 3.0}
    assert MTPHeadConfig.from_dict(saved).identity_bias == 3.0
    assert mean_diagonal(rank=32, identity_bias=3.0) == pytest.approx(0.37, abs=0.02)


@pytest.mark.by_day("hmm-True", "btree-shared")
@pytest.mark.parametrize("options", VARIANTS, ids=name)
def test_save_load_and_generate(options, tmp_path):
    model = tiny_model()
    model.set_head(rank=3, window=6, **options)
    with torch.no_grad():
        for parameter in model.mtp_head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    again = EvaByteForMTPC.from_pretrained(tmp_path).eval()
    assert again.config.mtp_head.options() == model.config.mtp_head.options()
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again.generation_config.eos_token_id = None
    prompt = TOKENS[:1, :20]
    for greedy in (dict(do_sample=False), dict(do_sample=False, num_assistant_tokens=2)):
        plain = again.generate(prompt, use_mtp=False, max_new_tokens=20, **greedy)
        assert torch.equal(again.generate(prompt, max_new_tokens=20, **greedy), plain)
    for sampled in (dict(top_k=0), dict(temperature=0.5), dict(top_p=0.8)):
        out = again.generate(prompt, do_sample=True, max_new_tokens=20, num_return_sequences=3, **sampled)
        assert out.shape == (3, 40)


@pytest.mark.by_day("hmm-False", "cp-shared-8")
@pytest.mark.parametrize("options", VARIANTS, ids=name)
def test_training_the_head_alone_moves_it_and_nothing_else(options):
    model = tiny_model().train()
    model.set_head(rank=3, window=6, **options)
    model.train_only("drafter")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(8):
        loss = model(TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) != key.startswith("mtp_head."), key


@pytest.mark.by_day("btree")
@pytest.mark.parametrize("kind", CIRCUITS)
def test_training_with_the_backbone_trains_the_next_byte_head_too(kind):
    model = tiny_model().train()
    model.set_head(head_type=kind, window=4, rank=2)
    model(TOKENS, labels=TOKENS).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in (
        model.lm_head.weight, model.mtp_head.leaf.weight, model.model.layers[0].mlp.up_proj.weight))  # fmt: skip
    assert model.draft_heads.weight.grad is None


@pytest.mark.core
def test_masked_tokens_are_observed_or_summed_out():
    model = tiny_model()
    model.set_head(head_type="cp", window=3, rank=3)
    with torch.no_grad():
        model.mtp_head.leaf.weight.add_(torch.randn_like(model.mtp_head.leaf.weight))
    labels = TOKENS.clone()
    labels[:, ::2] = -100
    losses = {}
    for way in ("observe", "marginalise"):
        model.config.mtp_head.masked_tokens = way
        losses[way] = model(TOKENS, labels=labels).head_losses
    hidden = model(TOKENS, output_hidden_states=-1).hidden_states[-1]
    distribution = model.window_distribution(hidden[:, :-3])
    windows = TOKENS.unfold(1, 3, 1)[:, 1:]
    observed = -distribution.token_log_probs(windows)
    scored = labels.unfold(1, 3, 1)[:, 1:] != -100
    expected = (observed * scored).sum((0, 1)) / scored.sum((0, 1))
    padded = model(TOKENS[:, :-1], labels=labels[:, :-1])
    assert padded.head_losses.shape == (3,)
    torch.testing.assert_close(losses["observe"][2], expected[2], atol=0.05, rtol=0)
    assert not torch.allclose(losses["observe"][1:], losses["marginalise"][1:])
    torch.testing.assert_close(losses["observe"][0], losses["marginalise"][0])


def test_from_pretrained_makes_a_circuit_from_official_ff_heads(tmp_path):
    model = EvaByteForMTPC.from_pretrained(TRAINED, mtp_head={"head_type": "btree", "rank": 2, "window": 8})
    assert isinstance(model.mtp_head, CircuitHead) and model.config.num_pred_heads == 8
    model.save_pretrained(tmp_path)
    assert isinstance(EvaByteForMTPC.from_pretrained(tmp_path).mtp_head, CircuitHead)
    for wrong in ({"rank": 3}, {"window": 4}, {"head_type": "cp"}):
        with pytest.raises(ValueError, match="mtp_head=.*'btree'"):
            EvaByteForMTPC.from_pretrained(tmp_path, mtp_head=wrong)


def test_heads_apart_may_be_circuits():
    model = tiny_model()
    prompt = TOKENS[:1, :20]
    expected = model.generate(prompt, use_mtp=False, do_sample=False, max_new_tokens=20)
    for unembedding in ("own", "shared"):
        heads = MTPHeads.from_backbone(model, window=4, unembedding=unembedding, head_type="btree", rank=3)
        out = model.generate(prompt, assistant_model=heads, do_sample=False, max_new_tokens=20)
        assert torch.equal(out, expected)
        heads.detach()


@pytest.mark.by_day("leaf.weight")
@pytest.mark.parametrize("attribute", ["leaf.weight", "sum_weight"])
def test_nan_weights_draft_nothing_and_leave_the_text_alone(attribute):
    model = tiny_model()
    model.set_head(head_type="cp", window=4, rank=2)
    module, _, parameter = attribute.rpartition(".")
    with torch.no_grad():
        getattr(model.mtp_head.get_submodule(module), parameter)[0] = float("nan")
    plain = model.generate(TOKENS[:1, :5], max_new_tokens=5, use_mtp=False)
    assert model.generate(TOKENS[:1, :5], max_new_tokens=5).equal(plain)
    for options in ({"do_sample": True, "top_k": 0}, {"do_sample": True, "temperature": 0.7}):
        out = model.generate(TOKENS[:1, :5], max_new_tokens=5, return_dict_in_generate=True, **options)
        assert not any(out.speculation.drafts)


def test_distribution_is_float32_whatever_the_models_dtype():
    config = MTPHeadConfig(head_type="btree", window=4, rank=2)
    head = build_head(config, 16, 20).to(torch.bfloat16)
    head.reset_head(0.02)
    distribution = window_distribution(head, config, torch.randn(3, 16, dtype=torch.bfloat16))
    assert distribution.log_prob(torch.zeros(3, 4, dtype=torch.long)).dtype == torch.float32
