"""Tables of README and docs whose raw results are in the repository: every cell follows from these; prose names them.

`docs/measuring.md` names these tables. Others of the box, of families and of engines have tests where they are made.
"""

import json
import math
import re
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmark_modules import ROOT, defaults, gpu, long_answers, spec_bench
from tokenahead.training.evaluation.drafts import ratio_of_sums

Table = list[list[str]]
SMOL = {name: ROOT / "model_cards" / "smollm2" / name / "results.json" for name in ("eagle1", "hydra")} | {
    "eagle3": ROOT / "docs" / "results" / "smollm2_eagle3.json"
}


def tables(page: str) -> Iterator[Table]:
    """The tables of a page, as rows of cells without bold marks; the second line of each is left out."""
    rows: Table = []
    for line in [*(ROOT / page).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip().replace("**", "") for cell in line.strip("|").split("|")])
        elif rows:
            yield [rows[0], *rows[2:]]
            rows = []


def table(page: str, *head: str) -> Table:
    """The rows of the first table of a page whose first row begins so."""
    return next(rows[1:] for rows in tables(page) if rows[0][: len(head)] == list(head))


HELD = {
    "README.md": ["drafter | training"],
    "docs/benchmarks.md": ["decoding | method", "category", "way, "],
    "docs/box.md": ["decoding | head"],
    "docs/circuits.md": [
        "head | context",
        "head, context 3",
        "drafter | steps",
        "rank | tokens per call",
        "constraint | heads",
        "r | window NLL",
        "n | drafts | head | window NLL",
        "head | likelihood",
        "n | drafts | head | forward",
        "transitions | contextual",
    ],
    "docs/drafters.md": ["drafter | prompts", "category | "],
    "docs/gpu.md": ["shape | batch", "shape | drafts"],
    "docs/measuring.md": ["backbone, drafter"],
    "docs/methods/block.md": ["law | seeds", "law | steps", "nodes, b included"],
    "docs/methods/eagle.md": ["learned by"],
    "docs/methods/ptp.md": ["source | two tokens", "N | student", "student | minutes"],
    "docs/methods/recycling.md": ["drafter | tokens per call"],
    "docs/online.md": ["steps of the policy", "learning within a text"],
    "docs/rl.md": ["steps of the policy", "answers of the group"],
    "docs/strategies.md": ["the text's token is", "graph | loss", "size | n", "head | draft layers", "model | seeds"],
    "docs/training.md": ["trainer | "],
    "docs/trees.md": ["head | chain of 6"],
}
"""How tables begin that are compared with raw results."""
NOT_MEASURED = {
    "docs/draft_length.md": ["backbone, where it runs"],
    "docs/families.md": ["`model_type`"],
    "docs/methods/assistant.md": ["transformers"],
    "docs/methods/ptp.md": ["default"],
    "docs/scale.md": ["target | tokens"],
    "docs/serving.md": ["family | ends with"],
    "docs/strategies.md": ["paper | settings"],
}
"""Tables with numbers of versions and settings."""
BESIDE = "question | whose"
"""How tables begin that show figures of papers above ours (`tests/test_papers.py`)."""


def silent_tables(page):
    """Return the heads of a page's tables that have figures, no raw results, and do not say so."""
    others, silent = (BESIDE, *HELD.get(page, []), *NOT_MEASURED.get(page, [])), []
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"(?:^\|.*\n){3,}", text, re.M):
        head, _, *rows = match[0].splitlines()
        cells = [cell for row in rows for cell in row.strip("|").split("|")[1:]]
        figures = sum(bool(re.search(r"\d\.\d", cell)) for cell in cells)
        told = "*Raw results were not kept.*" in text[match.end() :][:64] or head.strip("| ").startswith(others)
        if figures > 0.15 * len(cells) and not told:
            silent.append(head)
    return silent


PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]


def test_a_table_of_figures_has_raw_results_or_says_that_it_has_none():
    assert {page: silent for page in PAGES if (silent := silent_tables(page))} == {}


MEASURED = re.compile(
    r"[\d.]*\d (?:ms|µs|s|milliseconds|microseconds|(?:tokens|bytes)(?:/s| (?:per|a) (?:second|call|verification))"
    r"|times (?:\*?compiled\*? )?(?:plain|as (?:fast|many|long)|the (?:time|speed))"
    r"|% (?:accept\w*|(?:more|fewer) tokens|slower|faster|of (?:the |its )?(?:time|steps?|drafts?|calls?|places?)))\b"
)
"""Figures of speed, time and acceptance as prose says them; lengths of trainings and texts are settings."""
SOURCE = re.compile(r"(?:results/\w+|results|papers|serving)\.json|\*Raw results were not kept\.\*|not measured")


def silent_prose(text: str) -> list[str]:
    """Return the measured figures in paragraphs of sections, heading to heading, that name no raw results."""
    sections = re.split(r"^(?=#+ )", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), flags=re.M)
    silent = (section.splitlines() for section in sections if not SOURCE.search(section))
    prose = (" ".join(line.strip() for line in lines if not line.startswith(("|", "    "))) for lines in silent)
    return [match[0] for section in prose for match in MEASURED.finditer(section)]


def test_prose_with_figures_is_in_a_section_with_raw_results():
    told = "# A\nIt takes 3.1\nms, 2 times\nas long.\n    4 ms\n| 5 ms |\n# B\n6 ms ([raw](results/a.json))\n"
    assert silent_prose(told) == ["3.1 ms", "2 times as long"]
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    assert {page: silent for page, text in texts.items() if (silent := silent_prose(text))} == {}


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def means(steps: list[dict[str, float]], key: str, first: int, width: int, form: str = ".2f") -> list[str]:
    """Means over successive spans of steps; a step may lack the value."""
    spans: dict[int, list[float]] = {}
    for step in steps:
        if step[key] is not None:
            spans.setdefault(int(step["step"] - first) // width, []).append(step[key])
    return [format(statistics.fmean(spans[span]), form) for span in sorted(spans)]


def test_drafters_as_they_come():
    ways = {"one sequence": "", "T = 1": "_sampled", "eight sequences": "_batch"}
    for head, name in ((f"way, {way}", f"defaults_avx2{name}") for way, name in ways.items()):
        found = defaults.summary(read(ROOT / "docs" / "results" / f"{name}.json"))
        assert sorted(table("docs/benchmarks.md", head)) == sorted(found)


def test_drafters_along_stored_answers():
    found = read(ROOT / "docs" / "results" / "spec_bench.json")
    for head, *rows in (spec_bench.summary(found), spec_bench.by_category(found, "T=1")):
        assert table("docs/drafters.md", *head) == rows


def gain(calls: list[list[float]], others: list[list[float]]) -> str:
    """How much fewer verifications [seeds][texts] the same texts take, in per cent, and its error over both."""
    ours, theirs = torch.tensor(calls).double(), torch.tensor(others).double()
    ratio, over_texts = ratio_of_sums(theirs.sum(0), ours.sum(0))
    over_seeds = float((theirs.sum(1) / ours.sum(1)).std()) / len(ours) ** 0.5
    return f"{100 * (ratio - 1):+.1f} ± {100 * math.hypot(over_texts or 0.0, over_seeds):.1f} %"


def test_gains_are_of_the_same_texts():
    calls, error = [[9.0, 11.0], [10.0, 10.0]], 100 * math.hypot(0.1, 0.0)
    assert gain(calls, calls) == "+0.0 ± 0.0 %" and gain(calls, [[10.0, 10.0]] * 2).startswith("+0.0 ± ")
    assert gain([[10.0, 10.0]] * 2, [[12.0, 10.0]] * 2) == f"+10.0 ± {error:.1f} %"


def test_draft_layers_on_the_box():
    runs = read(ROOT / "docs" / "results" / "box_stages.json")

    def of(head: str, layers: int) -> list[dict[str, Any]]:
        kind = {"head_type": head.split(",")[0].lower(), "draft_layers": layers}
        return [run for run in runs if kind.items() <= run["cell"].items()]

    for head, layers, seeds, nats, call, gained, seconds in table("docs/strategies.md", "head", "draft layers"):
        found, first = of(head, int(layers)), of(head, 0)
        mean = {name: statistics.fmean(run[name] for run in found) for name in ("nll", "block", "seconds")}
        expected = [str(len(found)), f"{mean['nll']:.2f}", f"{mean['block']:.3f}", f"{mean['seconds']:.0f}"]
        assert [seeds, nats, call, seconds] == expected and len(found) == len(first) == 3
        assert gained == ("" if layers == "0" else gain(*([run["calls"] for run in rows] for rows in (found, first))))


def test_hass_beside_eagle_1():
    found = read(ROOT / "docs" / "results" / "hass.json")
    calls, tokens = found["verifications"], sum(found["tokens"])
    rates = {name: f"{tokens * len(rows) / sum(map(sum, rows)):.3f}" for name, rows in calls.items()}
    expected = [["start", "1", "", rates["start"], "", ""]]
    for name in ("EAGLE-1", "HASS"):
        over = gain(calls[name], calls["EAGLE-1"]) if name == "HASS" else ""
        seconds = f"{statistics.fmean(found['seconds'][name]):.0f}"
        expected.append([name, "3", seconds, rates[name], gain(calls[name], 3 * calls["start"]), over])
    assert table("docs/methods/eagle.md", "learned by") == expected


def mean_and_error(figures: Any, digits: int = 3, sign: str = "") -> str:
    """A mean and, of several figures, its standard error."""
    values = torch.as_tensor(figures, dtype=torch.float64)
    mean = f"{values.mean():{sign}.{digits}f}"
    return f"{mean} ± {values.std() / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else mean


def seeds_of(name: str, cell: str, figure: str) -> torch.Tensor:
    """A figure of all seeds of a cell of docs/results/NAME.json that have it, [seeds, ...]."""
    runs = read(ROOT / "docs" / "results" / f"{name}.json").items()
    return torch.tensor([run[figure] for row, run in runs if row.rsplit(", seed ", 1)[0] == cell and figure in run])


def among_five(cell: str) -> torch.Tensor:
    """The share of tokens that heads for SmolLM2 have among the first five, [seeds, texts, next and second]."""
    return seeds_of("retrofit", cell, "top_5")


def test_layer_heads_on_smollm2():
    rows = table("docs/strategies.md", "model", "seeds")
    assert {row[0] for row in rows} == {
        name.rsplit(", seed", 1)[0] for name in read(ROOT / "docs/results/retrofit.json")
    }
    for cell, *shown in rows:
        found, bits = among_five(cell), seeds_of("retrofit", cell, "bits_per_token")
        over = "" if cell == "jointly" else mean_and_error((found - among_five("jointly")).mean(0)[:, 1], sign="+")
        figures = [mean_and_error(found.mean(0)[:, depth]) for depth in range(2)]
        assert shown == [str(len(found)), *figures, over, f"{bits.mean():.2f}"]


def test_students_of_hard_chains():
    for student, minutes, seeds, steps, *cells in table("docs/methods/ptp.md", "student", "minutes"):
        found = {name: seeds_of("ptp_chain", student, name) for name in ("minutes", "steps", "coupled", "block")}
        told = [f"{found['minutes'][0]:g}", f"{statistics.fmean(found['steps']):.0f}"]
        assert [minutes, steps] == (["", ""] if student == "independent" else told)
        assert int(seeds) == len(found["coupled"])
        assert cells == [mean_and_error(found[rule], 2) if len(found[rule]) else "" for rule in ("coupled", "block")]


def fitted(found: list[dict[str, Any]], **cell: Any) -> tuple[dict[str, float], str]:
    """Means over the training seeds of a cell of the lexicon, and tokens per call with their deviation."""
    rows = [row for row in found if row["cell"] == cell]
    mean = {name: statistics.fmean(row[name] for row in rows) for name in rows[0].keys() - {"cell", "seed"}}
    assert len({row["seed"] for row in rows}) == len(rows) > 2
    return mean, f"{mean['decoded']:.2f} ± {statistics.stdev(row['decoded'] for row in rows):.2f}"


def test_heads_on_a_lexicon():
    found = read(ROOT / "docs" / "results" / "lexicon.json")
    names = {"FF": "ff", "CP": "cp", "HMM": "hmm", "BTree": "btree"}

    def row(**cell: Any) -> list[str]:
        mean, decoded = fitted(found, **cell)
        figures = (f"{mean[name]:.2f}" for name in ("nll", "token", "block"))
        return [*figures, decoded, f"{mean['biased']:.2f}", f"{mean['seconds']:.0f}"]

    for rank, *cells in table("docs/circuits.md", "r", "window NLL"):
        assert cells == row(head_type="cp", window=8, rank=int(rank))
    for n, drafts, head, *cells in table("docs/circuits.md", "n", "drafts", "head", "window NLL"):
        rank = 1 if head == "FF" else 8
        assert int(drafts) == int(n) - 1 and cells == row(head_type=names[head], window=int(n), rank=rank)
    for head, *cells in table("docs/circuits.md", "head", "likelihood"):
        for loss, cell in zip(("likelihood", "kl", "tv", "block"), cells, strict=True):
            kind = {"head_type": names[head], "window": 8, "rank": 1 if head == "FF" else 4, "loss": loss}
            mean, decoded = fitted(found, **kind)
            assert cell == f"{decoded} ({mean['seconds']:.0f} s)"
    for transitions, contextual, *cells in table("docs/circuits.md", "transitions", "contextual"):
        shape = {"homogeneous": transitions == "one for all steps", "contextual": contextual == "yes"}
        for bias, cell in zip((0.0, 3.0, None), cells, strict=True):
            mean, decoded = fitted(found, head_type="hmm", window=8, rank=32, **shape, identity_bias=bias)
            assert cell == f"{mean['nll']:.2f}, {decoded}"
    costs = read(ROOT / "docs" / "results" / "heads.json")
    for n, _, head, *cells in table("docs/circuits.md", "n", "drafts", "head", "forward"):
        cell = {"head_type": names[head], "window": int(n), "rank": 1 if head == "FF" else 8}
        runs, kept = [run for run in costs if cell.items() <= run.items()], fitted(found, **cell)[0]["decoded"]
        names_of_parts = ("forward", "head", "draft", "verify", "cycle")
        parts = [statistics.median(run[each] for run in runs) for each in names_of_parts]
        rates = (f"{1000 * each / parts[-1]:.0f}" for each in (kept, int(n)))
        assert cells == [*(f"{part:.2f}" for part in parts), f"{kept:.2f}", *rates] and len(runs) == 5


def test_budgets_of_block_trees():
    found = read(ROOT / "docs" / "results" / "block_budgets.json")
    ways = [found[way]["independent/final"] for way in ("greedy", "sampled")]
    rows = [[budget, *("{:.2f} ± {:.2f}".format(*way[budget]) for way in ways)] for budget in ways[0]]
    assert table("docs/methods/block.md", "nodes, b included") == rows


def test_acceptance_along_long_answers():
    head, rows = long_answers.summary(read(ROOT / "docs" / "results" / "long_answers.json"))
    assert table("docs/measuring.md", *head) == rows


def test_learning_within_long_answers():
    head, rows = long_answers.learning_summary(read(ROOT / "docs" / "results" / "learning_within.json"))
    assert table("docs/online.md", *head) == rows


def test_a_policy_that_moves():
    steps = read(ROOT / "docs" / "results" / "online.json")["steps"]
    shown = {row[0]: row[1:] for row in table("docs/online.md", "steps of the policy", "1 to 10")}
    names = {"loss of the policy": "loss", "static head": "static", "head that learns": "online"}
    assert shown == {name: means(steps, key, 0, 10) for name, key in names.items()}


def test_rollouts_in_trl():
    found = read(ROOT / "docs" / "results" / "grpo.json")
    names = {
        "none": "plain rollouts",
        "static": "EAGLE-3 head, static",
        "online": "EAGLE-3 head that learns",
        "suffix": "`SuffixDrafter`",
        "cascade": "cascade of suffixes and the head that learns",
    }
    rates, divergences = (
        rows[1:] for rows in tables("docs/rl.md") if rows[0][:2] == ["steps of the policy", "1 to 20"]
    )
    assert rates == [[names[k], *means(found["steps"][k], "tokens_per_call", 1, 20)] for k in list(names)[1:]]
    assert divergences == [[f"KL, {names[key]}", *means(found["steps"][key], "kl", 1, 20)] for key in names]
    answers = [row[1:] for row in table("docs/rl.md", "answers of the group that are there")]
    assert answers == [[f"{value:.2f}" for value in values] for values in found["suffix_by_answers"].values()]


def gpu_rows(card: str) -> dict[tuple[str, str, str, str], Any]:
    """Rows of a run of benchmarks/gpu.py by shape, batch, drafts and mode."""
    found = read(ROOT / "docs" / "results" / f"gpu_{card}.json")["rows"]
    rows = [gpu.Row(**row | {"calls": [gpu.Call(**call) for call in row["calls"]]}) for row in found]
    return {(row.shape, str(row.batch), GPU_NAMES.get(row.drafts, row.drafts), row.mode): row for row in rows}


GPU_NAMES = {"none": "plain decoding", "HMM": "HMM heads", "block": "block drafter"}


def test_cycles_on_a_gpu():
    by_key = gpu_rows("h200")
    for shape, batch, drafts, *shown in table("docs/gpu.md", "shape", "batch", "drafts"):
        pair = [by_key[shape, batch, drafts, mode] for mode in ("eager", "compiled")]
        cycles = [[statistics.median(row.calls[-1].cycles), row.ms_per_token] for row in pair]
        plain = by_key[shape, batch, "plain decoding", "compiled"].ms_per_token
        ratio = 1 if drafts == "plain decoding" else plain / cycles[1][1]
        values = [pair[1].calls[-1].tokens_per_call, *cycles[0], *cycles[1], ratio]
        assert [float(cell) for cell in shown] == pytest.approx(values, abs=0.0051), (shape, batch, drafts)


def test_recorded_cycles_on_a_gpu():
    by_key = gpu_rows("h100")
    for shape, drafts, rate, *shown, ratio in table("docs/gpu.md", "shape", "drafts"):
        modes = (mode for mode in ("recorded", "compiled") if (mode, drafts) != ("recorded", "plain decoding"))
        pair = {mode: by_key.get((shape, "1", drafts, mode)) for mode in modes}
        for mode, cells in zip(("recorded", "compiled"), (shown[:3], shown[3:])):
            if (row := pair.get(mode)) is None:
                assert cells == [""] * 3
                continue
            cycles = row.calls[-1].cycles
            values = [statistics.median(cycles), cycles[0], row.ms_per_token]
            assert [float(cell) for cell in cells] == pytest.approx(values, abs=0.0051), (shape, drafts)
            plain = by_key[shape, "1", "plain decoding", "compiled"].ms_per_token / row.ms_per_token
            assert float(rate) == pytest.approx(row.calls[-1].tokens_per_call, abs=0.0051)
        assert float(ratio) == pytest.approx(plain, abs=0.0051)


def law_of(cell: str) -> str:
    """The name of a law in the results, from its cell: `hmm`, 4 states."""
    kind, _, states = re.sub(r"[`,]|rank 256| states?", "", cell).strip().partition(" ")
    return "-".join(filter(None, (kind, states.strip())))


def test_laws_of_blocks():
    runs = read(ROOT / "docs" / "results" / "block_laws.json")["runs"]
    for law, seeds, *shown in table("docs/methods/block.md", "law", "seeds"):
        own = [run for run in runs if run["law"] == law_of(law)]
        assert len(own) == int(seeds)
        places = [statistics.fmean(run["acceptance"][place - 1] for run in own) for place in (1, 2, 4, 7)]
        assert [float(cell) for cell in shown[:4]] == pytest.approx(places, abs=0.00051)
        for rule, cell in zip(("token", "block", "greedy"), shown[4:], strict=True):
            assert cell == mean_and_error([run[rule]["expected_tokens_per_call"] for run in own])


def test_laws_of_blocks_that_learned_longer():
    measured = read(ROOT / "docs" / "results" / "block_laws_long.json")
    shown = table("docs/methods/block.md", "law", "steps")
    for (law, steps, seconds, *cells), run in zip(shown, measured["runs"], strict=True):
        assert run["law"] == law_of(law)
        assert (int(steps), int(seconds)) == (run["steps"], round(run["seconds"]))
        figures = [f"{run['acceptance'][place - 1]:.3f}".removeprefix("0") for place in (1, 2, 4, 7)]
        calls = (run[rule] for rule in ("token", "block", "greedy"))
        figures += [f"{each['expected_tokens_per_call']:.3f} ± {each['expected_standard_error']:.3f}" for each in calls]
        assert cells == figures
    eagle, hydra = (measured["released, along the same texts"][name]["block"] for name in ("eagle1", "hydra"))
    words = (ROOT / "docs" / "methods" / "block.md").read_text()
    for each, error in ((eagle, ".07"), (hydra, ".03")):
        assert f"{each['expected_tokens_per_call']:.2f} ± {error}" in words
        assert f"{each['expected_standard_error']:.2f}".removeprefix("0") == error


def test_parallel_prediction_on_text():
    runs = read(ROOT / "docs" / "results" / "ptp_text.json")["runs"]
    kinds = {"independent": "independent", "O-PTP": "one_hot", "C-PTP": "categorical"}
    shown = table("docs/methods/ptp.md", "N", "student")
    assert len(shown) == 6
    for slots, student, seeds, *cells in shown:
        of = [found for name, found in runs.items() if name.startswith(f"{kinds[student]}, N={slots}, seed")]
        assert len(of) == int(seeds)
        for mode, cell in zip(("coupled", "best of 2", "block"), cells, strict=True):
            values = [found[mode][0] for found in of if mode in found]
            assert cell == (mean_and_error(values) if values else "")


def test_drafters_without_training_on_smollm2():
    results = read(ROOT / "docs" / "results" / "smollm2_untrained.json")["results"]
    rows = {(row["method"], row["decoding"]): row for row in results}
    names = ["ngram", "recycling", "recycling16", "lookahead5"]
    shown = table("docs/methods/recycling.md", "drafter", "tokens per call, T = 1")
    for name, (_, *cells) in zip(names, shown, strict=True):
        found = [rows[name, "sampled, T=1"], rows[name, "greedy"]]
        figures = [f"{value:.2f}" for row in found for value in (row["tokens_per_verification"], row["speed_ups"][1])]
        assert cells == [*figures, f"{found[0]['call_ms']:.1f}"]


def test_released_heads_of_the_box():
    rows = {row["cell"]["head_type"]: row for row in read(ROOT / "docs" / "results" / "box_released.json")}
    for name, steps, *shown in table("docs/circuits.md", "head, context 3"):
        row = rows[name.lower()]
        assert int(steps) == row["steps"]
        assert [float(cell) for cell in shown] == pytest.approx([row["nll"], row["token"], row["block"]], abs=0.0051)


def test_chains_and_trees_of_the_box():
    found = read(ROOT / "docs" / "results" / "box_trees.json")
    for (head, *cells), (name, ways) in zip(table("docs/trees.md", "head", "chain of 6"), found.items(), strict=True):
        assert f"{head}, T = 1" == name
        assert cells == [f"{way['tokens per call']:.2f} ± {way['error']:.2f}" for way in ways.values()]


def bench_cells(row: dict[str, Any]) -> list[str]:
    """What the tables of a bench in docs/benchmarks.md show of a row, from its tokens per call on."""
    low, middle, high = row["speed_ups"]
    calls = len(row["per_prompt"]) / row["batch_size"]
    macro = statistics.fmean(row["category_speed_ups"].values())
    ratios = [f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{row['micro_speed_up']:.2f}", f"{macro:.2f}"]
    drafting = f"{row['draft_ms']:.1f}" if row["draft_ms"] else ""
    is_greedy, is_plain = row["decoding"] == "greedy", row["method"].startswith("plain")
    rate = "1" if is_plain else "withdrawn" if is_greedy else f"{row['tokens_per_verification']:.2f}"
    same = f"{row['texts'] - row['differing']} of {row['texts']}" if is_greedy else ""
    same += f", {row['near_ties']} near-ties" if row["differing"] else ""
    return [rate, f"{row['looping'] / calls:.0%}".replace("%", " %"), *ratios, f"{row['call_ms']:.1f}", drafting, same]


BENCHES = [  # by table of docs/benchmarks.md: the heads whose results are there, and the names of their rows
    {
        "eagle1": {"eagle1": "EAGLE-1, chains of 3", "eagle1 trees": "EAGLE-1, trees of 16"},
        "hydra": {"hydra": "Hydra heads, chains of 3", "hydra trees": "Hydra heads, trees of 16"},
    },
    {
        "eagle3": {
            "plain, again": "plain, again",
            "ngram": "`ngram`",
            "transformers:prompt_lookup": "transformers' prompt lookup",
            "eagle3": "EAGLE-3, chains of 3",
            "eagle3 tree": "EAGLE-3, trees of 12",
            "cascade": "suffixes, where unsure EAGLE-3's trees",
        }
    },
]


@pytest.mark.parametrize("number", [0, 1])
def test_benches_of_smollm2(number):
    page = [
        rows[1:]
        for rows in tables("docs/benchmarks.md")
        if rows[0][:4] == ["decoding", "method", "tokens per call", "left out"]
    ]
    shown, mode = {}, ""
    for decoding, method, *cells in page[number]:
        mode = {"greedy": "greedy", "T = 1": "sampled, T=1"}.get(decoding, mode)
        shown[mode, method] = cells
    for folder, names in BENCHES[number].items():
        for row in read(SMOL[folder])["results"]:
            if row["method"] in names:
                assert shown[row["decoding"], names[row["method"]]] == bench_cells(row), row["name"]


def test_tokens_per_call_by_category():
    columns = [("eagle1", "eagle1"), ("eagle1", "eagle1 trees"), ("hydra", "hydra"), ("hydra", "hydra trees")]
    columns += [("eagle3", "eagle3"), ("eagle3", "ngram")]
    rows = {
        (folder, row["method"]): row["category_tokens_per_call"]
        for folder in ("eagle1", "hydra", "eagle3")
        for row in read(SMOL[folder])["results"]
        if row["do_sample"]
    }
    rates = [rows[column] for column in columns]
    expected = [
        [name.replace("_", " "), *(f"{rate[name]:.2f}" if name in rate else "-" for rate in rates)] for name in rates[0]
    ]
    assert table("docs/benchmarks.md", "category") == expected


def test_the_first_table_of_the_readme():
    shown = {row[0]: row[2:] for row in table("README.md", "drafter", "training", "tokens per call, T = 1")}
    names = {
        ("eagle1", "eagle1"): "EAGLE-1, chains of 3",
        ("eagle1", "eagle1 trees"): "the same head, trees of 16",
        ("hydra", "hydra"): "Hydra heads, chains of 3",
        ("hydra", "hydra trees"): "the same heads, trees of 16",
    }
    for (folder, method), name in names.items():
        rows = {row["decoding"]: row for row in read(SMOL[folder])["results"] if row["method"] == method}
        greedy, sampled = (bench_cells(rows[mode]) for mode in ("greedy", "sampled, T=1"))
        medians = [cells[2].split()[0] for cells in (greedy, sampled)]
        assert shown[name] == [sampled[0], *medians, greedy[1], sampled[1]], name


def test_the_cost_of_a_rank():
    found = read(ROOT / "docs" / "results" / "heads_by_rank.json")
    tokens = {row[0]: row[4].split()[0] for row in table("docs/circuits.md", "r", "window NLL")}
    forward, expected = statistics.median(row["forward"] for row in found), []
    for row in found:
        times = [forward, row["head"], row["draft"], row["verify"]]
        kept = tokens[str(row["rank"])]
        cells = [f"{value:.2f}" for value in (*times, sum(times))]
        expected.append([str(row["rank"]), kept, *cells, f"{1e3 * float(kept) / sum(times):.0f}"])
    assert table("docs/circuits.md", "rank", "tokens per call") == expected


def test_constraints_within_the_circuit():
    found: dict[tuple[str, str], list[str]] = {}
    for row in read(ROOT / "docs" / "results" / "constrained_circuits.json"):
        cell = "{tokens_per_call:.3f} ± {error:.3f}".format(**row)
        if row["look-ahead"]:
            cell = f"{100 * (row['gain'] - 1):+.1f} ± {100 * row['gain_error']:.1f} %"
        head = row["head"].replace("hmm", "HMM").replace("btree", "BTree")
        found.setdefault((row["constraint"], head), []).append(cell)
    expected = [[*names, *cells, "", ""][:6] for names, cells in found.items()]  # with contexts one token ahead alone
    assert table("docs/circuits.md", "constraint", "heads") == expected


def test_the_plane_of_two_uniforms():
    found = read(ROOT / "docs" / "results" / "ptp_plane.json")
    expected = []
    for source, name in product(dict.fromkeys(run["source"] for run in found), found[0]["pairs"]):
        expected.append([source, name])
        for share in ("right", "unlikely"):
            values = [100 * run["pairs"][name][share] for run in found if run["source"] == source]
            expected[-1].append(f"{mean_and_error(values, 1)} %")
    assert table("docs/methods/ptp.md", "source", "two tokens") == expected


def test_what_smollm2_implies_of_tokens_ahead():
    found = read(ROOT / "docs" / "results" / "smollm2_ahead.json")["smol"]
    expected = []
    for most in (1, 5):
        names = ("summed out", 1), ("summed out", 2), ("known", 2)
        cells = [found[f"{name}, top {most}, depth {depth}"] for name, depth in names]
        expected.append([f"top {most}", *(f"{mean:.3f} ± {error:.3f}" for mean, error in cells)])
    assert table("docs/strategies.md", "the text's token is") == expected


def paths(arms: int, loss: str, step: int) -> list[float]:
    """Shares of paths that the models of all seeds write after so many steps; a run that finds them all ends early."""
    runs = [run for run in read(ROOT / "docs/results/star_graph.json") if run["graph"]["arms"] == arms]
    curves = [run["curve"] for run in runs if run["method"] == loss]
    return [next(share for at, share, _ in reversed(curve) if at <= step) for curve in curves]


def test_paths_in_star_graphs():
    rows = table("docs/strategies.md", "graph", "loss", "500 steps", "1000 steps", "1500 steps", "2000 steps")
    assert len(rows) == 6
    for graph, loss, *cells in rows:
        found = [paths(int(graph[2]), loss, step) for step in (500, 1000, 1500, 2000)]
        assert cells == [mean_and_error(shares, 2) for shares in found] and {len(shares) for shares in found} == {3}


def bits_of_bytes(size: str, window: int) -> torch.Tensor:
    """Bits per byte of models that learned with heads for a window, [seeds, texts]."""
    return seeds_of("joint_bytes", f"{size}, n = {window}", "bits")


def test_bits_of_models_that_learned_with_heads():
    for size, n, *cells in table("docs/strategies.md", "size", "n"):
        found, plain = bits_of_bytes(size, int(n)), bits_of_bytes(size, 1)
        over = "" if n == "1" else mean_and_error((found - plain).mean(1), sign="+")
        assert cells == [str(len(found)), mean_and_error(found.mean(0)), over]


def test_contexts_on_tokens():
    measured = read(ROOT / "docs" / "results" / "smollm2_contexts.json")
    runs = {run["drafter"]: run for run in measured["runs"]}
    shown = table("docs/circuits.md", "drafter", "steps")
    assert len(shown) == len(runs)
    for name, *cells in shown:
        run = runs["eagle1" if name == "EAGLE-1" else name.lower().replace(", context ", "-")]
        calls, error = run["expected_tokens_per_call"], run["expected_standard_error"]
        figures = [f"{run['expected_by_position'][0]:.3f}", f"{calls:.3f} ± {error:.3f}"]
        ratio = measured["plain call, ms"] / run["call, ms"]
        figures += [f"{run['call, ms']:.1f}", f"{calls * ratio:.2f} ± {error * ratio:.2f}"]
        assert cells == [str(run["steps"]), f"{run['parameters'] / 1e6:.1f} M", *figures]


def test_contexts_on_the_box():
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read(ROOT / "docs" / "results" / "box_contexts.json"):
        found.setdefault(json.dumps(row["cell"]), []).append(row)
    shown = {(row[0], row[1]): row[2:] for row in table("docs/circuits.md", "head", "context", "seeds")}
    assert len(shown) == len(found)
    names = {"ff": "FF", "cp": "CP", "hmm": "HMM", "btree": "BTree", "hydra": "Hydra"}
    for cell, rows in found.items():
        fields = json.loads(cell)
        context, small = fields.pop("context", None), "leaf_size" in fields
        fields.pop("transition_context", None)
        name = names[fields["head_type"]] + f", r = {fields.get('rank')}, small leaves" * small
        name += f", n = {fields['window']}" * (fields["window"] > 8)
        figures = [str(len(rows)), f"{statistics.fmean(row['nll'] for row in rows):.2f}"]
        plain = found.get(json.dumps(fields | {"context": 0}))
        for key in ("token", "block"):
            values = [row[key] for row in rows]
            words = mean_and_error(values)
            if context and plain:
                gain = statistics.fmean(values) / statistics.fmean(row[key] for row in plain) - 1
                words += f" (+{gain:.1%})".replace("%", " %")
            figures.append(words)
        figures.append(f"{statistics.fmean(row['seconds'] for row in rows):.0f}")
        assert shown[name, "-" if context is None else str(context)] == figures, cell
