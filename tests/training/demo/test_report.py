"""What is shown: whose byte is whose, the table, the notes."""

import io

import pytest
from rich.console import Console

from tokenahead.model_cards import DecodingResult
from tokenahead.training.demo import report
from tokenahead.training.evaluation import GREEDY, Comparison, Completion, drafted_flags, sampled


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
    return Comparison(mode, result, [completion], [0.75, 0.5])


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


def test_the_table_has_every_figure_and_fits_80_columns():
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(report.decoding_table([comparison(), comparison(sampled(0.7), identical=None)]))
    lines = console.file.getvalue().splitlines()
    rows = [line.split() for line in lines if "greedy" in line or "sampled" in line]
    figures = ["5,000", "1,250", "4.00", "2,500", "1,000", "2.50x"]
    assert max(map(len, lines)) <= 80 and "…" not in console.file.getvalue()
    assert rows == [["greedy", *figures, "yes"], ["sampled,", "T=0.7", *figures, "same", "law"]]


def test_a_failed_comparison_is_named():
    wrong = comparison(identical=False, difference="token 3 is 70 and not 71, whose logit is higher by 0.5")
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(report.decoding_table([wrong]))
    assert " no" in console.file.getvalue() and " yes" not in console.file.getvalue()
    (note,) = report.differences([comparison(), wrong])
    assert note == "greedy, prompt 1: with drafts, token 3 is 70 and not 71, whose logit is higher by 0.5"
