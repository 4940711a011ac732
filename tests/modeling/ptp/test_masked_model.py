"""Masked prediction in the frame of parallel token prediction: rows, adapters, the sampler's distribution, and
directories."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F

from tests.ptp_models import VOCABULARY, backbone, ids, student
from tokenahead import PTPConfig, PTPForCausalLM
from tokenahead.modeling.heads.window_distribution import FactorisedDistribution
from tokenahead.modeling.ptp.inputs import packed_mask, packed_positions


def masked(base=None, **options):
    """A model of three masks in float64."""
    return student("mask", (backbone() if base is None else base).double(), **options).eval()


def merged(model):
    """The backbone with its adapters in every row."""
    twin = copy.deepcopy(model)
    for layer in twin.backbone.modules():
        if hasattr(layer, "lora_A"):
            added = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            layer.base_layer.weight += layer.scaling["default"] * added
    return twin.backbone


@torch.no_grad()
def test_one_mask_behind_every_prefix_is_two_rows_by_hand():
    model, tokens = masked(num_slots=1), ids(1, 7)
    adapted, documents, starts = merged(model), torch.ones(1, 7, dtype=torch.long), torch.arange(1, 7)[None]
    out = model(
        tokens,
        masks=torch.zeros(1, 6, dtype=torch.long),
        attention_mask=packed_mask(documents, starts, 1),
        position_ids=packed_positions(documents, starts, 1, 0),
        output_hidden_states=-1,
    )
    states, embed, head = out.hidden_states[-1][0, 7:], model.get_input_embeddings(), model.get_output_embeddings()
    weights = dict(model.sampler.named_parameters())
    for place, start in enumerate(starts[0].tolist()):
        cache = model(tokens[:, :start], use_cache=True).past_key_values
        row = model.mask_embedding.weight[None]
        alone = adapted.get_decoder()(inputs_embeds=row, past_key_values=cache, position_ids=torch.tensor([[start]]))
        state = alone.last_hidden_state[0, 0]
        torch.testing.assert_close(states[place], state)
        mixed = torch.cat([embed(tokens[0, start]), state])
        for first in (0, 3):
            mixed = F.silu(weights[f"{first}.weight"] @ mixed + weights[f"{first}.bias"])
            mixed = F.layer_norm(mixed, mixed.shape, weights[f"{first + 2}.weight"], weights[f"{first + 2}.bias"])
        distribution = model.slot_distribution(out.hidden_states[-1][:, 7 + place : 8 + place], tokens[:, start])
        torch.testing.assert_close(
            distribution.conditional_log_probs(tokens[:, :1])[0, 0].exp(), head(mixed).softmax(-1)
        )


@torch.no_grad()
def test_the_distribution_of_a_group_is_sequential_and_sums_to_one():
    model, tokens = masked(), ids(1, 5)
    states = model(tokens, masks=torch.tensor([[0, 1]]), output_hidden_states=-1).hidden_states[-1][:, 5:]
    distribution = model.slot_distribution(states, tokens[:, -1])
    windows = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=2)))
    log_probs = distribution.conditional_log_probs(windows)
    chosen = log_probs.gather(-1, windows[..., None])[..., 0].sum(-1)
    assert abs(float(chosen.exp().sum()) - 1) < 1e-12
    second = log_probs[:, 1].view(VOCABULARY, VOCABULARY, VOCABULARY)[:, 0]  # by the first token
    assert (second - second[:1]).abs().max() > 1e-3
    rest = distribution.condition(windows[:, 0]).conditional_log_probs(windows[:, 1:])
    torch.testing.assert_close(rest[:, 0], log_probs[:, 1])
    independent = masked(sampler="none")
    assert independent.sampler is None and isinstance(
        independent.slot_distribution(states, tokens[:, -1]), FactorisedDistribution
    )


@pytest.mark.core_cases("mlp")
@pytest.mark.parametrize("sampler", ["mlp", "none"])
@torch.no_grad()
def test_folders_keep_the_distribution(sampler, tmp_path):
    model = student("mask", sampler=sampler).eval()
    model.save_pretrained(tmp_path)
    again = PTPForCausalLM.from_pretrained(tmp_path).eval()
    names = {name.split(".")[0] for name in again.state_dict()}
    assert names == {"backbone", "mask_embedding"} | ({"sampler"} if sampler == "mlp" else set())
    tokens, masks = ids(2, 5), torch.tensor([[0, 1, 2]])
    outs = [each(tokens, masks=masks, output_hidden_states=-1) for each in (model, again)]
    assert torch.equal(outs[0].logits, outs[1].logits)
    probs = [m.slot_distribution(out.hidden_states[-1][:, 5:], tokens[:, -1]) for m, out in zip((model, again), outs)]
    assert torch.equal(*(distribution.conditional_log_probs(ids(2, 3)) for distribution in probs))


def test_masks_and_their_head_train_in_float32_beside_a_backbone_of_bfloat16(tmp_path):
    model = student("mask", backbone().bfloat16())
    model.save_pretrained(tmp_path)
    again = PTPForCausalLM.from_pretrained(tmp_path, dtype="auto")
    for each in (model, again):
        assert {p.dtype for name, p in each.named_parameters() if p.requires_grad} <= {torch.float32, torch.bfloat16}
        assert each.mask_embedding.weight.dtype == each.sampler[0].weight.dtype == torch.float32
        assert each.backbone.get_output_embeddings().weight.dtype == torch.bfloat16
    states = torch.randn(1, 2, 16, dtype=torch.bfloat16)
    assert model.slot_distribution(states, ids(1)).leaf_logits.dtype == torch.float32
    model.train_only("drafter")
    assert all(p.requires_grad for part in (model.sampler, model.mask_embedding) for p in part.parameters())
    names = [name for name, _ in model.named_modules()]
    assert all(any(part in name for name in names) for part in model._keep_in_fp32_modules_strict)


def test_what_does_not_go_together():
    model, tokens = masked(), ids(1, 3)
    with pytest.raises(IndexError):
        model(tokens, masks=torch.tensor([[0, 3]]))
    with pytest.raises(ValueError, match="variant='mask'.*masks="):
        model(tokens, uniforms=torch.rand(1, 2))
    with pytest.raises(ValueError, match="variant='one_hot'.*uniforms="):
        student()(tokens, masks=torch.tensor([[0]]))
    with pytest.raises(Exception, match="greedy=True"):
        PTPConfig(variant="mask", greedy=True)
    with pytest.raises(Exception, match="lcm_weight=-1"):
        PTPConfig(variant="mask", lcm_weight=-1)
