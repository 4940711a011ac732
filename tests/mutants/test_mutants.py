"""The list of mutants: each can be planted, in code that is there. `make mutants` says which of them the tests kill."""

import pytest

from tests.mutants.run import ROOT, Mutant, check, read_mutants

SOURCE = "class A:\n    def f(self):\n        return 1 + 1\n\n    def g(self):\n        return 1\n"


def test_every_mutant_can_be_planted():
    mutants = read_mutants()
    check(mutants)
    assert len(mutants) >= 160
    assert {each.file.partition("/")[0] for each in mutants} >= {"generation", "modeling", "training"}


def test_a_mutant_changes_its_function_alone():
    assert Mutant("a.py", "A.g", "return 1", "return 2", "").applied(SOURCE) == SOURCE.replace(
        "        return 1\n", "        return 2\n"
    )


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("A.h", "1", "2"),
        ("A.f", "2", "3"),
        ("A.f", "1", "2"),
        ("A.g", "return 1", "return 1  # one"),
        ("A.g", "1", "("),
    ],
)
def test_a_mutant_that_cannot_be_planted_is_an_error(function, old, new):
    file = "generation/contract.py"
    with pytest.raises((LookupError, ValueError, SyntaxError)):
        Mutant(file, function, old, new, "").applied(SOURCE)
    with pytest.raises(ValueError, match=file):
        check([Mutant(file, function, old, new, "")], ROOT)
