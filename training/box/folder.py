"""The model in the box: a small EvaByte that comes with the package, and four heads that draft for it.

Knows the directory's layout and its checksums; how the box is trained and measured is written elsewhere.
"""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ...modeling import EvaByteForMTPC, EvaByteTokenizer

FAMILIES = ("ff", "cp", "hmm", "btree")
"""Heads of a box, in the order in which they are shown."""
CHECKSUMS = "SHA256SUMS"
"""Name of the file of checksums, in the format of `sha256sum`."""
FIGURES = "figures.json"
"""Name of the file of measured figures."""
LOG = "training.jsonl"
"""Name of the log of the training."""
EXCERPTS = "held_out.json"
"""Name of the file of held-out text."""
DRAFTED = 5
"""Bytes that a head of the box drafts unless its release or the user chose otherwise.

A head computes no more than its draft reads, and on a processor every drafted byte costs: of 3 to 8 bytes, FF writes
most per second with 3 or 5, circuits with 3 (`docs/box.md`).
"""
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_STORED = torch.bfloat16
_MODEL = "model.safetensors"


class BoxDamagedError(OSError):
    """A file of the box is missing or is not what was released."""


def box_folder() -> Path:
    """Where the box lies in this installation."""
    return Path(__file__).resolve().parents[2] / "model_cards" / "box"


def load_box(
    head: str = "ff", folder: str | Path | None = None, dtype: torch.dtype = torch.float32
) -> tuple[EvaByteForMTPC, PreTrainedTokenizerBase]:
    """Loads the model in the box with one of its heads.

    Args:
        head: `"ff"`, `"cp"`, `"hmm"` or `"btree"`, as far as the box holds them.
        folder: Another box than the installed one.
        dtype: Of the weights in memory.

    Returns:
        The model, in evaluation mode, and its tokenizer.

    Raises:
        BoxDamagedError: A file is missing, or its checksum is wrong; the message names it.
        ValueError: A head that the box does not hold.

    Example:
        >>> model, tokenizer = load_box("btree")
        >>> out = model.generate(**tokenizer("def main(", return_tensors="pt"), max_new_tokens=64)
    """
    folder = Path(folder or box_folder())
    check_box(folder)
    heads = heads_in(folder)
    if head not in heads:
        raise ValueError(f"head={head!r} is not in the box; choose one of {', '.join(heads)}")
    return _load(folder, head, dtype), EvaByteTokenizer.from_pretrained(folder)


def load_heads(
    folder: str | Path | None = None, dtype: torch.dtype = torch.float32
) -> tuple[dict[str, EvaByteForMTPC], PreTrainedTokenizerBase]:
    """Loads the model once with every head of a box.

    Args:
        folder: See `load_box`.
        dtype: Of the weights in memory.

    Returns:
        The models by head, FF first, and their tokenizer.

    Raises:
        BoxDamagedError: See `load_box`.
    """
    folder = Path(folder or box_folder())
    check_box(folder)
    models = {head: _load(folder, head, dtype) for head in heads_in(folder)}
    return models, EvaByteTokenizer.from_pretrained(folder)


def heads_in(folder: Path) -> list[str]:
    """The heads that a box holds: FF, then those of `FAMILIES`, then any other."""
    found = {path.stem for path in folder.glob("*.safetensors") if path.name != _MODEL}
    return ["ff", *(kind for kind in FAMILIES if kind in found), *sorted(found.difference(FAMILIES))]


def _load(folder: Path, head: str, dtype: torch.dtype) -> EvaByteForMTPC:
    model = EvaByteForMTPC.from_pretrained(folder, dtype=dtype)
    if head != "ff":
        file = folder / f"{head}.safetensors"
        with safe_open(file, framework="pt") as opened:
            notes = opened.metadata()
        model.set_head(**json.loads(notes["options"]))
        model.mtp_head.load_state_dict(load_file(file))
        model.generation_config.num_assistant_tokens = int(notes["num_assistant_tokens"])
    return model.eval()


def check_box(folder: Path) -> None:
    """Compares every file with its checksum.

    Raises:
        BoxDamagedError: See `load_box`.
    """
    sums = folder / CHECKSUMS
    if not sums.is_file():
        raise BoxDamagedError(f"{folder} holds no {CHECKSUMS}: there is no model in the box; reinstall tokenahead")
    for line in sums.read_text().splitlines():
        expected, name = line.split(maxsplit=1)
        file = folder / name
        if not file.is_file():
            raise BoxDamagedError(f"{file} is missing; reinstall tokenahead")
        if sha256(file) != expected:
            raise BoxDamagedError(f"{file} does not have the checksum that {CHECKSUMS} states; reinstall tokenahead")


def sha256(file: Path) -> str:
    """Checksum of a file's bytes, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def save_box(folder: Path, models: dict[str, EvaByteForMTPC], drafts: dict[str, int] | None = None) -> None:
    """Writes the weights of a box: the backbone with its FF heads, and every circuit beside it, in bfloat16.

    Args:
        folder: Where to; checksums are written apart (`seal_box`), when all other files are there.
        models: By head, all with the same backbone; `"ff"` gives backbone and FF heads.
        drafts: By head, bytes to draft unless the user says otherwise; `DRAFTED` where none is given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kind, model in models.items():
        count = (drafts or {}).get(kind, DRAFTED)
        if kind == "ff":
            stored = copy.deepcopy(model).to(_STORED)
            stored.generation_config = GenerationConfig(**_IDS, num_assistant_tokens=count)
            stored.save_pretrained(folder, remote_code=None)  # who has the box has the package
            EvaByteTokenizer().save_pretrained(folder, remote_code=None)
            continue
        weights = {name: weight.to(_STORED).contiguous() for name, weight in model.mtp_head.state_dict().items()}
        notes = {"options": json.dumps(model.config.mtp_head.options()), "num_assistant_tokens": str(count)}
        save_file(weights, folder / f"{kind}.safetensors", metadata={"format": "pt"} | notes)


def seal_box(folder: Path) -> None:
    """Writes the checksums of all files, and lets everyone read them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    for file in files:
        file.chmod(0o644)
    names = ((file, file.relative_to(folder).as_posix()) for file in files)
    (folder / CHECKSUMS).write_text("".join(f"{sha256(file)}  {name}\n" for file, name in names))
