"""Muon's direction and its state, and several optimizers as one."""

import copy

import pytest
import torch

from tests.internals import JointOptimizer, Muon, orthogonalised


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
def test_directions_keep_singular_vectors_and_level_singular_values(shape):
    matrix = torch.randn(shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    levelled = u.T @ orthogonalised(matrix) @ v.T
    values = levelled.diagonal()
    assert ((values > 0.6) & (values < 1.3)).all()
    assert (levelled - torch.diag(values)).abs().max() < 1e-4


@pytest.mark.parametrize("scale", [1e-41, 1e-38, 1e-25, 1e-22, 1.0, 1e18, 1e25])
def test_gradients_of_any_size_give_a_direction(scale):
    """Squares of float32 vanish below 1e-23 and overflow above 1e19; a direction of NaN ends a training."""
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(6, 12) * scale))
    assert values.min() > 0.6 and values.max() < 1.3


def test_no_gradient_gives_no_direction():
    assert torch.equal(orthogonalised(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_a_step_moves_against_the_gradient_by_the_learning_rate():
    weight = torch.nn.Parameter(torch.zeros(8, 4))
    weight.grad = torch.randn(8, 4)
    Muon([weight], lr=0.1).step()
    expected = -0.1 * 2**0.5 * orthogonalised(weight.grad)  # sqrt(8 / 4) for a tall matrix
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-5)


def test_weight_decay_shrinks_apart_from_the_gradient():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.zeros(2, 2)
    Muon([weight], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 0.95))


def test_only_matrices_are_taken():
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        Muon([torch.nn.Parameter(torch.zeros(3))])


def joint():
    torch.manual_seed(0)
    matrix, vector = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))
    parts = [Muon([matrix], lr=0.1), torch.optim.AdamW([vector], lr=0.01)]
    return matrix, vector, JointOptimizer(parts)


def steps(optimizer, matrix, vector, count: int) -> None:
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        matrix.grad, vector.grad = torch.randn(4, 4, generator=generator), torch.randn(4, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
        assert matrix.grad is None and vector.grad is None


def test_a_schedule_reaches_every_part():
    matrix, vector, optimizer = joint()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [part.param_groups[0]["lr"] for part in optimizer.parts] == [0.05, 0.005]
    before = matrix.detach().clone(), vector.detach().clone()
    steps(optimizer, matrix, vector, 1)
    assert not torch.equal(before[0], matrix) and not torch.equal(before[1], vector)


def test_a_restored_state_goes_on_as_if_nothing_had_happened():
    whole, restored = joint(), joint()
    steps(whole[2], *whole[:2], 3)
    state, values = copy.deepcopy(whole[2].state_dict()), [parameter.detach().clone() for parameter in whole[:2]]
    with torch.no_grad():
        for parameter, value in zip(restored, values):
            parameter.copy_(value)
    restored[2].load_state_dict(state)
    restored[2].param_groups[0]["lr"] = 0.2
    assert restored[2].parts[0].param_groups[0]["lr"] == 0.2  # still one object in both
    restored[2].param_groups[0]["lr"] = 0.1
    steps(whole[2], *whole[:2], 2)
    steps(restored[2], *restored[:2], 2)
    assert torch.equal(whole[0], restored[0]) and torch.equal(whole[1], restored[1])


def test_a_state_of_other_parts_is_refused():
    optimizer = joint()[2]
    with pytest.raises(ValueError, match="1 parts"):
        optimizer.load_state_dict({"parts": optimizer.state_dict()["parts"][:1]})
