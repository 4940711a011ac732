"""Heads apart from their backbone: attach, speculate, train, save, detach, and what is refused."""

import pytest
import torch
from transformers import AutoModel, Gemma3TextConfig, GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.modeling.heads.backbones import backbone
from tokenahead import MTPHeadConfig, MTPHeads

FAMILIES = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, GemmaConfig, Gemma3TextConfig]
PROMPT = torch.arange(5, 15)[None]
GREEDY = dict(max_new_tokens=24, do_sample=False)


@pytest.mark.by_day("LlamaConfig-shared", "Gemma3TextConfig-own")
@pytest.mark.parametrize("unembedding", ["shared", "own"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_greedy_output_is_the_backbones_own(family, unembedding):
    base = backbone(family, head_dim=8)
    expected = base.generate(PROMPT, **GREEDY)
    heads = MTPHeads.from_backbone(base, window=4, unembedding=unembedding)
    assert torch.equal(base.generate(PROMPT, assistant_model=heads, **GREEDY), expected)


@pytest.mark.by_day("ff", "hydra")
@pytest.mark.parametrize("kind", ["ff", "medusa", "hydra"])
def test_drafts_are_drawn_from_what_a_calls_processors_leave(kind):
    """With one token left, draws are the likeliest tokens: the text, the drafts and what is accepted of them."""
    base = backbone()
    heads = MTPHeads.from_backbone(base, window=4, head_type=kind)
    call = dict(max_new_tokens=16, assistant_model=heads, return_dict_in_generate=True)
    likeliest = base.generate(PROMPT, do_sample=False, **call)
    drawn = base.generate(PROMPT, do_sample=True, top_k=1, **call)
    assert torch.equal(drawn.sequences, likeliest.sequences)
    assert drawn.speculation.drafts == likeliest.speculation.drafts and len(drawn.speculation.drafts[0]) == 3


def test_a_folder_of_heads_is_small_and_round_trips(tmp_path):
    base = backbone(vocab_size=4000)
    heads = MTPHeads.from_backbone(base, window=4)
    with torch.no_grad():
        heads.head.maps.add_(torch.randn_like(heads.head.maps) * 0.1)
    heads.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 4 * 32 * 32 * 4 + 2000
    for again in (MTPHeads.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert isinstance(again, MTPHeads)
        assert torch.equal(again.head.maps, heads.head.maps)
        assert again.config.hidden_size == 32 and again.config.vocab_size == 4000 and again.window == 4


def test_detach_leaves_the_backbone_bit_equal():
    base = backbone()
    before, attributes = {k: v.clone() for k, v in base.state_dict().items()}, set(vars(base))
    heads = MTPHeads.from_backbone(base, window=4)
    heads(PROMPT, labels=PROMPT).loss.backward()
    assert all(parameter.grad is None for parameter in base.parameters())
    heads.detach()
    assert set(vars(base)) == attributes
    assert all(torch.equal(value, before[key]) for key, value in base.state_dict().items())


def test_training_on_a_frozen_backbone_raises_acceptance():
    base = backbone()
    heads = MTPHeads.from_backbone(base, window=4, unembedding="own")
    text = base.generate(torch.randint(2, 64, (16, 4)), max_new_tokens=60, do_sample=False)

    def tokens_per_call():
        calls = []
        handle = base.model.register_forward_hook(lambda *args: calls.append(1))
        base.generate(text[:1, :10], assistant_model=heads, max_new_tokens=40, do_sample=False)
        handle.remove()
        return 40 / len(calls)

    before = tokens_per_call()
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-2)
    for _ in range(60):
        loss = heads(text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert tokens_per_call() > max(1.5, before)


def test_another_backbone_is_refused_by_name():
    for changes, message in [
        ({"vocab_size": 65}, "vocab_size.*64"),
        ({"hidden_size": 64}, "hidden_size"),
    ]:
        heads = MTPHeads.from_backbone(backbone(), window=4).detach()
        with pytest.raises(ValueError, match=message):
            heads.attach(backbone(**changes))


def test_heads_must_be_attached():
    heads = MTPHeads(MTPHeadConfig(window=4, hidden_size=32, vocab_size=64, unembedding="shared"))
    with pytest.raises(RuntimeError, match=r"attach\(backbone\)"):
        backbone().generate(PROMPT, assistant_model=heads, **GREEDY)
    with pytest.raises(RuntimeError, match=r"attach\(backbone\)"):
        heads(PROMPT, labels=PROMPT)
    heads.attach(backbone())
    with pytest.raises(RuntimeError, match=r"detach\(\)"):
        heads.attach(backbone())
    with pytest.raises(ValueError, match="num_assistant_tokens=0"):
        heads.backbone.generate(PROMPT, assistant_model=heads, num_assistant_tokens=0, **GREEDY)


def test_config_must_say_what_the_heads_fit():
    with pytest.raises(ValueError, match="hidden_size.*vocab_size"):
        MTPHeads(MTPHeadConfig(window=4))


def test_two_sets_of_heads_may_share_a_backbone():
    base = backbone()
    first, second = (MTPHeads.from_backbone(base, window=n) for n in (2, 5))
    expected = base.generate(PROMPT, **GREEDY)
    for heads in (first, second):
        assert torch.equal(base.generate(PROMPT, assistant_model=heads, **GREEDY), expected)
    first.detach()
    assert torch.equal(base.generate(PROMPT, assistant_model=second, **GREEDY), expected)


def test_packed_documents_and_padding_are_masked():
    base = backbone()
    heads = MTPHeads.from_backbone(base, window=3, unembedding="own")
    labels = torch.randint(2, 64, (1, 12))
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None]
    out = heads(labels, position_ids=positions, labels=labels)
    parts = [heads(part, labels=part) for part in (labels[:, :7], labels[:, 7:])]
    counts = torch.tensor([[6, 5, 4], [4, 3, 2]])
    expected = sum(p.head_losses * c for p, c in zip(parts, counts)) / counts.sum(0)
    torch.testing.assert_close(out.head_losses, expected, atol=1e-5, rtol=0)
