"""Muon in the precision of its parameters, and a step that several optimizers take together.

`torch.optim.Muon` orthogonalises in bfloat16, which takes ten times longer than float32 on processors that only emulate
it. Knows tensors; does not know which of a model's tensors suit which optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_QUINTIC = (3.4445, -4.7750, 2.0315)  # a x + b x^3 + c x^5: five rounds bring singular values in (0, 1] close to 1
_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is orthogonalised, for matrices (Jordan et al. 2024).

    Args:
        params: Matrices, or groups of them.
        lr: Learning rate; a matrix [m, n] moves by lr * sqrt(max(1, m / n)) in every direction.
        momentum: Decay of the running mean of gradients (with Nesterov's look-ahead).
        weight_decay: Decoupled, as in AdamW.

    Raises:
        ValueError: A parameter that is no matrix.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        shapes = [tuple(p.shape) for group in self.param_groups for p in group["params"] if p.dim() != 2]
        if shapes:
            raise ValueError(f"Muon is for matrices; got a parameter of shape {shapes[0]}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, **{key: group[key] for key in ("lr", "momentum", "weight_decay")})
        return loss

    def _update(self, parameter: torch.Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["mean"] = torch.zeros_like(parameter)
        mean = state["mean"].lerp_(parameter.grad, 1 - momentum)
        direction = orthogonalised(parameter.grad.lerp(mean, momentum))
        rows, columns = parameter.shape
        parameter.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix [m, n] with the same singular vectors and all singular values near 1 (0.7 to 1.2)."""
    a, b, c = _QUINTIC
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    tiny = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax().clamp(min=tiny)  # the squares of what is left of a vanishing gradient would sum to 0
    x = x / x.norm().clamp(min=tiny)
    for _ in range(_ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers of different parameters, which a trainer can use as if they were one.

    Args:
        parts: The optimizers.
    """

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Lists the parts' own groups here, so that a schedule that changes a learning rate changes the part's."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every part."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of the parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the parts.

        Raises:
            ValueError: Another number of parts.
        """
        if len(state_dict["parts"]) != len(self.parts):
            raise ValueError(f"the state has {len(state_dict['parts'])} parts, this optimizer has {len(self.parts)}")
        for part, state in zip(self.parts, state_dict["parts"]):
            part.load_state_dict(state)
        self._share_groups()
