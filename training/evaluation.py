"""Measuring: bits per byte on held-out text, and decoding with and without drafts, side by side.

Knows models, tokenizers and prompts; does not know how the figures are shown.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..generation.statistics import Speculation
from ..model_cards import DecodingResult
from .data import ByteWindows


@dataclass(frozen=True)
class DecodingMode:
    """A way of decoding.

    Attributes:
        name: What the table calls it.
        options: Keyword arguments of `generate`.
    """

    name: str
    options: dict[str, Any]

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn; then two runs have the same law, not the same tokens."""
        return bool(self.options.get("do_sample"))


def sampled(temperature: float) -> DecodingMode:
    """Sampling from the whole law: transformers' default `top_k=50` is switched off."""
    options = {"do_sample": True, "temperature": float(temperature), "top_k": 0}
    return DecodingMode(f"sampled, T={temperature:g}", options)


GREEDY = DecodingMode("greedy", {"do_sample": False})
"""The most probable token at every position."""


@dataclass(frozen=True)
class Completion:
    """What a model wrote after a prompt.

    Attributes:
        prompt: The prompt.
        ids: New ids.
        drafted: For each new id, whether it was drafted and accepted; else the verifier added it.
        difference: Where speculative and plain greedy ids part, in words; None where they do not or were not compared.
    """

    prompt: str
    ids: list[int]
    drafted: list[bool]
    difference: str | None = None


@dataclass(frozen=True)
class Comparison:
    """A way of decoding, measured with and without drafts on the same prompts.

    Attributes:
        mode: The way of decoding.
        result: Counts and times.
        completions: The speculative runs, one per prompt.
        accepted_by_position: For draft positions 1, 2, ...: the share of drafts accepted up to there, over all prompts.
    """

    mode: DecodingMode
    result: DecodingResult
    completions: list[Completion]
    accepted_by_position: list[float]


@torch.inference_mode()
def bits_per_byte(model: PreTrainedModel, windows: ByteWindows, limit: int, batch_size: int = 16) -> list[float]:
    """Cross-entropy of every head on windows spread evenly over a text.

    Args:
        model: A model with `head_losses`.
        windows: The text.
        limit: Windows to use, at most.
        batch_size: Windows per forward.

    Returns:
        Bits per byte of head 1, 2, ... (head j predicts the byte j ahead).
    """
    chosen = range(0, len(windows), -(-len(windows) // limit))
    total = 0.0
    for batch in torch.tensor(chosen).split(batch_size):
        ids = torch.stack([windows[int(index)]["input_ids"] for index in batch]).to(model.device)
        losses = model(ids, labels=ids, use_cache=False, logits_to_keep=1).head_losses
        total = total + losses * len(batch)
    return (total / len(chosen) / math.log(2)).tolist()


def compare_decoding(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    mode: DecodingMode,
    new_tokens: int,
    seed: int = 0,
) -> Comparison:
    """Completes every prompt plainly and speculatively, in turn, so that a busy machine slows both alike.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompts: Texts to complete.
        mode: How.
        new_tokens: Tokens per completion, at most.
        seed: Of the sampled runs.

    Returns:
        Counts, times and texts.
    """
    plain, speculative = _Runs(), _Runs()
    completions = []
    _complete(model, tokenizer, prompts[0], mode, 8)  # the first call also sets things up, and is not measured
    for index, prompt in enumerate(prompts):
        torch.manual_seed(seed + index)
        expected = plain.add(_complete(model, tokenizer, prompt, mode, new_tokens, use_mtp=False))
        output = speculative.add(_complete(model, tokenizer, prompt, mode, new_tokens))
        ids = output.new_ids
        drafted = drafted_flags(output.speculation.accepted, len(ids))
        difference = None if mode.is_sampled else _difference(model, tokenizer, prompt, expected.new_ids, ids)
        completions.append(Completion(prompt, ids, drafted, difference))
    result = DecodingResult(
        name=mode.name,
        do_sample=mode.is_sampled,
        backbone_calls=speculative.speculation.backbone_calls,
        new_tokens=speculative.new_tokens,
        seconds=speculative.seconds,
        plain_seconds=plain.seconds,
        identical=None if mode.is_sampled else all(completion.difference is None for completion in completions),
        plain_new_tokens=plain.new_tokens,
    )
    return Comparison(mode, result, completions, speculative.speculation.accepted_by_position)


def drafted_flags(accepted: list[int], count: int) -> list[bool]:
    """Which of `count` new tokens were drafted and accepted.

    The prefill adds one token; each verification then gives its accepted drafts and one token of the verifier's own.
    The last verification may have been cut short.

    Args:
        accepted: Accepted drafts of each verification (`Speculation.accepted` of one row).
        count: New tokens.

    Example:
        >>> drafted_flags([2, 0], 5)
        [False, True, True, False, False]
    """
    flags = [False]
    for drafts in accepted:
        flags += [True] * drafts + [False]
    return flags[:count]


@dataclass(frozen=True)
class _Run:
    """One call of `generate` for one prompt."""

    new_ids: list[int]
    seconds: float
    speculation: Speculation | None


class _Runs:
    """Sums over the prompts."""

    def __init__(self) -> None:
        self.seconds, self.new_tokens = 0.0, 0
        self.speculation = Speculation([], [])

    def add(self, run: _Run) -> _Run:
        self.seconds += run.seconds
        self.new_tokens += len(run.new_ids)
        if run.speculation is not None:
            self.speculation.rows_accepted += run.speculation.rows_accepted
            self.speculation.rows_drafts += run.speculation.rows_drafts
            self.speculation.backbone_calls += run.speculation.backbone_calls
        return run


def _complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    mode: DecodingMode,
    new_tokens: int,
    use_mtp: bool | None = None,
) -> _Run:
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    started = time.perf_counter()
    output = model.generate(
        **inputs, **mode.options, max_new_tokens=new_tokens, use_mtp=use_mtp, return_dict_in_generate=True
    )
    ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return _Run(ids, time.perf_counter() - started, getattr(output, "speculation", None))


def _difference(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, expected: list[int], got: list[int]
) -> str | None:
    """Where two greedy runs part, and how nearly the two tokens were tied there; None where they are the same."""
    if expected == got:
        return None
    pairs = enumerate(zip(expected, got))
    index = next((i for i, (one, other) in pairs if one != other), min(len(expected), len(got)))
    if index >= min(len(expected), len(got)):
        return f"one ended after {index} tokens, the other went on"
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    scores = model.generate(
        **inputs,
        **GREEDY.options,
        max_new_tokens=index + 1,
        use_mtp=False,
        output_logits=True,
        return_dict_in_generate=True,
    ).logits[index][0]
    gap = float(scores[expected[index]] - scores[got[index]])
    return f"token {index + 1} is {got[index]} and not {expected[index]}, whose logit is higher by {gap:.2g}"
