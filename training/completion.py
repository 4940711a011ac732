"""`tokenahead generate`: the completion of one prompt by any checkpoint, streamed. Knows no training."""

from __future__ import annotations

from typing import Any

from transformers import TextStreamer
from transformers.utils import logging

from ..generation.attach import MTPGenerationMixin
from ..generation.call.sequences import acceptance_by_position
from .evaluation.decoding import GREEDY, DecodingMode, decode, named_method, plain_method
from .evaluation.prompts import Prompt, PromptEncoder
from .loading import load_model, unit_of
from .requests import GenerateRequest


def complete(request: GenerateRequest, shows: bool = False) -> dict[str, Any]:
    """Complete a prompt, and with `shows` stream it; return the text without its prompt, counts and times, for JSON.

    `accepted_by_position` are the shares of verifications that accept at least 1, 2, ... drafts.
    """
    logging.disable_progress_bar()
    model, tokenizer = load_model(request.model, request.dtype, request.device)
    spec, mode = request.method(), GREEDY
    if spec is None and not request.plain and isinstance(model, MTPGenerationMixin):
        spec = "own"
    method = named_method(spec, model) if spec else plain_method(model)
    if request.num_assistant_tokens is not None:
        method.options["num_assistant_tokens"] = request.num_assistant_tokens
    if shows:
        method.options["streamer"] = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    writer = PromptEncoder(tokenizer, request.chat, not request.no_thinking)
    writer.warn_of_thinking([method.drafter])
    batch = writer.batch([Prompt("", (request.prompt or "",))], [[]], model.device)
    count = batch["input_ids"].numel()
    if not count:
        raise ValueError("the prompt is empty, and this model's tokenizer adds nothing to it; write at least one word")
    if request.temperature != 0 and (request.temperature, request.top_k, request.top_p) != (None, None, None):
        chosen = {"temperature": request.temperature or 1.0, "top_k": request.top_k or 0, "top_p": request.top_p or 1.0}
        mode = DecodingMode("sampled", {"do_sample": True, **chosen})
    run = decode(method, batch, mode, request.max_new_tokens, request.seed)
    (accepted,), (drafted,) = run.accepted or [[]], run.drafted or [[]]
    return {
        "text": str(tokenizer.decode(run.ids[0], skip_special_tokens=True)),
        "unit": unit_of(tokenizer),
        "prompt_tokens": count,
        "new_tokens": run.new_tokens,
        "seconds": run.seconds,
        "backbone_calls": run.forwards,
        "accepted_by_position": acceptance_by_position(accepted, max(drafted)) if drafted else [],
        "tokens_per_second": run.new_tokens / run.seconds,
        "tokens_per_call": run.new_tokens / run.forwards,
    }


def statistics(done: dict[str, Any]) -> str:
    """Return what `complete` says of a completion in one line for a person."""
    unit, drafts = done["unit"], f"one {done['unit']} per backbone call"
    if done["accepted_by_position"]:
        drafts = f"{done['backbone_calls']} backbone calls, {done['tokens_per_call']:.2f} {unit}s per call"
    speed = f"{done['seconds']:.2f} s, {done['tokens_per_second']:,.0f} {unit}s/s"
    return f"{done['new_tokens']} {unit}s in {speed}; {drafts}"
