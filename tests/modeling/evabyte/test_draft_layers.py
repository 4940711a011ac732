"""MtPC's draft LoRA on EvaByte: the drafter without layers where adapters are 0, exact for any adapters."""

import pytest
import torch

from tests.modeling.heads.test_draft_layers import shaken
from tests.models import left_padded, tiny_model
from tests.training.conftest import ragged_rows, trainer_for
from tokenahead import EvaByteCache, EvaByteForMTPC
from tokenahead.training import TrainingStrategy

VOCAB = 6  # so small that some drafts of random heads are right
SMALL = dict(vocab_size=VOCAB, window_size=8, chunk_size=4, num_pred_heads=4, num_hidden_layers=3)


def prompts():
    """Lengths on both sides of borders of windows of 8."""
    generator = torch.Generator().manual_seed(3)
    return left_padded([torch.randint(1, VOCAB, (length,), generator=generator) for length in (7, 17, 2)])


HEADS = {"ff": {}, "cp": {"head_type": "cp", "window": 4, "rank": 2}}


def drafter(head="ff", k=2, **changes) -> EvaByteForMTPC:
    model = tiny_model(2, **SMALL, **changes)
    if HEADS[head]:
        model.set_head(**HEADS[head])
    return model.add_draft_layers(k) if k else model


@pytest.mark.by_day("1-cp", "3-ff")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("k", [1, 3])
def test_zero_adapters_are_the_drafter_without_layers(head, k):
    plain, model = drafter(head, 0), drafter(head, 0)
    model.load_state_dict(plain.state_dict())
    model.add_draft_layers(k)
    given = prompts()
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    plain.train_only("drafter")
    found, want = (each(**given, labels=labels) for each in (model, plain))
    torch.testing.assert_close(found.loss, want.loss)
    shaken(model)
    assert (model(**given, labels=labels).loss - want.loss).abs() > 1e-3


@pytest.mark.by_day("ff")
@pytest.mark.parametrize("head", HEADS)
def test_drafts_are_exact_across_borders_of_windows(head):
    model = shaken(drafter(head))
    options = dict(max_new_tokens=24, do_sample=False, pad_token_id=0)
    given = prompts()
    want = model.generate(**given, **options, use_mtp=False)
    found = model.generate(**given, **options, return_dict_in_generate=True)
    assert torch.equal(found.sequences, want)
    counts = [count for row in found.speculation.accepted for count in row]
    assert len(set(counts)) > 1, "rows must keep different numbers, or the test shows little"
    again = model.generate(**given, **options, num_assistant_tokens_schedule="adaptive")
    assert torch.equal(again, want)


@pytest.mark.core
def test_what_is_drafted_follows_from_verified_tokens_alone():
    """Every state that a cycle drafts from is a row of one run over the whole text, without a cache."""
    model = shaken(drafter())
    seen, distribution = [], model.distribution_after
    model.distribution_after = lambda features, *behind: (
        seen.append(features.clone()),
        distribution(features, *behind),
    )[1]
    given = prompts()
    text = model.generate(**given, max_new_tokens=24, do_sample=False, pad_token_id=0)
    del model.distribution_after
    mask = torch.nn.functional.pad(given["attention_mask"], (0, 24), value=1)
    outputs = model(text, attention_mask=mask, use_cache=False, output_hidden_states=model.hidden_layers)
    whole = model.features(outputs.hidden_states, mask)
    assert len(seen) > 5
    for states in seen:
        for row, state in enumerate(states):
            assert (whole[row] - state).abs().amax(-1).min() < 1e-4


@pytest.mark.core
def test_a_row_that_went_back_leaves_the_cache_of_one_that_never_drafted():
    model = shaken(drafter())
    states = torch.randn(2, 15, 32)
    run, cache = model.draft_layers.bind(model.model), EvaByteCache(model.config)
    whole = run(states)
    run(states[:, :6], cache=cache)
    wrong = torch.cat([states[:1, 6:10], torch.randn(1, 4, 32)])  # row 1 keeps nothing of this block
    run(wrong, cache=cache)
    cache.crop(torch.tensor([0, -4]))
    rest = torch.stack([states[0, 10:14], states[1, 6:10]])
    found = run(rest, cache=cache)
    torch.testing.assert_close(found, torch.stack([whole[0, 10:14], whole[1, 6:10]]), atol=1e-5, rtol=1e-5)


def test_only_adapters_and_heads_learn_and_folders_bring_them_back(tmp_path):
    model = shaken(drafter("cp"))
    ids = prompts()
    model.train()(**ids, labels=ids["input_ids"]).loss.backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learned == {name for name, _ in model.named_parameters() if name.startswith(("mtp_head", "draft_layers"))}
    before = {name: p.grad.clone() for name, p in model.draft_layers.named_parameters()}
    model.gradient_checkpointing_enable()
    model.zero_grad()
    model(**ids, labels=ids["input_ids"]).loss.backward()
    for name, parameter in model.draft_layers.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name])
    model.eval().save_pretrained(tmp_path)
    again = EvaByteForMTPC.from_pretrained(tmp_path).eval()
    assert again.config.mtp_head.draft_layers == 2
    torch.testing.assert_close(again(**ids, labels=ids["input_ids"]).loss, model(**ids, labels=ids["input_ids"]).loss)
    with pytest.raises(ValueError, match="train_only.*'all'"):
        again.train_only("all")


@pytest.mark.core_cases("ff")
@pytest.mark.by_day("cp")
@pytest.mark.parametrize("head", HEADS)
def test_layers_come_below_stored_heads(head, tmp_path):
    plain = drafter(head, 0)
    plain.save_pretrained(tmp_path)
    wanted = plain.config.mtp_head.options() | {"draft_layers": 1}
    model = EvaByteForMTPC.from_pretrained(tmp_path, mtp_head=wanted).eval()
    torch.testing.assert_close(model.head.state_dict(), plain.head.state_dict())
    assert len(model.draft_layers.adapters) == 1
    model.add_draft_layers(0)
    assert model.draft_layers is None
    with pytest.raises(ValueError, match="draft_layers=.*4.*3"):
        model.add_draft_layers(4)
    assert model.config.mtp_head.draft_layers == 0


def test_a_strategy_adds_them_and_both_stages_are_one_run(tmp_path):
    model = tiny_model(num_pred_heads=4)
    backbone = {name: p.clone() for name, p in model.model.named_parameters()}
    strategy = TrainingStrategy(draft_layers=1, head_warmup=1, loss={"target": "teacher"}, drafter_lr_multiplier=2.0)
    trainer = trainer_for(model, tmp_path, ragged_rows(), max_steps=2, learning_rate=1e-2, strategy=strategy)
    trainer.train()
    assert model.config.mtp_head.loss_target == "teacher"
    assert all(p.any() for name, p in model.draft_layers.named_parameters() if name.endswith("lora_B"))
    for name, parameter in model.model.named_parameters():
        assert torch.equal(parameter, backbone[name])
