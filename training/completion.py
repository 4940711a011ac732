"""`tokenahead generate`: the completion of one prompt by any checkpoint, streamed. Knows no training."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import TextStreamer
from transformers.utils import logging

from ..generation.attach import MTPGenerationMixin
from .evaluation.decoding import GREEDY, DecodingMode, Row, acceptance_by_position, decode
from .evaluation.methods import named_method, plain_method
from .evaluation.prompts import Prompt, PromptEncoder
from .loading import load_model, unit_of
from .requests import GenerateRequest


@dataclass(frozen=True)
class Completed:
    """A completion without its prompt, the unit of the model's tokens (`"byte"` or `"token"`), counts and times."""

    text: str
    unit: str
    prompt_tokens: int
    run: Row

    @property
    def accepted_by_position(self) -> list[float]:
        """Share of verifications that accept at least 1, 2, ... drafts; empty where nothing was drafted."""
        (accepted,), (drafted,) = self.run.accepted or [[]], self.run.drafted or [[]]
        return acceptance_by_position(accepted, max(drafted)) if drafted else []

    def statistics(self) -> str:
        """Return one line for a person."""
        count, seconds, calls = self.run.new_tokens, self.run.seconds, self.run.forwards
        drafts = f"{calls} backbone calls, {count / calls:.2f} {self.unit}s per call"
        drafts = drafts if self.run.accepted else f"one {self.unit} per backbone call"
        return f"{count} {self.unit}s in {seconds:.2f} s, {count / seconds:,.0f} {self.unit}s/s; {drafts}"

    def as_dict(self) -> dict[str, object]:
        """Return values for a JSON object."""
        count, seconds, calls = self.run.new_tokens, self.run.seconds, self.run.forwards
        said = {"text": self.text, "unit": self.unit, "prompt_tokens": self.prompt_tokens, "new_tokens": count}
        counts = {"seconds": seconds, "backbone_calls": calls, "accepted_by_position": self.accepted_by_position}
        return {**said, **counts, "tokens_per_second": count / seconds, "tokens_per_call": count / calls}


def complete(request: GenerateRequest, shows: bool = False) -> Completed:
    """Complete a prompt, and with `shows` stream it to the standard output.

    Raises:
        OSError: No such directory, one without a config, weights or tokenizer, or a name that the Hub cannot give.
        ValueError: A checkpoint that is not whole, or no language model; heads of another model; a prompt that is too
            long; a missing device; an option that does not apply to this model.
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
    return Completed(str(tokenizer.decode(run.ids[0], skip_special_tokens=True)), unit_of(tokenizer), count, run)
