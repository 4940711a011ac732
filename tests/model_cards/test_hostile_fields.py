"""What cards show of files and results is text: it writes no lines, no code and no escapes."""

import re
import unicodedata

import pytest

from tests.every_model import llama
from tokenahead import MTPHeads
from tokenahead.model_cards import DecodingResult, MeasuredResults, render_card
from tokenahead.training.utils import escaped, shown_word, visible

ROW = dict(
    name="greedy", do_sample=False, backbone_calls=5, new_tokens=20, seconds=1.0, plain_seconds=2.0, identical=True
)
RESULTS = dict(
    dataset_name="d", dataset_description="dd", hardware="hw", dtype="float32", command="c", library_version="1"
)
EVIL = {
    "line": "x\nEVIL",
    "carriage return": "x\rEVIL",
    "separator": "x\u2028EVIL\u2029EVIL\x85EVIL\x0bEVIL",
    "fence": "x\n```\nEVIL",
    "long fence": "x\n" + "`" * 9 + "\nEVIL",
    "code": 'x").eval(); EVIL("',
    "quote": "x'); EVIL('",
    "escape": "\x1b[31mEVIL\x9b31m",
    "bidi": "x\u202eLIVE\u2066\u200f",
    "tag": "x<script>EVIL</script><!-- EVIL",
}
FIELDS = ("library_version", "command", "hardware", "unit", "dtype", "dataset_name", "dataset_description")
TEXTS = ("training_data", "training_description", "training_results", "out_of_scope")


@pytest.fixture(scope="module")
def heads():
    return MTPHeads.from_backbone(llama(), window=4)


def _body(card) -> str:
    return str(card).split("---\n", 2)[2]


def _outside_fences(body):
    fence = ""
    for line in body.splitlines():
        ticks = re.match("`*", line.strip())[0]
        if not fence and len(ticks) >= 3:
            fence = ticks
        elif fence and line.strip() == ticks and len(ticks) >= len(fence):
            fence = ""
        elif not fence:
            yield line
    assert not fence, "a fence that never ends"


def _check(card):
    hidden = [c for c in str(card) if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c != "\n"]
    assert not hidden, hidden
    body = _body(card)
    lines = list(_outside_fences(body))
    assert not any(line.strip().startswith("EVIL") for line in lines)
    assert not any("<script" in line.replace("\\<", "") for line in lines)
    assert 'EVIL("' not in "".join(line for line in body.splitlines() if "from_pretrained" in line)


@pytest.mark.parametrize("evil", EVIL)
def test_values_write_no_lines(heads, evil):
    text = EVIL[evil]
    row = DecodingResult(**(ROW | {"name": text}))
    more = {"environment": {text: text}, "extra": {text: text}}
    results = MeasuredResults(results=[row], **(RESULTS | dict.fromkeys(FIELDS, text) | more))
    fields = {"model_name": text, "license": text, "language": text, "hyperparameters": {text: text}}
    _check(render_card(heads, results, **fields))
    _check(render_card(heads, None, compared=results, **fields))


@pytest.mark.parametrize("evil", EVIL)
def test_names_write_no_lines(heads, evil):
    results = MeasuredResults(results=[DecodingResult(**ROW)], **RESULTS)
    for argument in ("base_model", "repo_id", "picture"):
        with pytest.raises(ValueError, match=argument):
            render_card(heads, results, **{argument: EVIL[evil]})


def test_names_and_paths_are_shown(heads):
    for name in ("owner/name", "name", "a/b/c.d-e_f", "owner/Modèle", "my model"):
        card = str(render_card(heads, None, base_model=name, repo_id=f"me/{name.split('/')[-1]}"))
        assert name in card


def test_every_base_model_is_checked(heads):
    with pytest.raises(ValueError, match="base_model"):
        render_card(heads, None, base_model=["a/b", EVIL["code"]])


@pytest.mark.parametrize("argument", TEXTS)
def test_markdown_of_the_author_stays_without_escapes(heads, argument):
    card = render_card(heads, None, **{argument: "First.\n\n- a list\x1b[31m\u202e\n- `code`"})
    assert "First.\n\n- a list[31m\n- `code`" in str(card)


def test_the_code_of_a_card_compiles(heads):
    body = _body(render_card(heads, None, repo_id="me/it", base_model="a b\\c"))
    for code in re.findall("```python\n(.*?)```", body, re.DOTALL):
        compile(code, "card", "exec")


def test_fences_are_longer_than_what_they_hold(heads):
    results = MeasuredResults(results=[DecodingResult(**ROW)], **(RESULTS | {"command": "a\n````\nb"}))
    assert "`````\na\n````\nb\n`````" in str(render_card(heads, results))


def test_hidden_characters():
    assert visible("a\x1b\u202eb\n\tc\u200d") == "ab\n\tc\u200d"
    assert escaped("a\x1b[31m\u202e\nü") == "a\\x1b[31m\\u202e\\nü"


def test_a_long_word_of_a_command_is_no_path():
    word = "ngram=" + "n" * 300
    assert shown_word(word) == word
