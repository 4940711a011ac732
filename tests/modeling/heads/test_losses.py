"""Losses: targets of windows by brute force, goldens of the discounted loss, what is scored, accumulation."""

import pytest
import torch

from tests.distributions import golden
from tests.modeling.heads.plain_losses import head_and_batch, plain_loss
from tokenahead import MTPHeadConfig
from tokenahead.modeling.common.online import OwnLossMixin
from tokenahead.modeling.heads.circuit_head import FFHead
from tokenahead.modeling.heads.circuits import MixtureDistribution
from tokenahead.modeling.heads.family import window_distribution
from tokenahead.modeling.heads.losses import (
    IGNORE,
    counts_of_update,
    depth_targets,
    depth_weights,
    discounted_mtp_loss,
    head_loss,
    window_targets,
)

FAMILIES = ("ff", "cp", "hmm", "btree")
READINGS = ("observe", "marginalise", "univariate")


def expected_targets(labels, window, mask=None, position_ids=None):
    """The definition, position by position."""
    batch, length = labels.shape
    out = torch.full((batch, length, window), IGNORE)
    for row in range(batch):
        documents = [0] * length
        if position_ids is not None:
            starts = position_ids.expand(batch, -1)[row] == 0
            documents = starts.cumsum(0).tolist()
        for t in range(length):
            for ahead in range(1, window + 1):
                inside = t + ahead < length and documents[t] == documents[t + ahead]
                if inside and (mask is None or (mask[row, t] and mask[row, t + ahead])):
                    out[row, t, ahead - 1] = labels[row, t + ahead]
    return out


def padding_masks(length):
    """Padding on the left, on the right, on both sides, and none."""
    cuts = [(2, length), (0, length - 3), (1, length - 2), (0, length)]
    return torch.tensor([[int(low <= t < high) for t in range(length)] for low, high in cuts])


def test_targets_are_the_labels_ahead():
    for window in [1, 2, 5, 12]:
        labels = torch.randint(0, 50, (3, 9))
        labels[torch.rand(3, 9) < 0.2] = IGNORE
        assert torch.equal(window_targets(labels, window), expected_targets(labels, window))


def test_padding_predicts_nothing_and_is_no_target_even_if_labels_keep_its_ids():
    mask = padding_masks(9)
    labels = torch.randint(0, 50, mask.shape)
    for given in (labels, labels.masked_fill(mask == 0, IGNORE)):
        got = window_targets(given, 3, mask)
        assert torch.equal(got, expected_targets(given, 3, mask)) and (got[mask == 0] == IGNORE).all()


def test_mask_may_cover_a_cached_past():
    mask = padding_masks(9)
    labels = torch.randint(0, 50, mask.shape).masked_fill(mask == 0, IGNORE)
    longer = torch.cat([torch.ones(4, 6, dtype=mask.dtype), mask], dim=1)
    assert torch.equal(window_targets(labels, 3, longer), window_targets(labels, 3, mask))


def packed_positions(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


def test_windows_stop_at_document_borders():
    """Documents of 1 to 7 tokens, shorter and longer than the window; one row of position ids serves a batch."""
    for rows in [1, 2]:
        positions = packed_positions(4, 1, 7, 2, 3)
        if rows == 2:
            positions = torch.cat([positions, packed_positions(1, 1, 5, 10)])
        labels = torch.randint(0, 50, (2, 17))
        labels[0, 9] = IGNORE
        for window in (1, 3, 6):
            got = window_targets(labels, window, position_ids=positions)
            assert torch.equal(got, expected_targets(labels, window, position_ids=positions))


def test_positions_of_a_left_padded_batch_hide_nothing():
    """transformers counts positions of the real tokens and puts 1 under padding."""
    mask = padding_masks(9)
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    labels = torch.randint(0, 50, mask.shape).masked_fill(mask == 0, IGNORE)
    assert torch.equal(window_targets(labels, 4, mask, positions), window_targets(labels, 4, mask))


def test_golden_losses():
    for family in FAMILIES:
        for reading in READINGS:
            for dtype in [torch.float64, torch.float32]:
                data = golden(f"loss_{family}_n4")
                terms, valid = data[f"{reading}.terms"].to(dtype), data["valid"]
                assert terms.isnan().any()  # where there is no target
                close = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 2e-5}
                paper = discounted_mtp_loss(terms, valid, gamma=0.9, normalization="paper")
                tokens = discounted_mtp_loss(terms, valid, gamma=0.9, normalization="tokens")
                assert paper.dtype == tokens.dtype == dtype
                torch.testing.assert_close(paper.reshape(1), data[f"{reading}.loss_paper_eq4"].to(dtype), **close)
                torch.testing.assert_close(
                    tokens.reshape(1), data[f"{reading}.loss_global_over_gammasum"].to(dtype), **close
                )


def test_golden_terms_of_independent_heads():
    """From tokens and hidden states to the loss: the shift, the mask, the heads and the weights together."""
    data = golden("loss_ff_n4")
    weight = data["leaf_weight"][:, 0]  # [n, V, D]
    head = FFHead(weight.shape[2], weight.shape[1], weight.shape[0]).double()
    head.weight.data = weight.flatten(0, 1)
    labels = data["tokens"].long().masked_fill(data["target_mask"] == 0, IGNORE)
    targets = window_targets(labels, 4)
    valid = data["valid"].bool()
    assert torch.equal(targets != IGNORE, valid)
    config = MTPHeadConfig(window=4)
    terms = -window_distribution(head, config, data["e"]).token_log_probs(targets.clamp(min=0))
    torch.testing.assert_close(terms[valid], data["observe.terms"][valid], rtol=0, atol=1e-12)
    loss, means, *_ = head_loss(head, config, data["e"], targets, None).to_tuple()
    torch.testing.assert_close(loss[None], data["observe.loss_global_over_gammasum"], rtol=0, atol=1e-12)
    torch.testing.assert_close(means, data["observe.L_j_global"], rtol=0, atol=1e-12)
    config.loss_normalization = "paper"
    whole = head_loss(head, config, data["e"], targets, None)
    torch.testing.assert_close(whole.loss[None], data["observe.loss_paper_eq4"], rtol=0, atol=1e-12)
    pieces = [head_loss(head, config, data["e"][[row]], targets[[row]], None, torch.tensor([2] * 4)) for row in (0, 1)]
    torch.testing.assert_close(sum(piece.loss for piece in pieces), whole.loss)


def test_gamma_is_read_and_the_recipe_stands_where_there_is_none():
    for head_type in ["medusa", "hydra", "layer"]:
        counts = torch.tensor([4.0, 2.0, 1.0])
        recipe = MTPHeadConfig(head_type=head_type, window=3)
        assert recipe.gamma is None
        first, *weights = (depth_weights(recipe, counts) * counts).tolist()
        assert weights == pytest.approx({"medusa": [0.8, 0.64], "hydra": [1, 1], "layer": [1, 1]}[head_type])
        given = MTPHeadConfig(head_type=head_type, window=3, loss_options={"decay": 0.5})
        assert (depth_weights(given, counts) * counts).tolist() == pytest.approx([first, 0.5, 0.25])


def test_weights_by_hand():
    terms = torch.tensor([[[1.0, 10.0], [3.0, float("nan")]], [[8.0, 30.0], [float("nan"), float("nan")]]])
    valid = ~terms.isnan()
    # paper: (2 + 8) / 2 + 0.5 (10 + 30) / 2; tokens: (12 / 3 + 0.5 * 40 / 2) / 1.5
    assert discounted_mtp_loss(terms, valid, gamma=0.5).item() == pytest.approx(15.0)
    assert discounted_mtp_loss(terms, valid, 0.5, "tokens").item() == pytest.approx(14 / 1.5)
    assert discounted_mtp_loss(terms, valid, 0.5, "tokens", counts=4).item() == pytest.approx((3 + 5) / 1.5)
    counts = torch.tensor([6, 8])
    assert discounted_mtp_loss(terms, valid, 0.5, "tokens", counts).item() == pytest.approx((2 + 2.5) / 1.5)


def test_terms_without_a_target_do_not_matter():
    for normalization in ["paper", "tokens"]:
        valid = torch.rand(3, 6, 4) < 0.6
        terms = torch.rand(3, 6, 4)
        spoiled = terms.masked_fill(~valid, float("nan")).requires_grad_()
        want = discounted_mtp_loss(terms.masked_fill(~valid, 0.0), valid, normalization=normalization)
        for flags in (valid, valid.long(), valid.float()):
            assert torch.equal(discounted_mtp_loss(spoiled, flags, normalization=normalization), want)
        discounted_mtp_loss(spoiled, valid, normalization=normalization).backward()
        assert (spoiled.grad[~valid] == 0).all() and (spoiled.grad[valid] > 0).all()


def test_a_row_without_targets_is_no_sequence():
    terms, valid = torch.rand(3, 6, 4), torch.rand(3, 6, 4) < 0.6
    empty = torch.zeros(2, 6, 4)
    for normalization in ["paper", "tokens"]:
        with_empty = torch.cat([terms, empty]), torch.cat([valid, empty.bool()])
        found = discounted_mtp_loss(*with_empty, normalization=normalization)
        torch.testing.assert_close(found, discounted_mtp_loss(terms, valid, normalization=normalization))


def test_a_batch_without_targets_costs_nothing():
    for normalization in ["paper", "tokens"]:
        terms = torch.full((2, 3, 4), float("nan"), requires_grad=True)
        loss = discounted_mtp_loss(terms, torch.zeros(2, 3, 4), normalization=normalization)
        loss.backward()
        assert loss.item() == 0 and (terms.grad == 0).all()


def test_counts_make_accumulation_exact():
    """Micro-batches of unequal size and masking add up to the loss and gradient of the whole batch."""
    valid = torch.rand(5, 8, 3) < torch.tensor([0.9, 0.5, 0.2])
    terms = torch.rand(5, 8, 3, dtype=torch.float64, requires_grad=True)
    whole = discounted_mtp_loss(terms, valid, normalization="tokens")
    (want,) = torch.autograd.grad(whole, terms)
    counts = valid.sum((0, 1))
    parts = [
        discounted_mtp_loss(terms[rows], valid[rows], normalization="tokens", counts=counts)
        for rows in (slice(0, 1), slice(1, 3), slice(3, 5))
    ]
    (got,) = torch.autograd.grad(sum(parts), terms)
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    naive = sum(discounted_mtp_loss(terms[r], valid[r], normalization="tokens") for r in (slice(0, 1), slice(1, 5))) / 2
    assert abs(naive - whole) > 1e-4


def test_what_is_scored_is_the_label():
    """Labels that differ from the ids: the loss is that of ids that agree with them."""
    for masked in ["observe", "marginalise"]:
        for kind in FAMILIES:
            head, config, hidden, _ = head_and_batch(kind)
            config.masked_tokens = masked
            ids, labels = torch.randint(0, 11, (2, 2, 7))
            targets = window_targets(labels, 3)
            found = head_loss(head, config, hidden, targets, ids)[0]
            torch.testing.assert_close(found, head_loss(head, config, hidden, targets, labels)[0])
            torch.testing.assert_close(found, plain_loss(head, config, hidden, targets, labels)[0])
            assert abs(found - head_loss(head, config, hidden, window_targets(ids, 3), ids)[0]) > 1e-3


def test_labels_outside_the_vocabulary_are_refused_by_name():
    for wrong in [11, 70000, -1, -101]:
        head, config, hidden, targets = head_and_batch()
        targets[1, 2, 1] = wrong
        with pytest.raises(ValueError, match=f"labels hold {wrong}, but the vocabulary has 11 tokens"):
            head_loss(head, config, hidden, targets, None)


def test_shifted_labels_are_the_labels_of_the_next_position():
    for padding in [False, True]:
        mask = padding_masks(9) if padding else None
        labels = torch.randint(0, 50, (4, 9))
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)
        assert torch.equal(depth_targets(None, 3, mask, shift_labels=shifted), window_targets(labels, 3, mask))


def test_shifted_labels_may_go_on_behind_the_last_position():
    longer, positions = torch.randint(0, 50, (1, 10)), packed_positions(4, 5)
    want = window_targets(longer, 3, position_ids=packed_positions(4, 6))[:, :9]
    assert torch.equal(depth_targets(None, 3, None, positions, shift_labels=longer[:, 1:]), want)


def test_labels_of_every_depth_may_be_spelled_out():
    targets = torch.randint(0, 50, (2, 5, 3))
    assert torch.equal(depth_targets(targets, 3), targets)
    with pytest.raises(ValueError, match="labels.*3.*4"):
        depth_targets(targets, 4)


def test_one_number_counts_the_labels_of_an_update():
    """Labels but for each row's first; depths are as frequent among them as in this batch."""
    drafter, labels = OwnLossMixin(), torch.tensor([[5, 6, -100, 7, 8]])
    drafter.window = 3
    own = [3, 2, 2]
    assert drafter.loss_counts(labels).tolist() == own
    assert counts_of_update(drafter, None, labels) is None and counts_of_update(drafter, 3, None) is None
    assert counts_of_update(drafter, 3, labels).tolist() == own
    assert counts_of_update(drafter, torch.tensor([[12]]), labels).tolist() == [12, 8, 8]
    assert counts_of_update(drafter, torch.tensor([[11, 9, 7]]), labels).tolist() == [11, 9, 7]
    padding = torch.tensor([[0, 1, 1, 1, 1]])  # the first real token is a label that nothing predicts
    assert counts_of_update(drafter, 3, labels, padding).tolist() == [2, 2, 1]
    drafter.window, numbers = 1, (torch.tensor(6), torch.tensor([6]))  # of labels, and of the only depth
    assert [counts_of_update(drafter, each, labels, padding).tolist() for each in numbers] == [[4], [6]]
    drafter.loss_normalization, drafter.window = "paper", 2
    assert counts_of_update(drafter, 12, labels).tolist() == [4, 4]  # sequences


def test_terms_without_a_target_give_no_gradient():
    head, config, hidden, targets = head_and_batch()
    targets[0] = IGNORE
    targets[..., 2] = IGNORE
    loss, means, *_ = head_loss(head, config, hidden, targets, None).to_tuple()
    loss.backward()
    assert means[:2].isfinite().all() and means[2].isnan() and not means.requires_grad
    assert (hidden.grad[0] == 0).all() and (hidden.grad[1].abs().sum(-1) > 0).any()
    by_head = head.weight.grad.view(4, 11, 6).abs().amax((1, 2))
    assert (by_head[:2] > 0).all() and (by_head[2:] == 0).all()  # the fourth is outside the window


def test_packed_documents_cost_what_they_cost_apart():
    """Three documents packed into one row against the same documents as rows of a padded batch."""
    for kind in FAMILIES:
        for masked in ["observe", "marginalise"]:
            lengths = (5, 1, 8)
            head, config, _, _ = head_and_batch(kind)
            config.masked_tokens = masked
            documents = [torch.randn(length, 6) for length in lengths]
            ids = [torch.randint(0, 11, (length,)) for length in lengths]
            labels = [document.clone() for document in ids]
            labels[2][3] = IGNORE
            targets = window_targets(torch.cat(labels)[None], 3, position_ids=packed_positions(*lengths))
            packed, *_ = head_loss(head, config, torch.cat(documents)[None], targets, torch.cat(ids)[None]).to_tuple()
            hidden, tokens, apart_labels = (
                torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
                for rows, fill in ((documents, 0), (ids, 0), (labels, IGNORE))
            )
            apart_targets = window_targets(apart_labels, 3)
            apart, *_ = head_loss(head, config, hidden, apart_targets, tokens).to_tuple()
            torch.testing.assert_close(packed, apart)
            assert (targets != IGNORE).sum((0, 1)).tolist() == (apart_targets != IGNORE).sum((0, 1)).tolist()
            across, *_ = head_loss(
                head, config, torch.cat(documents)[None], window_targets(torch.cat(labels)[None], 3), None
            ).to_tuple()
            assert abs(across - packed) > 1e-3


def test_independent_positions_pay_for_what_two_tokens_share():
    rows = torch.softmax(2 * torch.randn(5, 5, dtype=torch.float64), -1)  # of y after x
    first = torch.softmax(torch.randn(5, dtype=torch.float64), -1)
    joint = first[:, None] * rows
    second = joint.sum(0)

    def entropy(probs):
        return -float(torch.xlogy(probs, probs).sum())

    shared = entropy(first) + entropy(second) - entropy(joint)  # I(X; Y)
    texts = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    independent = MixtureDistribution(
        torch.zeros(25, 1).double(), torch.stack([first, second]).log()[None, :, None].expand(25, -1, -1, -1)
    )
    leaves = torch.stack([torch.eye(5).double(), rows]).clamp(min=1e-300).log()  # the state is the first token
    mixture = MixtureDistribution(first.log().expand(25, -1), leaves.expand(25, -1, -1, -1))
    losses = [-float((joint.flatten() * each.prefix_log_prob(texts)[:, -1]).sum()) for each in (independent, mixture)]
    known = (entropy(joint) - entropy(first)) + (entropy(joint) - entropy(second))  # H(Y | X) + H(X | Y)
    assert losses[0] == pytest.approx(entropy(first) + entropy(second), abs=1e-12)
    assert losses[0] == pytest.approx(known + 2 * shared, abs=1e-12)
    assert losses[1] == pytest.approx(losses[0] - shared, abs=1e-12) and shared > 0.1
