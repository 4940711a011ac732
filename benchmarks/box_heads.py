"""The paper's tables on the model in the box: heads trained again on its own text, for the same processor time.

    python benchmarks/box_heads.py --table rank families start losses layers --seconds 90 --out box.json
    python benchmarks/box_heads.py --table families losses --out box.json --decode       # on an idle machine
    python benchmarks/box_heads.py --table contexts --only ff-8 hmm-8 --seed 0 1 2 --steps 400 --batch 1 --out box.json

The box's backbone is frozen. It goes on with beginnings of Python's standard library, sampled at T = 1, and every head
starts from the box's FF heads and learns from that text: where text is the target's own, likelihood estimates what
acceptance needs, and the block loss is exact. `losses` compares them, all other tables have the block loss. `layers`
compares draft LoRA, and `contexts` leaves that read the bytes before them, after equal steps (`--steps`); everything
else gets equal processor time. `contexts` learns by likelihood from states that are computed once, an HMM's transitions
read the last byte where its leaves read any, and `--only` chooses cells by the beginnings of their names. `released`
trains the heads of the box (leaves that read three bytes, circuits with small ones) and Hydra's beside them. A GPU is
used where there is one. `token` and `block` are tokens per call at T = 1 of drafts of window - 1 bytes,
expected along texts that the backbone has drawn behind held-out files; `nll` is the heads' loss per window on them, in
nats.

With `--decode`, the heads that were kept write at T = 1, all of one table by turns with plain decoding, prompt by
prompt: bytes per call, and bytes per second of the wall clock. Rows are added to the file; the command goes on where
it ended. Tables show means over seeds, and the standard errors of tokens per call.
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

TABLES = ("rank", "families", "start", "losses", "layers", "contexts", "released")
FAMILIES = ("ff", "cp", "hmm", "btree")
SMALL: list[tuple[str, dict[str, Any]]] = [("hmm", {"rank": 8, "leaf_size": 64})]
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0}
RATE = 3e-3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FIGURES = ("steps", "nll", "token", "block", "per call", "per second")


def cells(table: str) -> Iterator[dict[str, Any]]:
    """Options of heads, and `loss` if it is not likelihood."""
    ranks, block = {"ff": 1, "cp": 4, "hmm": 4, "btree": 4}, {"loss": "block"}
    if table == "rank":
        yield from ({"head_type": "cp", "window": 8, "rank": rank} | block for rank in (1, 2, 4, 8, 16, 32))
    elif table == "families":
        for kind, n in product(FAMILIES, (8, 16)):
            yield {"head_type": kind, "window": n, "rank": ranks[kind]} | block
    elif table == "start":
        for bias, shape in product((None, 0.0), ({}, {"homogeneous": True}, {"contextual": False})):
            yield {"head_type": "hmm", "window": 8, "rank": 8, "identity_bias": bias} | shape | block
    elif table == "losses":
        for loss, kind in product(({}, block, {"loss": "kl"}), FAMILIES):
            yield {"head_type": kind, "window": 8, "rank": ranks[kind]} | loss
    elif table == "released":
        small = {"leaf_size": 64}
        for kind, shape in {"ff": {"rank": 1}, **{kind: {"rank": 8} | small for kind in FAMILIES[1:]}}.items():
            moves = {"transition_context": True} if kind == "hmm" else {}
            yield {"head_type": kind, "window": 16, **shape, "context": 3} | moves | block
        yield {"head_type": "hydra", "window": 16} | block
    elif table == "contexts":
        for n, context, (kind, small) in product((8, 16), (0, 1, 3), [(kind, {}) for kind in FAMILIES] + SMALL):
            moves = {"transition_context": True} if kind == "hmm" and context else {}
            yield {"head_type": kind, "window": n, "rank": ranks[kind], **small, "context": context} | moves
        yield {"head_type": "hydra", "window": 8}
    else:
        for (kind, window), count in product((("ff", 8), ("btree", 16)), (0, 1, 2)):
            yield {"head_type": kind, "window": window, "rank": ranks[kind], "draft_layers": count} | block


def own_text(folder: Path, rows: int) -> list[dict[str, torch.Tensor]]:
    """Rows of 512 ids that the backbone has written, as training reads them."""
    windows = ByteWindows(load_corpus(seed=0).train, LENGTH)
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(2))[:rows].tolist()
    model = load_box("ff", dtype=torch.bfloat16)[0].to(DEVICE)
    prompts = [windows[index]["input_ids"][:BEGUN] for index in chosen]
    more = {"use_mtp": False, "min_new_tokens": 512 - BEGUN}
    more |= {"batch_size": 128 if DEVICE.type == "cpu" else 2048}
    text = regenerate(model, prompts, folder, max_new_tokens=512 - BEGUN, **SAMPLED, **more)
    ids = (torch.tensor(row["ids"]) for row in text.rows)
    return [{"input_ids": row, "labels": row} for row in ids if len(row) == 512]


@torch.no_grad()
def with_states(rows: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Rows with the backbone's last states [L, 1, D], which need not be computed in every step."""
    body = load_box("ff")[0].model.to(DEVICE)
    states = (body(row["input_ids"][None].to(DEVICE)).last_hidden_state[0, :, None].cpu() for row in rows)
    return [row | {"cached_states": each} for row, each in zip(rows, states)]


def head_of(cell: dict[str, Any]) -> EvaByteForMTPC | MTPHeads:
    """The box with the head of a cell, which starts from its FF heads.

    Hydra's heads are apart from it, and start as new ones.
    """
    model = load_box("ff")[0].to(DEVICE)
    options = {name: value for name, value in cell.items() if name not in ("loss", "draft_layers")}
    if cell["head_type"] == "hydra":
        return MTPHeads.from_backbone(model, **options)
    model.set_head(**options)
    if cell.get("draft_layers"):
        model.add_draft_layers(cell["draft_layers"])
    return model


def fit(cell: dict[str, Any], data: list[dict[str, torch.Tensor]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Train and measure the head of a cell, and keep it."""
    torch.manual_seed(arguments.seed)
    model = head_of(cell)
    loss = {"target": "teacher", "divergence": cell["loss"]} if "loss" in cell else {}
    if cell.get("loss") == "block":  # where drafts are hopeless it has no gradient
        loss["label_weight"] = 0.1
    strategy = TrainingStrategy(loss=loss)
    begun = time.process_time()
    is_counted = "draft_layers" in cell or ("loss" not in cell and ("context" in cell or cell["head_type"] == "hydra"))
    steps = arguments.steps if is_counted else None
    how = {"seed": arguments.seed, "steps": steps, "bfloat16": arguments.bfloat16, "rows": arguments.batch}
    done = train(model, strategy, data, arguments.seconds, RATE, **how)
    figures = {"seconds": round(time.process_time() - begun), "steps": done.state.global_step}
    model.save_pretrained(folder := folder_of(arguments, cell), remote_code=None)
    stage = f"head-{cell['head_type']}, {cell.get('loss', 'likelihood')} loss on the box's own text"
    line = {"stage": stage, "step": figures["steps"], "seconds": figures["seconds"], "recipe": cell}
    (folder / "log.jsonl").write_text(json.dumps(line) + "\n")
    return figures | expected(model, arguments.drawn)


def expected(model: EvaByteForMTPC | MTPHeads, texts: torch.Tensor) -> dict[str, float]:
    """Loss per window, and expected tokens per call of both rules, along texts that the backbone has drawn."""
    measures = measured(model, texts.to(DEVICE))
    rules = {rule: round(found.tokens_per_call, 4) for rule, found in measures.calls.items()}
    return {"nll": round(sum(measures.means()["loss"]), 4)} | rules


def decode(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Note bytes per call and per second of kept heads, by turns, and of plain decoding."""
    models = [head_from(folder_of(arguments, row["cell"]), row["cell"]) for row in rows]
    prompts = arguments.drawn[: arguments.prompts, :BEGUN].to(DEVICE)
    common = {**SAMPLED, "max_new_tokens": 128, "eos_token_id": None, "pad_token_id": 0}
    common |= {"return_dict_in_generate": True}
    seconds, calls = [0.0] * (len(models) + 1), [0] * (len(models) + 1)
    for number, prompt in enumerate(prompts):
        for index, (model, options) in enumerate([(models[0][0], {"use_mtp": False}), *models]):
            torch.manual_seed(number)
            begun = time.perf_counter()
            out = model.generate(prompt[None], **options, **common)
            seconds[index] += time.perf_counter() - begun
            calls[index] += out.speculation.backbone_calls if index else 128
    written = 128 * len(prompts)
    for row, spent, count in zip(rows, seconds[1:], calls[1:]):
        row |= {"per call": round(written / count, 3), "per second": round(written / spent, 1)}
        row["plain per second"] = round(written / seconds[0], 1)


def head_from(folder: Path, cell: dict[str, Any]) -> tuple[EvaByteForMTPC, dict[str, Any]]:
    """A model that a kept head drafts for, and the options with which it does."""
    if cell["head_type"] != "hydra":
        return EvaByteForMTPC.from_pretrained(folder).to(DEVICE).eval(), {}
    model = load_box("ff")[0].to(DEVICE)
    return model, {"assistant_model": MTPHeads.from_pretrained(folder).attach(model)}


def folder_of(arguments: argparse.Namespace, cell: dict[str, Any]) -> Path:
    """Where a trained head lies."""
    return arguments.scratch / f"{name_of(cell)}-{arguments.seed}"


def name_of(cell: dict[str, Any]) -> str:
    """Return the options of a cell, joined by hyphens."""
    return "-".join(str(value) for value in cell.values())


def print_table(table: str, rows: list[dict[str, Any]]) -> None:
    """Print a table: means over seeds."""
    options = list(dict.fromkeys(name for cell in cells(table) for name in cell))
    shown = []
    for cell in cells(table):
        own = [row for row in rows if row["cell"] == cell]
        if own:
            found = {name: [row[name] for row in own if name in row] for name in FIGURES}
            figures = (figure(values, name in ("token", "block")) for name, values in found.items())
            shown.append([*(cell.get(name, "") for name in options), len(own), *figures])
    show((name.replace("_", " ") for name in (*options, "seeds", *FIGURES)), shown, table)


def figure(values: list[float], has_error: bool) -> str:
    """Return the mean of values, and its standard error."""
    if not has_error or len(values) < 2:
        return f"{statistics.mean(values):.4g}" if values else ""
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def main() -> None:
    """Train what is not trained yet, or decode, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", nargs="+", default=list(TABLES[:-1]), choices=TABLES)
    parser.add_argument("--seconds", type=float, default=90, help="of processor time, for each head")
    parser.add_argument("--steps", type=int, default=400, help="of each head of `layers` and `contexts`")
    parser.add_argument("--batch", type=int, default=ROWS, help="rows of a step")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of names, as `ff-8-1` (options by hyphens)")
    parser.add_argument("--rows", type=int, default=4096, help="texts of 512 bytes that the backbone writes")
    parser.add_argument("--seed", dest="seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--texts", type=int, default=64, help="held-out texts to measure along")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--bfloat16", action="store_true", help="where the processor multiplies bfloat16 fast")
    parser.add_argument("--decode", action="store_true", help="measure speeds of the heads that were kept")
    parser.add_argument("--out", type=Path, default=Path("box.json"), help="rows, which later calls add to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.scratch = arguments.out.with_suffix("")
    held_out = held_out_rows(load_corpus(seed=0), arguments.texts).to(DEVICE)
    arguments.drawn = drawn_texts(load_box("ff")[0].to(DEVICE), held_out)
    rows: list[dict[str, Any]] = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    data = [] if arguments.decode else own_text(arguments.scratch / "text", arguments.rows)
    for table, seed in product(arguments.table, arguments.seeds):
        arguments.seed = seed
        wanted = [cell for cell in cells(table) if name_of(cell).startswith(tuple(arguments.only))]
        for cell in [] if arguments.decode else wanted:
            if not any(row["cell"] == cell and row["seed"] == arguments.seed for row in rows):
                if table == "contexts" and "cached_states" not in data[0]:
                    data = with_states(data)
                rows.append({"cell": cell, "seed": arguments.seed, **fit(cell, data, arguments)})
                replace_file(arguments.out, json.dumps(rows, indent=0))
        if arguments.decode:
            decode([row for row in rows if row["cell"] in wanted and row["seed"] == arguments.seed], arguments)
            replace_file(arguments.out, json.dumps(rows, indent=0))
        print_table(table, rows)


if __name__ == "__main__":
    main()
