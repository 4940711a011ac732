"""Whether a decoding function keeps the text of its model: greedy texts are equal, and sampled ones drawn alike.

All models are small and in float64, so that nothing but a fault tells two greedy texts apart. Sampled texts are
compared with the probabilities of every token of theirs (`sampled`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ...generation.backbone.wrapped_models import untyped
from ..utils import one_line
from .decoders import Decoder, MakesModel, letters, plain, small_model
from .sampled import ALARM, LAST, VOCABULARY, CoarseTests, Damping, Follows, Law, plain_probabilities, verdict_of

KEPT, BROKEN, REFUSED = "kept", "BROKEN", "refused"
"""Results of a check; a refused one raised an error."""
_Options = Mapping[str, Any]
_Seen = tuple[str, str, float | None]
"""Of a check: result, words, p-value."""
_Call = tuple[Tensor, _Options, Tensor]
"""A greedy call: prompts, options of `generate`, and the text of plain decoding."""
_NEW = 16
_PROMPTS = torch.tensor(
    [[1, 2, 1, 1, 2, 1, LAST], [0, 0, 0, 0, 1, 1, LAST], [2, 1, 1, 2, 1, 1, LAST], [0, 1, 2, 1, 1, 1, LAST]]
)
"""Of sampled texts, padded on the left; two of the tokens are in none of them, so that penalties find them new."""
PLACES = "sampled, places"
_SHARES = {"sampled": 1.0, PLACES: 4.0, "sampled, precision": 1.0, "sampled, processors": 1.0}
"""Texts of a check, as a share of those that are asked for; a quarter of other checks, whose faults are larger."""
_BATCH = 1000
_FEWER = 16
"""Texts that are drawn one by one are fewer by this factor."""


@dataclass(frozen=True)
class Verified:
    """What a check found: its result, `"kept"`, `"BROKEN"` or `"refused"`, what differs, or why it was refused, and the
    p-value of sampled texts, corrected for the number of tests."""

    check: str
    result: str
    words: str = ""
    p_value: float | None = None


class Favouring(LogitsProcessor):
    """A user's processor, which knows rows and lengths."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Favour one token in three."""
        rows = torch.arange(len(input_ids), device=scores.device)[:, None]
        liked = (input_ids[:, -1:] + rows + input_ids.shape[1]) % 3
        return scores + (torch.arange(scores.shape[1], device=scores.device) % 3 == liked) * 1.5


def verify(decode: Decoder, samples: int = 4000, seed: int = 0, longest_draft: int = 6) -> list[Verified]:
    """Return what a decoding function keeps; its `NotImplementedError` or `ValueError` refuse, other errors are faults.

    Args:
        decode: See `Decoder`.
        samples: Texts that are drawn for `"sampled"`, four times as many for `"sampled, places"`, and mostly a quarter
            for other checks; more where they are suspect, a sixteenth of them where batches are refused.
        seed: Of the samples.
        longest_draft: Of the function, in tokens; sampled texts are longer by three, so that a whole draft is kept, and
            others follow it.

    Example:
        >>> from tokenahead.testing import verify
        >>> all(found.result == "kept" for found in verify(my_decoding_function))
    """
    greedy, checks, *_ = _small_models(getattr(decode, "small_model", small_model))
    return [*_compared(decode, greedy, checks), *verify_sampled(decode, samples, seed, longest_draft)]


def verify_greedy(
    decode: Decoder,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reference: Decoder = plain,
) -> list[Verified]:
    """Return what a decoding function keeps of the greedy texts of a model in whose dtype rounding decides no token.

    `tokenizer` is that of stop strings, `letters` by default, and `reference` writes the model's plain texts.
    """
    return _compared(decode, model, _greedy_checks(model, tokenizer, reference))


def verify_sampled(
    decode: Decoder, samples: int = 4000, seed: int = 0, longest_draft: int = 6, checks: Sequence[str] | None = None
) -> list[Verified]:
    """Return what a decoding function keeps of sampled texts; arguments as for `verify`, and the names of checks."""
    _, _, model, steady = _small_models(getattr(decode, "small_model", small_model))
    found = []
    for check, calls in _sampled_checks().items():
        if checks is None or check in checks:
            torch.manual_seed(seed)
            source, count = steady if check == PLACES else model, int(samples * _SHARES.get(check, 0.25))
            found.append(_checked(check, partial(_deviating, decode, source, calls, count, longest_draft + 3)))
    return found


def _compared(decode: Decoder, model: PreTrainedModel, checks: Mapping[str, list[_Call]]) -> list[Verified]:
    """Return what a decoding function keeps of known greedy texts."""
    return [_checked(check, partial(_differing, decode, model, calls)) for check, calls in checks.items()]


@cache
def _small_models(
    make_model: MakesModel,
) -> tuple[PreTrainedModel, dict[str, list[_Call]], PreTrainedModel, PreTrainedModel]:
    """Return the model of greedy checks, their calls, and the two models of sampled ones; made once."""
    greedy, sampled = make_model(1, 8), make_model(14, VOCABULARY)
    return greedy, _greedy_checks(greedy, None, plain), sampled, _steady(sampled)


@torch.no_grad()
def _steady(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose probabilities, and those of a drafter that resembles it, hardly depend on the text.

    What a fault at a place of the block adds to a token's probability then has one sign in all texts, and adds up.
    """
    copied, draws = copy.deepcopy(model), torch.Generator().manual_seed(3)
    embeddings, unembedding = untyped(copied).get_input_embeddings().weight, untyped(copied).lm_head.weight
    common = torch.randn(embeddings.shape[1], generator=draws).sign().to(embeddings)
    embeddings.mul_(20 / embeddings.std()).add_(100 * common)
    unembedding.mul_(0.3)
    return copied


def _greedy_checks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, reference: Decoder
) -> dict[str, list[_Call]]:
    """Return the calls of every check, with their plain texts: of one prompt, and of a ragged batch."""
    size = model.config.get_text_config().vocab_size
    tokenizer, draws = tokenizer or letters(size), [(n, torch.Generator().manual_seed(n)) for n in (7, 3, 12, 5)]
    rows = [torch.randint(1, size, (1, length), generator=draw) for length, draw in draws]
    batch = pad_sequence([row[0] for row in rows], batch_first=True, padding_side="left")

    def call(ids: Tensor, own: _Options) -> _Call:
        options = {"max_new_tokens": _NEW, "do_sample": False, "pad_token_id": 0, **own}
        return ids, options, reference(model, ids, attention_mask=(ids > 0).long(), **options)

    checks = {
        "greedy": [call(row, {}) for row in rows], "padded prompt": [call(batch[1:2], {})],
        "ragged batch": [call(batch, {})],
    }  # fmt: skip
    first, second = (want[0, -_NEW:].tolist() for _, _, want in checks["greedy"][:2])
    stops = [first[3:5], second[-8:-4], first[9:11], second[-8:-3], first[5:8], second[-8:-2]]  # within drafts
    asked: dict[str, list[dict[str, Any]]] = {  # of the first and the second prompt by turns
        "few tokens": [{"max_new_tokens": count} for count in (1, 2, 3)],
        "eos": [{"eos_token_id": each} for each in (first[5], [second[2], second[6]], first[9], second[9])],
        "stop strings": [
            {"stop_strings": [tokenizer.decode(stop)], "tokenizer": tokenizer, "eos_token_id": size} for stop in stops
        ],  # transformers pads rows that have ended only where there is an eos: here one that never comes
        "processors": [
            {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}, {"min_new_tokens": 9, "eos_token_id": second[3]}
        ],
        "user's processor": [{"logits_processor": [Favouring()]}],
        "allowed tokens": [{"prefix_allowed_tokens_fn": partial(_allowed, size)}],
    }  # fmt: skip
    for check, options in asked.items():
        checks[check] = [call(rows[at % 2], own) for at, own in enumerate(options)]
        checks[f"{check}, ragged batch"] = [call(batch, own) for own in options[:2]]
    return checks


def _differing(decode: Decoder, model: PreTrainedModel, calls: Sequence[_Call]) -> _Seen:
    """Return how greedy texts differ from plain ones, if they do."""
    for ids, options, want in calls:
        got = _decoded(decode, model, ids, options)
        if not got.equal(want):
            width = min(got.shape[1], want.shape[1])
            odd = (got[:, :width] != want[:, :width]).any(0).nonzero()[:, 0].tolist()
            return BROKEN, f"differs from new token {(odd or [width])[0] - ids.shape[1] + 1} on", None
    return KEPT, "", None


def _sampled_checks() -> dict[str, list[tuple[Tensor, _Options]]]:
    """Return prompts and options of the calls of every check of sampled texts, among which texts are divided."""
    one, options = _PROMPTS[:1], {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    asked: dict[str, list[dict[str, Any]]] = {
        "sampled": [{}],
        "sampled, warped": [{"temperature": 0.6, "top_k": 3}],
        "sampled, top_p": [{"top_p": 0.7}],
        "sampled, other warpers": [{"min_p": 0.3}, {"typical_p": 0.7}, {"epsilon_cutoff": 0.15}, {"eta_cutoff": 0.3}],
        "sampled, processors": [{"repetition_penalty": 1.5}, {"min_new_tokens": 6, "eos_token_id": 3}],
        "sampled, user's processor": [{"logits_processor": [Favouring()]}],
        "sampled, constraint": [{"logits_processor": [Follows()]}],
        "sampled, precision": [{"logits_processor": [Damping()]}],
    }
    return {check: [(one, options | own) for own in each] for check, each in asked.items()} | {
        PLACES: [(_PROMPTS[:1, -2:], options | {"temperature": each}) for each in (2.5, 5.0)],
        "sampled, ragged batch": [(_PROMPTS, options | {"max_new_tokens": 24})],  # of many cycles
        "sampled, eos": [(_PROMPTS, options | {"eos_token_id": end}) for end in (3, [0, 3])],
    }


def _deviating(
    decode: Decoder, model: PreTrainedModel, calls: Sequence[tuple[Tensor, _Options]], samples: int, length: int
) -> _Seen:
    """Return how likely drawn texts are: in batches, or one by one, and fewer, where batches are refused."""

    def draw(law: Law, count: int) -> None:
        for prompts, own in calls:
            options = {"max_new_tokens": length, **own}
            rows = prompts.repeat(-(-count // len(calls) // len(prompts)), 1)  # [B, L]
            try:
                for part in rows.split(_BATCH):
                    _add_texts(law, decode, model, part, options)
            except (ValueError, NotImplementedError):
                for row in rows[: -(-len(rows) // _FEWER)]:
                    _add_texts(law, decode, model, row[None, int((row == 0).sum()) :], options)

    law = verdict_of(draw, VOCABULARY, samples)
    p_value, (anywhere, at_place) = law.p_value(), law.found_errors()
    words = (
        f"p = {p_value:.1g}, {law.num_texts} texts: finds errors from {anywhere:.1%} on, of one place {at_place:.1%}"
    )
    return KEPT if p_value >= ALARM else BROKEN, words, p_value


def _add_texts(law: Law, decode: Decoder, model: PreTrainedModel, ids: Tensor, options: _Options) -> None:
    """Add the texts of a call; refuse other lengths than were asked for, and what goes on behind its end."""
    with CoarseTests() if "logits_processor" in options else nullcontext() as tests:
        found, width, length = _decoded(decode, model, ids, options), ids.shape[1], options["max_new_tokens"]
    if tests is not None and tests.found:
        raise _Fault("drafts are accepted by numbers of 16 bits")
    ends = torch.tensor(options.get("eos_token_id", [])).flatten().long()  # [E]
    is_end = torch.isin(found[:, width:], ends)  # [B, T]
    counted = is_end.cumsum(1) - is_end.long() == 0  # up to the end, itself included
    rest = torch.where(counted, options["pad_token_id"], found[:, width:])
    if found.shape[1] > width + length or not (found.shape[1] == width + length or is_end.any(1).all()):
        raise _Fault(f"texts have {found.shape[1] - width} new tokens, not {length}")
    if not bool((rest == options["pad_token_id"]).all()):
        raise _Fault("texts go on behind their end")
    law.add(found, width, counted, plain_probabilities(model, found, width, options))


class _Fault(Exception):
    """What a text shows by itself."""


def _decoded(decode: Decoder, model: PreTrainedModel, ids: Tensor, options: _Options) -> Tensor:
    """Return the prompts and texts that a function writes."""
    found = decode(model, ids, attention_mask=(ids > 0).long(), **options)
    found = getattr(found, "sequences", found)
    if not isinstance(found, Tensor) or found.dim() != 2 or not found[:, : ids.shape[1]].equal(ids):
        raise TypeError("it must return the prompts and what follows them, ids [B, L + T]")
    return found


def _checked(check: str, look: Callable[[], _Seen]) -> Verified:
    try:
        result, words, p_value = look()
    except (NotImplementedError, ValueError) as error:
        return Verified(check, REFUSED, f"{type(error).__name__}: {one_line(error)}")
    except _Fault as error:
        return Verified(check, BROKEN, str(error), 0.0)
    except Exception as error:  # of a stranger's function
        return Verified(check, BROKEN, f"{type(error).__name__}: {one_line(error)}")
    return Verified(check, result, words, p_value)


def _allowed(size: int, row: int, ids: Tensor) -> list[int]:
    return [1 + row, 2 + (int(ids[-1]) + row) % (size - 2)]
