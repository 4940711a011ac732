"""The model in the box: a small EvaByte that comes with the package, and four heads that draft for it.

Knows the folder's layout and its checksums; how the box is trained and measured is written elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ...modeling import EvaByteForMTPC, EvaByteTokenizer

CHECKSUMS = "SHA256SUMS"
"""Name of the file of checksums, in the format of `sha256sum`."""
FIGURES = "figures.json"
"""Name of the file of measured figures."""
DRAFTED = 5
"""Bytes that the box drafts unless told otherwise: of 15, the last ten cost more time than they save."""
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
    heads = ["ff", *sorted(path.stem for path in folder.glob("*.safetensors") if path.name != _MODEL)]
    if head not in heads:
        raise ValueError(f"head={head!r} is not in the box; choose one of {', '.join(heads)}")
    model = EvaByteForMTPC.from_pretrained(folder, dtype=dtype)
    if head != "ff":
        file = folder / f"{head}.safetensors"
        with safe_open(file, framework="pt") as opened:
            options = json.loads(opened.metadata()["options"])
        model.set_head(**options)
        model.mtp_head.load_state_dict(load_file(file))
    return model.eval(), EvaByteTokenizer.from_pretrained(folder)


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


def save_box(folder: Path, models: dict[str, EvaByteForMTPC]) -> None:
    """Writes the weights of a box: the backbone with its FF heads, and every circuit beside it, in bfloat16.

    Args:
        folder: Where to; checksums are written apart (`seal_box`), when all other files are there.
        models: By head, all with the same backbone; `"ff"` gives backbone and FF heads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kind, model in models.items():
        if kind == "ff":
            model.generation_config = GenerationConfig(**_IDS, num_assistant_tokens=DRAFTED)
            model.to(_STORED).save_pretrained(folder, remote_code=None)  # lies in the package itself
            EvaByteTokenizer().save_pretrained(folder, remote_code=None)
            continue
        weights = {name: weight.to(_STORED).contiguous() for name, weight in model.mtp_head.state_dict().items()}
        options = json.dumps(model.config.mtp_head.options())
        save_file(weights, folder / f"{kind}.safetensors", metadata={"format": "pt", "options": options})


def seal_box(folder: Path) -> None:
    """Writes the checksums of all files, and lets everyone read them."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    for file in files:
        file.chmod(0o644)
    (folder / CHECKSUMS).write_text("".join(f"{sha256(file)}  {file.name}\n" for file in files))
