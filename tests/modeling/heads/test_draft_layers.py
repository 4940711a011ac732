"""MtPC's draft LoRA: equal to today's drafter where the adapters are 0, exact for any adapters, one backbone call."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from tests.backbones import backbone as other_backbone
from tests.training.test_evaluation_loss import llama
from tokenahead import MTPHeadConfig, MTPHeads
from tokenahead.modeling.common.learning import counted_positions


def shaken(heads, std=0.3):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in heads.draft_layers.parameters():
            parameter.add_(torch.randn_like(parameter) * std)
    return heads


def prompts():
    ids = torch.randint(5, 320, (3, 11), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :2] = 0, 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def backbone(**changes):
    model = llama(num_hidden_layers=3, **changes)
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.core_cases("1")
@pytest.mark.parametrize("k", [1, 3])
def test_zero_adapters_are_the_drafter_without_layers(k):
    base = backbone()
    torch.manual_seed(0)
    plain = MTPHeads.from_backbone(base, window=3, head_type="cp", rank=2)
    drafter = MTPHeads(
        MTPHeadConfig(**(plain.config.to_dict() | {"draft_layers": k, "backbone_config": base.config.to_dict()}))
    )
    drafter.load_state_dict(plain.state_dict(), strict=False)
    drafter.attach(base)
    given = prompts()
    want, found = (heads.distribution(**given).leaf_logits for heads in (plain, drafter))
    real = given["attention_mask"].bool()
    torch.testing.assert_close(found[real], want[real], atol=1e-5, rtol=1e-5)
    labels = given["input_ids"].masked_fill(~real, -100)
    torch.testing.assert_close(drafter(**given, labels=labels).loss, plain(**given, labels=labels).loss)
    shaken(drafter)
    assert (drafter.distribution(**given).leaf_logits[real] - want[real]).abs().max() > 1e-2


@pytest.mark.by_day("gemma3")
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_drafts_are_exact_and_those_of_whole_sequences(kind):
    base = other_backbone(kind) if kind != "llama" else backbone()
    base.generation_config.eos_token_id = None
    heads = shaken(MTPHeads.from_backbone(base, window=4, draft_layers=2), 0.05)
    vocab = base.config.get_text_config().vocab_size
    given = prompts()
    given["input_ids"] = given["input_ids"] % vocab
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    want = base.generate(**given, **options)
    found = base.generate(**given, **options, assistant_model=heads, return_dict_in_generate=True)
    assert torch.equal(found.sequences, want)
    alone = [base.generate(given["input_ids"][1:2], **options, assistant_model=heads)]
    assert torch.equal(alone[0][0], want[1])


@pytest.mark.parametrize("options", [{"draft_layers": 1}, {"head_type": "layer"}], ids=["draft layers", "layer heads"])
def test_experts_are_computed_as_the_backbone_computes_its_own(options):
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, eos_token_id=None,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager").eval()
    heads = MTPHeads.from_backbone(base, window=3, **options).to(torch.float64)
    given = {name: value % 64 if name == "input_ids" else value for name, value in prompts().items()}
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)  # torch groups no products of float64
    found = base.generate(**given, **options, assistant_model=heads)
    assert torch.equal(found, base.generate(**given, **options))


@pytest.mark.core
def test_what_is_drafted_follows_from_verified_tokens_alone():
    """The state that a cycle drafts from is that of one run over the whole text."""
    base = backbone()
    heads = shaken(MTPHeads.from_backbone(base, window=4, draft_layers=2))
    seen, distribution = [], heads.distribution_after
    heads.distribution_after = lambda features, *behind: (
        seen.append(features.clone()),
        distribution(features, *behind),
    )[1]
    ids = prompts()["input_ids"][1:2]
    text = base.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0, assistant_model=heads)
    del heads.distribution_after
    outputs = heads._run_backbone(text, None, None)
    whole = heads.features(outputs.hidden_states)[0]
    assert len(seen) > 4
    for state in seen:  # every drafting state is a row of the whole text, in order
        assert (whole - state[0]).abs().amax(-1).min() < 1e-4


def test_the_backbone_learns_nothing_and_only_adapters_are_saved(tmp_path):
    base = backbone()
    heads = shaken(MTPHeads.from_backbone(base, window=3, draft_layers=2, draft_lora_rank=4))
    ids = prompts()["input_ids"]
    heads.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is None for p in base.parameters())
    assert all(p.grad is not None and p.grad.any() for p in heads.parameters())
    heads.eval().save_pretrained(tmp_path)
    names = {name.rpartition(".")[2] for name in heads.state_dict() if name.startswith("draft_layers")}
    assert names == {"lora_A", "lora_B"}
    again = MTPHeads.from_pretrained(tmp_path).attach(base)
    torch.testing.assert_close(again.distribution(ids).leaf_logits, heads.distribution(ids).leaf_logits)
    heads.draft_layers.gradient_checkpointing = True
    before = [p.grad.clone() for p in heads.parameters()]
    heads.zero_grad()
    heads.train()(ids, labels=ids).loss.backward()
    for old, parameter in zip(before, heads.parameters()):
        torch.testing.assert_close(parameter.grad, old)


def test_refusals():
    for options, message in [
        (dict(draft_layers=9), "draft_layers=.*9.*3"),
        (dict(draft_layers=1, head_type="layer"), "draft_layers=1"),
        (dict(draft_layers=-1), "draft_layers=.*1.*0"),
    ]:
        with pytest.raises((ValueError, StrictDataclassError), match=message):
            MTPHeads.from_backbone(backbone(), **options)


def test_states_behind_a_cache_have_the_last_positions_of_the_mask():
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert counted_positions(torch.zeros(2, 2, 8), mask).tolist() == [[2, 3], [3, 4]]
    assert counted_positions(torch.zeros(2, 2, 8), None).tolist() == [[0, 1]]
