"""What a head would draft under another convention: features, tokens or positions one off, other layers, other norms.

A trial changes what the head reads, for as long as it lasts, and nothing else; the drafts along known texts then say
which convention the head learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from torch import Tensor
from transformers import Cache

from ...modeling import EagleHead, MTPHeads
from ...modeling.eagle.conversion import default_aux_layers, resolved_aux_layers


@dataclass(frozen=True)
class Trial:
    """A convention to try: what it is about, what fits if it is the better one, and a context in which it holds.

    Attributes:
        shows_answer: Rows read what follows the next token, from which any head guesses better; only a head that reads
            it off has learned so.
    """

    check: str
    words: str
    holds: Callable[[], Any]
    shows_answer: bool = False


def trials_of(drafter: object) -> list[Trial]:
    """Return the trials that a drafter allows; none for one that reads no hidden states."""
    if isinstance(drafter, EagleHead):
        return [*_shifts_of_eagle(drafter), *_layers(drafter), *_norms(drafter)]
    return [*_shifts_of_heads(drafter)] if isinstance(drafter, MTPHeads) else []


@contextmanager
def shifted_rows(head: EagleHead, features: int = 0, tokens: int = 0, positions: int = 0) -> Iterator[None]:
    """Let rows read features and tokens of other places, and drafted rows have other positions.

    Args:
        head: Drafts, or learns.
        features: -1: row t reads the feature of token t - 1.
        tokens: -1: row t reads token t in place of token t + 1; as do the rows that are drafted after it.
        positions: Added to the positions of drafted rows alone, for what all rows have in common changes nothing.
    """
    rows, fuse = head.rows, head.fuse

    def changed(
        states: Tensor,
        next_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        is_drafted = past_key_values is not None and past_key_values.get_seq_length() > 0
        if position_ids is not None and is_drafted:
            position_ids = position_ids + positions
        return rows(states, next_ids.roll(-tokens, 1), position_ids, attention_mask, past_key_values)

    with replaced(head, rows=changed, fuse=lambda states: fuse(states).roll(-features, 1)):
        yield


@contextmanager
def shifted_features(heads: MTPHeads, by: int) -> Iterator[None]:
    """Let heads at position t read the features of position t + `by`."""
    features = heads.features
    with replaced(heads, features=lambda *args, **kwargs: features(*args, **kwargs).roll(-by, 1)):
        yield


@contextmanager
def replaced(owner: object, **values: Any) -> Iterator[None]:
    """Set attributes of an object, and put back what was there."""
    held = vars(owner)
    known = {name: held[name] for name in values if name in held}
    held.update(values)
    try:
        yield
    finally:
        for name in values:
            del held[name]
        held.update(known)


def _shifts_of_eagle(head: EagleHead) -> Iterator[Trial]:
    for by in (-1, 1):
        yield Trial("feature shift", f"features of {_off(by)}", lambda by=by: shifted_rows(head, features=by), by > 0)
        yield Trial("token shift", f"tokens of {_off(by)}", lambda by=by: shifted_rows(head, tokens=by), by > 0)
        if head.config.mask_token_id is None:
            where = f"positions of drafted rows {'one less' if by < 0 else 'one more'}"
            yield Trial("positions", where, lambda by=by: shifted_rows(head, positions=by))


def _shifts_of_heads(heads: MTPHeads) -> Iterator[Trial]:
    for by in (-1, 1):
        yield Trial("feature shift", f"states of {_off(by)}", lambda by=by: shifted_features(heads, by), by > 0)


def _off(by: int) -> str:
    return "the place before" if by < 0 else "the place after"


def _layers(head: EagleHead) -> Iterator[Trial]:
    """Yield other hidden states than those that the head reads: all one lower or higher, the official choice, and the
    same ones in another order."""
    if not head.config.num_aux:
        return
    count = head.backbone.config.get_text_config().num_hidden_layers
    now = resolved_aux_layers(head.config, count)
    found = [[index + by for index in now] for by in (-1, 1)]
    found += [default_aux_layers(count), *map(list, permutations(now))] if len(now) == 3 else [now[::-1]]
    for layers in found:
        if layers != now and all(0 <= index <= count for index in layers):
            yield Trial(
                "layer ids", f"aux_layers={layers}", lambda layers=layers: replaced(head.config, aux_layers=layers)
            )


def _norms(head: EagleHead) -> Iterator[Trial]:
    if head.config.version != 3:
        return
    output, residual = not head.config.norm_output, not head.config.norm_before_residual
    yield Trial("norms", f"norm_output={output}", lambda: replaced(head.config, norm_output=output))
    first = head.layers[0]
    words = f"norm_before_residual={residual}"
    yield Trial("norms", words, lambda: replaced(first, norm_before_residual=residual))
