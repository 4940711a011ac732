"""Beginnings of code to complete."""

import random

import pytest

from tokenahead.training.box import code_prompts

FILES = [
    "".join(
        f"def f{number}_{part}(self, x):\n    return self.x[{number}] + {part}\n\n\n" for part in range(12)
    ).encode()
    for number in range(4)
]


def test_prompts_are_whole_lines_of_different_files_that_end_in_a_head():
    prompts = code_prompts(FILES, 6, seed=1, length=200)
    assert prompts == code_prompts(FILES, 6, seed=1, length=200) != code_prompts(FILES, 6, seed=2, length=200)
    for prompt in prompts:
        assert 100 <= len(prompt) <= 200 and f"\n{prompt}" in b"".join(FILES).decode()
        assert prompt.splitlines()[-1].startswith("def ") and prompt.endswith(":\n")
    assert all(any(prompt.encode() in file for prompt in prompts) for file in FILES)


def test_prompts_are_ascii_and_a_long_line_is_cut():
    content = ("# \u00e9\n" * 60 + "def f():\n    pass\n").encode()
    with pytest.raises(ValueError, match="function"):
        code_prompts([content], 1, length=100)
    word = "".join(random.Random(0).choices("abc", k=300))
    (prompt,) = code_prompts([f'x = "{word}"\ndef f():\n    pass\n'.encode()], 1, length=100)
    assert len(prompt) == 100 and prompt.endswith('"\ndef f():\n')
