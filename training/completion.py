"""One prompt, any checkpoint, completed while the writer shows the bytes as they come. Knows no training."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.utils import logging

from ..configuration import EagleHeadConfig, MTPHeadConfig, PTPStudentConfig
from ..configuration.mtp_families import REFUSED, count_modules
from ..generation import Speculation
from ..modeling import DeepSeekMTP
from .byte_text import decode, encode, escaped, is_byte_level, streamer_for
from .checkpoints import adapters_for, base_of, has_adapters, is_hub_name, put_adapters, tokenizer_source

DRAFTERS = (MTPHeadConfig, EagleHeadConfig, PTPStudentConfig)
"""Configurations of drafters that stand apart from their backbones."""


@dataclass(frozen=True)
class Request:
    """Options of `tokenahead generate`, whose help says what each is, and the bytes to complete.

    Greedy, unless `temperature`, `top_k` or `top_p` asks for samples.
    """

    model: str
    prompt: bytes
    heads: str | None = None
    chat: bool = False
    dtype: str = "auto"
    device: str | None = None
    max_new_tokens: int = 256
    num_assistant_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    plain: bool = False

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `generate`."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "return_dict_in_generate": True}
        if self.num_assistant_tokens is not None:
            options["num_assistant_tokens"] = self.num_assistant_tokens
        if self.plain:
            options["use_mtp"] = False
        return options | self._sampling()

    def _sampling(self) -> dict[str, Any]:
        if self.temperature == 0 or (self.temperature is None and self.top_k is None and self.top_p is None):
            return {"do_sample": False}
        chosen = {"temperature": self.temperature or 1.0, "top_k": self.top_k or 0, "top_p": self.top_p or 1.0}
        return {"do_sample": True} | chosen


@dataclass(frozen=True)
class Completed:
    """A completion and what it cost.

    Attributes:
        data: The completion's bytes, without the prompt.
        unit: `"byte"` or `"token"`: what a token of this model is.
        prompt_tokens: Tokens of the prompt, special ones included.
        new_tokens: Tokens written.
        seconds: Time that `generate` took.
        backbone_calls: Forward passes of the backbone; None where nobody counted them.
        accepted_by_position: Share of verifications that accept at least 1, 2, ... drafts; empty where nothing
            was drafted.
    """

    data: bytes
    unit: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    backbone_calls: int | None
    accepted_by_position: list[float]

    @property
    def tokens_per_call(self) -> float | None:
        """New tokens per call of the backbone."""
        return self.new_tokens / max(1, self.backbone_calls) if self.backbone_calls is not None else None

    def statistics(self) -> str:
        """Return one line for a person."""
        speed = f"{self.new_tokens} {self.unit}s in {self.seconds:.2f} s, {self._speed():,.0f} {self.unit}s/s"
        if self.backbone_calls is None:
            return speed
        if not self.accepted_by_position:
            return f"{speed}; one {self.unit} per backbone call"
        return f"{speed}; {self.backbone_calls} backbone calls, {self.tokens_per_call:.2f} {self.unit}s per call"

    def as_dict(self) -> dict[str, Any]:
        """Return values for a JSON object; `base64` holds the bytes, `text` has U+FFFD where they are no UTF-8."""
        found = {"text": self.data.decode("utf-8", "replace"), "base64": base64.b64encode(self.data).decode("ascii")}
        counts = {name: value for name, value in vars(self).items() if name != "data"}
        return found | counts | {"tokens_per_second": self._speed(), "tokens_per_call": self.tokens_per_call}

    def _speed(self) -> float:
        return self.new_tokens / self.seconds


def complete(request: Request, write: Callable[[bytes], None]) -> Completed:
    """Complete a prompt and hand the bytes to `write` as they come.

    Raises:
        FileNotFoundError: No such directory.
        OSError: A directory without a config, weights or tokenizer, or a name that the Hub cannot give.
        ValueError: A checkpoint that is not whole, or no language model; heads of another model; a prompt that is too
            long or no text; a device that is not there; an option that means nothing for this model.
    """
    device = _device(request.device)
    model, tokenizer = _load(request, device)
    options = request.options()
    if request.heads is not None:
        heads = _load_heads(request.heads)
        if adapters := adapters_for(request.heads, request.model, "--model"):
            put_adapters(model, adapters)
        options["assistant_model"] = heads.to(device=device, dtype=model.dtype).attach(model)
    _check_drafter(request, model)
    ids = _prompt_ids(request, tokenizer)
    set_seed(request.seed)
    started = time.perf_counter()
    output = model.generate(
        input_ids=torch.tensor([ids], device=device),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
        streamer=streamer_for(tokenizer, write),
        **options,
    )
    seconds = time.perf_counter() - started
    new = output.sequences[0, len(ids) :].tolist()
    return Completed(
        data=decode(tokenizer, new),
        unit="byte" if is_byte_level(tokenizer) else "token",
        prompt_tokens=len(ids),
        new_tokens=len(new),
        seconds=seconds,
        **_counts(getattr(output, "speculation", None), None if request.heads else len(new)),
    )


def _counts(speculation: Speculation | None, calls_without: int | None) -> dict[str, Any]:
    """Return the counts; plain decoding calls the backbone once per token, an assistant elsewhere is not counted."""
    if speculation is None:
        return {"backbone_calls": calls_without, "accepted_by_position": []}
    return {
        "backbone_calls": speculation.backbone_calls,
        "accepted_by_position": speculation.accepted_by_position,
    }


def _prompt_ids(request: Request, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text = escaped(request.prompt)
    if not request.chat:
        ids = encode(tokenizer, text)
    elif tokenizer.chat_template is None:
        raise ValueError(f"--chat: the tokenizer of {request.model} has no chat template; leave --chat out")
    else:
        said = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        ids = encode(tokenizer, str(rendered), add_special_tokens=False)
    if not ids:
        raise ValueError("the prompt is empty, and this model's tokenizer adds nothing to it; write at least one word")
    return ids


def _load(request: Request, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    adapters = request.model if has_adapters(request.model) else None
    source = base_of(adapters) if adapters else request.model
    logging.disable_progress_bar()
    config = load_config(source, "--model")
    if isinstance(config, DRAFTERS):
        raise ValueError(f"--model {source} holds a drafter without a backbone; name a whole model, and it as --heads")
    kind = causal_class(config)
    is_plain = request.plain or request.heads is not None
    options = {"inference_only": is_plain} if kind is DeepSeekMTP else {}
    model = kind.from_pretrained(source, config=config, dtype=request.dtype, **options)
    if adapters:
        put_adapters(model, adapters)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(tokenizer_source(source))


def _load_heads(source: str) -> PreTrainedModel:
    config = load_config(source, "--heads")
    if not isinstance(config, DRAFTERS):
        raise ValueError(f"--heads {source} holds a model of type {config.model_type!r} and no drafter; see --model")
    return AutoModel.from_pretrained(source, config=config).eval()


def causal_class(config: PreTrainedConfig) -> type[DeepSeekMTP] | type[AutoModelForCausalLM]:
    """Return the class that loads a causal language model with the modules that its checkpoint has."""
    return DeepSeekMTP if config.model_type not in REFUSED and count_modules(config) else AutoModelForCausalLM


def load_config(source: str, option: str) -> PreTrainedConfig:
    """Return the configuration of a directory or of a name on the Hub.

    Raises:
        FileNotFoundError: What can only be a directory, and is none.
        OSError: A directory without a configuration, or a name that the Hub cannot give, also because it is offline.
    """
    if Path(source).is_dir():
        return AutoConfig.from_pretrained(source)
    if not is_hub_name(source):
        raise FileNotFoundError(f"{option} {source}: no such directory")
    try:
        return AutoConfig.from_pretrained(source)
    except OSError as error:
        reason = "HF_HUB_OFFLINE is set, and the cache does not hold it" if is_offline_mode() else error
        raise OSError(f"{option} {source}: no such directory, and the Hub did not give it: {reason}") from error


def _check_drafter(request: Request, model: PreTrainedModel) -> None:
    has_drafter = request.heads is not None or (hasattr(model, "window") and not request.plain)
    if request.num_assistant_tokens is not None and not has_drafter:
        raise ValueError(
            f"--num-assistant-tokens {request.num_assistant_tokens}: nothing drafts here; take a model with a drafter "
            "or add --heads, and leave --plain out"
        )


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device).sum().item()  # "meta" holds no numbers, either
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name}: PyTorch cannot use it here ({str(error).splitlines()[0]})") from None
    return device
