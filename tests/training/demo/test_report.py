"""What is shown: whose byte is whose, the table, the notes."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tokenahead import EvaByteTokenizer
from tokenahead.model_cards import DecodingResult, MeasuredResults
from tokenahead.training import demo as report
from tokenahead.training.commands.bench import show
from tokenahead.training.evaluation.bench import BLEU, EXACT, Completion
from tokenahead.training.evaluation.decoding import drafted_flags
from tokenahead.training.evaluation.prompts import PromptEncoder


def ids(text: str | bytes) -> list[int]:
    return [byte + 64 for byte in (text.encode() if isinstance(text, str) else text)]


def coloured(completion: Completion, **options):
    return report.coloured(completion, PromptEncoder(EvaByteTokenizer(), chats=False), **options)


def result(**changes) -> DecodingResult:
    fields = dict(name="greedy", do_sample=False, backbone_calls=1250, new_tokens=5000, seconds=2.0, plain_seconds=5.0)
    return DecodingResult(**fields | {"identical": True} | changes)


def test_the_prefill_and_each_verification_add_one_byte_of_their_own():
    whole, cut = [([], 1, "v"), ([2, 0, 1], 7, "vddvvdv")], [([3, 3], 8, "vdddvddd"), ([1, 2], 3, "vdv")]
    for accepted, count, pattern in whole + cut:
        assert "".join("d" if flag else "v" for flag in drafted_flags(accepted, count)) == pattern


def test_bytes_are_coloured_by_origin():
    text = coloured(Completion("x = ", ids("1 + 2"), [False, True, True, True, False]))
    assert text.plain == "x = 1 + 2"
    spans = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert spans == [("x = ", report.PROMPT), ("1", report.VERIFIED), (" + ", report.DRAFTED), ("2", report.VERIFIED)]


@pytest.mark.core
def test_only_the_last_lines_of_a_prompt_are_shown():
    completion = Completion("a\nb\nc\nd\n", ids("e"), [False])
    assert coloured(completion, prompt_lines=2).plain == "c\nd\ne"


def test_what_would_move_the_cursor_is_left_out():
    completion = Completion("", [*ids(b"a\x1b[2J\n\t"), 2], [False] * 8)
    assert coloured(completion).plain == "a[2J\n\t<eos>"


def test_markup_in_generated_text_is_text():
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(coloured(Completion("p", ids("[red]x[/red]"), [True] * 12)))
    assert console.file.getvalue() == "p[red]x[/red]\n"


def shown(*rows: DecodingResult) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    words = dict.fromkeys(("dataset_name", "dataset_description", "hardware", "dtype", "command"), "x")
    measured = MeasuredResults(results=list(rows), library_version="0", not_measured={"own": "no drafts"}, **words)
    show(console, measured)
    return console.file.getvalue()


def test_the_table_has_every_figure_and_fits_80_columns():
    more = dict(method="btree 32", tokens_per_verification=4.01, expected_tokens_per_call=3.126, repeated_share=0.31)
    more |= dict(expected_by_position=[0.9, 0.5], speed_ups=[2.25, 2.5, 2.75], call_ms=1.6, texts=20, differing=2)
    more |= dict(near_ties=2, identical=False, category_speed_ups={"a": 2.0, "b": 3.0}, micro_speed_up=2.6)
    more |= dict(looping_share=0.25, whole_speed_ups=[2.0, 2.4, 2.6])
    more |= dict(draft_ms=0.4, prompt_ms=12.0, cache_bytes=3_400_000, accepted_by_position=[0.9, 0.5])
    wide = dict(method="transformers:assistant:a-long-name", quality={EXACT: 55.5, BLEU: 22.2}, call_ms=1234.5)
    wide |= dict(draft_ms=123.4, prompt_ms=12345.0, cache_bytes=123456789, accepted_by_position=[0.9, 0.8, 0.7, 0.6])
    text = shown(result(**more), result(**more | wide), result(name="plain", method="plain", identical=None))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text and "55.5" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(" btree")]
    figures = ["4.01", "3.13", "(2)", "2.50x", "(2.25-2.75)", "1.6", "25%"]
    assert rows[0] == ["btree", "32", *figures]
    assert rows[1] == ["btree", "32", "2.40", "2.60", "2.50", "0.4", "12", "31%", "3.4", "90", "50"]
    assert "n/a: own: no drafts" in text and "NOT LOSSLESS" not in text
    assert text.count("Greedy texts, greedy: equal 18, near-ties 2, different 0\n") == 2


@pytest.mark.core
def test_text_that_loops_claims_nothing():
    for loops in ({"repeated_share": 0.8}, {"looping_share": 1.0}):
        row = result(tokens_per_verification=4.01, **{"looping_share": 0.7, "repeated_share": 0.4} | loops)
        text = " ".join(shown(row).split())
        assert "2.50x" not in text and "4.01" not in text and text.split().count("loops") == 2
        assert f" {row.looping_share:.0%} " in text


def test_where_plain_against_plain_is_unstable_no_speed_up_is_told():
    row = result(speed_ups=[5.7, 5.86, 5.9], micro_speed_up=5.86, category_speed_ups={"a": 5.86})
    for ratios in ([0.03, 1.0, 30.0, 1.0], [1.0, 1.0, 1.0, 1.3], [0.7, 1.0, 1.1, 1.0]):
        text = " ".join(shown(replace(row, plain_ratios=ratios)).split())
        assert "5.86" not in text and " unstable " in text
        words = f"greedy, batch 1: plain decoding ran at {min(ratios):.2f} to {max(ratios):.2f} times its own speed"
        assert words in text
    calm = shown(replace(row, plain_ratios=[0.95, 1.0, 1.1, 1.02]))
    assert "5.86x" in calm and "unstable" not in calm


@pytest.mark.core
def test_a_failed_comparison_is_named():
    text = shown(result(identical=False, texts=4, differing=2, near_ties=1), result(name="other"))
    assert "Greedy texts, greedy: equal 2, near-ties 1, different 1 NOT LOSSLESS\n" in text
