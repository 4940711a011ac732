"""What every drafter must do, as tests of one class: a drafter is a subclass that names its model."""

from __future__ import annotations

import pytest

from tests.matrix import models
from tests.matrix.decoding import DecodingConformance
from tests.matrix.drafting import DraftingConformance
from tests.matrix.life_cycle import LifeCycleConformance


class DrafterConformance(DecodingConformance, DraftingConformance, LifeCycleConformance):
    """All tests of a drafter; one that does something else overrides the test and says why.

    Attributes:
        name: Of its entry in `tests.matrix.models`.
    """

    name: str

    @pytest.fixture
    def entry(self) -> models.Entry:
        """The model and its drafter, made once in a run."""
        return models.entry(self.name)
