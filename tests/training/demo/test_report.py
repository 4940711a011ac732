"""What is shown: whose byte is whose, the table, the notes."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.internals import GREEDY, Comparison, Completion, HeadReport, drafted_flags, sampled
from tests.internals import demo_report as report
from tokenahead.model_cards import DecodingResult, MeasuredResults


def ids(text: str | bytes) -> list[int]:
    return [byte + 64 for byte in (text.encode() if isinstance(text, str) else text)]


def comparison(mode=GREEDY, identical: bool | None = True, difference: str | None = None) -> Comparison:
    result = DecodingResult(
        name=mode.name,
        do_sample=mode.is_sampled,
        backbone_calls=1250,
        new_tokens=5000,
        seconds=2.0,
        plain_seconds=5.0,
        identical=identical,
    )
    completion = Completion("prompt", ids("ab"), [False, True], difference)
    return Comparison(mode, result, [completion])


@pytest.mark.parametrize(
    ("accepted", "count", "pattern"),
    [([], 1, "v"), ([2, 0, 1], 7, "vddvvdv"), ([3, 3], 8, "vdddvddd"), ([1, 2], 3, "vdv")],
    ids=["prefill only", "whole", "cut after drafts", "cut early"],
)
def test_the_prefill_and_each_verification_add_one_byte_of_their_own(accepted, count, pattern):
    assert "".join("d" if flag else "v" for flag in drafted_flags(accepted, count)) == pattern


def test_bytes_are_coloured_by_origin():
    text = report.coloured(Completion("x = ", ids("1 + 2"), [False, True, True, True, False]))
    assert text.plain == "x = 1 + 2"
    spans = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert spans == [("x = ", report.PROMPT), ("1", report.VERIFIED), (" + ", report.DRAFTED), ("2", report.VERIFIED)]


def test_only_the_last_lines_of_a_prompt_are_shown():
    completion = Completion("a\nb\nc\nd\n", ids("e"), [False])
    assert report.coloured(completion, prompt_lines=2).plain == "c\nd\ne"


def test_a_character_has_the_origin_of_its_last_byte():
    assert list(report.pieces(ids("aé!"), [False, False, True, False])) == [("a", False), ("é", True), ("!", False)]


def test_what_is_no_text_is_made_visible():
    shown = list(report.pieces([*ids(b"a\xff\x1b[2J\n\t"), 2, *ids(b"\xc3")], [False] * 10))
    assert shown == [("a\ufffd\ufffd[2J\n\t<eos>\ufffd", False)]


def test_markup_in_generated_text_is_text():
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(report.coloured(Completion("p", ids("[red]x[/red]"), [True] * 12)))
    assert console.file.getvalue() == "p[red]x[/red]\n"


def reports(*rows: DecodingResult) -> list[HeadReport]:
    words = dict.fromkeys(("dataset_name", "dataset_description", "hardware", "dtype", "command"), "x")
    measured = MeasuredResults(results=list(rows), library_version="0", **words)
    return [HeadReport("btree", 16, 32, 1000, measured)]


def shown(*rows: DecodingResult) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(report.reports_table(reports(*rows), "A title"))
    for words in report.explanation(reports(*rows)):
        console.print(words)
    return console.file.getvalue()


def test_the_table_has_every_figure_and_fits_80_columns():
    more = dict(per_prompt=[2.5, 14.0], expected_tokens_per_call=3.126, repeated_share=0.31)
    full = replace(comparison().result, **more)
    text = shown(full, replace(comparison(sampled(0.7), identical=None).result, name="sampled, T=0.7, batch 16"))
    rows = [line.split() for line in text.splitlines() if line.startswith("btree")]
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    figures = ["4.00", "2.5-14.0", "3.13", "1.6", "2,500", "2.50x", "31%", "yes"]
    assert rows[0] == ["btree", "32", "greedy", *figures]
    assert rows[1] == ["btree", "32", "T=0.7", "x", "16", "4.00", "1.6", "2,500", "2.50x", "drawn"]
    assert "Plain decoding, bytes per second: greedy 1,000" in text


def test_text_that_loops_claims_no_speed_up():
    text = shown(replace(comparison().result, repeated_share=0.8))
    text = " ".join(text.split())
    assert "2.50x" not in text and " loops " in text and "says little: btree 32 greedy." in text


def test_a_failed_comparison_is_named():
    wrong = comparison(identical=False, difference="token 3 is 70 and not 71, whose logit is higher by 0.5")
    assert " no" in shown(wrong.result) and " yes" not in shown(wrong.result)
    (note,) = report.differences([comparison(), wrong])
    assert note == "greedy, prompt 1: with drafts, token 3 is 70 and not 71, whose logit is higher by 0.5"
