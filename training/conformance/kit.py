"""Whether a decoding function keeps the text of its model: greedy texts are equal, and sampled ones drawn alike.

All models are small and in float64, so that nothing but a fault tells two greedy texts apart. Sampled texts are
compared with their exact distribution, which is enumerated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from ..utils import one_line
from .decoders import DECODERS, Decoder, plain, small_model
from .distributions import continuation_distribution, continuation_p_value
from .letters import letters

KEPT, BROKEN, REFUSED = "kept", "BROKEN", "refused"
"""Results of a check; a refused one raised an error."""
ALARM = 1e-6
"""p-values below it are faults: a right loop meets one in a million."""
_NEW, _DRAWN, _BATCH = 24, 3, 500
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


def verify(decode: Decoder, samples: int = 4000, seed: int = 0) -> list[Verified]:
    """Return what a decoding function keeps.

    Args:
        decode: See `Decoder`.
        samples: Texts that are drawn for each distribution.
        seed: Of the samples.

    Example:
        >>> from tokenahead.testing import verify
        >>> all(found.result == "kept" for found in verify(my_decoding_function))
    """
    return [*_greedy(decode), *_drawn(decode, samples, seed)]


def verify_all(decoders: Mapping[str, Decoder] = DECODERS, samples: int = 4000) -> dict[str, list[Verified]]:
    """Return what each of several decoding functions keeps, by name."""
    return {name: verify(decode, samples) for name, decode in decoders.items()}


def _greedy(decode: Decoder) -> Iterator[Verified]:
    """Yield the checks of greedy texts."""
    model = small_model(1, 24)
    tokenizer, rows = letters(24), [_prompt(length, 24) for length in (7, 3, 12, 5)]
    text = plain(model, rows[0], max_new_tokens=_NEW, do_sample=False)[0, rows[0].shape[1] :].tolist()
    calls: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
        "greedy": (rows, {}),
        "ragged batch": ([_padded(rows)], {}),
        "eos": (rows, {"eos_token_id": text[5]}),
        "eos, ragged batch": ([_padded(rows)], {"eos_token_id": [text[5], text[9]]}),
        "stop strings": (rows[:1], {"stop_strings": [tokenizer.decode(text[4:6])], "tokenizer": tokenizer}),
        "processors": (rows, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}),
        "user's processor": (rows, {"logits_processor": [Favouring()]}),
    }
    for check, (prompts, options) in calls.items():
        yield _checked(check, lambda prompts=prompts, options=options: _differing(decode, model, prompts, options))


def _differing(decode: Decoder, model: PreTrainedModel, prompts: list[Tensor], options: dict[str, Any]) -> str:
    """Return how greedy texts differ from plain ones; an empty string where they do not."""
    options = {"max_new_tokens": _NEW, "do_sample": False, "pad_token_id": 0} | options
    for ids in prompts:
        mask = (ids > 0).long()
        want = plain(model, ids, attention_mask=mask, **options)
        got = decode(model, ids, attention_mask=mask, **options)
        if not got.equal(want):
            width = min(got.shape[1], want.shape[1])
            odd = (got[:, :width] != want[:, :width]).any(0).nonzero()[:, 0].tolist()
            return f"differs from new token {(odd or [width])[0] - ids.shape[1] + 1} on"
    return ""


def _drawn(decode: Decoder, samples: int, seed: int) -> Iterator[Verified]:
    """Yield the checks of sampled texts."""
    model, prompt = small_model(3), torch.tensor([[1, 4, 2, 5, 1, 4]])
    for check, warps in _SAMPLED.items():
        torch.manual_seed(seed)
        want = continuation_distribution(model, prompt, _DRAWN, **warps)
        options = {"max_new_tokens": _DRAWN, "do_sample": True, "top_p": 1.0, "pad_token_id": 0} | warps
        try:
            drawn = _samples(decode, model, prompt, samples, options)
        except (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError) as error:
            yield Verified(check, REFUSED, one_line(error))
            continue
        if drawn.shape[1] != _DRAWN:
            yield Verified(check, BROKEN, f"texts have {drawn.shape[1]} new tokens, not {_DRAWN}")
            continue
        p_value = continuation_p_value(drawn, want)
        words = f"p = {p_value:.1g}, of {len(drawn)} texts"
        yield Verified(check, KEPT if p_value >= ALARM else BROKEN, words, p_value)


def _samples(decode: Decoder, model: PreTrainedModel, prompt: Tensor, samples: int, options: dict[str, Any]) -> Tensor:
    """Return drawn texts [N, T]: by batches, or one by one, and fewer, where batches are refused."""
    try:
        parts = [_call(decode, model, prompt.expand(_BATCH, -1), options) for _ in range(max(1, samples // _BATCH))]
    except (ValueError, NotImplementedError):
        parts = [_call(decode, model, prompt, options) for _ in range(samples // 4)]
    return torch.cat(parts)[:, prompt.shape[1] :]


def _call(decode: Decoder, model: PreTrainedModel, ids: Tensor, options: dict[str, Any]) -> Tensor:
    return decode(model, ids, attention_mask=torch.ones_like(ids), **options)


def _checked(check: str, differing: Callable[[], str]) -> Verified:
    try:
        words = differing()
    except (ValueError, TypeError, NotImplementedError, AttributeError, RuntimeError) as error:
        return Verified(check, REFUSED, one_line(error))
    return Verified(check, BROKEN if words else KEPT, words)


def _prompt(length: int, size: int) -> Tensor:
    return torch.randint(1, size, (1, length), generator=torch.Generator().manual_seed(length))


def _padded(rows: list[Tensor]) -> Tensor:
    width = max(row.shape[1] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
