"""Options of the commands `generate`, `bench` and `card`: a field is an option of the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

_DTYPES = ("auto", "float32", "bfloat16", "float16")
NAME = "directory, or name on the Hub (owner/name)"
OF_WEIGHTS: dict[str, Any] = {"choices": _DTYPES, "help": "of the weights (auto: the checkpoint's)"}
_KEEPS = "; as the card there says if left out"
_METHODS = (
    "of plain, own, ngram, suffix[:SOURCE], assistant:SOURCE, heads:SOURCE, eagle:SOURCE, student:SOURCE, "
    "cascade:SOURCE, transformers:prompt_lookup, transformers:assistant:SOURCE, transformers:use_mtp; NAME= before one "
    "names its row, and ?OPTION=VALUE&... after it are options of generate"
)


def number(rule: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser of finite numbers for which `holds` is true."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {rule}")
        return value

    return read


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return a parser of whole numbers from `least` to `most`."""
    wanted = f"of at least {least}" if most == math.inf else f"from {least} to {most}"

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number {wanted}")
        return int(text)

    return read


SECONDS, SEED = number("above 0", lambda x: x > 0), whole(0, 2**32 - 1)


def option(value: Any = MISSING, help: str = "", **options: Any) -> Any:
    """Return a field of a dataclass that is an option of the command line, with arguments of `add_argument`."""
    if isinstance(value, list):
        return field(default_factory=lambda: [*value], metadata={"help": help, **options})
    return field(default=value, metadata={"help": help, **options})


def add_options(parser: argparse.ArgumentParser, kind: type, *exclusive: str) -> None:
    """Add the fields of a dataclass to a parser as options; `exclusive` ones exclude each other."""
    group = parser.add_mutually_exclusive_group() if exclusive else parser
    for entry in fields(kind):
        options: dict[str, Any] = dict(entry.metadata)
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        name = f"--{entry.name.replace('_', '-')}"
        if options.pop("positional", False):
            name = entry.name
        elif default is MISSING:
            options["required"] = True
        elif default is False:
            options["action"] = "store_true"
        if default is not MISSING and default is not False:
            options.setdefault("default", default)
        (group if entry.name in exclusive else parser).add_argument(name, *options.pop("others", ()), **options)


@dataclass(frozen=True)
class GenerateRequest:
    """Options of `tokenahead generate`. Greedy, unless `temperature`, `top_k` or `top_p` asks for samples."""

    model: str = option(help=NAME)
    prompt: str = option("", "the text to complete; '-', or none: the standard input; write '--' before a prompt that "
                          "begins with '-'", positional=True, nargs="?", default=None)  # fmt: skip
    heads: str | None = option(None, "directory, or name on the Hub, of heads, an EAGLE head or a student that were "
                               "trained for this model", others=["--eagle", "--student"], metavar="SOURCE")  # fmt: skip
    plain: bool = option(False, "one token at a time, without drafts")
    chat: bool = option(False, "put the prompt into the tokenizer's chat template")
    dtype: str = option("auto", **OF_WEIGHTS)
    device: str | None = option(None, "such as cpu or cuda:1; a GPU where there is one if left out")
    temperature: float | None = option(
        None, "sample; 0 is greedy, the default", type=number("at least 0", lambda x: x >= 0)
    )
    top_k: int | None = option(None, "sample from the k most probable tokens (0: from all)", type=whole(0))
    top_p: float | None = option(
        None, "sample from the nucleus", type=number("above 0 and at most 1", lambda x: 0 < x <= 1)
    )
    seed: int = option(0, "of the samples (%(default)s)", type=SEED)
    max_new_tokens: int = option(256, "%(default)s if left out", type=whole(1))
    num_assistant_tokens: int | None = option(None, "tokens to draft; as many as fit if left out", type=whole(1))


@dataclass(frozen=True)
class BenchRequest:
    """Options of `tokenahead bench`."""

    model: str = option(help=NAME)
    prompts: Path = option(
        help="Spec-Bench's or GSM8K's .jsonl, one of prompts or messages, or text with a prompt per line", type=Path
    )
    methods: list[str] = option(help=_METHODS, nargs="+", metavar="METHOD")
    output: Path = option(help="directory of results; an earlier run there continues", type=Path)
    decoding: list[str] = option(["greedy"], "'greedy', 'T=1', 'T=0.7' (greedy)", nargs="+")
    batch_size: list[int] = option([1], "prompts per call (1)", nargs="+", type=whole(1))
    new_tokens: int = option(128, "per answer, at most (%(default)s)", type=whole(1))
    per_category: int | None = option(None, "prompts of each category; all if left out", type=whole(1))
    seconds: float | None = option(None, "time after which nothing is begun", type=SECONDS)
    dtype: str = option("auto", **OF_WEIGHTS)
    device: str = option("cpu", "such as cpu or cuda (%(default)s)")
    threads: int | None = option(None, "of PyTorch", type=whole(1))
    seed: int = option(0, "of the samples (%(default)s)", type=SEED)
    raw: bool = option(False, "prompts as they are, without the chat template")
    force_length: bool = option(False, "let no answer end early; such texts often loop")
    skip_broken: bool = option(False, "leave out lines that hold no prompt")
    no_expected: bool = option(False, "expect no calls along the plain texts")
    recommend: bool = option(False, "say which method and length of drafts pay here")


@dataclass(frozen=True)
class CardRequest:
    """Options of `tokenahead card`."""

    model: str = option(help=NAME, positional=True)
    results: Path | None = option(
        None, "file of results of `tokenahead bench`; the one beside the card if left out", type=Path, metavar="FILE"
    )
    methods: list[str] | None = option(
        None, "the methods of the results that drafted with this model; those that name its directory if left out",
        nargs="+", metavar="NAME",
    )  # fmt: skip
    name: str | None = option(None, f"title{_KEEPS}, or else the name of the directory")
    output: Path | None = option(None, "directory of the card and the figures; the model's if left out", type=Path)
    license: str | None = option(None, f"licence id of the weights{_KEEPS}")
    language: list[str] | None = option(None, f"codes of the languages that it writes{_KEEPS}", nargs="+")
    base_model: str | None = option(None, f"name on the Hub of what it derives from{_KEEPS}")
    overwrite: bool = option(False, "replace a README.md that a person wrote")
