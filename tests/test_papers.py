"""Tables "Beside the paper": figures of papers are those of docs/results/papers.json, ours those of raw results."""

import json
import re
import statistics
from typing import Any

import pytest

from tests.benchmark_modules import defaults
from tests.test_tables import BESIDE, ROOT, SMOL, read, tables

RESULTS = ROOT / "docs" / "results"
PAPERS = json.loads((RESULTS / "papers.json").read_text(encoding="utf-8"), parse_float=str, parse_int=str)
WITHOUT_FIGURES = re.compile(r"not at hand|not measured here|\[results not kept\]\([\w./#-]+\)")
KINDS = ("FF", "CP", "HMM", "BTree")
TASKS = {
    "translation": ("TL", "translation"),
    "summarisation": ("SUM", "summarization"),
    "questions": ("QA", "qa"),
    "mathematics": ("Math", "math_reasoning"),
    "RAG": ("RAG", "rag"),
}
"""Names of Spec-Bench's tasks in the PTP paper's table 3, and in results of `tokenahead bench`."""
Figures = list[str | None]
"""The figures of a table's rows; None where a row says why it has none."""


def listed(figures: dict[str, Any]) -> str:
    return ", ".join(f"{name} {figure}" for name, figure in figures.items())


def cited(paper: str, name: str, column: str, **where: str) -> str:
    """A cell of a paper's table with the digits that were printed."""
    found = PAPERS[paper]["tables"][name]
    rows = (dict(zip(found["columns"], row, strict=True)) for row in found["rows"])
    (row,) = (row for row in rows if where.items() <= row.items())
    return str(row[column])


def stated(paper: str, figure: str) -> str:
    return cited(paper, "stated", "value", figure=figure)


def specbench(*methods: str) -> str:
    return listed({name: cited("ptp", "3", "average", method=name) for name in methods})


def bench(name: str, method: str) -> dict[str, Any]:
    """A row of a bench of SmolLM2 at T = 1."""
    path = SMOL[name] if name in SMOL else RESULTS / f"{name}.json"
    (row,) = (row for row in read(path)["results"] if row["method"] == method and row["decoding"] == "sampled, T=1")
    return row


def rates(**methods: tuple[str, str]) -> str:
    """Tokens per call of rows of a bench, by the words of the table."""
    found = {words: bench(*row)["tokens_per_verification"] for words, row in methods.items()}
    return listed({words: f"{rate:.2f}" for words, rate in found.items()})


def by_task(method: str, name: str, own: str, *tasks: str) -> Figures:
    rates = bench(name, own)["category_tokens_per_call"]
    theirs = {task: cited("ptp", "3", TASKS[task][0], method=method) for task in tasks}
    return [listed(theirs), listed({task: f"{rates[TASKS[task][1]]:.2f}" for task in tasks})]


def of_kinds(name: str, column: str, **where: str) -> str:
    return listed({kind: cited("mtpc", name, column, model=kind, **where) for kind in KINDS})


def box(file: str = "box_contexts", **cell: Any) -> str:
    """Mean bytes per call over seeds, block verification."""
    runs = [row for row in read(RESULTS / f"{file}.json") if cell.items() <= row["cell"].items()]
    return f"{statistics.fmean(row['block'] for row in runs):.3f}"


def circuits() -> Figures:
    cells = {kind: {"head_type": kind.lower(), "context": 0, "rank": 1 if kind == "FF" else 4} for kind in KINDS}
    ours = [listed({kind: box(window=window, **cell) for kind, cell in cells.items()}) for window in (8, 16)]
    released = listed({kind: box("box_released", head_type=kind.lower()) for kind in KINDS})
    states = {f"r = {rank}:": box(head_type="hmm", window=8, context=0, rank=rank) for rank in (4, 8)}
    runs = {row["rank"]: row for row in read(RESULTS / "heads_by_rank.json")}
    forward = statistics.median(row["forward"] for row in runs.values())
    times = {rank: forward + row["head"] + row["draft"] + row["verify"] for rank, row in runs.items()}
    adapted = {f"k = {k}:": cited("mtpc", "3", "accepted", n="16", model="MtPC-BTree", lora_layers=k) for k in "0124"}
    published = "authors_csv_evabyte_sampling_n16"
    return [
        *(of_kinds("2", "accepted", n="8"), ours[0]),
        *(of_kinds("2", "accepted", n="16"), ours[1], released),
        *(listed({f"r = {r}:": cited("mtpc", "1", "accepted", r=r) for r in ("8", "32", "128")}), listed(states)),
        listed({f"r = {r}:": cited("mtpc", "1", "latency_s", r=r) for r in ("1", "8", "32", "128")}),
        listed({f"r = {rank}:": f"{times[rank]:.2f}" for rank in (1, 8, 32)}),
        *(listed(adapted), None),
        *(of_kinds("2", "speedup", n="8"), None),
        *(of_kinds(published, "accepted"), None, of_kinds(published, "latency_ms"), None),
        *(of_kinds("authors_csv_llama_argmax_n8", "accepted"), None),
    ]


def parallel() -> Figures:
    runs, pairs = read(RESULTS / "ptp_text.json")["runs"], read(RESULTS / "ptp_plane.json")["pairs"]
    names = {"O-PTP": ("O-PTP", "PTP", "one_hot"), "independent": ("independent prediction",) * 2 + ("independent",)}

    def ours(slots: int, kind: str, mode: str = "coupled") -> str:
        found = (run[mode][0] for name, run in runs.items() if name.startswith(f"{kind}, N={slots}, seed"))
        return f"{statistics.fmean(found):.3f}"

    def by_slots(figures: list[dict[str, str]]) -> str:
        return "; ".join(f"N = {slots}: {listed(each)}" for slots, each in zip((4, 16), figures, strict=True))

    correct = [{name: cited("ptp", "8", f"N={n}", row=row) for name, row in MTP.items()} for n in (4, 16)]
    coupled = [{name: ours(n, kind) for name, (*_, kind) in names.items()} for n in (4, 16)]
    return [
        listed({name: cited("ptp", "2", "accepted", technique=row) for name, (row, *_) in names.items()}),
        *(listed(coupled[1]), by_slots(correct), by_slots(coupled)),
        listed({f"M = {m}:": cited("ptp", "7", f"M={m}", row="correct") for m in (1, 4, 16)}),
        listed({"M = 1:": ours(4, "one_hot"), "M = 2:": ours(4, "one_hot", "best of 2")}),
        listed(
            {name: cited("ptp", "figure_5", "incompatible pairs", model=row) for name, (_, row, _) in names.items()}
        ),
        listed({name: f"{100 * pairs[name]['impossible']:.0f} %" for name in names}),
        *(listed({text: cited("ptp", "4", "ce", proposal=row) for text, row in WRITERS.items()}), None),
        *(specbench("O-PTP", "EAGLE-2", "Hydra", "EAGLE", "Medusa"), None),
    ]


MTP = {"O-PTP": "O-PTP", "independent": "MTP"}
WRITERS = {"teacher": "Teacher", "student": "Student", "data": "Dataset"}


def mehra(strategy: str, column: str = "410m 2nd") -> str:
    return cited("mehra", "1", column, strategy=strategy)


def strategies() -> Figures:
    tuned, implied = read(RESULTS / "fine_tuned.json"), "baseline (tuned base model)"
    rows = {"implied": (implied, "fine-tuned", "summed out"), "heads": ("diff. LR + WHS", "heads", "heads")}
    theirs, ours = [], []
    for name, (strategy, kind, source) in rows.items():
        run = tuned[f"demo-llama, {kind}, 60 steps, seed 0"]
        depths = (f"{run[f'{source}, top 5, depth {depth}'][0]:.3f}" for depth in (1, 2))
        theirs.append(f"{name} {mehra(strategy, '410m next')} and {mehra(strategy)}")
        ours.append(f"{name} {' and '.join(depths)}")
    sizes = {size.upper(): mehra(implied, f"{size} 2nd") for size in ("410m", "1b", "1.4b", "2.8b")}
    graphs = {
        run["method"]: {step: share for step, share, _ in run["curve"]} for run in read(RESULTS / "star_graph.json")
    }
    return [
        *(", ".join(theirs), ", ".join(ours), listed(sizes), None),
        *(listed({"heads alone": mehra("heads only"), "joint": mehra("joint, vanilla")}), None, None),
        listed({"next-token": f"{graphs['next-token'][700]:.2f}", "with heads": f"{graphs['mtp'][700]:.2f}"}),
    ]


def block() -> Figures:
    runs = {run["law"]: run for run in read(RESULTS / "block_laws_long.json")["runs"]}
    ours = [
        listed(
            {name: f"{runs[name.lower()][rule]['expected_tokens_per_call']:.3f}" for name in ("independent", "Markov")}
        )
        for rule in ("block", "greedy")
    ]
    theirs = {name: cited("dspark", "modelopt", "accepted", method=name) for name in ("DFlash", "DSpark")}
    chains = {name: cited("dspark", "ascend", "accepted", method=name) for name in theirs}
    others = {name: cited("dspark", "modelopt", "accepted", method=name) for name in ("Domino", "D-PACE")}
    tasks = {data: cited("dspark", "deepspec_1", "accepted", data=data) for data in ("GSM8K", "HumanEval", "MT-Bench")}
    return [listed(theirs), ours[0], listed(chains), ours[1], listed(others), None, listed(tasks), None]


def heads() -> Figures:
    measured = read(RESULTS / "smollm2_contexts.json")
    runs = {run["drafter"]: run for run in measured["runs"]}
    calls = {name: runs[name.lower().replace("-", "")]["expected_tokens_per_call"] for name in NINE_MINUTES}
    ratio = measured["plain call, ms"] / runs["medusa"]["call, ms"]
    assert stated("gloeckle", "best n on code") == "not legible"
    return [
        *(specbench("Medusa", "Hydra", "EAGLE"), listed({name: f"{call:.3f}" for name, call in calls.items()})),
        *(stated("medusa", "speed-up, at most"), f"{calls['Medusa'] * ratio:.2f}", None, None),
    ]


NINE_MINUTES = ("Medusa", "Hydra", "EAGLE-1")


def eagle() -> Figures:
    trained = {"chains of 3": ("eagle3", "eagle3"), "trees of 12": ("eagle3", "eagle3 tree")}
    speeds = {f"{words}:": f"{bench(*row)['speed_ups'][1]:.2f}" for words, row in trained.items()}
    return [
        specbench("EAGLE", "EAGLE-2"),
        rates(**{"chains of 3:": ("eagle1", "eagle1"), "trees of 16:": ("eagle1", "eagle1 trees")}),
        *(*by_task("EAGLE-2", "eagle1", "eagle1 trees", *TASKS), None, listed(speeds)),
        *(stated("hass", "training cost against EAGLE, n alignment steps"), None),
    ]


def modules() -> Figures:
    names = {"before": "own MTP head before fine-tuning", "after": "own MTP head after fine-tuning"}
    tuned = {word: stated("field_others", figure) for word, figure in names.items()}
    speed = stated("deepseek_v3", "throughput with speculative decoding")
    return [stated("deepseek_v3", "second token accepted"), None, speed, None, listed(tuned), None]


def untrained(**methods: str) -> str:
    return rates(**{words: ("smollm2_untrained", method) for words, method in methods.items()})


def suffix() -> Figures:
    ways = {row[0]: row for row in defaults.summary(read(RESULTS / "defaults_avx2.json"))}
    return [specbench("SAMD", "PLD"), listed({name: ways[name][-1] for name in ("suffixes", "n-grams")})]


def trees_of_box() -> Figures:
    found = read(RESULTS / "box_trees.json")["ff, T = 1"]
    names = {"fixed": "fixed tree", "drawn": "tree"}
    ours = {name: f"{found[row]['tokens per call']:.2f}" for name, row in names.items()}
    return [specbench("EAGLE", "EAGLE-2"), listed(ours)]


PAGES = {
    "docs/circuits.md": circuits,
    "docs/strategies.md": strategies,
    "docs/trees.md": trees_of_box,
    "docs/methods/assistant.md": lambda: [specbench("SpS"), None, stated("gemma4", FASTER), None],
    "docs/methods/block.md": block,
    "docs/methods/eagle.md": eagle,
    "docs/methods/heads.md": heads,
    "docs/methods/lookahead.md": lambda: [
        specbench("Lookahead", "PLD"),
        untrained(**{"Lookahead": "lookahead5", "n-grams": "ngram"}),
    ],
    "docs/methods/modules.md": modules,
    "docs/methods/ngram.md": lambda: by_task("PLD", "eagle3", "ngram", *list(TASKS)[:4]),
    "docs/methods/ptp.md": parallel,
    "docs/methods/recycling.md": lambda: [
        specbench("Recycling", "PLD", "Lookahead"),
        untrained(**{"Recycling": "recycling", "n-grams": "ngram", "Lookahead": "lookahead5"}),
    ],
    "docs/methods/suffix.md": suffix,
}
FASTER = "speed-up, at most (maker's figure)"


def test_pages():
    pages = (str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
    assert {page for page in pages if any(rows[0][:2] == BESIDE.split(" | ") for rows in tables(page))} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_figures_beside_the_paper(page):
    (rows,) = (rows[1:] for rows in tables(page) if rows[0][:2] == BESIDE.split(" | "))
    for (question, whose, _, figures, agrees), expected in zip(rows, PAGES[page](), strict=True):
        assert expected == figures if expected is not None else WITHOUT_FIGURES.fullmatch(figures), (question, whose)
        assert (agrees == "") == (whose != "here")
        assert whose != "here" or re.match("not shown" if expected is None else "yes|no|not shown", agrees), figures
