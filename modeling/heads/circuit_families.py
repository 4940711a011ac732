"""Which circuits there are, and how each is built from unnormalised parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .circuits import ChainDistribution, MixtureDistribution, TreeDistribution
from .window_distribution import FactorisedDistribution, WindowDistribution


@dataclass(frozen=True)
class Circuit:
    """What tells one family of circuits from another; independent positions are the one without sums.

    Args:
        distribution: From its parameters, in this order, and the leaves to the distribution.
        parameters: Their names: the root, then the [r, r] sums if the family has any.
        sum_counts: From the window n to how many such sums there are: one per step, and if all steps share theirs.
        persistent: When a head is new, states tend to stay what they are from one sum to the next.
    """

    distribution: Callable[..., WindowDistribution]
    parameters: tuple[str, ...] = ("root_logits",)
    sum_counts: Callable[[int], tuple[int, ...]] = lambda window: (0,)
    persistent: bool = False

    def shapes(self, window: int, rank: int) -> dict[str, list[tuple[int, ...]]]:
        """The last axes that each parameter may have; without those that this window is too short for."""
        counts = sorted(set(self.sum_counts(window)))
        sums = [(count, rank, rank) for count in counts]
        return dict(zip(self.parameters, ([(rank,)], sums if any(counts) else [])))


CIRCUITS = {
    "ff": Circuit(FactorisedDistribution, ()),
    "cp": Circuit(MixtureDistribution),
    "hmm": Circuit(ChainDistribution, ("root_logits", "trans_logits"), lambda window: (window - 1, 1), persistent=True),
    "btree": Circuit(TreeDistribution, ("root_logits", "node_logits"), lambda window: (max(window - 2, 0),)),
}
"""The distributions that `circuit_from_logits` can build, by `head_type`."""


def circuit_from_logits(
    head_type: str,
    *,
    leaf_logits: torch.Tensor,
    root_logits: torch.Tensor | None = None,
    trans_logits: torch.Tensor | None = None,
    node_logits: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> WindowDistribution:
    """Builds the distribution of a head family from unnormalised parameters; layouts in the docstring of `circuits`.

    Args:
        head_type: `"ff"` (leaves only, r = 1), `"cp"` (and root), `"hmm"` (root, trans) or `"btree"` (root, node).
        leaf_logits: [..., n, r, v].
        root_logits: [..., r].
        trans_logits: [..., n - 1 or 1, r, r].
        node_logits: [..., n - 2, r, r]; None for n = 2.
        dtype: Of the arithmetic and of what the distribution returns. Models use float32.

    Raises:
        ValueError: An unknown `head_type`, or parameters that the family lacks or does not have.

    Example:
        >>> distribution = circuit_from_logits("cp", root_logits=torch.zeros(3), leaf_logits=torch.zeros(4, 3, 10))
        >>> distribution.condition(torch.tensor(7)).window
        3
    """
    window, rank = leaf_logits.shape[-3], leaf_logits.shape[-2]
    given = {"root_logits": root_logits, "trans_logits": trans_logits, "node_logits": node_logits}
    if head_type not in CIRCUITS:
        raise ValueError(f"head_type={head_type!r} is unknown; choose one of {', '.join(CIRCUITS)}")
    family = CIRCUITS[head_type]
    wanted = family.shapes(window, rank)
    for name, value in given.items():
        _check(head_type, name, value, wanted.get(name))
    if not family.parameters and rank != 1:
        raise ValueError(f"leaf_logits: {head_type!r} has rank 1, got {tuple(leaf_logits.shape)}")
    cast = [None if given[name] is None else given[name].to(dtype) for name in family.parameters]
    return family.distribution(*cast, leaf_logits.to(dtype))


def _check(head_type: str, name: str, value: torch.Tensor | None, shapes: list[tuple[int, ...]] | None) -> None:
    if not shapes:
        if value is not None:
            raise ValueError(f"{name}: head_type={head_type!r} has none for this window")
        return
    if value is None:
        raise ValueError(f"{name} is missing: head_type={head_type!r} needs it")
    if not any(value.shape[-len(shape) :] == shape for shape in shapes):
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it should end in {' or '.join(map(str, shapes))}")
