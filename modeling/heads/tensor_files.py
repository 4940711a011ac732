"""Tensors of foreign directories: safetensors, or pickles that hold tensors and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open


def read_json(file: Path) -> dict[str, Any]:
    """Fields of a JSON file; none where there is no such file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Writes fields as JSON."""
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_tensors(files: Iterable[Path], prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors of all files whose names begin with `prefix`, which is taken off.

    Raises:
        ValueError: A damaged file, or a pickle of more than tensors.
    """
    found = {}
    for file in files:
        with naming(file):
            is_safe = file.suffix == ".safetensors"
            found |= _read_safetensors(file, prefix) if is_safe else below(read_pickle(file), prefix)
    return found


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Says of a file that is read inside what is wrong with it.

    Raises:
        ValueError: It is damaged, or a pickle of more than tensors.
        FileNotFoundError: There is none.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors, and is not unpickled; save its state_dict as safetensors"
        ) from error
    except (SafetensorError, RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"{file} is damaged or cut short ({error}); fetch it again") from error


def read_pickle(file: str | Path) -> dict[str, torch.Tensor]:
    """Tensors of a pickle, by name.

    Raises:
        ValueError: It holds something else.
    """
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    loaded = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise ValueError(f"{file} holds a {type(loaded).__name__}, not tensors by name; save its state_dict")
    return loaded


def _read_safetensors(file: Path, prefix: str) -> dict[str, torch.Tensor]:
    with safe_open(file, framework="pt") as opened:
        names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118
        return {name.removeprefix(prefix): opened.get_tensor(name) for name in names}


def below(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Those whose names begin with `prefix`, which is taken off."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def refuse_unknown(folder: Path, names: Iterable[str]) -> None:
    """Nothing of a checkpoint is skipped in silence.

    Raises:
        ValueError: There are such tensors.
    """
    if names := sorted(names):
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ValueError(f"{folder}: {len(names)} tensors are not known in this layout: {shown}")


def untied(tensors: dict[str, torch.Tensor], heads: int, blocks: int) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether the blocks of every head are copies of one, and the tensors without the copies.

    Args:
        tensors: Among them `blocks.{k}.{j}.linear.{weight, bias}`.
        heads: How many k.
        blocks: How many j.
    """
    names = [(f"blocks.{k}.0.linear.{part}", f"blocks.{k}.{j}.linear.{part}")
             for k in range(heads) for j in range(1, blocks) for part in ("weight", "bias")]  # fmt: skip
    copies = {copy for first, copy in names if _equal(tensors.get(first), tensors.get(copy))}
    if not names or len(copies) < len(names):
        return False, tensors
    return True, {name: tensor for name, tensor in tensors.items() if name not in copies}


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    return first is not None and second is not None and torch.equal(first, second)
