"""Verifiers of one call (greedy, sampled, coupled by uniforms), which also choose its first token; and its uniforms.

Uniforms are numbers of a counter-based generator: sequence i reads a stream of its own, so that its numbers depend on
its seed and on how far it has come, and not on other sequences or on the length limit. Heads and modules draw from
torch's own generator: a draw of theirs may need a number for every token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..call.sequences import Sequences
from ..contract import DraftTree, VerificationResult, follow
from ..tensors.masks import cached_arange
from ..tensors.sampling import draw, pick, stream_uniforms
from .rules import TRACE, block_surplus, verify_sampled


class Verifier(Protocol):
    """Verification in one call of `generate`.

    Of the last one, `rows` [B, m + 1] are NaN or infinite where a row of scores is none to choose from (NaN, +inf, or
    -inf everywhere); None: nothing looks at them.
    """

    rows: Tensor | None = None
    takes_fixed: bool = False

    def first(self, scores: Tensor, tokens: Sequences) -> Tensor:
        """Return the token after the prompt, [B], from processed scores [B, v]."""
        ...

    def picked(self, scores: Tensor, tokens: Sequences) -> VerificationResult:
        """Return the result without drafts, from processed scores [B, 1, v]."""
        first = self.first(scores[:, 0], tokens)
        return VerificationResult(torch.zeros_like(first), first[:, None])

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        """Return the verification result of a draft, from processed scores [B, m + 1, v]."""
        ...

    def path_rows(self, result: VerificationResult) -> Tensor | None:
        """Return `rows` along the accepted path, [B, k + 1], of which the first `result.num_accepted` + 1 count.

        A drawn chain accepts no draft without a distribution, so that the draw of the added token tells: [B, 1].
        """
        if result.check is not None:
            return result.check[:, None]
        if self.rows is None or result.tree_path is None or self.rows.shape[1] == 1:
            return self.rows
        return self.rows.gather(1, result.tree_path)

    def hold(self, hold: Callable[[str, Tensor], Tensor], count: int) -> None:
        """Keep what the next `count` positions are verified with at constant addresses (`CacheView.held`)."""

    def shape(self, prompt: Tensor) -> int | None:
        """Return a number of the host that verification reads, and that calls differ in; None: there is none."""
        return None


class GreedyVerifier(Verifier):
    """The target's argmax at every index.

    Where processors `may_exclude_all` tokens, that is an error; of others, plain decoding goes on from it.
    """

    takes_fixed = True
    takes_infinity = False  # scores of +inf are right, and -inf everywhere where it is no error: processors made them

    def __init__(self, may_exclude_all: bool = False) -> None:
        self.may_exclude_all = may_exclude_all

    def first(self, scores: Tensor, tokens: Sequences) -> Tensor:
        return self._picks(scores[:, None])[:, 0]

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        return follow(tree, self._picks(scores))

    def _picks(self, scores: Tensor) -> Tensor:
        best = scores.max(-1)  # NaN where any score is
        self.rows = best.values
        return best.indices

    def path_rows(self, result: VerificationResult) -> Tensor | None:
        if self.takes_infinity and self.rows is not None:
            self.rows = self.rows.clamp(None if self.may_exclude_all else -1, 1)
        return super().path_rows(result)


class SampledVerifier(Verifier):
    """The target's distribution at every index; see `rules.verify_sampled`.

    With `uniforms`, these are the source of all that is random, and the added token is picked by that of its position.
    """

    def __init__(self, rule: str | None = None, uniforms: Uniforms | None = None) -> None:
        self.rule, self.uniforms = rule or "block", uniforms
        self.takes_fixed = uniforms is None  # fresh ones are counted on the host

    def first(self, scores: Tensor, tokens: Sequences) -> Tensor:
        probs = scores.softmax(-1)
        self.rows = probs[:, None, 0]
        return draw(probs) if self.uniforms is None else pick(self.uniforms.draw(tokens, 1)[:, 0], probs)

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        probs = scores.softmax(-1)
        self.rows = probs[..., 0]  # softmax makes all of a row NaN
        if tree.probs is not None:  # what was chosen from no numbers is no draft, and those before it are verified
            tree.probs = tree.probs.nan_to_num(nan=0.0)
        if self.uniforms is None:
            is_whole_chain = tree.is_chain and tree.num_nodes is None and tree.depth > 0
            if is_whole_chain and tree.probs is not None and self.rule == "block" and probs.device.type != "cpu":
                accepted, tokens, check = race_block(tree.tokens, tree.probs, probs)
                return VerificationResult(accepted, tokens, check=check)
            return verify_sampled(tree, probs, self.rule)
        uniforms = self.uniforms.current[:, : scores.shape[1]]
        tests = self.uniforms.fresh(tree.tokens.shape[1])
        return verify_sampled(tree, probs, self.rule, uniforms=uniforms, tests=tests)


class CoupledVerifier(Verifier):
    """The target picks with the very uniforms that the draft was made from, one per position (PTP, Algorithm 1)."""

    def __init__(self, uniforms: Uniforms) -> None:
        self.uniforms, self.takes_fixed = uniforms, uniforms.stay

    def first(self, scores: Tensor, tokens: Sequences) -> Tensor:
        probs = distribution_of(scores)
        self.rows = probs[:, None, 0]
        return pick(self.uniforms.draw(tokens, 1)[:, 0], probs)

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        probs = distribution_of(scores)
        self.rows = probs[..., 0]
        return follow(tree, pick(self.uniforms.current[:, : scores.shape[1]], probs))

    def hold(self, hold: Callable[[str, Tensor], Tensor], count: int) -> None:
        positions = self.uniforms.positions
        positions.table = hold("uniforms", positions.upto(count))

    def shape(self, prompt: Tensor) -> int | None:
        return prompt.shape[1]


def race_block(
    draft: Tensor, q: Tensor, p: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Block verification as a race, for accelerators, where random numbers are cheap and every launch counts.

    On a processor, which makes random numbers one after the other, one uniform per draft and one for the added token
    cost less (`rules.verify`). What is emitted has the same distribution. In row i the surplus of every token and a
    refusal of weight 1 - P_i run for arrivals w / E with E ~ Exp(1). The refusal loses with probability
    Z_i / (Z_i + 1 - P_i) = h_i, and the first token is then a draw from the residual, whatever the refusal's arrival
    was. Rows are independent.

    Arguments are those of `rules.verify`, with at least one draft. Return num_accepted [B]; tokens [B, m + 1], the
    accepted drafts and then the added token; and [B], NaN where the target's first row is no distribution.
    """
    weight, surplus = block_surplus(draft, q, p)
    arrivals = p.new_empty(*p.shape[:2], p.shape[2] + 1).exponential_(generator=generator)
    best, tokens = surplus.add_(p, alpha=TRACE).div_(arrivals[..., 1:]).max(-1)
    kept = torch.addcmul(weight, best, arrivals[..., 0]) >= 1
    rows = cached_arange(p.shape[1], p.device)
    accepted = (kept * rows).amax(1)
    torch.where(rows[:-1] < accepted[:, None], draft, tokens[:, :-1], out=tokens[:, :-1])
    return accepted, tokens, best[:, 0]


def distribution_of(scores: Tensor) -> Tensor:
    """Return probabilities in float64: cumulative sums over a large vocabulary in float32 misplace picks."""
    return scores.double().softmax(-1)


_CHUNK = 256
_POSITIONS, _FRESH = 0, 1
_SEEDS = range(-(2**63), 2**64)


class Uniforms:
    """Uniforms of one call, from a `table` [B, positions] of the user, or from a `seed` (`seed_streams`).

    Where they `stay`, the uniform of a position is the same in every cycle, whatever is drafted or rejected on the way
    (coupled verification). Otherwise every cycle draws fresh ones: a speculative rule must not use again what a
    rejected draft has used.
    """

    current: Tensor  # [B, n], of the positions from the next one on, of the last `draw`

    def __init__(
        self,
        rows: int,
        device: torch.device,
        table: Tensor | None = None,
        seed: int | Sequence[int] | None = None,
        stay: bool = True,
    ) -> None:
        self.stay = stay
        streams = seed_streams(seed, rows)
        self.positions = _Stream(streams, _POSITIONS, device, table)
        self.others = _Stream(streams, _FRESH, device)
        self.used = 0

    def draw(self, tokens: Sequences, count: int) -> Tensor:
        """Return u of the next `count` output positions of every sequence, [B, count]."""
        if not self.stay:
            self.current = self.fresh(count)
        elif tokens.is_even:
            self.current = self.positions.read(tokens.lengths[0] - tokens.prompt_length, count)
        else:
            table = self.positions.upto(max(tokens.lengths) - tokens.prompt_length + count)
            self.current = table.gather(1, tokens.ends[:, None] - tokens.prompt_length + tokens.steps[:count])
        return self.current

    def fresh(self, count: int) -> Tensor:
        """Return numbers that were never read before, [B, count]."""
        self.used += count
        return self.others.read(self.used - count, count)


class _Stream:
    """One stream per sequence, made in chunks on the host, each of which is copied to the device at once."""

    def __init__(self, streams: Tensor, purpose: int, device: torch.device, table: Tensor | None = None) -> None:
        self.streams, self.purpose, self.device = streams, purpose, device
        self.table = torch.empty(len(streams), 0, device=device) if table is None else table

    def upto(self, stop: int) -> Tensor:
        """Return the beginning of all streams, [B, stop or more]."""
        begun = self.table.shape[1]
        if stop > begun:
            count = (stop - begun + _CHUNK - 1) // _CHUNK * _CHUNK
            more = stream_uniforms(self.streams, begun, count, self.purpose)
            self.table = torch.cat([self.table, more.to(self.device, self.table.dtype)], dim=1)
        return self.table

    def read(self, start: int, count: int) -> Tensor:
        """Return numbers from `start` on, [B, count]."""
        return self.upto(start + count)[:, start : start + count]


def seed_streams(seed: int | Sequence[int] | None, rows: int) -> Tensor:
    """Return the stream of every sequence, [B, 2] int64 on the host: seed, number of the stream.

    Of an int, sequence i reads stream i; of one int per sequence, each reads stream 0 of its own, so that it has the
    same output in any batch; None: an int from torch's global generator.
    """
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    found: Any = seed
    seeds = found.tolist() if hasattr(found, "tolist") else found  # tensors, and the numbers and arrays of numpy
    is_one = not isinstance(seeds, (list, tuple))
    numbers = [seeds] if is_one else list(seeds)
    if any(isinstance(each, bool) or not isinstance(each, int) or each not in _SEEDS for each in numbers):
        raise ValueError(f"seed={seed!r} must be a whole number of 64 bits, or a list of one per row")
    if not is_one and len(numbers) != rows:
        raise ValueError(f"seed has {len(numbers)} numbers, but there are {rows} rows: give one int, or one per row")
    signed = [(number + 2**63) % 2**64 - 2**63 for number in numbers]  # the same 64 bits as int64
    return torch.tensor([[signed[0], row] for row in range(rows)] if is_one else [[number, 0] for number in signed])
