"""Griffe's view of our docstrings: a section `Example:` is code, as `Examples:` is. Read by mkdocstrings only."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section of one example, which griffe would show as prose."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename it in the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
