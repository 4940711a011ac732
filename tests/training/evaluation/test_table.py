"""The tables of a bench on a console of 80 columns."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tokenahead.training.evaluation.summary import BLEU, EXACT
from tokenahead.training.evaluation.table import tables
from tokenahead.training.results import MeasuredResults

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results" / "smollm2_eagle3.json"
WIDE = dict(
    method="transformers:assistant:a-long-name", quality={EXACT: 55.5, BLEU: 22.2}, call_ms=1234.5, draft_ms=123.4,
    prompt_ms=12345.0, cache_bytes=123456789, texts=80, differing=2, near_ties=2, identical=False, looping_share=0.31,
    repeated_share=0.12, expected_tokens_per_call=2.345, expected_by_position=[0.9, 0.8, 0.7, 0.6],
    accepted_by_position=[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], whole_speed_ups=[1.1, 1.2, 1.3],
)  # fmt: skip


def test_columns_of_every_kind_fit_without_losing_a_figure():
    measured = MeasuredResults.from_json(RESULTS)
    rows = [replace(row, **WIDE) for row in measured.results[:2]]
    console = Console(width=80, file=io.StringIO())
    for table in tables(replace(measured, results=rows)):
        console.print(table)
    shown = console.file.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert shown.count("method") == 3 and "78/80 + 2 ties" in shown and "55.5" in shown
