"""From a training run to the box: weights, log, sources, figures, card and checksums in one folder."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_from_disk

from ... import __version__
from ..data import SourceText, code_prompts
from .figures import MODES, ExpectedAcceptance, circumstances, decoding_figures
from .folder import DRAFTED, FIGURES, load_box, save_box, seal_box
from .model import held_out_bits
from .run import BoxRun
from .text import BYTE_OFFSET, EOS_ID, windows

_PREFIX, _NEW_BYTES, _PROMPTS, _WINDOWS = 320, 128, 8, 48


def release_box(run: Path, output: Path, minutes: float = 10.0) -> dict[str, Any]:
    """Writes the box of a run.

    Args:
        run: Folder of the training.
        output: The box; its files are written over.
        minutes: Time for measuring decoding.

    Returns:
        The figures.
    """
    trained = BoxRun.load(run)
    models = trained.trained_models()
    kept_bits = held_out_bits(models["ff"], _held_out_windows(run, _WINDOWS))["bits_per_byte"]
    for stale in output.glob("*"):
        stale.unlink()
    save_box(output, models)
    (output / "training.jsonl").write_text("".join(trained.log_lines()))
    shutil.copy(run / "text" / "manifest.json", output / "manifest.json")
    seal_box(output)
    figures = measure_box(output, run, list(models), minutes)
    figures["bits_per_byte_float32"] = round(kept_bits, 4)
    (output / FIGURES).write_text(json.dumps(figures, indent=1) + "\n")
    write_card(output)
    return figures


def write_card(folder: Path) -> None:
    """Writes the card of a box from its figures, sources and log, and seals it."""
    figures, manifest = (json.loads((folder / name).read_text()) for name in (FIGURES, "manifest.json"))
    lines = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    (folder / "README.md").write_text(box_card(figures, manifest, {line["stage"]: line for line in lines}))
    seal_box(folder)


def measure_box(folder: Path, run: Path, kinds: list[str], minutes: float) -> dict[str, Any]:
    """Figures of the heads `kinds` of a box on the held-out text of a run."""
    deadline = time.monotonic() + 60 * minutes
    model, tokenizer = load_box("ff", folder)
    ids = _held_out_windows(run, 192, _PREFIX)
    prompts = code_prompts(_as_files(load_from_disk(str(run / "text" / "held_out"))), _PROMPTS, seed=0, length=_PREFIX)
    figures: dict[str, Any] = {"version": __version__, "command": "python examples/measure_box.py"}
    figures |= dict(circumstances())
    figures["bits_per_byte"] = round(held_out_bits(model, _held_out_windows(run, _WINDOWS))["bits_per_byte"], 4)
    expected = ExpectedAcceptance(model, ids)
    figures["heads"] = {kind: _expected(folder, kind, expected) for kind in kinds}
    models = {kind: load_box(kind, folder)[0] for kind in kinds}
    for batch in (1, _PROMPTS):
        for mode in (MODES[0], MODES[2], MODES[1]):
            if time.monotonic() > deadline:
                figures.setdefault("left_out", []).append(f"{mode.name}, batch {batch}")
                continue
            measured = decoding_figures(models, tokenizer, prompts, mode, _NEW_BYTES, batch)
            for kind, row in measured.items():
                figures["heads"][kind].setdefault(f"generated, batch {batch}", {})[mode.name] = row
                print(kind, mode.name, f"batch {batch}", json.dumps(row), flush=True)
    figures["load_average_after"] = dict(circumstances())["load_average"]
    return figures


def _expected(folder: Path, kind: str, expected: ExpectedAcceptance) -> dict[str, Any]:
    model = load_box(kind, folder)[0]
    modes = {mode.name: expected(model, mode) for mode in MODES}
    print(kind, json.dumps(modes), flush=True)
    return {
        "rank": model.config.mtp_head.rank,
        "parameters": sum(parameter.numel() for parameter in model.head.parameters()),
        "teacher_forced": {name: {key: round(v, 4) for key, v in figures.items()} for name, figures in modes.items()},
    }


def _held_out_windows(run: Path, count: int, length: int = 1024) -> torch.Tensor:
    """About `count` windows spread evenly over the held-out text."""
    rows = load_from_disk(str(run / "text" / "held_out")).with_format("numpy")
    chosen = rows[list(range(0, len(rows), max(1, -(-len(rows) // count))))]["ids"]
    return windows(chosen[:, : length - 1] if length < 1024 else chosen, length)


def _as_files(rows: Dataset) -> SourceText:
    """Packed rows as a text of files: what stands in one row between two ends of files."""
    contents = []
    for row in rows.with_format("numpy")["ids"][:: max(1, len(rows) // 400)]:
        for piece in np.split(np.asarray(row), np.flatnonzero(np.asarray(row) == EOS_ID)):
            contents.append((piece[piece != EOS_ID] - BYTE_OFFSET).astype(np.uint8).tobytes())
    contents = [content for content in contents if content]
    starts = [0, *np.cumsum([len(content) for content in contents]).tolist()]
    data = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)
    return SourceText(tuple(map(str, range(len(contents)))), data, tuple(starts))


def box_card(figures: dict[str, Any], manifest: dict[str, Any], stages: dict[str, dict[str, Any]]) -> str:
    """The card: what the box is, what it was trained on, and what was measured; `stages` are their last lines."""
    names = [mode.name for mode in MODES]
    lines = [
        "---",
        "license: apache-2.0",
        "library_name: tokenahead",
        "pipeline_tag: text-generation",
        "tags: [evabyte, multi-token-prediction, speculative-decoding, code]",
        "---",
        "# The model in the box",
        "",
        "A small byte-level EvaByte that learned Python source, with heads that draft 16 bytes ahead. It shows",
        "what multi-token prediction does and is no assistant: it writes code that looks right and is not.",
        "",
        "```python",
        "from tokenahead.training.box import load_box",
        "",
        'model, tokenizer = load_box("ff")',
        'out = model.generate(**tokenizer("def main(", return_tensors="pt"), max_new_tokens=64)',
        "```",
        "",
        f"Held-out text, of packages that nothing was trained on: {figures['bits_per_byte']} bits per byte.",
        "",
        "Expected bytes per call on held-out text (block verification; computed, not sampled, for each draft):",
        "",
        "| head | rank | parameters | " + " | ".join(names) + " |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for kind, head in figures["heads"].items():
        cells = [f"{head['teacher_forced'][name]['bytes_per_call']:.2f}" for name in names]
        lines.append(f"| {kind} | {head['rank']} | {head['parameters']:,} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"By itself `generate` drafts {DRAFTED} bytes (`num_assistant_tokens`); these figures are for all 15.",
    ]
    lines += _generated_tables(figures)
    lines += [
        "",
        f"Measured with torch {figures['torch']}, transformers {figures['transformers']}, Python {figures['python']}",
        f"on {figures['processor']}, {figures['threads']} thread(s), load {figures['load_average']} at the start, by",
        f"`{figures['command']}`; all figures are in `{FIGURES}`, the log of the training is `training.jsonl`.",
        "",
        "## Training",
        "",
        f"The backbone saw {stages['backbone']['bytes']:,} bytes in {stages['backbone']['seconds']:,} seconds by the",
        "wall clock, with its FF heads; the heads then learned on its frozen states, for the same processor time:",
        ", ".join(f"{name[5:]} {line['seconds']} s" for name, line in stages.items() if name != "backbone") + ".",
        "`examples/train_box.py` goes on from where a run stopped.",
        "",
        "## Text",
        "",
        "Permissively licensed source that was installed on the machine; tests, tables, generated files and files that",
        "resemble another were left out.",
        "",
        "| part | package | version | licence | files | bytes |",
        "|---|---|---|---|---|---|",
    ]
    for part, title in (("train", "train"), ("held_out", "held out")):
        for source in manifest[part]:
            cells = [title, *(str(source[key]) for key in ("package", "version", "licence", "files", "size"))]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _generated_tables(figures: dict[str, Any]) -> list[str]:
    lines = []
    for batch in (1, _PROMPTS):
        rows = [
            f"| {kind} | {mode} | {m['bytes_per_call']} | {m['bytes_per_second']} | {m['plain_bytes_per_second']} "
            f"| {m['speed_up']} | {m['repeated_share']:.0%} |"
            for kind, head in figures["heads"].items()
            for mode, m in head.get(f"generated, batch {batch}", {}).items()
        ]
        if rows:
            lines += ["", f"Generated, {batch} at a time, beside plain decoding of the same prompts by turns:", ""]
            lines += ["| head | mode | bytes per call | bytes per second | plain | speed-up | repeated text |"]
            lines += ["|---|---|---|---|---|---|---|"]
            lines += rows
    return lines
