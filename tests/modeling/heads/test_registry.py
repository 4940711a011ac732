"""The registry of heads: its two halves agree, options of other families are refused, copies and wrappers work."""

import copy
import pickle

import peft
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from tests.backbones import backbone
from tests.models import tiny_model
from tokenahead import MTPHeadConfig, MTPHeads
from tokenahead.configuration.head_families import HEAD_FAMILIES
from tokenahead.modeling.common.backbone_parts import BackboneParts
from tokenahead.modeling.heads.family import FAMILIES, build_head, init_head, window_distribution

TOKENS = torch.randint(64, 320, (1, 12), generator=torch.Generator().manual_seed(2))


def test_both_halves_hold_the_same_families():
    assert {name: family.facts for name, family in FAMILIES.items()} == HEAD_FAMILIES


def test_every_family_has_options_that_exist_and_a_description():
    for kind in HEAD_FAMILIES:
        config = MTPHeadConfig(head_type=kind, window=3)
        assert set(config.family.written()) == set(config.options())
        assert config.describe() and "{" not in config.describe() and config.family.citation


def test_an_option_of_another_family_is_refused_by_name():
    for kind, option, value, takers in [
        ("ff", "rank", 2, "cp, hmm, btree"),
        ("ff", "contextual", False, "cp, hmm, btree"),
        ("cp", "homogeneous", True, "hmm"),
    ]:
        with pytest.raises(StrictDataclassError, match=f"{option}={value}: head_type='{kind}'.*option of {takers}$"):
            MTPHeadConfig(head_type=kind, window=3, **{option: value})


def test_a_head_built_alone_starts_as_in_a_model():
    head = build_head(MTPHeadConfig(head_type="ff", window=4), 32, 200)
    init_head(head, std=0.5)
    assert 0.45 < head.weight.std().item() < 0.55


def test_new_heads_start_as_their_modules_say():
    for options in ({"head_type": kind} for kind in FAMILIES):
        for more in [{}, {"block": "ffn"}] if options["head_type"] == "medusa" else [{}]:
            heads = MTPHeads.from_backbone(backbone(), window=3, **options | more)
            again, found = copy.deepcopy(heads), dict(heads.named_parameters())
            for parameter in again.parameters():
                parameter._is_hf_initialized = False
            for module in reversed([*again.modules()]):
                init_head(module)
            for name, parameter in again.named_parameters():
                assert parameter.any() or not found[name].any(), (options, name)
            if options["head_type"] == "hydra":  # the state passes, and what tokens say comes from nothing
                close = heads.head.firsts[1].res_connection.weight
                assert close.equal(torch.eye(*close.shape)) and not heads.head.firsts[1].linear.weight.any()


def test_copies_of_a_model_draft_with_their_own_unembedding():
    for unembedding in ["own", "shared"]:
        model = tiny_model()
        model.set_head(head_type="cp", window=3, rank=2, unembedding=unembedding)
        hidden = torch.randn(2, 32)
        tokens = torch.zeros(2, 3, dtype=torch.long)
        expected = model.window_distribution(hidden).conditional_log_probs(tokens)
        twin, loaded = copy.deepcopy(model).double(), pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            model.lm_head.weight.zero_()
        torch.testing.assert_close(loaded.window_distribution(hidden).conditional_log_probs(tokens), expected)
        exact = twin.window_distribution(hidden.double()).conditional_log_probs(tokens)
        torch.testing.assert_close(exact.float(), expected)


def test_a_head_that_peft_wraps_is_asked_by_contract():
    model = tiny_model()
    model.set_head(head_type="hmm", window=4, rank=2)
    before = model(TOKENS, labels=TOKENS).head_losses
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mtp_head"]))
    torch.testing.assert_close(wrapped(input_ids=TOKENS, labels=TOKENS).head_losses, before)
    plain = model.generate(TOKENS, use_mtp=False, do_sample=False, max_new_tokens=8)
    assert torch.equal(model.generate(TOKENS, do_sample=False, max_new_tokens=8), plain)


def test_ff_heads_are_no_linear_layer_that_peft_would_adapt_in_another_shape():
    model = tiny_model()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    assert not any(
        "lm_head" in name or "draft_heads" in name for name, _ in adapted.named_parameters() if "lora" in name
    )
    adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
    with pytest.raises(ValueError, match="FFHead"):
        peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["draft_heads"]))


def test_the_shared_unembedding_gets_no_gradient():
    head = build_head(MTPHeadConfig(window=3, unembedding="shared"), 32, 320)
    model = tiny_model()
    config = MTPHeadConfig(window=3, unembedding="shared")
    window_distribution(head, config, torch.randn(2, 32), BackboneParts(model)).leaf_logits.sum().backward()
    assert head.maps.grad is not None and model.lm_head.weight.grad is None
    with pytest.raises(RuntimeError, match=r"attach\(backbone\)"):
        window_distribution(head, config, torch.randn(2, 32))
