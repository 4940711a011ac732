"""From a training run to the box: weights, held-out text, log, sources, figures, figures, card and checksums.

Everything is written into a directory beside the box and takes its place when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import Distribution, distribution
from pathlib import Path

from datasets import load_from_disk

from ..demo.pictures import acceptance_figure, save_picture, speed_figure
from ..evaluation import write_reports
from ..evaluation.bits import window_bits
from .card import ACCEPTANCE_PICTURE, SPEED_PICTURE, write_box_card
from .excerpts import cut_excerpts, save_excerpts
from .folder import DRAFTED, EXCERPTS, FIGURES, LOG, check_box, load_heads, save_box, seal_box
from .measure import Box, BoxMeasurement
from .run import BoxRun
from .text import held_out_files, windows

_EXCERPTS, _WINDOWS = 128, 64


def release_box(run: Path, output: Path, seconds: float = 180.0, drafts: dict[str, int] | None = None) -> None:
    """Writes the box of a run.

    Args:
        run: Directory of the training.
        output: The box; an older one is replaced as a whole.
        seconds: Time for measuring; the rest takes about a minute.
        drafts: By head, bytes to draft by default.

    Raises:
        ValueError: A package is both learned from and held out, or another version of it is installed now.
    """
    trained = BoxRun.load(run)
    manifest = json.loads((run / "text" / "manifest.json").read_text())
    check_split(manifest)
    with _in_place_of(output) as scratch:
        models = trained.trained_models()
        save_box(scratch, models, dict.fromkeys(models, DRAFTED) | (drafts or {}))
        rows = load_from_disk(str(run / "text" / "held_out")).with_format("numpy")
        sample = windows(rows[list(range(0, len(rows), -(-len(rows) // _WINDOWS)))]["ids"], 1024)
        bits = window_bits(models["ff"], sample)
        (scratch / LOG).write_text("".join(trained.log_lines()))
        (scratch / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        write_excerpts(scratch, manifest)
        spread = float(bits.std()) / len(bits) ** 0.5
        of_run = {
            "bits_per_byte": round(float(bits.mean()), 4),
            "standard_error": round(spread, 4),
            "windows": len(bits),
        }
        seal_box(scratch)
        _measure(scratch, seconds, of_run)


def measure_again(box: Path, seconds: float = 180.0, drafts: dict[str, int] | None = None) -> None:
    """Measures a box on this machine, and puts the figures in the place of its old ones; the weights stay.

    Args:
        box: Its directory.
        seconds: Time for measuring.
        drafts: By head, bytes to draft by default from now on; the others go on as they are.

    Raises:
        BoxDamagedError: A file is missing, or its checksum is wrong; nothing has changed then.
    """
    check_box(box)
    with _in_place_of(box) as scratch:
        shutil.copytree(box, scratch, dirs_exist_ok=True)
        if drafts:
            models, _ = load_heads(box)
            lengths = {kind: model.generation_config.num_assistant_tokens for kind, model in models.items()}
            save_box(scratch, models, lengths | drafts)
            seal_box(scratch)
        _measure(scratch, seconds, json.loads((box / FIGURES).read_text())["before_rounding"])


@contextmanager
def _in_place_of(output: Path) -> Iterator[Path]:
    """A directory that takes the place of `output` when all is written."""
    started, output = time.monotonic(), output.resolve()
    scratch, old = (output.with_name(f".{output.name}.{os.getpid()}.{part}") for part in ("part", "old"))
    scratch.mkdir(parents=True)
    try:
        yield scratch
        if output.exists():
            output.rename(old)
        scratch.rename(output)
    finally:
        if old.exists() and not output.exists():  # whatever came between: the weights may be the only copy
            old.rename(output)
        for folder in (scratch, old):
            shutil.rmtree(folder, ignore_errors=True)
    size = sum(file.stat().st_size for file in output.iterdir())
    print(f"{output}: {size / 1e6:.1f} MB, written in {time.monotonic() - started:.0f} s")


def _measure(folder: Path, seconds: float, before_rounding: dict[str, float]) -> None:
    """Writes figures, figures and card of a sealed box, and seals it anew."""
    measurement = BoxMeasurement(seconds=seconds, batch_size=8, on_step=lambda words: print(words, flush=True))
    reports, _ = measurement.measure(Box.load(folder))
    for name, figure in (
        (SPEED_PICTURE, speed_figure(reports)),
        (ACCEPTANCE_PICTURE, acceptance_figure(reports)),
    ):
        save_picture(figure, folder / name)
    write_reports(folder / FIGURES, reports, before_rounding=before_rounding)
    write_box_card(folder)
    seal_box(folder)


def check_split(manifest: dict[str, list[dict[str, object]]]) -> None:
    """Refuses a text of which a package stands on both sides.

    Raises:
        ValueError: It names the packages.
    """
    both = {s["package"] for s in manifest["train"]} & {s["package"] for s in manifest["held_out"]}
    if both:
        raise ValueError(f"{', '.join(sorted(map(str, both)))} is learned from and held out; collect the text again")


def write_excerpts(folder: Path, manifest: dict[str, list[dict[str, object]]]) -> None:
    """Writes held-out excerpts, and the licences of the packages that they come from.

    Raises:
        ValueError: The installed packages are not those that the run held out.
    """
    held_out = list(held_out_files())
    expected, found = {s["package"]: s for s in manifest["held_out"]}, {s.package: asdict(s) for s, _ in held_out}
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ValueError(f"{', '.join(wrong)}: not installed as the run held it out; release where the text was packed")
    packages = [((s.package, s.version, s.licence), files) for s, files in held_out]
    excerpts = cut_excerpts(packages, _EXCERPTS)
    save_excerpts(folder / EXCERPTS, excerpts)
    names = sorted({excerpt.package for excerpt in excerpts})
    (folder / "LICENSES.txt").write_text("\n".join(map(_licences, names)), encoding="utf-8")


def _licences(package: str) -> str:
    found = distribution(package)
    texts = "\n".join(_licence_texts(found)) or f"(No licence file; its metadata says: {found.metadata['License']})\n"
    return f"{'=' * 80}\n{EXCERPTS} holds excerpts of {package} {found.version}, under this licence:\n\n{texts}"


def _licence_texts(found: Distribution) -> Iterator[str]:
    for file in found.files or ():
        if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE")) and file.suffix != ".py":
            yield Path(str(found.locate_file(file))).read_text(encoding="utf-8", errors="replace")
