"""Joined rows have the losses and gradients of padded ones, for every drafter, and attention takes them one by one."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, Gemma3TextConfig

from tests.every_model import llama
from tests.families import family_model
from tests.training.conftest import small_model
from tokenahead import EagleHead, MTPHeads
from tokenahead.generation.backbone import cache as cache_module
from tokenahead.generation.tensors import masks as masks_module
from tokenahead.modeling.heads.joint import JointMTPModel
from tokenahead.training.batches import Collator, JoinedCollator

LENGTHS = (70, 3, 90, 20, 51)
TEACHER = {"target": "teacher", "divergence": "kl"}
HALF = torch.arange(0, 64, 2)


def heads(**options):
    return lambda: MTPHeads.from_backbone(llama(num_hidden_layers=3, vocab_size=64), window=3, **options)


def eagle(version=3, **options):
    layers = {"aux_layers": [1, 2]} if version == 3 else {}
    return lambda: EagleHead.from_backbone(
        llama(num_hidden_layers=3, vocab_size=64), version=version, **layers, **options
    )


def evabyte(**options):
    model = small_model()
    if options:
        model.set_head(**options)
    return model


def deepseek():
    model = family_model("deepseek_v3", num_nextn_predict_layers=2)
    model.set_experts_implementation("eager")  # the kernel has no float64
    return model


DRAFTERS = {
    "independent": heads(unembedding="own"),
    "circuit": heads(head_type="cp", rank=2),
    "btree": heads(head_type="btree", rank=2),
    "medusa": heads(head_type="medusa"),
    "hydra": heads(head_type="hydra"),
    "layers": heads(head_type="layer"),
    "draft layers": heads(draft_layers=1),
    "taught": heads(loss_options=TEACHER),
    "lk over half": heads(loss_options={"target": "teacher", "divergence": "lk"}, draft_ids=HALF),
    "joint": lambda: JointMTPModel(heads(head_type="layer")()),
    "eagle 1": eagle(1),
    "eagle 3": eagle(),
    "eagle over half": eagle(draft_ids=HALF),
    "hass": eagle(1, loss_options={"objective": "hass"}),
    "eagle block": eagle(loss_options={"divergence": "block"}),
    "evabyte": evabyte,
    "evabyte circuit": lambda: evabyte(head_type="cp", rank=2),
    "modules": lambda: family_model("llama", num_nextn_predict_layers=2),
    "deepseek": deepseek,
}


def rows(vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """Rows whose prompts, a third of each, are left out of the loss."""
    draws, made = torch.Generator().manual_seed(0), []
    for length in LENGTHS:
        ids = torch.randint(5, vocab_size, (length,), generator=draws)
        made.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(length) < length // 3, -100)})
    return made


def learned(model, batch) -> list[torch.Tensor]:
    """The loss, the losses by depth, and the gradients."""
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    gradients = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    return [output.loss.detach(), output.head_losses.nan_to_num(0.0), *gradients]


BY_DAY = ["circuit", "hydra", "lk over half", "joint", "eagle 1", "eagle over half", "hass", "evabyte", "modules"]


@pytest.mark.by_day(*(f"{name}-torch.float64-1e-12" for name in BY_DAY))
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 5e-6)], ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_joined_rows_teach_what_padded_ones_do(name, dtype, bound):
    torch.manual_seed(0)
    model = DRAFTERS[name]().to(dtype)
    if getattr(model, "is_apart", False):
        model.backbone.to(dtype)
    if name == "deepseek":  # whose router has float32 anyway
        bound = 2e-6
    with torch.no_grad():
        for weight in model.parameters():  # some gradients of new heads are 0
            weight += 0.02 * torch.randn_like(weight)
    data = rows(model.config.get_text_config().vocab_size)
    padded, joined = Collator()(data), JoinedCollator(Collator())(data)
    assert padded["input_ids"].numel() > 1.9 * joined["input_ids"].numel() == 1.9 * sum(LENGTHS)
    expected, found = learned(model, padded), learned(model, joined)
    assert len(expected) == len(found) > 2
    for mine, theirs in zip(found, expected):
        assert (mine - theirs).norm() <= bound * theirs.norm().clamp(min=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("window", [None, 40])
def test_attention_takes_documents_one_by_one_and_short_ones_together(window, monkeypatch):
    lengths, calls = (70, 3, 5, 100, 20, 50, 1, 90), []
    real = cache_module.sdpa_attention_forward

    def counted(module, query, *rest, **kwargs):
        calls.append(query.shape[2])
        return real(module, query, *rest, **kwargs)

    if window is None:
        model = llama(vocab_size=64)
    else:
        config = Gemma3TextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, sliding_window=window,
            layer_types=["sliding_attention", "full_attention"],
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
    model, documents = model.double().eval(), [torch.randint(5, 64, (1, length)) for length in lengths]
    expected = torch.cat([model(each, use_cache=False).logits for each in documents], 1)
    monkeypatch.setattr(cache_module, "sdpa_attention_forward", counted)
    AttentionInterface.register("sdpa", cache_module.grouped_attention)  # bundled code may have registered its own
    AttentionMaskInterface.register("sdpa", masks_module.mask_by_documents)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    found = model(torch.cat(documents, 1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert calls == [70, 8, 100, 20, 51, 90] * model.config.num_hidden_layers
