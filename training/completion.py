"""One prompt, any checkpoint: the text streams to the output while it is written. Knows no training."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
    set_seed,
)
from transformers.utils import logging

from ..configuration import EvaByteConfig, MTPHeadConfig


def complete(
    source: str,
    prompt: str,
    max_new_tokens: int = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    plain: bool = False,
    report: TextIO | None = None,
) -> str:
    """Writes a completion to the standard output as it comes, and a line of statistics to `report`.

    Greedy, unless one of `temperature`, `top_k` and `top_p` asks for samples.

    Args:
        source: Folder of a checkpoint, or its name on the Hub.
        prompt: The text to complete.
        max_new_tokens: Tokens to write, at most.
        temperature: Of the samples; 0 is greedy.
        top_k: Sample from the most probable tokens; 0 or None: from all.
        top_p: Sample from the nucleus.
        seed: Of the samples.
        plain: One token at a time.
        report: Where the statistics go; None is the standard error.

    Returns:
        The completion, without the prompt.

    Raises:
        FileNotFoundError: No such folder.
        OSError: A folder without a config, weights or tokenizer, or a name that the Hub does not know.
        ValueError: A checkpoint that is not whole, or no language model; a prompt that is too long or no text.
    """
    model, tokenizer = _load(source)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    options = _options(temperature, top_k, top_p) | ({"use_mtp": False} if plain else {})
    set_seed(seed)
    started = time.perf_counter()
    output = model.generate(
        **inputs,
        **options,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    seconds = time.perf_counter() - started
    new = output.sequences[0, inputs["input_ids"].shape[1] :]
    unit = "byte" if isinstance(model.config, EvaByteConfig) else "token"
    print(_statistics(len(new), seconds, unit, getattr(output, "speculation", None)), file=report or sys.stderr)
    return tokenizer.decode(new, skip_special_tokens=True)


def _load(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # a name on the Hub is `owner/name`; anything else can only be a folder
    if not Path(source).is_dir() and (source.count("/") != 1 or source.startswith((".", "/", "~"))):
        raise FileNotFoundError(f"--model {source}: no such folder")
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(source)
    if isinstance(config, MTPHeadConfig):
        raise ValueError(f"--model {source} holds heads without a backbone; name a folder with a whole model")
    model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype="auto").eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device), AutoTokenizer.from_pretrained(source)


def _options(temperature: float | None, top_k: int | None, top_p: float | None) -> dict[str, Any]:
    if temperature == 0 or (temperature is None and top_k is None and top_p is None):
        return {"do_sample": False}
    chosen = {"temperature": temperature or 1.0, "top_k": top_k or 0, "top_p": top_p or 1.0}
    return {"do_sample": True} | chosen


def _statistics(count: int, seconds: float, unit: str, speculation: Any) -> str:
    speed = f"{count} {unit}s in {seconds:.2f} s, {count / seconds:,.0f} {unit}s/s"
    if speculation is None:
        return f"{speed}; one {unit} per backbone call"
    calls = speculation.backbone_calls
    return f"{speed}; {calls} backbone calls, {speculation.tokens_per_call:.2f} {unit}s per call"
