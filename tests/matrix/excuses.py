"""Cells of the matrix in which nothing is drafted, or something is refused: why, and what happens instead."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model

from tests.matrix.models import NAMES, Entry


@dataclass(frozen=True)
class Excuse:
    """Why a habit does not hold as it stands, and a test of what holds instead."""

    reason: str
    check: Callable[[Entry], None]


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """Messages of a logger, also those that are given once only."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.Logger.warning_once.cache_clear()
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def decodes_plainly(entry: Entry, shown: str, **options: Any) -> None:
    """The plain result, one warning however often it is asked for, and a refusal where drafts are asked for by name."""
    inputs = entry.inputs(2)
    with warnings_of("tokenahead") as messages:
        texts = [entry.generate(inputs, use_mtp=None, **options) for _ in range(2)]
    expected = entry.plain(inputs, **options)
    assert all(torch.equal(text, expected) for text in texts)
    assert [message for message in messages if shown in message] == [
        f"Decoding one token at a time, without speculation, because of {shown}."
    ]
    with pytest.raises(ValueError, match=f"use_mtp=True cannot be combined with {shown}"):
        entry.generate(inputs, **options)


def refuses_lora(entry: Entry) -> None:
    """The model stays as it was."""
    model = copy.deepcopy(entry.model)
    with pytest.raises(ValueError, match="gated adapters"):
        get_peft_model(model, LoraConfig(target_modules=[entry.lora_target]))
    assert torch.equal(model.generate(**entry.inputs(3), max_new_tokens=16, do_sample=False), entry.text())


def refuses_offloaded(entry: Entry) -> None:
    """At `attach`, by name."""
    model = cpu_offload(copy.deepcopy(entry.model), execution_device="cpu")
    with pytest.raises(ValueError, match="LlamaForCausalLM"):
        copy.deepcopy(entry.drafter).attach(model)


_PLAINLY = {
    "guidance": Excuse(
        "guidance feeds a second text, which counts its calls",
        lambda e: decodes_plainly(e, "guidance_scale=1.5", guidance_scale=1.5),
    ),
    "beams": Excuse("beams have no single path", lambda e: decodes_plainly(e, "num_beams=2", num_beams=2)),
    "attentions": Excuse(
        "a block has the attention weights of a block",
        lambda e: decodes_plainly(e, "output_attentions=True", output_attentions=True),
    ),
}
_GATED = Excuse("its own adapters are gated, and LoRA would wrap them", refuses_lora)
EXCUSES: dict[tuple[str, str], Excuse] = {
    **{(name, habit): excuse for habit, excuse in _PLAINLY.items() for name in NAMES},
    **{(name, "peft"): _GATED for name in ("ptp-one_hot", "ptp-categorical", "ptp-mask")},
    ("ptp-student-llama", "offloaded"): Excuse("a student's adapters join layers that are there", refuses_offloaded),
}
