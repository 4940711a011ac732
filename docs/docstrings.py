"""Griffe's view of this library, for mkdocstrings: examples are code, configs are dataclasses, lazy names are found."""

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


class ConfigFields(griffe.Extension):
    """Gives a config the `__init__` that transformers makes of its fields; griffe does so for `@dataclass` only."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Add it to a class with `@strict`."""
        if not any(decorator.callable_path.endswith(".strict") for decorator in cls.decorators):
            return
        attributes = [each for each in cls.members.values() if isinstance(each, griffe.Attribute)]
        kinds = griffe.ParameterKind
        fields = [
            griffe.Parameter(each.name, annotation=each.annotation, kind=kinds.keyword_only, default=each.value)
            for each in attributes
            if {"class-attribute", "instance-attribute"} <= each.labels and each.annotation is not None
        ]
        fields.append(griffe.Parameter("kwargs", kind=kinds.var_keyword))  # those of the classes above it
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*fields), parent=cls))


class LazyNames(griffe.Extension):
    """Adds the names that a package loads on first use: its `_HOMES` says which submodule defines each."""

    def on_module_members(self, *, mod: griffe.Module, **kwargs: Any) -> None:
        """Add an alias for each of them."""
        homes = mod.members.get("_HOMES")
        if isinstance(homes, griffe.Attribute):
            for name, home in ast.literal_eval(str(homes.value)).items():
                mod.set_member(name, griffe.Alias(name, f"{mod.path}.{home}.{name}"))
