"""Every model does what users of transformers do with models; `python -m tests.matrix` prints the table."""

import pytest

from tests.matrix.excuses import EXCUSES
from tests.matrix.life_cycle import HABITS
from tests.matrix.models import NAMES, entry


def _id(cell):
    return "-".join(cell)


CELLS = [(model, habit) for model in NAMES for habit in HABITS]


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in EXCUSES], ids=_id)
def test_holds(cell):
    model, habit = cell
    HABITS[habit](entry(model))


@pytest.mark.parametrize("cell", EXCUSES, ids=_id)
def test_excused(cell):
    """What holds instead is documented, and the excuse is still needed."""
    model, habit = cell
    EXCUSES[cell].check(entry(model))
    with pytest.raises((ValueError, AssertionError)):
        HABITS[habit](entry(model))


def test_the_matrix_is_large_and_few_cells_are_excused():
    assert len(NAMES) >= 12 and len(HABITS) >= 20
    assert set(EXCUSES) <= set(CELLS) and 8 * len(EXCUSES) <= len(CELLS)
