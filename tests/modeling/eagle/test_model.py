"""The architecture against the official code's numbers, and what a head asks of its backbone."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from tests.backbones import backbone
from tests.eagle_models import CASES, golden_case, teacher_forced, tiny_backbone
from tokenahead import EagleHead, EagleHeadConfig


def gpt2(**sizes):
    return GPT2Config(vocab_size=64, eos_token_id=None, n_embd=40, n_head=4, n_layer=2, n_positions=256)


IDS = torch.randint(2, 64, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=CASES)
def case(request):
    return golden_case(request.param)


def test_rows_are_the_official_ones(case):
    features, hidden, logits = teacher_forced(case)
    real = case.golden["attention_mask"].bool()
    for got, name in ((features, "features"), (hidden, "hidden"), (logits, "logits")):
        mask = real[:, : got.shape[1]]
        torch.testing.assert_close(got[mask], case.golden[name][mask], atol=1e-4, rtol=0)


def test_a_greedy_chain_is_the_official_one(case):
    golden, real = case.golden, case.golden["attention_mask"]
    positions = (real.cumsum(1) - 1).clamp(min=0)
    ids, cache, mask = torch.cat([golden["input_ids"], golden["first"]], dim=1)[:, 1:], DynamicCache(), real
    features, drafts = case.head.fuse(case.base.hidden_states()), []
    for depth in range(golden["chain_ids"].shape[1]):
        with torch.no_grad():
            features, logits = case.head.step(features, ids, positions, mask, cache, logits_to_keep=1)
        torch.testing.assert_close(logits[:, 0], golden["chain_logits"][:, depth], atol=1e-4, rtol=0)
        ids, features = logits.argmax(-1), features[:, -1:]
        drafts.append(ids)
        mask, positions = torch.nn.functional.pad(mask, (0, 1), value=1), positions[:, -1:] + 1
    assert torch.equal(torch.cat(drafts, 1), golden["chain_ids"])


def test_positions_count_what_a_row_sees(case):
    head, features = case.head, case.head.fuse(case.base.hidden_states())[:1, -6:]
    ids, tree = case.golden["input_ids"][:1, -6:], torch.eye(6, dtype=torch.bool)[None, None].clone()
    tree[..., 0] = True
    tree[0, 0, 4, 2] = True  # 0 <- 1, 2, 3, 5 and 2 <- 4
    expected = head.rows(features, ids, torch.tensor([[0, 1, 1, 1, 2, 1]]), tree)
    torch.testing.assert_close(head.rows(features, ids, attention_mask=tree), expected)
    path = head.rows(features[:, [0, 2, 4]], ids[:, [0, 2, 4]])
    torch.testing.assert_close(expected[:, [0, 2, 4]], path)


def test_drafted_rows_stand_at_the_places_of_their_features(monkeypatch):
    """Row t at position t, without padding; which ropes that depend on a length would show."""
    base = tiny_backbone()
    head, seen, lengths = EagleHead.from_backbone(base), [], [7, 4]
    run = head.run

    def noted(features, embeddings, positions, *rest):
        seen.append(positions.expand(len(features), -1).tolist())
        return run(features, embeddings, positions, *rest)

    monkeypatch.setattr(head, "run", noted)
    mask = torch.stack([torch.arange(7) >= 7 - length for length in lengths]).long()
    call = dict(max_new_tokens=8, do_sample=False, assistant_model=head, num_assistant_tokens=3)
    base.generate(IDS[:, :7], attention_mask=mask, **call)
    for row, length in enumerate(lengths):
        assert seen[0][row][-length:] == [*range(length)]
        assert [level[row] for level in seen[1:3]] == [[length], [length + 1]]


def test_padding_gives_numbers_and_changes_none():
    for implementation in ["sdpa", "eager"]:
        case = golden_case("eagle3_llama", attn_implementation=implementation)
        _, hidden, _ = teacher_forced(case)
        assert hidden.isfinite().all()
        real = case.golden["attention_mask"].bool()[:, :-1]
        torch.testing.assert_close(hidden[real], case.golden["hidden"][real], atol=1e-4, rtol=0)
        whole = torch.ones(real.shape[1], real.shape[1], dtype=torch.bool)
        square = (real[:, None, None] & whole.tril()) | torch.eye(real.shape[1]).bool()
        features = case.head.fuse(case.base.hidden_states())[:, :-1]
        again = case.head.rows(features, case.golden["input_ids"][:, 1:], (real.cumsum(1) - 1).clamp(min=0), square)
        torch.testing.assert_close(again[real], hidden[real])


OPTIONS = [
    dict(version=1),
    dict(version=1, fc_bias=True, attention_bias=True, num_hidden_layers=2),
    dict(draft_vocab_size=20),
    dict(version=1, draft_vocab_size=20),
    dict(fc_norm=True, norm_output=True, norm_before_residual=True),
    dict(norm_before_fc=True, norm_output=True, num_hidden_layers=3),
    dict(use_aux_hidden_state=False, qk_norm=True, head_dim=16),
    dict(aux_layers=[1, 1, 4, 8], attention_bias=True),
]


@pytest.mark.by_day(
    "{'version': 1, 'fc_bias': True, 'attention_bias': True, 'num_hidden_layers': 2}",
    "{'fc_norm': True, 'norm_output': True, 'norm_before_residual': True}",
    "{'use_aux_hidden_state': False, 'qk_norm': True, 'head_dim': 16}",
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_round_trips_and_matters(options, tmp_path):
    base = tiny_backbone()
    head = EagleHead.from_backbone(base, **options).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += torch.randn_like(parameter) * 0.2
    states = base(IDS, output_hidden_states=True).hidden_states
    features, logits = head.step(head.fuse(states)[:, :-1], IDS[:, 1:])
    assert features.shape == (2, 11, 32) and logits.shape == (2, 11, 64)
    assert logits.isfinite().sum(-1).unique().tolist() == [head.config.draft_vocab_size]
    head.save_pretrained(tmp_path)
    for again in (EagleHead.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        again = again.eval().attach(base)
        assert torch.equal(again.step(again.fuse(states)[:, :-1], IDS[:, 1:])[1], logits)
    if head.config.version == 3:
        for name in ("norm_before_residual", "norm_output"):
            other = EagleHead.from_pretrained(tmp_path, **{name: not getattr(head.config, name)}).eval().attach(base)
            assert not torch.allclose(_second_row(other, states), _second_row(head, states))


def _second_row(head, states):
    """Logits of rows that read what others returned."""
    features = head.rows(head.fuse(states)[:, :3], IDS[:, 1:4])
    return head.step(features, IDS[:, 2:5])[1]


def test_new_heads_fit_any_backbone():
    for version in [1, 3]:
        for family, changes in [(LlamaConfig, {}), (Qwen3Config, {"head_dim": 16}), (gpt2, {})]:
            base = tiny_backbone(0, family, **changes)
            head = EagleHead.from_backbone(base, version=version)
            with torch.no_grad():
                out = head(IDS, labels=IDS)
                states = base(IDS, output_hidden_states=True).hidden_states
                _, logits = head.step(head.fuse(states)[:, :-1], IDS[:, 1:])
            assert out.loss.isfinite() and logits.shape == (2, 11, 64) and logits.isfinite().all()
            assert head.config.rope_parameters["rope_type"] == "default"


def test_draft_ids_choose_the_unembedding():
    base = tiny_backbone()
    ids = torch.tensor([40, 3, 63, 7])
    head = EagleHead.from_backbone(base, draft_ids=ids)
    assert head.draft_ids.tolist() == [3, 7, 40, 63]
    assert torch.equal(head.lm_head.weight, base.lm_head.weight[[3, 7, 40, 63]])
    states = base(IDS, output_hidden_states=True).hidden_states
    _, logits = head.step(head.fuse(states)[:, :-1], IDS[:, 1:], logits_to_keep=1)
    assert logits[0, 0].isfinite().nonzero().flatten().tolist() == [3, 7, 40, 63]
    for wrong in ([1, 1], [0, 64], [-1, 2]):
        with pytest.raises(ValueError, match="draft_ids"):
            EagleHead.from_backbone(base, draft_ids=torch.tensor(wrong))


def test_it_follows_its_backbone_and_leaves_it_alone():
    base = tiny_backbone().to(torch.bfloat16)
    before, attributes = {name: t.clone() for name, t in base.state_dict().items()}, set(vars(base))
    head = EagleHead.from_backbone(base, version=1)
    assert head.dtype == torch.bfloat16 and head.attach(base) is head
    head(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is None for parameter in base.parameters())
    assert not any("lm_head" in name or "embed" in name for name, _ in head.named_parameters())
    head.detach()
    assert set(vars(base)) - attributes <= {"_output_capturing_hooks_installed"}
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())


def test_a_copy_of_the_embeddings_is_used_and_frozen():
    base = tiny_backbone()
    head = EagleHead.from_backbone(base, own_embeddings=True)
    features = head.fuse(base(IDS, output_hidden_states=True).hidden_states)[:, :-1]
    expected = head.rows(features, IDS[:, 1:])
    base.get_input_embeddings().weight.data.zero_()
    assert torch.equal(head.rows(features, IDS[:, 1:]), expected)
    assert not head.embed_tokens.weight.requires_grad


def test_another_backbone_is_refused_by_name():
    for changes, message in [
        ({"vocab_size": 65}, "vocab_size.*64.*LlamaForCausalLM.*65"),
        ({"hidden_size": 64}, "hidden_size.*32"),
        ({"num_hidden_layers": 4}, "aux_layers=.*2.*4.*5.*4"),
    ]:
        head = EagleHead.from_backbone(tiny_backbone()).detach()
        with pytest.raises(ValueError, match=message):
            head.attach(tiny_backbone(**changes))


def test_default_layers_need_seven():
    head = EagleHead(EagleHeadConfig(hidden_size=32, num_attention_heads=4, vocab_size=64))
    assert head.attach(tiny_backbone(num_hidden_layers=7)).hidden_layers == [2, 3, 4]
    with pytest.raises(ValueError, match="aux_layers="):
        head.detach().attach(tiny_backbone(num_hidden_layers=6))


def test_the_length_of_drafts_is_saved_and_an_option_of_a_call_overrides_it(tmp_path):
    model = tiny_backbone()
    head = EagleHead.from_backbone(model, version=1)
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False, return_dict_in_generate=True)

    def drafted(head, **more):
        stats = model.generate(IDS[:1], assistant_model=head, **options, **more).speculation
        return max(map(len, stats.rows_drafts[0]))

    assert drafted(head) == 5
    head.config.draft_length = 2
    head.save_pretrained(tmp_path)
    head.detach()
    head = EagleHead.from_pretrained(tmp_path).attach(model)
    assert drafted(head) == 2 and drafted(head, num_assistant_tokens=3) == 3
    with pytest.raises(StrictDataclassError, match="draft_length=0 must be at least 1"):
        EagleHeadConfig(draft_length=0)


def test_a_backbone_with_its_own_cache_is_refused(trained):
    with pytest.raises(ValueError, match="cache"):
        EagleHead.from_backbone(trained, version=1)


def test_a_backbone_without_attention_or_rotary_positions_is_refused_by_name():
    for kind in ["t5", "mamba", "bloom", "mpt"]:
        config = AutoConfig.for_model(kind, vocab_size=64, hidden_size=16, num_hidden_layers=2)
        model = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
        base = model.from_config(config)
        with pytest.raises(ValueError, match=type(base).__name__):
            EagleHead.from_backbone(base, version=1)
        head = EagleHead(EagleHeadConfig(version=1, vocab_size=64, hidden_size=16, num_attention_heads=2))
        with pytest.raises(ValueError, match=type(base).__name__):
            head.attach(base)


def test_what_a_new_head_is_attached_to_is_recorded(tmp_path):
    head = EagleHead.from_backbone(tiny_backbone()).detach()
    head.config.base_model_type = None
    head.attach(tiny_backbone(config_class=MistralConfig)).save_pretrained(tmp_path)
    assert EagleHead.from_pretrained(tmp_path).config.base_model_type == "mistral"


@pytest.mark.by_day("EAGLE-1-dtype0", "EAGLE-3-dtype1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [dict(version=1), dict(version=3, aux_layers=[1])], ids=["EAGLE-1", "EAGLE-3"])
def test_a_backbone_may_change_its_dtype_while_a_head_is_attached(options, dtype):
    model = backbone()
    head = EagleHead.from_backbone(model, **options)
    model.to(dtype)
    prompt = torch.randint(2, 40, (2, 7))
    want = model.generate(prompt, max_new_tokens=12, do_sample=False)
    found = model.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=head)
    assert found.shape == want.shape and (dtype == torch.bfloat16 or torch.equal(found, want))
