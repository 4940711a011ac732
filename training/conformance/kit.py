"""Whether a decoding function keeps the text of its model: greedy texts are equal, and sampled ones drawn alike.

All models are small and in float64, so that nothing but a fault tells two greedy texts apart. Sampled texts are
compared with their exact distribution, which is enumerated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..utils import one_line
from .decoders import DECODERS, Decoder, MakesModel, plain, small_model
from .distributions import Distribution, continuation_distribution, continuation_p_value
from .letters import letters

KEPT, BROKEN, REFUSED = "kept", "BROKEN", "refused"
"""Results of a check; a refused one raised an error."""
ALARM = 1e-6
"""p-values below it are faults: a right loop meets one in a million."""
_Options = Mapping[str, Any]
_Seen = tuple[str, str, float | None]
"""Of a check: result, words, p-value."""
_NEW, _DRAWN = 16, 3
_PROMPT = torch.tensor([[1, 4, 2, 5, 1, 4]])
_SAMPLED: Mapping[str, dict[str, Any]] = {
    "sampled": {"temperature": 1.0, "top_k": 0},
    "sampled, warped": {"temperature": 0.6, "top_k": 4},
    "sampled, processors": {"temperature": 1.2, "top_k": 0, "repetition_penalty": 1.5},
}


@dataclass(frozen=True)
class Verified:
    """What a check found.

    Attributes:
        check: Its name.
        result: `"kept"`, `"BROKEN"` or `"refused"`.
        words: What differs, or why it was refused.
        p_value: Of sampled texts.
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


def verify(decode: Decoder, samples: int = 4000, seed: int = 0) -> list[Verified]:
    """Return what a decoding function keeps.

    Args:
        decode: See `Decoder`.
        samples: Texts that are drawn for each distribution; a quarter of them where batches are refused.
        seed: Of the samples.

    Example:
        >>> from tokenahead.testing import verify
        >>> all(found.result == "kept" for found in verify(my_decoding_function))
    """
    greedy, checks, sampled = _small_models(getattr(decode, "small_model", small_model))
    return [*_compared(decode, greedy, checks), *_drawn(decode, sampled, samples, seed)]


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


def _compared(decode: Decoder, model: PreTrainedModel, checks: Mapping[str, list[_Call]]) -> list[Verified]:
    """Return what a decoding function keeps of known greedy texts."""
    return [_checked(check, partial(_differing, decode, model, calls)) for check, calls in checks.items()]


@cache
def _small_models(make_model: MakesModel) -> tuple[PreTrainedModel, dict[str, list[_Call]], PreTrainedModel]:
    """Return the model of greedy checks, their calls, and the model of sampled ones; made once."""
    greedy = make_model(1, 8)
    return greedy, _greedy_checks(greedy, None, plain), make_model(3, 6)


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


def _drawn(decode: Decoder, model: PreTrainedModel, samples: int, seed: int) -> Iterator[Verified]:
    """Yield the checks of sampled texts."""
    for check, (options, want) in _sampled_checks(model).items():
        torch.manual_seed(seed)
        yield _checked(check, partial(_deviating, decode, model, options, want, samples))


@cache
def _sampled_checks(model: PreTrainedModel) -> dict[str, tuple[_Options, Distribution]]:
    """Return the options of every check, and the exact distribution of its texts."""
    fixed = {"max_new_tokens": _DRAWN, "do_sample": True, "top_p": 1.0, "pad_token_id": 0}
    return {
        check: (fixed | warps, continuation_distribution(model, _PROMPT, _DRAWN, **warps))
        for check, warps in _SAMPLED.items()
    }


def _deviating(decode: Decoder, model: PreTrainedModel, options: _Options, want: Distribution, samples: int) -> _Seen:
    """Return how likely drawn texts are: in one batch, or one by one, and fewer, where batches are refused."""
    try:
        drawn = _decoded(decode, model, _PROMPT.expand(samples, -1), options)
    except (ValueError, NotImplementedError):
        drawn = torch.cat([_decoded(decode, model, _PROMPT, options) for _ in range(samples // 4)])
    drawn = drawn[:, _PROMPT.shape[1] :]
    if drawn.shape[1] != _DRAWN:
        return BROKEN, f"texts have {drawn.shape[1]} new tokens, not {_DRAWN}", None
    p_value = continuation_p_value(drawn, want)
    return KEPT if p_value >= ALARM else BROKEN, f"p = {p_value:.1g}, of {len(drawn)} texts", p_value


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
    except Exception as error:  # of a stranger's function
        return Verified(check, REFUSED, f"{type(error).__name__}: {one_line(error)}")
    return Verified(check, result, words, p_value)


def _allowed(size: int, row: int, ids: Tensor) -> list[int]:
    return [1 + row, 2 + (int(ids[-1]) + row) % (size - 2)]


def _prompt(length: int, size: int) -> Tensor:
    return torch.randint(1, size, (1, length), generator=torch.Generator().manual_seed(length))


def _padded(rows: list[Tensor]) -> Tensor:
    width = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
