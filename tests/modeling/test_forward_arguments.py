"""What every model's forward takes as transformers' own do: labels, shifted labels, and choices of hidden states."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import family_model
from tests.models import tiny_model
from tests.ptp_models import CONFIGS, VOCABULARY, backbone, student
from tokenahead import MTPHeads


def circuit_model():
    model = tiny_model()
    model.set_head(head_type="btree", rank=2, window=3)
    return model


MODELS = {
    "evabyte": tiny_model,
    "evabyte, circuit": circuit_model,
    "modules": lambda: family_model("llama", num_nextn_predict_layers=2),
    "parallel": student,
    "heads apart": lambda: MTPHeads.from_backbone(backbone(), window=3),
}
WITH_STATES = {
    "evabyte": tiny_model,
    "modules": lambda: family_model("deepseek_v3"),
    "parallel": student,
    "parallel, gpt2": lambda: student(base=backbone(CONFIGS["gpt2"]())),
}


def ids(model, length=9):
    return torch.randint(3, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))


def other_labels(model):
    labels = ids(model).flip(1)
    labels[0, 2:5] = -100
    return labels


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_labels_are_what_is_scored(make):
    model = make()
    tokens, labels = ids(model), other_labels(model)
    losses = [model(tokens, labels=part).loss for part in (tokens, labels, labels.clamp(max=5))]
    assert len({round(loss.item(), 4) for loss in losses}) == 3


@pytest.mark.by_day(most=4)
@pytest.mark.parametrize("wrong", [70000, -1])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_labels_that_are_no_ids_are_refused_by_name(make, wrong):
    model = make()
    labels = other_labels(model)
    labels[1, 4] = wrong
    with pytest.raises(ValueError, match=rf"labels hold {wrong}, but the vocabulary has \d+ tokens"):
        model(ids(model), labels=labels)


@pytest.mark.core_cases("evabyte")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_shifted_labels_give_the_loss_of_labels(make):
    model = make()
    tokens, labels = ids(model), other_labels(model)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    want = model(tokens, labels=labels).loss
    torch.testing.assert_close(model(tokens, shift_labels=shifted).loss, want)
    torch.testing.assert_close(model(tokens, labels=tokens, shift_labels=shifted).loss, want)  # as in transformers
    shifted[:, -1] = 4
    assert abs(model(tokens, shift_labels=shifted).loss - want) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("make", WITH_STATES.values(), ids=WITH_STATES)
def test_hidden_states_are_chosen_as_in_transformers(make):
    model = make()
    tokens = ids(model)
    whole = model(tokens, output_hidden_states=True).hidden_states
    assert len(whole) == model.config.get_text_config().num_hidden_layers + 1
    for chosen in (-1, 0, [0, -1], [1], []):
        found = model(tokens, output_hidden_states=chosen).hidden_states
        wanted = {index % len(whole) for index in ([chosen] if isinstance(chosen, int) else chosen)}
        if not wanted:
            assert not found
            continue
        assert len(found) == len(whole)
        for index, state in enumerate(found):
            assert (state is not None) == (index in wanted)
            assert state is None or torch.equal(state, whole[index])
    assert model(tokens).hidden_states is None
    model.config.output_hidden_states = True
    assert all(torch.equal(a, b) for a, b in zip(model(tokens).hidden_states, whole, strict=True))
    assert model(tokens, output_hidden_states=False).hidden_states is None


@pytest.mark.parametrize("make", [WITH_STATES["modules"], student, tiny_model], ids=["modules", "parallel", "evabyte"])
def test_heads_learn_on_every_kind_of_backbone(make):
    base = make()
    heads = MTPHeads.from_backbone(base, window=3, unembedding="own")
    assert heads(ids(base), labels=ids(base)).loss.isfinite()


@pytest.mark.core
def test_a_parallel_model_scales_its_loss_as_its_backbone_does():
    base = AutoModelForCausalLM.from_config(CONFIGS["llama"]()).eval()
    tokens = torch.randint(3, VOCABULARY, (2, 9))
    want = base(tokens, labels=tokens, num_items_in_batch=32).loss
    torch.testing.assert_close(student(base=base)(tokens, labels=tokens, num_items_in_batch=32).loss, want)
