"""Tables "Beside the paper": figures of papers are those of docs/results/papers.json, ours those of raw results."""

import json
import re
import statistics
from typing import Any

import pytest

from tests.benchmark_modules import defaults, spec_bench
from tests.test_tables import BESIDE, ROOT, SMOL, among_five, bits_of_bytes, fitted, paths, read, seeds_of, tables

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


def rates(name: str, methods: dict[str, str]) -> str:
    """Tokens per call of rows of a bench, by the words of the table."""
    found = {words: bench(name, method)["tokens_per_verification"] for words, method in methods.items()}
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
    assert runs
    return f"{statistics.fmean(row['block'] for row in runs):.3f}"


def circuits() -> Figures:
    cells = {kind: {"head_type": kind.lower(), "context": 0, "rank": 1 if kind == "FF" else 4} for kind in KINDS}
    ours = [listed({kind: box(window=window, **cell) for kind, cell in cells.items()}) for window in (8, 16)]
    released = listed({kind: box("box_released", head_type=kind.lower()) for kind in KINDS})
    card = {row["name"]: row["speed_ups"] for row in read(ROOT / "model_cards" / "box" / "results.json")["results"]}
    decoded = {kind: card[f"{name}, sampled, T=1"][1] for kind, name in (("FF", "ff"), ("HMM", "hmm 8"))}
    cells = {rank: {"head_type": "cp", "window": 8, "rank": rank} for rank in (1, 8, 32)}
    states = {f"r = {r}:": fitted(read(RESULTS / "lexicon.json"), **cell)[1].split()[0] for r, cell in cells.items()}
    runs = {row["rank"]: row for row in read(RESULTS / "heads_by_rank.json")}
    forward = statistics.median(row["forward"] for row in runs.values())
    times = {rank: forward + row["head"] + row["draft"] + row["verify"] for rank, row in runs.items()}

    def stages(kind: str, window: int) -> Figures:
        theirs = {"n": str(window), "model": f"MtPC-{kind}"}
        cells = {k: {"head_type": kind.lower(), "window": window, "draft_layers": k} for k in range(3)}
        return [
            listed({f"k = {k}:": cited("mtpc", "3", "accepted", lora_layers=k, **theirs) for k in "0124"}),
            listed({f"k = {k}:": box("box_stages", **cell) for k, cell in cells.items()}),
        ]

    published = "authors_csv_evabyte_sampling_n16"
    return [
        of_kinds("2", "accepted", n="8"),
        ours[0],
        of_kinds("2", "accepted", n="16"),
        ours[1],
        released,
        listed({f"r = {r}:": cited("mtpc", "1", "accepted", r=r) for r in ("1", "8", "32", "128")}),
        listed(states),
        listed({f"r = {r}:": cited("mtpc", "1", "latency_s", r=r) for r in ("1", "8", "32", "128")}),
        listed({f"r = {rank}:": f"{times[rank]:.2f}" for rank in (1, 8, 32)}),
        *stages("BTree", 16),
        *stages("FF", 8),
        of_kinds("2", "speedup", n="8"),
        listed({kind: f"{ratio:.2f}" for kind, ratio in decoded.items()}),
        of_kinds(published, "accepted"),
        None,
        of_kinds(published, "latency_ms"),
        None,
        of_kinds("authors_csv_llama_argmax_n8", "accepted"),
        None,
    ]


def parallel() -> Figures:
    runs, planes = read(RESULTS / "ptp_text.json")["runs"], read(RESULTS / "ptp_plane.json")
    chains = [run["pairs"] for run in planes if run["source"] == "chain"]
    unlikely = {kind: statistics.fmean(run[kind]["unlikely"] for run in chains) for kind in ("O-PTP", "independent")}

    def ours(slots: int, kind: str, mode: str = "coupled") -> str:
        found = (run[mode][0] for name, run in runs.items() if name.startswith(f"{kind}, N={slots}, seed"))
        return f"{statistics.fmean(found):.3f}"

    def theirs(name: str, column: str, row: str, one_hot: str, independent: str) -> str:
        names = {"O-PTP": one_hot, "independent": independent}
        return listed({ours: cited("ptp", name, column, **{row: theirs}) for ours, theirs in names.items()})

    chains = {kind: seeds_of("ptp_chain", kind, "coupled") for kind in ("C-PTP", "O-PTP", "independent")}
    coupled = {n: listed({"O-PTP": ours(n, "one_hot"), "independent": ours(n, "independent")}) for n in (4, 16)}
    correct = {n: theirs("8", f"N={n}", "row", "O-PTP", "MTP") for n in (4, 16)}
    writers = {"teacher": "Teacher", "student": "Student", "data": "Dataset"}
    (_, _, *ways), *rows = spec_bench.summary(read(RESULTS / "spec_bench.json"))
    answered = {row[0]: row[2 + ways.index("T=0.7")] for row in rows}
    return [
        theirs("2", "accepted", "technique", "O-PTP", "independent prediction"),
        coupled[16],
        "; ".join(f"N = {slots}: {figures}" for slots, figures in correct.items()),
        "; ".join(f"N = {slots}: {figures}" for slots, figures in coupled.items()),
        "N = 16: " + listed({kind: f"{right.mean():.2f}" for kind, right in chains.items()}),
        listed({f"M = {m}:": cited("ptp", "7", f"M={m}", row="correct") for m in (1, 4, 16)}),
        listed({"M = 1:": ours(4, "one_hot"), "M = 2:": ours(4, "one_hot", "best of 2")}),
        theirs("figure_5", "incompatible pairs", "model", "PTP", "independent prediction"),
        listed({name: f"{100 * share:.1f} %" for name, share in unlikely.items()}),
        listed({text: cited("ptp", "4", "ce", proposal=row) for text, row in writers.items()}),
        None,
        specbench("O-PTP", "EAGLE-2", "Hydra", "EAGLE", "Medusa"),
        listed({name: answered[name].split()[0] for name in ("O-PTP", "EAGLE-1", "Hydra")}),
    ]


RETROFITTED = {
    "tuned, summed out": "baseline (tuned base model)",
    "heads alone": "heads only",
    "jointly": "joint, vanilla",
    "jointly, warm-up": "head warmup",
    "jointly, 4 x rate": "diff. LR",
    "jointly, warm-up, 4 x rate": "head warmup + diff. LR",
    "jointly, 4 x rate, weighted states": "diff. LR + WHS",
}
"""Rows of docs/results/retrofit.json, and those of the paper."""


def strategies() -> Figures:
    def mehra(column: str) -> dict[str, str]:
        return {ours: cited("mehra", "1", column, strategy=theirs) for ours, theirs in RETROFITTED.items()}

    sizes = {size.upper(): mehra(f"{size} 2nd")["tuned, summed out"] for size in ("410m", "1b", "1.4b", "2.8b")}
    ours = {name: among_five(name).mean((0, 1)).tolist() for name in RETROFITTED}
    compared = []
    for depth, column in enumerate(("410m next", "410m 2nd")):
        found = {name: f"{shares[depth]:.3f}" for name, shares in ours.items()}
        compared += ["; ".join(f"{name}: {share}" for name, share in each.items()) for each in (mehra(column), found)]
    graphs = {name: paths(2, loss, 2000) for name, loss in (("next-token", "next-token"), ("with heads", "mtp"))}
    learned = {f"n = {n}:": f"{bits_of_bytes('128 x 6', n).mean():.3f}" for n in (1, 2, 4)}
    return [
        *compared,
        listed(sizes),
        None,
        None,
        listed({name: f"{statistics.fmean(shares):.2f}" for name, shares in graphs.items()}),
        listed(learned),
    ]


def block() -> Figures:
    runs = {run["law"]: run for run in read(RESULTS / "block_laws_long.json")["runs"]}

    def ours(rule: str) -> str:
        calls = {name: runs[name.lower()][rule]["expected_tokens_per_call"] for name in ("independent", "Markov")}
        return listed({name: f"{call:.3f}" for name, call in calls.items()})

    def theirs(name: str, *methods: str) -> str:
        return listed({method: cited("dspark", name, "accepted", method=method) for method in methods})

    tasks = {data: cited("dspark", "deepspec_1", "accepted", data=data) for data in ("GSM8K", "HumanEval", "MT-Bench")}
    return [
        theirs("modelopt", "DFlash", "DSpark"),
        ours("block"),
        theirs("ascend", "DFlash", "DSpark"),
        ours("greedy"),
        theirs("modelopt", "Domino", "D-PACE"),
        None,
        listed(tasks),
        None,
    ]


def heads() -> Figures:
    measured = read(RESULTS / "smollm2_contexts.json")
    runs = {run["drafter"]: run for run in measured["runs"]}
    names = {"Medusa": "medusa", "Hydra": "hydra", "EAGLE-1": "eagle1"}
    calls = {name: runs[drafter]["expected_tokens_per_call"] for name, drafter in names.items()}
    ratio = measured["plain call, ms"] / runs["medusa"]["call, ms"]
    return [
        specbench("Medusa", "Hydra", "EAGLE"),
        listed({name: f"{call:.3f}" for name, call in calls.items()}),
        stated("medusa", "speed-up, at most"),
        f"{calls['Medusa'] * ratio:.2f}",
        None,
        None,
    ]


def eagle() -> Figures:
    trained = {"chains of 3:": "eagle3", "trees of 12:": "eagle3 tree"}
    hass = read(RESULTS / "hass.json")["seconds"]
    return [
        specbench("EAGLE", "EAGLE-2"),
        rates("eagle1", {"chains of 3:": "eagle1", "trees of 16:": "eagle1 trees"}),
        *by_task("EAGLE-2", "eagle1", "eagle1 trees", *TASKS),
        None,
        listed({words: f"{bench('eagle3', method)['speed_ups'][1]:.2f}" for words, method in trained.items()}),
        stated("hass", "training cost against EAGLE, n alignment steps"),
        f"{statistics.fmean(hass['HASS']) / statistics.fmean(hass['EAGLE-1']):.1f}",
    ]


def modules() -> Figures:
    names = {"before": "own MTP head before fine-tuning", "after": "own MTP head after fine-tuning"}
    return [
        stated("deepseek_v3", "second token accepted"),
        None,
        stated("deepseek_v3", "throughput with speculative decoding"),
        None,
        listed({word: stated("field_others", figure) for word, figure in names.items()}),
        None,
    ]


def assistants() -> Figures:
    return [specbench("SpS"), None, stated("gemma4", "speed-up, at most (maker's figure)"), None]


def recycling() -> Figures:
    names = {"Recycling": "recycling", "n-grams": "ngram", "Lookahead": "lookahead5"}
    return [specbench("Recycling", "PLD", "Lookahead"), rates("smollm2_untrained", names)]


def lookahead() -> Figures:
    return [specbench("Lookahead", "PLD"), rates("smollm2_untrained", {"Lookahead": "lookahead5", "n-grams": "ngram"})]


def ngrams() -> Figures:
    return by_task("PLD", "eagle3", "ngram", "translation", "summarisation", "questions", "mathematics")


def suffixes() -> Figures:
    ways = {row[0]: row for row in defaults.summary(read(RESULTS / "defaults_avx2.json"))}
    return [specbench("SAMD", "PLD"), listed({name: ways[name][-1] for name in ("suffixes", "n-grams")})]


def trees() -> Figures:
    found = read(RESULTS / "box_trees.json")["ff, T = 1"]
    ours = {name: found[row]["tokens per call"] for name, row in (("fixed", "fixed tree"), ("drawn", "tree"))}
    return [specbench("EAGLE", "EAGLE-2"), listed({name: f"{call:.2f}" for name, call in ours.items()})]


PAGES = {
    "docs/circuits.md": circuits,
    "docs/strategies.md": strategies,
    "docs/trees.md": trees,
    "docs/methods/assistant.md": assistants,
    "docs/methods/block.md": block,
    "docs/methods/eagle.md": eagle,
    "docs/methods/heads.md": heads,
    "docs/methods/lookahead.md": lookahead,
    "docs/methods/modules.md": modules,
    "docs/methods/ngram.md": ngrams,
    "docs/methods/ptp.md": parallel,
    "docs/methods/recycling.md": recycling,
    "docs/methods/suffix.md": suffixes,
}


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
