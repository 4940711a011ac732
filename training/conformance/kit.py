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
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..utils import one_line
from .decoders import DECODERS, Decoder, MakesModel, plain, small_model
from .letters import letters
from .sampled import ALARM, LAST, VOCABULARY, CoarseTests, Damping, Follows, Law, plain_probabilities, verdict_of

KEPT, BROKEN, REFUSED = "kept", "BROKEN", "refused"
"""Results of a check; a refused one raised an error."""
_Options = Mapping[str, Any]
_Seen = tuple[str, str, float | None]
"""Of a check: result, words, p-value."""
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
    """What a check found.

    Attributes:
        check: Its name.
        result: `"kept"`, `"BROKEN"` or `"refused"`.
        words: What differs, or why it was refused.
        p_value: Of sampled texts, corrected for the number of tests.
    """

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


@dataclass(frozen=True)
class _Call:
    """A greedy call: prompts, options of `generate`, and the text of plain decoding."""

    ids: Tensor
    options: _Options
    want: Tensor


def verify(decode: Decoder, samples: int = 4000, seed: int = 0, longest_draft: int = 6) -> list[Verified]:
    """Return what a decoding function keeps.

    A `NotImplementedError` or `ValueError` of the function is a refusal, any other error a fault.

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


def verify_all(decoders: Mapping[str, Decoder] = DECODERS, samples: int = 4000) -> dict[str, list[Verified]]:
    """Return what each of several decoding functions keeps, by name."""
    return {name: verify(decode, samples) for name, decode in decoders.items()}


def verify_greedy(
    decode: Decoder,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reference: Decoder = plain,
) -> list[Verified]:
    """Return what a decoding function keeps of the greedy texts of a model.

    Args:
        decode: See `Decoder`.
        model: One whose numbers are precise enough that rounding decides no token.
        tokenizer: Of stop strings; `letters` by default.
        reference: Writes the model's plain texts.
    """
    return _compared(decode, model, _greedy_checks(model, tokenizer, reference))


def verify_sampled(
    decode: Decoder, samples: int = 4000, seed: int = 0, longest_draft: int = 6, checks: Sequence[str] | None = None
) -> list[Verified]:
    """Return what a decoding function keeps of sampled texts; arguments as for `verify`, and the names of checks."""
    _, _, model, steady = _small_models(getattr(decode, "small_model", small_model))
    found = []
    for check, calls in sampled_checks().items():
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
    """Return a copy whose probabilities hardly depend on the text.

    Those of a drafter that resembles it do not either: what a fault at a place of the block adds to a token's
    probability then has one sign in all texts, and adds up.
    """
    copied, draws = copy.deepcopy(model), torch.Generator().manual_seed(3)
    made: Any = copied
    embeddings, unembedding = made.get_input_embeddings().weight, made.get_output_embeddings().weight
    common = torch.randn(embeddings.shape[1], generator=draws).sign().to(embeddings)
    embeddings.mul_(20 / embeddings.std()).add_(100 * common)
    unembedding.mul_(0.3)
    return copied


def _greedy_checks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, reference: Decoder
) -> dict[str, list[_Call]]:
    """Return the calls of every check, with their plain texts: of one prompt, and of a ragged batch."""
    size = model.config.get_text_config().vocab_size
    tokenizer, rows = tokenizer or letters(size), [_prompt(length, size) for length in (7, 3, 12, 5)]
    batch = _padded(rows)

    def call(ids: Tensor, own: _Options) -> _Call:
        options = {"max_new_tokens": _NEW, "do_sample": False, "pad_token_id": 0, **own}
        return _Call(ids, options, reference(model, ids, attention_mask=(ids > 0).long(), **options))

    checks = {
        "greedy": [call(row, {}) for row in rows], "padded prompt": [call(batch[1:2], {})],
        "ragged batch": [call(batch, {})],
    }  # fmt: skip
    first, second = (each.want[0, -_NEW:].tolist() for each in checks["greedy"][:2])
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
    for call in calls:
        got, want, start = _decoded(decode, model, call.ids, call.options), call.want, call.ids.shape[1]
        if not got.equal(want):
            width = min(got.shape[1], want.shape[1])
            odd = (got[:, :width] != want[:, :width]).any(0).nonzero()[:, 0].tolist()
            return BROKEN, f"differs from new token {(odd or [width])[0] - start + 1} on", None
    return KEPT, "", None


def sampled_checks() -> dict[str, list[tuple[Tensor, _Options]]]:
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
    calls: dict[str, list[tuple[Tensor, _Options]]] = {
        check: [(one, options | own) for own in each] for check, each in asked.items()
    }
    return calls | {
        PLACES: [(_PROMPTS[:1, -2:], options | {"temperature": each}) for each in (2.5, 5.0)],
        "sampled, ragged batch": [(_PROMPTS, options | {"max_new_tokens": 24})],  # of many cycles
        "sampled, eos": [(_PROMPTS, options | {"eos_token_id": end}) for end in (3, [0, 3])],
    }


def _deviating(
    decode: Decoder, model: PreTrainedModel, calls: Sequence[tuple[Tensor, _Options]], samples: int, length: int
) -> _Seen:
    """Return how likely drawn texts are: in one batch, or one by one, and fewer, where batches are refused."""

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
    """Add the texts of a call.

    Raises:
        _Fault: They are longer or shorter than was asked, or go on behind their end, or tests have 16 bits.
    """
    with CoarseTests() if "logits_processor" in options else nullcontext() as tests:
        found, width, length = _decoded(decode, model, ids, options), ids.shape[1], options["max_new_tokens"]
    if tests is not None and tests.found:
        raise _Fault("drafts are accepted by numbers of 16 bits")
    ends = torch.tensor(options.get("eos_token_id", [])).flatten().long()  # [E]
    is_end = torch.isin(found[:, width:], ends)  # [B, T]
    counted = is_end.cumsum(1) - is_end.long() == 0  # up to the end, itself included
    rest = torch.where(counted, options["pad_token_id"], found[:, width:])
    is_whole = found.shape[1] == width + length or (found.shape[1] < width + length and is_end.any(1).all())
    if not is_whole:
        raise _Fault(f"texts have {found.shape[1] - width} new tokens, not {length}")
    if not bool((rest == options["pad_token_id"]).all()):
        raise _Fault("texts go on behind their end")
    law.add(found, width, counted, plain_probabilities(model, found, width, options))


class _Fault(Exception):
    """What a text shows by itself."""


def _decoded(decode: Decoder, model: PreTrainedModel, ids: Tensor, options: _Options) -> Tensor:
    """Return what a function writes.

    Raises:
        TypeError: It returns something else than prompts and texts.
    """
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


def _prompt(length: int, size: int) -> Tensor:
    return torch.randint(1, size, (1, length), generator=torch.Generator().manual_seed(length))


def _padded(rows: list[Tensor]) -> Tensor:
    width = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
