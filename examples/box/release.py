"""Measure a trained box and write its directory: weights, held-out text, log, manifest, results, figures and card.

    python examples/box/release.py --run box-run --output model_cards/box
    python examples/box/release.py --output model_cards/box --readme docs/box.md --threads 1
    python examples/box/release.py --output model_cards/box --heads '{"ff": "box/ff-16-1-block-released-0"}'

`--run` is the directory of `train.py`; without it, a box that is there is measured again, with other heads where they
are given (`benchmarks/box_heads.py --table released` trains them). Everything is written beside the box and takes its
place when it is whole.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from card import LOG, MANIFEST, fill_readme, write_box_card
from safetensors.torch import save_file
from text import Package, collect, windows
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig

from tokenahead import EvaByteForMTPC, EvaByteTokenizer
from tokenahead.model_cards import MeasuredResults
from tokenahead.modeling.evabyte.tokenizer import BYTE_OFFSET
from tokenahead.training.box import (
    CHECKSUMS,
    EXCERPTS,
    check_box,
    heads_in,
    load_box,
    sha256,
)
from tokenahead.training.commands.bench import RESULTS, write
from tokenahead.training.demo import Measurement, box_model

DRAFTED = 5
"""Bytes that a head of the box drafts unless its release or the user chose otherwise; figures are in `docs/box.md`."""
EXCERPT = 1023  # bytes of an excerpt; with `<bos>` before it, a window of 1,024 ids
BEFORE = "Bits per byte before rounding to bfloat16"
"""What `results.json` says of the weights that were trained."""
HEADS = ("ff", "cp", "hmm", "btree")
"""Heads that a run may hold."""
_EXCERPTS, _WINDOWS = 128, 64
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Excerpt:
    """A piece of a file of a package that nothing was trained on: `EXCERPT` bytes of ASCII from the start of a line.

    Package, version and licence are those of its distribution's metadata.
    """

    package: str
    version: str
    licence: str
    text: str


def load_excerpts(folder: Path) -> list[Excerpt]:
    """Read a box's held-out text."""
    return [Excerpt(**fields) for fields in json.loads((folder / EXCERPTS).read_text(encoding="utf-8"))]


def release(run: Path, output: Path, drafts: dict[str, int], measurement: Measurement) -> None:
    """Write the box of a run; an older one is replaced as a whole.

    Raises:
        ValueError: A package is both learned from and held out, or another version of it is installed now.
    """
    manifest = json.loads((run / "text" / MANIFEST).read_text())
    check_split(manifest)
    stages = {"ff": "backbone"} | {kind: kind for kind in HEADS if (run / kind).exists()}
    models = {kind: EvaByteForMTPC.from_pretrained(run / stage).eval() for kind, stage in stages.items()}
    with _in_place_of(output) as scratch:
        save_box(scratch, models, dict.fromkeys(models, DRAFTED) | drafts)
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        recipe = {"stage": "backbone", "step": 0, "bytes": 0, "recipe": json.loads((run / "recipe.json").read_text())}
        logs = [(run / stage / "log.jsonl").read_text() for stage in dict.fromkeys(("backbone", *stages.values()))]
        (scratch / LOG).write_text("".join((json.dumps(recipe) + "\n", *logs)))
        write_excerpts(scratch, manifest)
        rows = np.load(run / "text" / "held_out.npy", mmap_mode="r")
        bits = window_bits(models["ff"], windows(rows[:: -(-len(rows) // _WINDOWS)], 1024))
        error = float(bits.std()) / len(bits) ** 0.5
        before = {BEFORE: round(float(bits.mean()), 4), f"{BEFORE}, standard error": round(error, 4)}
        seal(scratch)
        _measure(scratch, measurement, before)


def measure_again(box: Path, drafts: dict[str, int], measurement: Measurement, heads: dict[str, str]) -> None:
    """Measure a box on this machine, and replace its results; the weights stay, but for the heads that are given.

    Raises:
        BoxDamagedError: A file is missing, or its checksum is wrong; nothing has changed then.
        ValueError: A head of another backbone.
    """
    check_box(box)
    with _in_place_of(box) as scratch:
        shutil.copytree(box, scratch, dirs_exist_ok=True)
        if drafts or heads:
            models = {head: load_box(head, box)[0] for head in heads_in(box)}
            for kind, folder in heads.items():
                check_same_backbone(models[kind], other := EvaByteForMTPC.from_pretrained(folder).eval())
                other.generation_config, models[kind] = models[kind].generation_config, other
                log = (scratch / LOG).read_text().splitlines()
                if kind != "ff":  # a circuit starts from the FF heads, not from the circuit that it replaces
                    stages = (json.loads(line)["stage"].removeprefix("head-") for line in log)
                    log = [line for line, stage in zip(log, stages) if not stage.startswith(kind)]
                log += (Path(folder) / "log.jsonl").read_text().splitlines()
                (scratch / LOG).write_text("".join(f"{line}\n" for line in log))
            lengths = {kind: int(model.generation_config.num_assistant_tokens) for kind, model in models.items()}
            save_box(scratch, models, lengths | drafts)
            seal(scratch)
        known = MeasuredResults.from_json(box / RESULTS).extra
        before = {name: float(value) for name, value in known.items() if name.startswith(BEFORE)}
        _measure(scratch, measurement, before)


def check_same_backbone(old: EvaByteForMTPC, new: EvaByteForMTPC) -> None:
    """Refuse a head whose backbone has other weights, rounded to bfloat16.

    Raises:
        ValueError: It names a weight.
    """
    weights = new.model.state_dict() | {"lm_head": new.lm_head.weight[: new.config.vocab_size]}
    for name, weight in (old.model.state_dict() | {"lm_head": old.lm_head.weight[: old.config.vocab_size]}).items():
        if not torch.equal(weight.bfloat16(), weights[name].bfloat16()):
            raise ValueError(f"{name} differs from the box's: the head was trained on another backbone")


@contextmanager
def _in_place_of(output: Path) -> Iterator[Path]:
    """Yield a directory that takes the place of `output` when all is written."""
    output = output.resolve()
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


@torch.no_grad()
def window_bits(model: EvaByteForMTPC, ids: torch.Tensor, batch_size: int = 8) -> torch.Tensor:
    """Return the bits per byte of the next byte, window by window.

    Args:
        model: A causal language model over bytes.
        ids: [N, L] windows that begin with `<bos>`.
        batch_size: Windows per forward.

    Returns:
        [N] float64; windows have one length, so their mean is that of the text, and their spread its uncertainty.
    """
    found = []
    for part in ids.split(batch_size):
        logits = model(part, use_cache=False).logits[:, :-1].float()
        nats = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none").view(len(part), -1)
        found.append(nats.double().mean(1) / math.log(2))
    return torch.cat(found)


def _measure(folder: Path, measurement: Measurement, before_rounding: dict[str, float]) -> None:
    """Write results, figures and card of a sealed box, and seal it anew."""
    bits = window_bits(load_box(directory=folder)[0], excerpt_windows(load_excerpts(folder)))
    measured, _ = measurement.measure(box_model(folder))
    words = f"--seconds {measurement.seconds:g} --new-tokens {measurement.new_tokens} --seed {measurement.seed}"
    command = f"tokenahead demo {words} --batch-size {measurement.batch_size}"
    changes = {"command": command, "bits_per_byte": float(bits.mean()), "extra": measured.extra | before_rounding}
    write(folder, replace(measured, **changes))
    write_box_card(folder)
    seal(folder)


def excerpt_windows(excerpts: Sequence[Excerpt]) -> torch.Tensor:
    """Return `<bos>` and the bytes of every excerpt, [N, 1 + EXCERPT] int64."""
    data = torch.stack([torch.tensor(list(excerpt.text.encode("ascii"))) for excerpt in excerpts])
    return torch.nn.functional.pad(data + BYTE_OFFSET, (1, 0), value=_IDS["bos_token_id"])


def save_box(folder: Path, models: dict[str, EvaByteForMTPC], drafts: dict[str, int]) -> None:
    """Write the weights of a box in bfloat16: the backbone with its FF heads, and every circuit beside it.

    Args:
        folder: The box; `seal` writes the checksums when all other files are there.
        models: By head, all with the same backbone; `"ff"` gives backbone and FF heads.
        drafts: By head, bytes to draft unless the user says otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kind, model in models.items():
        if kind == "ff":
            stored = copy.deepcopy(model).to(torch.bfloat16)
            stored.generation_config = GenerationConfig(**_IDS, num_assistant_tokens=drafts[kind])
            stored.save_pretrained(folder, remote_code=None)  # who has the box has the package
            EvaByteTokenizer().save_pretrained(folder, remote_code=None)
            continue
        weights = {name: weight.bfloat16().contiguous() for name, weight in model.head.state_dict().items()}
        notes = {"options": json.dumps(model.config.mtp_head.options()), "num_assistant_tokens": str(drafts[kind])}
        save_file(weights, folder / f"{kind}.safetensors", metadata={"format": "pt"} | notes)


def seal(folder: Path) -> None:
    """Write the checksums of all files, and let everyone read them."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    for file in files:
        file.chmod(0o644)
    (folder / CHECKSUMS).write_text("".join(f"{sha256(file)}  {file.name}\n" for file in files))


def check_split(manifest: dict[str, list[dict[str, Any]]]) -> None:
    """Refuse a text of which a package stands on both sides.

    Raises:
        ValueError: It names the packages.
    """
    both = {s["package"] for s in manifest["train"]} & {s["package"] for s in manifest["held_out"]}
    if both:
        raise ValueError(f"{', '.join(sorted(both))} is learned from and held out; collect the text again")


def write_excerpts(folder: Path, manifest: dict[str, list[dict[str, Any]]]) -> None:
    """Write held-out excerpts, and the licences of the packages that they come from.

    Raises:
        ValueError: The installed packages are not those that the run held out.
    """
    packages = list(collect({}, {}, only_held_out=True))
    expected = {s["package"]: s for s in manifest["held_out"]}
    found = {package.name: package.as_dict() for package in packages}
    if found != expected:
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise ValueError(f"{', '.join(wrong)}: not installed as the run held it out; release where the text was packed")
    excerpts = cut_excerpts(packages, _EXCERPTS)
    text = json.dumps([asdict(excerpt) for excerpt in excerpts], indent=1)
    (folder / EXCERPTS).write_text(text + "\n", encoding="utf-8")
    names = sorted({excerpt.package for excerpt in excerpts})
    (folder / "LICENSES.txt").write_text("\n".join(map(_licences, names)), encoding="utf-8")


def cut_excerpts(packages: Sequence[Package], count: int, seed: int = 0) -> list[Excerpt]:
    """Take at most `count` excerpts from packages in turn, at most one of each file.

    Raises:
        ValueError: No file holds one.
    """
    chooser = random.Random(seed)
    queues = []
    for package in packages:
        files = chooser.sample(package.files, len(package.files))
        texts = [text for file in files if (text := _cut(file, chooser))]
        queues.append([Excerpt(package.name, package.version, package.licence, text) for text in texts])
    turns = [queue[turn] for turn in range(max(map(len, queues), default=0)) for queue in queues if turn < len(queue)]
    if not turns:
        raise ValueError(f"no held-out file has {EXCERPT} bytes of ASCII text")
    return turns[:count]


def _cut(content: bytes, chooser: random.Random) -> str | None:
    starts = [0, *(i + 1 for i, byte in enumerate(content) if byte == 10 and i + 1 + EXCERPT <= len(content))]
    start = chooser.choice(starts)
    piece = content[start : start + EXCERPT]
    return piece.decode("ascii") if len(piece) == EXCERPT and piece.isascii() else None


def _licences(package: str) -> str:
    found = distribution(package)
    names = ("LICENSE", "LICENCE", "COPYING", "NOTICE")
    files = [file for file in found.files or () if file.name.upper().startswith(names) and file.suffix != ".py"]
    texts = [Path(str(found.locate_file(file))).read_text(encoding="utf-8", errors="replace") for file in files]
    text = "\n".join(texts) or f"(No licence file; its metadata says: {found.metadata['License']})\n"
    return f"{'=' * 80}\n{EXCERPTS} holds excerpts of {package} {found.version}, under this licence:\n\n{text}"


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="directory of train.py; none: measure the box of --output again")
    parser.add_argument("--output", type=Path, required=True, help="the box; it is written over")
    parser.add_argument("--seconds", type=float, default=180.0, help="for measuring")
    parser.add_argument("--drafts", type=json.loads, default={}, help="bytes to draft by head, as JSON")
    parser.add_argument("--heads", type=json.loads, default={}, help="directories by head to replace, as JSON")
    parser.add_argument("--readme", type=Path, help="page whose marked block shows the results")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measurement = Measurement(arguments.seconds, batch_size=8, on_step=lambda words: print(words, flush=True))
    if arguments.run is None:
        measure_again(arguments.output, arguments.drafts, measurement, arguments.heads)
    else:
        release(arguments.run, arguments.output, arguments.drafts, measurement)
    if arguments.readme is not None:
        fill_readme(arguments.readme, arguments.output)


if __name__ == "__main__":
    main()
