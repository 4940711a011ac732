"""Completions by the backbone itself, to train its drafter on, because these are what it will draft.

The seed of a batch is that of its first row, so that completions, sampled ones too, are the same for any number of
processes, and after an interruption, which loses what was written in the last minute.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import GenerationConfig, PreTrainedModel, set_seed
from transformers.utils import logging

from ..configuration.ptp import SAMPLING
from ..generation.backbone.wrapped_models import untyped
from ..modeling import PTPForCausalLM
from ..modeling.heads.losses import IGNORE
from ..modeling.ptp.gated_lora import ADAPTER
from .columns import RowReader
from .endpoint import Endpoint
from .features import checksum
from .parts import Processes, Save, complete, part_files, read_parts
from .utils import eos_ids, needs_extra, until_end

if TYPE_CHECKING:
    import datasets

_PLAN, _IDS, _PROMPTS = "plan.json", "ids", "prompts"
_SECONDS = 60.0  # between two files


class RegeneratedText(Dataset):
    """Rows that `regenerate` wrote into a folder; labels are -100 on prompts. `rows` has ids, and a prompt's length."""

    def __init__(self, folder: str | Path) -> None:
        self.rows = list[dict[str, Any]]()
        for part in read_parts(Path(folder) / _PLAN, "regenerate"):
            file = part.opened()
            texts = file.get_tensor(_IDS).split(part.lengths.tolist())
            prompts = file.get_tensor(_PROMPTS).tolist()
            self.rows += [{"ids": ids.tolist(), "prompt": size} for ids, size in zip(texts, prompts)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(self.rows[row]["ids"])
        labels = ids.clone()
        labels[: self.rows[row]["prompt"]] = IGNORE
        return {"input_ids": ids, "labels": labels}

    def to_dataset(self) -> datasets.Dataset:
        """Return the rows as a data set of `datasets`, with `input_ids` and `labels`, for trainers and for the Hub."""
        with needs_extra("train", "RegeneratedText.to_dataset"):
            import datasets

        return datasets.Dataset.from_list([{name: each.tolist() for name, each in row.items()} for row in self])


def holds_text(folder: str | Path) -> bool:
    """Return whether a directory was written by `regenerate`."""
    return (Path(folder) / _PLAN).is_file() and bool(part_files(folder))


def regenerate(
    backbone: PreTrainedModel | Endpoint,
    prompts: Iterable[Sequence[int] | torch.Tensor | Mapping[str, Any]],
    folder: str | Path,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    **options: Any,
) -> RegeneratedText:
    """Let a backbone write the completions of prompts, or those that are missing or damaged.

    The processes of a group of `torch.distributed`, all of which call this, divide the batches, and return when all
    rows are written. A drafter that remembers text (`SuffixDrafter`) keeps the distribution of samples, but not the
    samples themselves.

    Args:
        backbone: Any causal language model, or the server that runs it.
        prompts: Token ids, or rows that hold them as `input_ids`, such as a data set of `datasets`.
        folder: Output directory; created if missing.
        max_new_tokens: Length of every completion, at most.
        batch_size: Prompts that are completed together, padded on the left; the samples depend on it.
        seed: Seed of the samples.
        **options: Options of `generate`, such as `do_sample=True`, `temperature`, or an `assistant_model` that drafts;
            of a server, fields of its requests. Samples are drawn from the whole distribution at temperature 1
            (`top_k=0`, `top_p=1`), where these or a `generation_config` do not ask for another one, whatever the
            model's own defaults are: a drafter is measured along text of that distribution.

    Raises:
        EndpointError: A server that cannot be used, or did not answer; what it has answered is written.
    """
    read = RowReader(("input_ids", "labels", "position_ids"), what="a prompt")
    rows = [read(prompt)["input_ids"] if isinstance(prompt, Mapping) else prompt for prompt in prompts]
    ids = [torch.as_tensor(row, dtype=torch.int64).flatten() for row in rows]
    if not ids or not all(map(len, ids)):
        raise ValueError("prompts: there must be at least one, and each needs a token, such as <bos>")
    options = _of_whole_law(backbone, options)
    processes = Processes.of(None if isinstance(backbone, Endpoint) else backbone)
    plan = {
        "backbone": _identity(backbone),
        "rows": len(ids),
        "prompts": hashlib.sha256(b"|".join(prompt.numpy().tobytes() for prompt in ids)).hexdigest(),
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "options": json.loads(json.dumps(options, default=_as_json)),
    }

    def completions(rows: list[int]) -> Iterator[tuple[int, list[int]]]:
        if isinstance(backbone, Endpoint):
            prompts = {row: ids[row].tolist() for row in rows}
            yield from backbone.completions(prompts, max_new_tokens, seed, options)
            return
        missing = {*rows}
        for start in sorted({row - row % batch_size for row in missing}):
            set_seed(seed + start)
            found = _completed(backbone, ids[start : start + batch_size], max_new_tokens, options)
            yield from ((row, new) for row, new in enumerate(found, start) if row in missing)

    def write(rows: list[int], save: Save) -> None:
        texts, since = dict[int, list[int]](), time.monotonic()
        try:
            for row, new in logging.tqdm(completions(rows), desc="completions", total=len(rows)):
                texts[row] = new
                if time.monotonic() - since >= _SECONDS and (row + 1) % batch_size == 0:
                    _write(save, ids, texts)
                    texts, since = {}, time.monotonic()
        finally:
            _write(save, ids, texts)

    complete(Path(folder) / _PLAN, plan, write, processes, batch_size)
    return RegeneratedText(folder)


def _of_whole_law(backbone: PreTrainedModel | Endpoint, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that say from what samples are drawn; a student has what its slots learned."""
    if isinstance(backbone, PTPForCausalLM) or "generation_config" in options:
        return dict(options)
    samples = isinstance(backbone, Endpoint) or options.get("do_sample", backbone.generation_config.do_sample)
    return (SAMPLING if samples else {}) | dict(options)


def _write(save: Save, prompts: Sequence[torch.Tensor], completions: Mapping[int, list[int]]) -> None:
    """Write a file for each of the runs of rows; answers of a server come in any order."""
    for _, run in groupby(enumerate(sorted(completions)), lambda each: each[1] - each[0]):
        rows = [row for _, row in run]
        texts = [torch.cat([prompts[row], torch.tensor(completions[row], dtype=torch.int64)]) for row in rows]
        columns = {_IDS: torch.cat(texts), _PROMPTS: torch.tensor([len(prompts[row]) for row in rows])}
        save(rows[0], [*map(len, texts)], columns)


def _identity(backbone: PreTrainedModel | Endpoint) -> str:
    """Return a checksum of the weights that generate (adapters of a `PTPForCausalLM` do not), or the served name."""
    if isinstance(backbone, Endpoint):
        return f"served as {backbone.served_model()}"
    if isinstance(backbone, PTPForCausalLM):
        return checksum(backbone.backbone, skip=f".{ADAPTER}.")
    return checksum(backbone)


def _as_json(value: object) -> object:
    """Return what JSON holds of another object: of a config its changes, else, as of a drafter, its class."""
    return value.to_diff_dict() if isinstance(value, GenerationConfig) else type(value).__name__


@torch.no_grad()
def _completed(
    backbone: PreTrainedModel, prompts: list[torch.Tensor], max_new_tokens: int, options: Mapping[str, Any]
) -> list[list[int]]:
    pad = backbone.generation_config.pad_token_id or 0
    padded = pad_sequence(prompts, True, pad, "left")
    real = pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, 0, "left")
    output = untyped(backbone).generate(
        input_ids=padded.to(backbone.device),
        attention_mask=real.to(backbone.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        **options,
    )
    ends = eos_ids(backbone)
    return [until_end(new, ends) for new in output[:, padded.shape[1] :].tolist()]
