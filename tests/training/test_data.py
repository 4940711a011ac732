"""The standard library's source: what is read, how it is split, how it is cut into windows and prompts."""

import random
import sysconfig
from pathlib import Path

import pytest
import torch

from tests.internals import ByteWindows, SourceText, code_prompts, load_corpus, source_files
from tokenahead import EvaByteTokenizer


def test_only_code_is_read_in_the_order_of_paths(source):
    names = [path.relative_to(source).as_posix() for path in source_files(source)]
    assert names == [f"module_{number}.py" for number in range(8)]


def test_this_machine_has_the_standard_library():
    root = Path(sysconfig.get_path("stdlib"))
    names = {path.relative_to(root).as_posix() for path in source_files(root)}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any(name.startswith(("test/", "site-packages/")) for name in names)


def test_the_split_is_by_file_and_follows_from_the_seed(source):
    first, again = load_corpus(source, seed=3, held_out=0.3), load_corpus(source, seed=3, held_out=0.3)
    assert first.train.files == again.train.files and torch.equal(first.train.data, again.train.data)
    assert sorted(first.train.files + first.held_out.files) == [f"module_{number}.py" for number in range(8)]
    assert len(first.held_out.files) == 3  # three files of eight hold the 30 per cent asked for
    held_out = {load_corpus(source, seed=seed, held_out=0.3).held_out.files for seed in range(6)}
    assert len(held_out) > 1


def test_contents_are_those_of_the_files(source):
    text = load_corpus(source).train
    for index, name in enumerate(text.files):
        assert text.content(index) == (source / name).read_bytes()
    assert len(text) == sum((source / name).stat().st_size for name in text.files)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_that_splits_nothing_is_refused(source, share):
    with pytest.raises(ValueError, match=f"held_out={share}"):
        load_corpus(source, held_out=share)


def test_a_folder_without_source_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds.*0"):
        load_corpus(tmp_path)


def test_windows_are_what_the_tokenizer_makes_of_the_same_bytes(source):
    text, tokenizer = load_corpus(source).train, EvaByteTokenizer()
    windows = ByteWindows(text, 50)
    pieces = []
    for index in range(len(text.files)):
        content = text.content(index)
        pieces += [content[start : start + 49] for start in range(0, len(content) - 48, 49)]
    assert len(windows) == len(pieces)
    for window, piece in zip((windows[index] for index in range(len(windows))), pieces):
        assert window["input_ids"].tolist() == tokenizer(piece.decode())["input_ids"]
        assert torch.equal(window["labels"], window["input_ids"])


def test_windows_that_cannot_be_filled_are_refused(source):
    text = load_corpus(source).train
    with pytest.raises(ValueError, match="length=1"):
        ByteWindows(text, 1)
    with pytest.raises(ValueError, match="length=100000"):
        ByteWindows(text, 100_000)


def test_prompts_are_whole_lines_that_end_in_a_head(source):
    text = load_corpus(source, held_out=0.4).held_out
    prompts = code_prompts(text, 6, seed=1, length=200)
    assert prompts == code_prompts(text, 6, seed=1, length=200)
    assert prompts != code_prompts(text, 6, seed=2, length=200)
    whole = "".join(text.content(index).decode() for index in range(len(text.files)))
    for prompt in prompts:
        assert 100 <= len(prompt) <= 200 and prompt in whole
        assert prompt.splitlines()[-1].startswith("def ") and prompt.endswith(":\n")
        assert f"\n{prompt}" in whole


def test_prompts_come_from_different_files_while_there_are_enough(source):
    text = load_corpus(source, held_out=0.5).held_out
    prompts = code_prompts(text, len(text.files), length=200)
    numbers = {next(index for index in range(len(text.files)) if p.encode() in text.content(index)) for p in prompts}
    assert len(numbers) == len(text.files)


def test_prompts_are_ascii(tmp_path):
    (tmp_path / "a.py").write_text("# é\n" * 60 + "def f():\n    pass\n", encoding="utf-8")
    text = SourceText.read(tmp_path, [tmp_path / "a.py"])
    with pytest.raises(ValueError, match="function"):
        code_prompts(text, 1, length=100)


def test_a_long_line_is_cut_rather_than_the_prompt_lost(tmp_path):
    word = "".join(random.Random(0).choices("abc", k=300))
    (tmp_path / "a.py").write_text(f'x = "{word}"\ndef f():\n    pass\n')
    text = SourceText.read(tmp_path, [tmp_path / "a.py"])
    (prompt,) = code_prompts(text, 1, length=100)
    assert len(prompt) == 100 and prompt.endswith('"\ndef f():\n')
