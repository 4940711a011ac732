"""Heads of the model in the box, trained again on its own text: leaves that read the bytes before them, and Hydra's.

    python benchmarks/box_heads.py --table contexts --only ff-8 hmm-8 --seed 0 1 2 --batch 1 --out box.json
    python benchmarks/box_heads.py --table released --rows 1024 --seconds 720 --out box_released.json

The box's backbone is frozen. It goes on with beginnings of Python's standard library, sampled at T = 1, and every head
starts from the box's FF heads and learns from that text: where text is the target's own, likelihood estimates what
acceptance needs, and the block loss is exact. `contexts` has leaves that read no, one or three bytes, by likelihood,
after equal steps; an HMM's transitions read the last byte where its leaves read any. `released` trains the heads of the
box (three bytes, circuits with small leaves) and Hydra's beside them, by the block loss, for equal processor time.
`stages` is MtPC's Table 3: `--steps` without draft layers, and then as many more with adapters on 0, 1 and 2 layers. A
GPU is used where there is one. `token` and `block` are tokens per call at T = 1 of drafts of window - 1 bytes, expected
along texts that the backbone has drawn behind held-out files; `nll` is the heads' loss per window on them, in nats. The
command goes on where it ended; tables show means over seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from corpus import ByteWindows, load_corpus
from measuring import show
from studies import BEGUN, LENGTH, ROWS, drawn_texts, held_out_rows, measured, train

from tokenahead import EvaByteForMTPC, MTPHeads
from tokenahead.training import TrainingStrategy, regenerate
from tokenahead.training.box import load_box
from tokenahead.training.utils import replace_file

TABLES = ("contexts", "released", "stages")
CIRCUITS = ("cp", "hmm", "btree")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FIGURES = ("steps", "nll", "token", "block")


def cells(table: str) -> Iterator[dict[str, Any]]:
    """Options of heads, and `loss` if it is not likelihood."""
    small = {"rank": 8, "leaf_size": 64}
    if table == "stages":
        heads = {"head_type": "ff", "window": 8, "rank": 1}, {"head_type": "btree", "window": 16, "rank": 4}
        for head, layers in product(heads, ({}, *({"draft_layers": k} for k in range(3)))):
            yield head | {"context": 0} | layers
        return
    if table == "released":
        for kind, shape in {"ff": {"rank": 1}, **dict.fromkeys(CIRCUITS, small)}.items():
            moves = {"transition_context": True} if kind == "hmm" else {}
            yield {"head_type": kind, "window": 16, **shape, "context": 3} | moves | {"loss": "block"}
        yield {"head_type": "hydra", "window": 16, "loss": "block"}
        return
    kinds = [("ff", {"rank": 1}), *((kind, {"rank": 4}) for kind in CIRCUITS), ("hmm", small)]
    for n, context, (kind, shape) in product((8, 16), (0, 1, 3), kinds):
        moves = {"transition_context": True} if kind == "hmm" and context else {}
        yield {"head_type": kind, "window": n, **shape, "context": context} | moves
    yield {"head_type": "hydra", "window": 8}


def own_text(folder: Path, rows: int) -> list[dict[str, torch.Tensor]]:
    """Rows of 512 ids that the backbone has written, as training reads them."""
    windows = ByteWindows(load_corpus().train, LENGTH)
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(2))[:rows].tolist()
    model = load_box("ff", dtype=torch.bfloat16)[0].to(DEVICE)
    prompts, new = [windows[index]["input_ids"][:BEGUN] for index in chosen], 512 - BEGUN
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "use_mtp": False, "min_new_tokens": new}
    size = 128 if DEVICE.type == "cpu" else 2048
    text = regenerate(model, prompts, folder, max_new_tokens=new, batch_size=size, **how)
    ids = (torch.tensor(row["ids"]) for row in text.rows)
    return [{"input_ids": row, "labels": row} for row in ids if len(row) == 512]


def head_of(cell: dict[str, Any], arguments: argparse.Namespace) -> EvaByteForMTPC | MTPHeads:
    """The box with the head of a cell, which starts from its FF heads, or from the cell without draft layers that was
    trained before; Hydra's are apart from it, and new."""
    options = {name: value for name, value in cell.items() if name not in ("loss", "draft_layers")}
    if "draft_layers" in cell:
        trained: Any = EvaByteForMTPC.from_pretrained(folder_of(options, arguments)).to(DEVICE)
        return trained.add_draft_layers(cell["draft_layers"])
    model = load_box("ff")[0].to(DEVICE)
    if cell["head_type"] == "hydra":
        return MTPHeads.from_backbone(model, **options)
    model.set_head(**options)
    return model


def fit(cell: dict[str, Any], data: list[dict[str, torch.Tensor]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and measure the head of a cell, and keep it."""
    torch.manual_seed(arguments.seed)
    model = head_of(cell, arguments)
    # where drafts are hopeless the block loss has no gradient
    loss = {"target": "teacher", "divergence": "block", "label_weight": 0.1} if "loss" in cell else {}
    how = {"seed": arguments.seed, "bfloat16": arguments.bfloat16, "rows": arguments.batch}
    steps = None if "loss" in cell else arguments.steps
    begun = time.process_time()
    done = train(model, TrainingStrategy(loss=loss), data, arguments.seconds, 3e-3, steps=steps, **how)
    figures = {"seconds": round(time.process_time() - begun), "steps": done.state.global_step}
    folder = folder_of(cell, arguments)
    model.save_pretrained(folder, remote_code=None)
    stage = f"head-{cell['head_type']}, {cell.get('loss', 'likelihood')} loss on the box's own text"
    line = {"stage": stage, "step": figures["steps"], "seconds": figures["seconds"], "recipe": cell}
    (folder / "log.jsonl").write_text(json.dumps(line) + "\n")
    measures = measured(model, arguments.drawn)
    rules = {rule: round(found.tokens_per_call, 4) for rule, found in measures.calls.items()}
    calls = [round(each, 3) for each in measures.calls["block"].calls.tolist()]
    return figures | {"nll": round(sum(measures.means()["loss"]), 4)} | rules | {"calls": calls}


def folder_of(cell: dict[str, Any], arguments: argparse.Namespace) -> Path:
    """Return where the trained head of a cell lies."""
    return arguments.out.with_suffix("") / f"{name_of(cell)}-{arguments.seed}"


def name_of(cell: dict[str, Any]) -> str:
    """Return the options of a cell, joined by hyphens."""
    return "-".join(str(value) for value in cell.values())


def print_table(table: str, rows: list[dict[str, Any]]) -> None:
    """Print a table: means over seeds, and the standard errors of tokens per call."""

    def figure(values: list[float], has_error: bool) -> str:
        if not has_error or len(values) < 2:
            return f"{statistics.mean(values):.4g}"
        return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"

    options = list(dict.fromkeys(name for cell in cells(table) for name in cell))
    shown = []
    for cell in cells(table):
        if own := [row for row in rows if row["cell"] == cell]:
            figures = (figure([row[name] for row in own], name in ("token", "block")) for name in FIGURES)
            shown.append([*(cell.get(name, "") for name in options), len(own), *figures])
    show((name.replace("_", " ") for name in (*options, "seeds", *FIGURES)), shown, table)


def main() -> None:
    """Train what is not trained yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", nargs="+", default=["contexts"], choices=TABLES)
    parser.add_argument("--seconds", type=float, default=90, help="of processor time, for each head of `released`")
    parser.add_argument("--steps", type=int, default=384, help="of each head of `contexts`")
    parser.add_argument("--batch", type=int, default=ROWS, help="rows of a step")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names, as `ff-8-1` (options by hyphens)")
    parser.add_argument("--rows", type=int, default=4096, help="texts of 512 bytes that the backbone writes")
    parser.add_argument("--seed", dest="seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--texts", type=int, default=64, help="held-out texts to measure along")
    parser.add_argument("--bfloat16", action="store_true", help="where the processor multiplies bfloat16 fast")
    parser.add_argument("--out", type=Path, default=Path("box.json"), help="rows, which later calls add to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    held_out = held_out_rows(load_corpus(), arguments.texts).to(DEVICE)
    arguments.drawn = drawn_texts(load_box("ff")[0].to(DEVICE), held_out)
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    data = own_text(arguments.out.with_suffix("") / "text", arguments.rows)
    for table, seed in product(arguments.table, arguments.seeds):
        arguments.seed = seed
        for cell in cells(table):
            known = any(row["cell"] == cell and row["seed"] == seed for row in rows)
            if name_of(cell).startswith(tuple(arguments.only)) and not known:
                rows.append({"cell": cell, "seed": seed, **fit(cell, data, arguments)})
                replace_file(arguments.out, json.dumps(rows, indent=0))
        print_table(table, rows)


if __name__ == "__main__":
    main()
