"""What may change or go: its names are there, and are none of the stable ones."""

import dataclasses
import inspect
from importlib import import_module

import pytest

import tokenahead
from tokenahead import experimental, extending


def test_names_are_importable_and_not_stable():
    assert all(getattr(experimental, name) is not None for name in experimental.__all__)
    assert not set(experimental.__all__) & {*tokenahead.__all__, *vars(extending)}
    with pytest.raises(AttributeError, match="nothing"):
        experimental.nothing  # noqa: B018


@pytest.mark.parametrize("owner", experimental.OPTIONS)
def test_experimental_options_exist_and_are_no_defaults(owner):
    module, _, name = owner.rpartition(".")
    kind = getattr(import_module(module), name)
    defaults = (
        {field.name: field.default for field in dataclasses.fields(kind)}
        if dataclasses.is_dataclass(kind)
        else {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    )
    for option, values in experimental.OPTIONS[owner].items():
        assert option in defaults and defaults[option] not in values
