"""The head loss in chunks: equal to the definition with all logits at once, computed once, summed up in float32."""

import pytest
import torch

from tests.modeling.heads.plain_losses import head_and_batch, plain_loss
from tokenahead.modeling.common import chunks
from tokenahead.modeling.heads import losses
from tokenahead.modeling.heads.family import window_distribution
from tokenahead.modeling.heads.losses import IGNORE, discounted_mtp_loss, head_loss

FAMILIES = ("ff", "cp", "hmm", "btree")


def with_gradients(loss, head, config, hidden, targets, ids):
    """The loss, its means, and the gradients of three times the loss."""
    value, means, *_ = loss(head, config, hidden, targets, ids)
    return value, means, *torch.autograd.grad(3 * value, (*head.parameters(), hidden))


def assert_equal_to_the_definition(arguments):
    expected = with_gradients(plain_loss, *arguments)
    found = with_gradients(lambda *given: head_loss(*given).to_tuple(), *arguments)
    for value, want in zip(found, expected, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.fixture
def calls(monkeypatch):
    """How many positions each distribution of the loss is of."""
    sizes = []
    monkeypatch.setattr(
        losses, "window_distribution", lambda *given: (sizes.append(len(given[2])), window_distribution(*given))[1]
    )
    return sizes


@pytest.mark.by_day("ff-False-5.0-sizes0", "cp-True-7.9-sizes1", "hmm-False-0.1-sizes2", "btree-True-14.0-sizes3")
@pytest.mark.parametrize(("rows", "sizes"), [(5.0, [5, 5, 4]), (7.9, [7, 7]), (0.1, [1] * 14), (14.0, [14])])
@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_chunks_change_nothing_and_are_computed_once(kind, observed, rows, sizes, calls, monkeypatch):
    head, config, hidden, targets = head_and_batch(kind)
    arguments = (head, config, hidden, targets, torch.randint(0, 11, (2, 7)) if observed else None)
    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", int(rows * 3 * config.rank * 11))
    assert_equal_to_the_definition(arguments)
    assert calls == sizes


@pytest.mark.by_day("ff-0", "hmm-5")
@pytest.mark.parametrize("kept", [0, 1, 5])
@pytest.mark.parametrize("kind", FAMILIES)
def test_positions_without_targets_have_no_logits(kind, kept, calls):
    head, config, hidden, targets = head_and_batch(kind)
    targets[:] = 4
    targets.view(14, 3)[kept:] = IGNORE
    assert_equal_to_the_definition((head, config, hidden, targets, None))
    assert calls == [max(kept, 1)]


def test_chunks_on_a_frozen_backbone(monkeypatch):
    """Hidden states that want no gradient, and a second backward that adds to the first."""
    for kind in FAMILIES:
        head, config, hidden, targets = head_and_batch(kind)
        arguments = (head, config, hidden.detach(), targets, None)
        plain_loss(*arguments)[0].backward()
        whole = [parameter.grad.clone() for parameter in head.parameters()]
        monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", 5 * 3 * config.rank * 11)
        head_loss(*arguments)[0].backward()
        for parameter, want in zip(head.parameters(), whole, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * want, rtol=1e-5, atol=1e-5)


@pytest.mark.core
def test_no_gradients_are_made_where_none_are_wanted(monkeypatch):
    head, config, hidden, targets = head_and_batch()
    want = plain_loss(head, config, hidden, targets, None)[0]
    seen = []
    monkeypatch.setattr(
        losses, "window_distribution", lambda *given: (seen.append(given[2]), window_distribution(*given))[1]
    )
    with torch.no_grad():
        torch.testing.assert_close(head_loss(head, config, hidden, targets, None)[0], want)
    head.requires_grad_(False)
    loss = head_loss(head, config, hidden.detach(), targets, None)[0]
    assert not loss.requires_grad and not any(states.requires_grad for states in seen)


def test_a_second_backward_through_one_loss_is_refused():
    head, config, hidden, targets = head_and_batch()
    loss, *_ = head_loss(head, config, hidden, targets, None).to_tuple()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


@pytest.mark.by_day("ff")
@pytest.mark.parametrize("kind", FAMILIES)
def test_gradients_of_chunks_are_summed_up_in_float32(kind, monkeypatch):
    """In bfloat16, a sum of 256 equal gradients would stop growing long before the end."""
    head, config, _, _ = head_and_batch(kind)
    head, hidden = head.bfloat16(), torch.ones(1, 256, 6, dtype=torch.bfloat16)
    targets = torch.full((1, 256, 3), 4)
    plain_loss(head.float(), config, hidden.float(), targets, None)[0].backward()
    leaf = head if kind == "ff" else head.leaf
    want = leaf.weight.grad.clone()
    head.bfloat16().zero_grad()
    monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", 3 * config.rank * 11)
    head_loss(head, config, hidden, targets, None)[0].backward()
    torch.testing.assert_close(leaf.weight.grad.float(), want, rtol=0.03, atol=2e-3)


def test_float32_heads_read_states_of_any_dtype():
    for kind in FAMILIES:
        head, config, hidden, targets = head_and_batch(kind)
        low = hidden.detach().bfloat16()
        loss, *_ = head_loss(head, config, low, targets, None).to_tuple()
        torch.testing.assert_close(loss, plain_loss(head, config, low.float(), targets, None)[0])
        assert window_distribution(head, config, low).leaf_logits.dtype == loss.dtype == torch.float32


def test_bfloat16_heads_have_a_float32_loss():
    head, config, hidden, targets = head_and_batch()
    head, hidden = head.bfloat16(), hidden.detach().bfloat16()
    loss, *_ = head_loss(head, config, hidden, targets, None).to_tuple()
    assert loss.dtype == torch.float32
    log_q = head(hidden)[:, :, :3].float().log_softmax(-1)
    terms = -log_q.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(loss, discounted_mtp_loss(terms, targets != IGNORE, 0.9, "tokens"))


def test_chunks_are_smaller_on_a_processor_unless_they_are_few_positions_already():
    """Of 4,096 tokens at rank 8 and window 4; of 32,768; and of one state."""
    wanted = {2**17: (32, 128), 2**20: (16, 16), 2**14: (256, 1024), 2**25: (1, 8)}
    devices = torch.device("cpu"), torch.device("meta")
    assert {logits: tuple(chunks.rows_per_chunk(logits, each, 32) for each in devices) for logits in wanted} == wanted


def test_products_have_rows_enough_to_be_worth_reading_the_unembedding():
    """Of 131,072 tokens: window 4 that shares one, window 4 with an own one per depth, and a module."""
    wanted = {(2**19, 4): (32, 64), (2**19, 1): (32, 256), (2**17, 1): (128, 256), (2**15, 1): (128, 512)}
    devices = torch.device("cpu"), torch.device("meta")
    assert {key: tuple(chunks.rows_per_chunk(key[0], each, key[1]) for each in devices) for key in wanted} == wanted
