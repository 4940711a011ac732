"""The demo's output directory: who may write there, and writing so that an interruption leaves no half of a model."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...model_cards.card import is_generated
from ...modeling.folders import whole_folder

MARK = "demo.json"
"""The file by which the demo knows its own directories; it says how the model there came about."""


def check_output(output: Path, overwrite: bool) -> None:
    """Refuses a directory that holds something else, and one that cannot be written to, before any work is done.

    Args:
        output: The directory, which need not exist.
        overwrite: Allow a directory that the demo did not make. Files of the same names are then replaced, others stay.

    Raises:
        FileExistsError: The directory holds something that the demo did not make.
        NotADirectoryError: The path is a file.
        OSError: The directory cannot be made or written to.
    """
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"--output {output} is a file; name a directory")
    if not overwrite and output.is_dir() and any(output.iterdir()) and not (output / MARK).is_file():
        raise FileExistsError(
            f"--output {output} holds files that the demo did not make; name another directory, or add --overwrite to "
            "replace files of the same names"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output if output.is_dir() else output.parent):
        pass


def forget_measurements(output: Path, *names: str) -> None:
    """Removes an earlier demo's figures and card, which would misdescribe the next model.

    Args:
        output: The directory; one that the demo did not make is left alone.
        names: Files of figures.
    """
    if not (output / MARK).is_file():
        return
    for name in names:
        (output / name).unlink(missing_ok=True)
    card = output / "README.md"
    if card.is_file() and is_generated(card):
        card.unlink()


def save_checkpoint(
    output: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, notes: dict[str, object]
) -> None:
    """Saves a model and its tokenizer beside `output` and moves them there when they are whole.

    Args:
        output: The directory. Where it exists, files of the same names are replaced one by one.
        model: The model.
        tokenizer: The tokenizer.
        notes: How the model came about, for the demo's mark.
    """
    with whole_folder(output) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / MARK).write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
