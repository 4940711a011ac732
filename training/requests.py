"""Options of the commands `demo`, `generate`, `bench` and `card`: a field is an option of the command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser

from .utils import escaped

_DTYPES = ("auto", "float32", "bfloat16", "float16")
NAME = "directory, or name on the Hub (owner/name)"
OF_WEIGHTS: dict[str, Any] = {"choices": _DTYPES, "help": "of the weights (auto: the checkpoint's)"}
_KEEPS = "; as the card there says if left out"
_METHODS = (
    "of plain, own, ngram, suffix[:SOURCE], recycling, lookahead, assistant:SOURCE, heads:SOURCE, eagle:SOURCE, "
    "block:SOURCE, student:SOURCE, auto:SOURCE, cascade:SOURCE, transformers:prompt_lookup, "
    "transformers:assistant:SOURCE, transformers:use_mtp; NAME= before one names its row, and ?OPTION=VALUE&... after "
    "it are options of generate"
)


def number(kind: Callable[[str], float], rule: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a parser of finite numbers for which `holds` is true."""

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"{text!r} must be a {rule}")
        return value

    return read


def whole(least: int, most: float = math.inf) -> Callable[[str], float]:
    """Return a parser of whole numbers from `least` to `most`."""
    return number(int, f"whole number from {least} to {most:g}", lambda x: least <= x <= most)


SECONDS = number(float, "number above 0", lambda x: x > 0)
NOT_NEGATIVE = number(float, "number of at least 0", lambda x: x >= 0)
SHARE = number(float, "number above 0 and at most 1", lambda x: 0 < x <= 1)
COUNT, SEED = whole(1), whole(0, 2**32 - 1)


def option(value: Any = MISSING, help: str = "", **options: Any) -> Any:
    """Return a field of a dataclass that is an option of the command line, with arguments of `add_argument`.

    `read` parses a word, in place of the field's type; `positional` makes it no option but an argument.
    """
    if isinstance(value, list):
        return field(default_factory=lambda: [*value], metadata={"help": help, **options})
    return field(default=value, metadata={"help": help, **options})


class RequestParser(HfArgumentParser):
    """Reads the options of a command as the dataclass of its request, and reports an error in one line."""

    def __init__(self, request_class: Any, **options: Any) -> None:
        super().__init__(request_class, formatter_class=argparse.HelpFormatter, **options)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:  # type: ignore[override]
        """Add an option as `HfArgumentParser` describes it, but for positional ones and flags."""
        if read := options.pop("read", None):
            options["type"] = read
        if options.get("const") is True:  # a flag takes no word: it may be the prompt
            options = {"action": "store_true", "help": options["help"]}
        if options.pop("positional", False):
            options.pop("required", None)
            return super().add_argument(names[0].removeprefix("--"), **options)
        return super().add_argument(*(name for name in names if "_" not in name), **options)

    def error(self, message: str) -> NoReturn:
        """Exit with one line, where argparse would print the usage first."""
        self.exit(2, f"{self.prog}: {escaped(message)} (see {self.prog} --help)\n")


_IGNORED = "columns of the prompts that are left out unread; others that are not known are refused"
_PROMPTS = "file of prompts, as `tokenahead bench` takes it; short requests if left out"
_DEVICE = "such as cpu or cuda:1; a GPU where there is one if left out"
_EACH = "prompts of each category; all if left out"
_DRAFTER = "a method of `tokenahead bench`, such as eagle:SOURCE or ngram; the model's own if left out"
_HEADS = "short for --drafter auto:SOURCE: heads, an EAGLE head, a block drafter or a student, in any layout"
_SOURCE = (
    "Spec-Bench's or GSM8K's .jsonl, one of prompts or messages, or text with a prompt per line; or a data set of such "
    "rows, on the Hub or in a directory: NAME:SPLIT, or NAME:CONFIG:SPLIT"
)


@dataclass(frozen=True, kw_only=True)
class NamesDrafter:
    """Options of commands that draft in one way."""

    drafter: str | None = option(None, _DRAFTER, metavar="METHOD")
    heads: str | None = option(None, _HEADS, aliases=["--eagle", "--student"], metavar="SOURCE")

    def __post_init__(self) -> None:
        if self.heads and self.drafter:
            raise ValueError(f"argument --heads: not allowed with argument --drafter ({self.drafter})")

    def method(self) -> str | None:
        """Return what drafts, as a method of `tokenahead bench`."""
        return f"auto:{self.heads}" if self.heads else self.drafter


@dataclass(frozen=True)
class DemoRequest(NamesDrafter):
    """Options of `tokenahead demo`."""

    seconds: float = option(40.0, "time for measuring (%(default)g)", read=SECONDS)
    new_tokens: int = option(128, "per completion, at most (%(default)s)", read=COUNT, aliases=["--new-bytes"])
    batch_size: int = option(1, "measure batches of so many prompts, too", read=COUNT)
    output: Path = option(Path("tokenahead-demo"), "directory of results (%(default)s)")
    # of a first text that does not repeat itself, greedily, as the small model's mostly do
    seed: int = option(13, "of prompts and samples (%(default)s)", read=SEED)
    web: str | None = option(None, "serve a page instead (at 127.0.0.1)", nargs="?", const="", metavar="HOST:PORT")
    model: str | None = option(None, f"{NAME}; the model in the box if left out")
    dtype: str = option("auto", **OF_WEIGHTS)
    prompts: Path | None = option(None, _PROMPTS, metavar="FILE")


@dataclass(frozen=True)
class DoctorRequest(NamesDrafter):
    """Options of `tokenahead doctor`."""

    model: str = option(help=NAME)
    prompts: Path | None = option(None, _PROMPTS, metavar="FILE")
    raw: bool = option(False, "prompts as they are, without the chat template")
    ignore_columns: list[str] | None = option(None, _IGNORED, nargs="+", metavar="NAME")
    per_category: int | None = option(None, _EACH, read=COUNT)
    new_tokens: int = option(64, "per answer, at most (%(default)s)", read=whole(2))
    dtype: str = option("auto", **OF_WEIGHTS)
    device: str | None = option(None, _DEVICE)
    json: bool = option(False, "write one JSON object in place of the tables")


@dataclass(frozen=True)
class GenerateRequest(NamesDrafter):
    """Options of `tokenahead generate`. Greedy, unless `temperature`, `top_k` or `top_p` asks for samples."""

    model: str = option(help=NAME)
    prompt: str | None = option(
        None, "the text to complete; '-', or none: the standard input; '--' before one that begins with '-'",
        positional=True, nargs="?",
    )  # fmt: skip
    plain: bool = option(False, "one token at a time, without drafts")
    chat: bool = option(False, "put the prompt into the tokenizer's chat template")
    no_thinking: bool = option(False, "chats without thinking: the template gets enable_thinking=False")
    dtype: str = option("auto", **OF_WEIGHTS)
    device: str | None = option(None, _DEVICE)
    temperature: float | None = option(None, "sample; 0: greedy, as without any of these three", read=NOT_NEGATIVE)
    top_k: int | None = option(None, "sample from the k most probable tokens (0: from all)", read=whole(0))
    top_p: float | None = option(None, "sample from the nucleus", read=SHARE)
    seed: int = option(0, "of the samples (%(default)s)", read=SEED)
    max_new_tokens: int = option(256, "%(default)s if left out", read=COUNT)
    num_assistant_tokens: int | None = option(None, "tokens to draft; as many as fit if left out", read=COUNT)
    json: bool = option(False, "write one JSON object: the text and statistics")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plain and self.method():
            raise ValueError(f"argument --plain: not allowed with argument {'--heads' if self.heads else '--drafter'}")


@dataclass(frozen=True)
class BenchRequest:
    """Options of `tokenahead bench`."""

    model: str = option(help=NAME)
    prompts: str = option(help=_SOURCE)
    methods: list[str] = option(help=_METHODS, nargs="+", metavar="METHOD")
    output: Path = option(help="directory of results; an earlier run there continues")
    decoding: list[str] = option(["greedy"], "'greedy', 'T=1', 'T=0.7' (greedy)", nargs="+")
    batch_size: list[int] = option([1], "prompts per call (1)", nargs="+", read=COUNT)
    new_tokens: int = option(128, "per answer, at most (%(default)s)", read=COUNT)
    per_category: int | None = option(None, _EACH, read=COUNT)
    seconds: float | None = option(None, "time after which nothing is begun", read=SECONDS)
    dtype: str = option("auto", **OF_WEIGHTS)
    device: str = option("cpu", "such as cpu or cuda (%(default)s)")
    threads: int | None = option(None, "of PyTorch", read=COUNT)
    seed: int = option(0, "of the samples (%(default)s)", read=SEED)
    raw: bool = option(False, "prompts as they are, without the chat template")
    no_thinking: bool = option(False, "chats without thinking: the template gets enable_thinking=False")
    force_length: bool = option(False, "let no answer end early; such texts often loop")
    ignore_columns: list[str] | None = option(None, _IGNORED, nargs="+", metavar="NAME")
    skip_broken: bool = option(False, "leave out lines that hold no prompt")
    no_expected: bool = option(False, "expect no calls along the plain texts")
    quality: bool = option(False, "score answers by the file's references: exact match of numbers, BLEU of texts")
    recommend: bool = option(False, "say which method and length of drafts pay here")


@dataclass(frozen=True)
class VerifyRequest:
    """Options of `tokenahead verify`."""

    decoders: list[str] | None = option(
        None, "names of known functions, as ngram or dflash; all, without --function, if left out",
        nargs="+", metavar="NAME",
    )  # fmt: skip
    function: list[str] | None = option(
        None, "MODULE:NAME of others: (model, input_ids, **options of generate) -> sequences", nargs="+", metavar="NAME"
    )
    samples: int = option(4000, "texts that are drawn for each distribution (%(default)s)", read=whole(500))
    json: bool = option(False, "write one JSON object in place of the tables")
    markdown: bool = option(False, "write one Markdown table of what each function keeps")


@dataclass(frozen=True)
class CardRequest:
    """Options of `tokenahead card`."""

    model: str = option(help=NAME, positional=True)
    results: Path | None = option(None, "file of results of `tokenahead bench`; the one beside the card if left out")
    methods: list[str] | None = option(
        None, "methods of the results that drafted with this model; those that name its directory if left out",
        nargs="+", metavar="NAME",
    )  # fmt: skip
    name: str | None = option(None, f"title{_KEEPS}, or else the name of the directory")
    output: Path | None = option(None, "directory of the card and the figures; the model's if left out")
    license: str | None = option(None, f"licence id of the weights{_KEEPS}")
    language: list[str] | None = option(None, f"codes of the languages that it writes{_KEEPS}", nargs="+")
    base_model: str | None = option(None, f"name on the Hub of what it derives from{_KEEPS}")
    ignore_fields: list[str] | None = option(None, "fields of its config.json that are passed over", nargs="+")
    overwrite: bool = option(False, "replace a README.md that a person wrote")
