"""Texts that a teacher writes ahead of training, in shards: a run that was cut off goes on where it stopped.

A directory holds `settings.json` and `texts-00000.parquet`, `texts-00001.parquet`, ...; needs `datasets`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.utils import logging

from ...configuration.ptp import SAMPLING
from ...modeling.heads.losses import IGNORE
from ...modeling.ptp.gated_lora import ADAPTER
from ..features import checksum
from ..files import replace_text
from ..regeneration import hash_of
from .teacher import eos_ids, verified_sampling

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.get_logger(__name__)


def write_texts(
    teacher: nn.Module,
    prompts: Sequence[Sequence[int]],
    folder: str | os.PathLike,
    *,
    max_new_tokens: int = 256,
    per_prompt: int = 1,
    batch_size: int = 8,
    shard_size: int = 256,
    seed: int = 0,
    sampling: dict[str, Any] | None = None,
) -> Dataset:
    """Has a teacher continue prompts, and writes the texts; shards that exist are kept.

    Every shard has random numbers of its own, so that a run that was cut off ends with the same texts.

    Args:
        teacher: A causal language model of transformers, or a `PTPForCausalLM`.
        prompts: Ids of the prompts; none may be empty.
        folder: Where to write, and to go on.
        max_new_tokens: Tokens per text, at most.
        per_prompt: Texts per prompt.
        batch_size: Prompts per call.
        shard_size: Prompts per file.
        seed: Of all texts.
        sampling: `temperature`, `top_k` and `top_p`; None takes the distribution that a `PTPForCausalLM` is to verify,
            else the whole distribution.

    Returns:
        All texts, with columns `input_ids` and `labels` (-100 on prompts).

    Raises:
        ValueError: An empty prompt, or a directory that was begun with other settings, other prompts or another
            teacher.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty; give at least one token, the bos token say")
    folder = Path(folder)
    sampling = SAMPLING | (sampling or getattr(teacher.config, "sampling", None) or {})
    settings = {
        "max_new_tokens": max_new_tokens,
        "per_prompt": per_prompt,
        "shard_size": shard_size,
        "batch_size": batch_size,
        "seed": seed,
        "sampling": sampling,
        "prompts": len(prompts),
        "prompt_ids": hash_of([torch.tensor(prompt) for prompt in prompts]),
        "teacher": checksum(getattr(teacher, "backbone", teacher), skip=f".{ADAPTER}."),
    }
    _begin(folder, settings)
    shards = range(0, len(prompts), shard_size)
    for number, start in enumerate(shards):
        file = folder / f"texts-{number:05d}.parquet"
        if file.is_file():
            continue
        with torch.random.fork_rng():
            torch.manual_seed(seed * 1_000_003 + number)
            rows = _texts(teacher, prompts[start : start + shard_size], settings)
        _write(rows, file)
        logger.info(f"{file}: {len(rows)} texts ({number + 1} of {len(shards)} shards)")
    return load_texts(folder)


def load_texts(folder: str | os.PathLike) -> Dataset:
    """The texts that a directory holds so far.

    Raises:
        FileNotFoundError: No texts.
    """
    from datasets import Dataset, concatenate_datasets

    files = sorted(Path(folder).glob("texts-*.parquet"))
    if not files:
        raise FileNotFoundError(f"{folder}: no texts (texts-*.parquet); write_texts makes them")
    return concatenate_datasets([Dataset.from_parquet(str(file)) for file in files])


def _begin(folder: Path, settings: dict[str, Any]) -> None:
    """Writes the settings, or compares them with those that the directory was begun with."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.json"
    if not file.is_file():
        replace_text(file, json.dumps(settings, indent=1) + "\n")
        return
    begun = json.loads(file.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if begun.get(name, value) != value:  # directories of older versions say less
            shown = {"prompt_ids": "other prompts", "teacher": "another teacher"}
            what = shown.get(name, f"{name}={begun[name]!r}, not {value!r}")
            raise ValueError(f"{folder} was begun with {what}; choose another directory")


@torch.no_grad()
def _texts(teacher: nn.Module, prompts: Sequence[Sequence[int]], settings: dict[str, Any]) -> list[dict[str, Any]]:
    was_training = teacher.training
    teacher.eval()
    rows = []
    for start in range(0, len(prompts), settings["batch_size"]):
        batch = [
            list(p) for p in prompts[start : start + settings["batch_size"]] for _ in range(settings["per_prompt"])
        ]
        rows += _continue(teacher, batch, settings)
    teacher.train(was_training)
    return rows


def _continue(teacher: Any, prompts: list[list[int]], settings: dict[str, Any]) -> list[dict[str, Any]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=teacher.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=teacher.device)
    how = verified_sampling(teacher, settings["sampling"], settings["max_new_tokens"])
    texts = teacher.generate(ids, attention_mask=mask, generation_config=how)[:, width:].tolist()
    eos = set(eos_ids(teacher))
    written = [_up_to(text, eos) for text in texts]
    return [{"input_ids": p + text, "labels": [IGNORE] * len(p) + text} for p, text in zip(prompts, written)]


def _up_to(text: list[int], eos: set[int]) -> list[int]:
    """A text up to its first end, with it."""
    end = next((index for index, token in enumerate(text) if token in eos), len(text) - 1)
    return text[: end + 1]


def _write(rows: list[dict[str, Any]], file: Path) -> None:
    """Writes a shard as a whole or not at all."""
    from datasets import Dataset

    unfinished = file.with_suffix(".unfinished")
    Dataset.from_list(rows).to_parquet(str(unfinished))
    unfinished.replace(file)
