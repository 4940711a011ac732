"""How the drafts of one call are verified, and how its first token is chosen: greedy, sampled, or picked by
uniforms.

Where the uniforms of a call come from: one for every output position, and fresh ones for everything else.

They are numbers of a counter-based generator: row i reads a stream of its own, so that what it reads depends on its
seed and on how far it has come, and not on the rows next to it or on how long the texts may become. Heads and modules
draw from torch's own generator: a draw of theirs may need a number for every token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...modeling.sampling import draw, pick, stream_uniforms
from ..call.sequences import Sequences
from ..trees.contract import DraftTree, VerificationResult, follow
from .races import is_raced, race
from .rules import verify_sampled


class Verifier(Protocol):
    """Verification in one call of `generate`."""

    def first(self, scores: Tensor, tokens: Sequences) -> Tensor:
        """The token after the prompt, [B], from processed scores [B, v]."""
        ...

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        """What is kept of a draft, and the token that is added, from processed scores [B, m + 1, v]."""
        ...

    def invalid(self, result: VerificationResult) -> Tensor | None:
        """Rows [B] whose last verification result rests on scores that are no distribution (NaN, or all -inf); None
        where none can be."""


class GreedyVerifier:
    """The target's argmax at every place.

    Args:
        is_checked: Also look for places where every token is excluded; plain greedy decoding does not.
    """

    def __init__(self, is_checked: bool = False) -> None:
        self.is_checked = is_checked

    def first(self, scores: Tensor, tokens: Sequences) -> Tensor:
        """See `Verifier`."""
        return self._picks(scores[:, None])[:, 0]

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        """See `Verifier`."""
        return follow(tree, self._picks(scores))

    def _picks(self, scores: Tensor) -> Tensor:
        if not self.is_checked:
            return scores.argmax(-1)
        best = scores.max(-1)
        self.faults = torch.where(best.values == -torch.inf, torch.nan, 0.0)[..., None]
        return best.indices

    def invalid(self, result: VerificationResult) -> Tensor | None:
        """See `Verifier`."""
        return _reached_faults(self.faults, result) if self.is_checked else None


class SampledVerifier:
    """The target's distribution at every place; see `verification.verify_sampled`.

    Args:
        rule: `"block"` (None) or `"token"`.
        uniforms: Where given, all that is random comes from there; the added token is picked by the uniform of its
            position.
    """

    def __init__(self, rule: str | None = None, uniforms: Uniforms | None = None) -> None:
        self.rule, self.uniforms = rule or "block", uniforms

    def first(self, scores: Tensor, tokens: Sequences) -> Tensor:
        """See `Verifier`."""
        self.distribution = scores.softmax(-1)[:, None]
        if self.uniforms is None:
            return draw(self.distribution[:, 0])
        return pick(self.uniforms.draw(tokens, 1)[:, 0], self.distribution[:, 0])

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        """See `Verifier`."""
        self.distribution = scores.softmax(-1)
        if self.uniforms is None:
            if is_raced(tree, self.rule):
                return race(tree, self.distribution)
            return verify_sampled(tree, self.distribution, self.rule)
        uniforms = self.uniforms.current[:, : scores.shape[1]]
        tests = self.uniforms.fresh(tree.tokens.shape[1])
        return verify_sampled(tree, self.distribution, self.rule, uniforms=uniforms, tests=tests)

    def invalid(self, result: VerificationResult) -> Tensor | None:
        """See `Verifier`."""
        return _reached_faults(self.distribution, result)


class CoupledVerifier:
    """The target picks with the very uniforms that the draft was made from (PTP paper, Algorithm 1).

    Args:
        uniforms: One for every output position.
    """

    def __init__(self, uniforms: Uniforms) -> None:
        self.uniforms = uniforms

    def first(self, scores: Tensor, tokens: Sequences) -> Tensor:
        """See `Verifier`."""
        self.distribution = distribution_of(scores)[:, None]
        return pick(self.uniforms.draw(tokens, 1)[:, 0], self.distribution[:, 0])

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        """See `Verifier`."""
        self.distribution = distribution_of(scores)
        return follow(tree, pick(self.uniforms.current[:, : scores.shape[1]], self.distribution))

    def invalid(self, result: VerificationResult) -> Tensor | None:
        """See `Verifier`."""
        return _reached_faults(self.distribution, result)


def distribution_of(scores: Tensor) -> Tensor:
    """Probabilities in float64: cumulative sums over a large vocabulary in float32 misplace picks."""
    return scores.double().softmax(-1)


def _reached_faults(distribution: Tensor, result: VerificationResult) -> Tensor:
    """Rows [B] bool in which a place on the accepted path has no distribution; softmax makes NaN of all its entries
    there.

    A drawn chain keeps no draft whose distribution is none, so that its verification result knows from the draw of the
    added token.
    """
    if result.invalid is not None:
        return result.invalid
    if result.tree_path is not None:
        return distribution[..., 0].gather(1, result.tree_path).isnan().any(1)
    return distribution[..., 0].cumsum(1).gather(1, result.num_accepted[:, None])[:, 0].isnan()


_CHUNK = 256
_POSITIONS, _FRESH = 0, 1
_SEEDS = range(-(2**63), 2**64)


class Uniforms:
    """Uniforms of one call.

    Args:
        rows: B.
        device: Where they are needed.
        table: [B, positions] in [0, 1), given by the user.
        seed: An int, of which row i reads stream i, or one int per sequence; None: drawn from torch's global generator.
        stay: The uniform of a position is the same in every cycle, whatever is drafted or rejected on the way (coupled
            verification). Otherwise every cycle draws fresh ones: a speculative rule must not use again what a
            rejected draft has used.

    Attributes:
        current: [B, n], of the positions from the next one on, as `draw` gave them last.
    """

    current: Tensor

    def __init__(
        self,
        rows: int,
        device: torch.device,
        table: Tensor | None = None,
        seed: int | Sequence[int] | None = None,
        stay: bool = True,
    ) -> None:
        self.stay, self.device = stay, device
        streams = seed_streams(seed, rows)
        self.positions = _Stream(streams, _POSITIONS, device, table)
        self.others = _Stream(streams, _FRESH, device)
        self.used = 0

    def draw(self, tokens: Sequences, count: int) -> Tensor:
        """u of the next `count` output positions of every sequence, [B, count]."""
        if not self.stay:
            self.current = self.fresh(count)
        elif tokens.is_even:
            self.current = self.positions.read(tokens.lengths[0] - tokens.prompt_length, count)
        else:
            table = self.positions.upto(max(tokens.lengths) - tokens.prompt_length + count)
            self.current = table.gather(1, tokens.ends[:, None] - tokens.prompt_length + tokens.steps[:count])
        return self.current

    def fresh(self, count: int) -> Tensor:
        """Numbers that nobody has read before, [B, count]."""
        self.used += count
        return self.others.read(self.used - count, count)


class _Stream:
    """One stream per sequence, made in chunks on the host, each of which is copied to the device at once."""

    def __init__(self, streams: Tensor, purpose: int, device: torch.device, table: Tensor | None = None) -> None:
        self.streams, self.purpose, self.device = streams, purpose, device
        self.table = torch.empty(len(streams), 0, device=device) if table is None else table

    def upto(self, stop: int) -> Tensor:
        """The beginning of all streams, [B, stop or more]."""
        begun = self.table.shape[1]
        if stop > begun:
            count = (stop - begun + _CHUNK - 1) // _CHUNK * _CHUNK
            more = stream_uniforms(self.streams, begun, count, self.purpose)
            self.table = torch.cat([self.table, more.to(self.device, self.table.dtype)], dim=1)
        return self.table

    def read(self, start: int, count: int) -> Tensor:
        """Numbers from `start` on, [B, count]."""
        return self.upto(start + count)[:, start : start + count]


def seed_streams(seed: int | Sequence[int] | None, rows: int) -> Tensor:
    """The stream of every sequence.

    Args:
        seed: An int: row i reads stream i of it; one int per sequence: every sequence reads stream 0 of its own, so
            that a row writes the same text in any batch; None: an int from torch's global generator.
        rows: B.

    Returns:
        [B, 2] int64 on the host: seed, number of the stream.

    Raises:
        ValueError: Something else than whole numbers of 64 bits, or another number of them than there are rows.
    """
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    found: Any = seed
    seeds = found.tolist() if hasattr(found, "tolist") else found  # tensors, and the numbers and arrays of numpy
    is_one = not isinstance(seeds, (list, tuple))
    numbers = [seeds] if is_one else list(seeds)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number not in _SEEDS:
            raise ValueError(f"seed={seed!r} must be a whole number of 64 bits, or a list of one per row")
    if is_one:
        return torch.tensor([[_signed(numbers[0]), row] for row in range(rows)])
    if len(numbers) != rows:
        raise ValueError(f"seed has {len(numbers)} numbers, but there are {rows} rows: give one int, or one per row")
    return torch.tensor([[_signed(number), 0] for number in numbers])


def _signed(seed: int) -> int:
    """The same 64 bits as int64 shows them."""
    return (seed + 2**63) % 2**64 - 2**63
