"""Completions by the backbone itself, to train its drafter on, because these are what it will draft.

EAGLE-3, Medusa and MtPC's successors replace the answers of a data set by the backbone's own. Rows are written in
order, one line each; a process that is killed loses the batch it was writing, and called again it continues with the
same completions, because the seed of every batch is its number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GenerationConfig, PreTrainedModel, set_seed
from transformers.utils import logging

from ..modeling import PTPForCausalLM
from ..modeling.ptp.gated_lora import ADAPTER
from .features import checksum
from .utils import check_same, eos_ids, replace_file, until_end

_TEXT, _PLAN = "text.jsonl", "plan.json"
IGNORE = -100


class RegeneratedText(Dataset):
    """Rows of prompts and the backbone's completions; labels are -100 on prompts.

    Args:
        folder: What `regenerate` wrote.

    Raises:
        FileNotFoundError: A directory without completions.
        ValueError: Incomplete completions.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        if not (folder / _PLAN).exists():
            raise FileNotFoundError(f"{folder} holds no regenerated text: there is no {_PLAN}")
        plan = json.loads((folder / _PLAN).read_text(encoding="utf-8"))
        self.rows = _lines(folder / _TEXT)
        if len(self.rows) != plan["rows"]:
            raise ValueError(f"{folder} holds {len(self.rows)} of {plan['rows']} rows: complete them with regenerate")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor(self.rows[row]["ids"])
        labels = ids.clone()
        labels[: self.rows[row]["prompt"]] = IGNORE
        return {"input_ids": ids, "labels": labels}


def holds_text(folder: str | Path) -> bool:
    """Return whether a directory was written by `regenerate`."""
    return (Path(folder) / _PLAN).is_file() and (Path(folder) / _TEXT).is_file()


def regenerate(
    backbone: PreTrainedModel,
    prompts: Sequence[Sequence[int] | torch.Tensor],
    folder: str | Path,
    max_new_tokens: int = 256,
    batch_size: int = 8,
    seed: int = 0,
    **options: Any,
) -> RegeneratedText:
    """Let a backbone write the completions of prompts, or the missing ones.

    Args:
        backbone: Any causal language model.
        prompts: Token ids.
        folder: Output directory; created if missing.
        max_new_tokens: Length of every completion, at most.
        batch_size: Prompts that are completed together, padded on the left; the samples depend on it.
        seed: Seed of the samples.
        **options: Options of `generate`, such as `do_sample=True`, `temperature`, or an `assistant_model` that drafts.

    Returns:
        The rows, to train with.

    Raises:
        ValueError: No prompts, an empty one, or a directory of another backbone, other prompts or other options.
    """
    for name, value in {"max_new_tokens": max_new_tokens, "batch_size": batch_size}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    folder, ids = Path(folder), [torch.as_tensor(prompt, dtype=torch.int64).flatten() for prompt in prompts]
    if not ids:
        raise ValueError("there are no prompts: at least one is needed")
    if empty := [number for number, prompt in enumerate(ids) if not len(prompt)]:
        raise ValueError(f"prompt {empty[0]} is empty: it needs at least one token, such as <bos>")
    plan = {
        "backbone": _identity(backbone),
        "rows": len(ids),
        "prompts": hashlib.sha256(b"|".join(prompt.numpy().tobytes() for prompt in ids)).hexdigest(),
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "options": {name: _as_json(value) for name, value in options.items()},
    }
    written = _lines(folder / _TEXT)
    if (folder / _PLAN).exists() and written:  # not after a wrong option, where nothing was written
        check_same(f"folder={folder}", json.loads((folder / _PLAN).read_text(encoding="utf-8")), plan)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / _PLAN, json.dumps(plan))
    done = len(written) - len(written) % batch_size if len(written) < len(ids) else len(ids)
    replace_file(folder / _TEXT, "".join(json.dumps(row) + "\n" for row in written[:done]))
    for start in logging.tqdm(range(done, len(ids), batch_size), desc="outputs of the backbone, in batches"):
        set_seed(seed + start)
        rows = _completed(backbone, ids[start : start + batch_size], max_new_tokens, options)
        with (folder / _TEXT).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    return RegeneratedText(folder)


def _identity(backbone: PreTrainedModel) -> str:
    """Return a checksum of the weights that generate; the adapters of a `PTPForCausalLM` do not."""
    if isinstance(backbone, PTPForCausalLM):
        return checksum(backbone.backbone, skip=f".{ADAPTER}.")
    return checksum(backbone)


def _as_json(value: object) -> object:
    """Return an option as JSON reads it back; of other objects, such as a drafter, the name of the class."""
    if isinstance(value, GenerationConfig):
        value = value.to_diff_dict()
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return type(value).__name__


@torch.no_grad()
def _completed(
    backbone: PreTrainedModel, prompts: list[torch.Tensor], max_new_tokens: int, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    longest = max(map(len, prompts))
    pad = backbone.generation_config.pad_token_id or 0
    padded = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0), value=pad) for prompt in prompts])
    real = torch.arange(longest)[None] >= longest - torch.tensor([len(prompt) for prompt in prompts])[:, None]
    output = backbone.generate(
        input_ids=padded.to(backbone.device),
        attention_mask=real.long().to(backbone.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        **options,
    )
    ends = eos_ids(backbone)
    completions = zip(prompts, output[:, longest:].tolist())
    return [{"ids": [*prompt.tolist(), *until_end(new, ends)], "prompt": len(prompt)} for prompt, new in completions]


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file whose last line may have been cut off."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
