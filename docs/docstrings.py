"""Griffe's view of this library, for mkdocstrings: examples are code, and names that load on first use are found."""

import ast
import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section `Example:`, which griffe would show as prose, to `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rename it in the docstring of a module, class, function or attribute."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)


class LazyNames(griffe.Extension):
    """Adds the names that a package loads on first use: its `_HOMES` says which submodule defines each."""

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Add an alias for each of them."""
        homes = mod.members.get("_HOMES")
        if isinstance(homes, griffe.Attribute):
            for name, home in ast.literal_eval(str(homes.value)).items():
                mod.set_member(name, griffe.Alias(name, f"{mod.path}.{home}.{name}"))
