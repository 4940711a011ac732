"""The loss of a chain: values and gradients against a naive one, masking, weights, and unrolled training."""

import pytest
import torch
from torch.nn import functional

from tests.families import family_model, random_ids
from tests.models import checkpoint_activations
from tests.towers import image_batch, tower_model
from tokenahead.configuration.loss_options import ModuleLossOptions
from tokenahead.modeling.common import chunks
from tokenahead.modeling.deepseek.losses import chain_loss, teacher_forced

LENGTH = 16


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", 96 * 7)


def naive_loss(model, ids, labels, weight=0.3):
    """Main + weight / D * sum of means, with all logits at once."""
    out = model(ids, output_mtp_logits=True)
    terms = []
    for k, logits in enumerate((out.logits, *out.mtp_logits)):
        target = labels[:, k + 1 :]
        terms.append(functional.cross_entropy(logits[:, : target.shape[1]].transpose(1, 2), target))
    return terms[0] + weight / (len(terms) - 1) * sum(terms[1:])


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def some_labels(ids):
    labels = ids.clone()
    labels[0, 3:6] = -100
    return labels


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_the_naive_loss(name, checkpointing):
    model, ids = family_model(name, num_nextn_predict_layers=3).train(), random_ids()
    labels = some_labels(ids)
    expected = gradients(model, naive_loss(model, ids, labels))
    if checkpointing:
        checkpoint_activations(model)
    loss = model(ids, labels=labels).loss
    found = gradients(model, 2 * loss)
    torch.testing.assert_close(loss, naive_loss(model, ids, labels), atol=1e-5, rtol=0)
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], 2 * expected[key], atol=1e-5, rtol=1e-4)


def test_checkpointing_runs_every_block_twice_and_not_three_times():
    model, ids = family_model("llama").train(), random_ids()
    checkpoint_activations(model)
    calls = []
    model.mtp[0].block.mlp.register_forward_hook(lambda *_: calls.append(1))
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 2


@pytest.mark.parametrize("option", ["detach_trunk", "detach_head", "detach_embedding"])
def test_detached_parts_learn_from_the_main_loss_only(option):
    model, ids = family_model("llama"), random_ids()
    main = gradients(model.train(), functional.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:]))
    setattr(model.loss_options, option, True)
    found = gradients(model, model(ids, labels=ids).loss)
    head, embedding = "main.lm_head.weight", "main.model.embed_tokens.weight"
    trunk = "main.model.layers.0.mlp.up_proj.weight"
    close = {name: torch.allclose(found[name], main[name], atol=1e-6) for name in (head, trunk)}
    assert close == {head: option == "detach_head", trunk: option == "detach_trunk"}
    setattr(model.loss_options, option, False)
    full = gradients(model, model(ids, labels=ids).loss)
    assert torch.allclose(found[embedding], full[embedding], atol=1e-6) == (option == "detach_head")
    torch.testing.assert_close(found["mtp.0.eh_proj.weight"], full["mtp.0.eh_proj.weight"])


def test_paper_divides_every_depth_by_the_main_model_s_targets():
    model, ids = family_model("llama", num_nextn_predict_layers=2), random_ids(2)
    mean, heads = model(ids, labels=ids).loss, model(ids, labels=ids).head_losses
    model.loss_options.normalization = "paper"
    share = torch.tensor([(LENGTH - 1 - k) / (LENGTH - 1) for k in (1, 2)])
    torch.testing.assert_close(model(ids, labels=ids).loss, heads[0] + 0.15 * (heads[1:] * share).sum())
    torch.testing.assert_close(mean, heads[0] + 0.15 * heads[1:].sum())


@pytest.mark.core
def test_options_are_checked_and_kept_in_the_folder(tmp_path):
    from tokenahead import DeepSeekMTP

    for wrong in ({"normalization": "sum"}, {"weight": -1}, {"unroll_steps": 0}, {"decay": 1.5}):
        with pytest.raises(ValueError, match="{}=.*{}".format(*[*wrong.items()][0])):
            ModuleLossOptions(**wrong)
    model = family_model("llama")
    model.loss_options = ModuleLossOptions(weight=0.1, unroll_steps=3, decay=0.5)
    model.save_pretrained(tmp_path)
    assert DeepSeekMTP.from_pretrained(tmp_path).loss_options == model.loss_options


@pytest.mark.by_day("deepseek_v4", "mimo_v2_flash")
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4", "mimo_v2_flash", "qwen4_exp_text"])
@torch.no_grad()
def test_unrolled_rows_equal_those_of_drafting(name):
    """Row i of depth k, against a cache with the ordinary columns up to i and then one column for each further step."""
    model, ids = family_model(name), random_ids(1)
    hidden = model(ids, output_hidden_states=-1).hidden_states[-1]
    embeds, positions = model.get_input_embeddings()(ids), torch.arange(LENGTH)[None]
    depths = teacher_forced(model.mtp, hidden, embeds, positions, None, 4)
    for row in (0, 3, 11):
        cache = model.mtp.new_cache()
        stop = row + 1
        state = model.mtp.step(1, hidden[:, :stop], embeds[:, 1 : stop + 1], positions[:, :stop], None, cache)[:, -1:]
        for k in range(2, 5):
            place = positions[:, row : row + 1] + k - 1
            state = model.mtp.step(k, state, embeds[:, row + k : row + k + 1], place, None, cache)
            torch.testing.assert_close(depths[k - 1][:, row : row + 1], state, atol=1e-5, rtol=0)


def test_unrolling_is_refused_where_attention_takes_no_mask():
    model, batch = tower_model("glm5_next"), image_batch("glm5_next")
    model.loss_options.unroll_steps = 3
    with pytest.raises(ValueError, match="unroll_steps.*glm5_next_text"):
        model(**batch, labels=batch["input_ids"])


@pytest.mark.core_cases("sdpa")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_unrolled_training_counts_every_step_and_checkpoints(attention):
    model, ids = family_model("llama", attn_implementation=attention).train(), random_ids()
    model.loss_options.unroll_steps = 3
    assert model.window == 4
    out = model(ids, labels=ids)
    assert out.head_losses.shape == (4,)
    expected = gradients(model, out.loss)
    checkpoint_activations(model)
    found = gradients(model, model(ids, labels=ids).loss)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-6, rtol=1e-4)
    assert not torch.allclose(out.head_losses[2], out.head_losses[1])


def test_half_precision_keeps_small_gradients():
    """A mean's gradient would vanish in float16 if it were divided by the number of targets before it is needed."""
    model = family_model("llama", hidden_size=8, head_dim=4).half()
    head = model.get_output_embeddings()
    states = [torch.randn(1, 4, 8).half().requires_grad_()]
    targets = [torch.randint(0, 96, (1, 4))]
    total, *_ = chain_loss(model.readout, states, targets, 96, ModuleLossOptions(), torch.tensor([10**7])).to_tuple()
    (1e7 * total).backward()
    expected = head.weight.grad.float().clone()
    assert expected.abs().max() > 0.1 and states[0].grad.abs().max() > 0.01


def test_nothing_is_drafted_at_the_main_models_depth():
    model = family_model("llama", num_nextn_predict_layers=2)
    model.loss_options = ModuleLossOptions(target="teacher")
    ids = torch.randint(3, 96, (2, 9))
    accepted = model(ids, labels=ids).acceptances
    assert accepted.isnan().tolist() == [True, False, False] and (accepted[1:] <= 1).all()


def test_heads_of_their_own_learn_where_the_main_models_is_held():
    model = tower_model("step3p7")
    model.loss_options = ModuleLossOptions(detach_head=True)
    model.requires_grad_(True)
    ids = torch.randint(3, 90, (2, 9))
    model(ids, labels=ids).loss.backward()
    own = {id(each): each for depth in range(1, model.window) for each in [model.readout_of(depth)]}
    assert own and all(each.has_own_head for each in own.values())
    assert all(each.head.weight.grad is not None and each.head.weight.grad.any() for each in own.values())


def test_near_depths_may_weigh_more():
    model, ids = family_model("llama"), random_ids(2)
    model.loss_options.unroll_steps, model.loss_options.decay = 3, 0.5
    out = model(ids, labels=ids)
    shares = torch.tensor([4.0, 2.0, 1.0]) / 7
    torch.testing.assert_close(out.loss, out.head_losses[0] + 0.3 * (shares * out.head_losses[1:]).sum())
