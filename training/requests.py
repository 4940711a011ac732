"""Options of the commands, but of those that train: a field is an option of the command line."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_type_hints

from .utils import escaped

_DTYPES = ("auto", "float32", "bfloat16", "float16")
NAME = "directory, or name on the Hub (owner/name)"
_KEEPS = "; as the card there says if left out"
_METHODS = (
    "of plain, own, ngram, suffix[:SOURCE], recycling, lookahead, assistant:SOURCE, heads:SOURCE, eagle:SOURCE, "
    "block:SOURCE, student:SOURCE, auto:SOURCE, cascade:SOURCE, transformers:prompt_lookup, "
    "transformers:assistant:SOURCE, transformers:use_mtp; NAME= before one names its row, and ?OPTION=VALUE&... after "
    "it are options of generate"
)


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def option(value: Any = MISSING, help: str = "", **options: Any) -> Any:
    """Return a field of a dataclass that is an option of the command line, with arguments of `add_argument`.

    `read` parses a word, in place of the field's type; `positional` makes it an argument; `flag` names it otherwise.
    """
    if isinstance(value, list):
        return field(default_factory=lambda: [*value], metadata={"help": help, **options})
    return field(default=value, metadata={"help": help, **options})


class RequestParser(argparse.ArgumentParser):
    """Reads the options of a command as the fields of its request's dataclass, and reports an error in one line.

    transformers' `HfArgumentParser` does the same after a second of imports, which `--help` does not need.
    """

    def __init__(self, request_class: type | None = None, **options: Any) -> None:
        super().__init__(**options)
        kinds = {} if request_class is None else get_type_hints(request_class)
        for entry in () if request_class is None else fields(request_class):
            self._add(entry, kinds[entry.name])

    def _add(self, entry: Field[Any], kind: Any) -> None:
        """Add an option as its field says: a flag for a truth, words for a list; without a default it is required."""
        options = dict(entry.metadata)
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        read, aliases = options.pop("read", None), options.pop("aliases", [])
        if options.pop("positional", False):
            names = [entry.name]
        else:
            names = [options.pop("flag", f"--{entry.name.replace('_', '-')}"), *aliases]
            options |= {"required": default is MISSING, "dest": entry.name}
        if kind is bool:
            options["action"] = "store_true"  # a flag takes no word: it may be the prompt
        else:
            kind = next(each for each in (get_args(kind) if isinstance(kind, UnionType) else [kind]) if each)
            options["type"] = read or next(iter(get_args(kind)), kind)
        self.add_argument(*names, **options, **({} if default is MISSING else {"default": default}))

    def error(self, message: str) -> NoReturn:
        """Exit with one line, where argparse would print the usage first."""
        self.exit(2, f"{self.prog}: {escaped(message)} (see {self.prog} --help)\n")


_IGNORED = "columns of the prompts that are left out unread; others that are not known are refused"
_PROMPTS = "file of prompts, as `tokenahead bench` takes it; short requests if left out"
_EACH = "prompts of each category; all if left out"
_NO_THINKING = "chats without thinking: the template gets enable_thinking=False"
_RAW = "prompts as they are, without the chat template"
_SOURCE = (
    "Spec-Bench's or GSM8K's .jsonl, one of prompts or messages, or text with a prompt per line; or a data set of such "
    "rows, on the Hub or in a directory: NAME:SPLIT, or NAME:CONFIG:SPLIT"
)


@dataclass(frozen=True, kw_only=True)
class LoadsModel:
    """Options of commands that load a model."""

    model: str = option(help=NAME)
    dtype: str = option("auto", "of the weights (auto: the checkpoint's)", choices=_DTYPES)


@dataclass(frozen=True, kw_only=True)
class ChoosesDevice:
    """Options of commands that run a model where they are told."""

    device: str | None = option(None, "such as cpu or cuda:1; a GPU where there is one if left out")


@dataclass(frozen=True, kw_only=True)
class NamesDrafter(LoadsModel):
    """Options of commands that draft in one way."""

    drafter: str | None = option(
        None, "a method of `tokenahead bench`, such as eagle:SOURCE or ngram; the model's own if left out",
        metavar="METHOD",
    )  # fmt: skip
    heads: str | None = option(
        None, "short for --drafter auto:SOURCE: heads, an EAGLE head, a block drafter or a student, in any layout",
        aliases=["--eagle", "--student"], metavar="SOURCE",
    )  # fmt: skip

    def __post_init__(self) -> None:
        given = [name for name in ("plain", "heads", "drafter") if getattr(self, name, None)]
        if len(given) > 1:
            raise ValueError(f"argument --{given[0]}: not allowed with argument --{given[1]}")

    def method(self) -> str | None:
        """Return what drafts, as a method of `tokenahead bench`."""
        return f"auto:{self.heads}" if self.heads else self.drafter


@dataclass(frozen=True, kw_only=True)
class DemoRequest(NamesDrafter):
    """Options of `tokenahead demo`."""

    model: str | None = option(None, f"{NAME}; the model in the box if left out")
    seconds: float = option(40.0, "time for measuring (%(default)g)")
    new_tokens: int = option(128, "per completion, at most (%(default)s)", read=count, aliases=["--new-bytes"])
    batch_size: int = option(1, "measure batches of so many prompts, too", read=count)
    output: Path = option(Path("tokenahead-demo"), "directory of results (%(default)s)")
    # of a first text that does not repeat itself, greedily, as the small model's mostly do
    seed: int = option(13, "of prompts and samples (%(default)s)")
    web: str | None = option(None, "serve a page instead (at 127.0.0.1)", nargs="?", const="", metavar="HOST:PORT")
    prompts: Path | None = option(None, _PROMPTS, metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class DoctorRequest(ChoosesDevice, NamesDrafter):
    """Options of `tokenahead doctor`."""

    prompts: Path | None = option(None, _PROMPTS, metavar="FILE")
    raw: bool = option(False, _RAW)
    ignore_columns: list[str] | None = option(None, _IGNORED, nargs="+", metavar="NAME")
    per_category: int | None = option(None, _EACH, read=count)
    new_tokens: int = option(64, "per answer, at most (%(default)s)", read=count)
    json: bool = option(False, "write one JSON object in place of the tables")


@dataclass(frozen=True, kw_only=True)
class RestoreRequest(ChoosesDevice, LoadsModel):
    """Options of `tokenahead restore-modules`."""

    model: str = option(help=f"the fine-tune: {NAME}", positional=True)
    modules: str = option(help="the model with modules that it was tuned from, named in the same way", metavar="BASE")
    output: Path = option(help="directory of the restored model")
    prompts: Path | None = option(None, _PROMPTS, metavar="FILE")
    new_tokens: int = option(64, "per answer, at most (%(default)s)", read=count)
    train: str | None = option(None, "train the modules on this dataset_name, into OUTPUT/trained", metavar="DATA")
    steps: int = option(100, "of this training (%(default)s)", read=count)


@dataclass(frozen=True)
class GenerateRequest(ChoosesDevice, NamesDrafter):
    """Options of `tokenahead generate`. Greedy, unless `temperature`, `top_k` or `top_p` asks for samples."""

    model: str = option(help=NAME)
    prompt: str | None = option(
        None, "the text to complete; '-', or none: the standard input; '--' before one that begins with '-'",
        positional=True, nargs="?",
    )  # fmt: skip
    plain: bool = option(False, "one token at a time, without drafts")
    chat: bool = option(False, "put the prompt into the tokenizer's chat template")
    no_thinking: bool = option(False, _NO_THINKING)
    temperature: float | None = option(None, "sample; 0: greedy, as without any of these three")
    top_k: int | None = option(None, "sample from the k most probable tokens (0: from all)")
    top_p: float | None = option(None, "sample from the nucleus (0: from all)")
    seed: int = option(0, "of the samples (%(default)s)")
    max_new_tokens: int = option(256, "%(default)s if left out", read=count)
    num_assistant_tokens: int | None = option(None, "tokens to draft; as many as fit if left out", read=count)
    json: bool = option(False, "write one JSON object: the text and statistics")


@dataclass(frozen=True, kw_only=True)
class BenchRequest(LoadsModel):
    """Options of `tokenahead bench`."""

    prompts: str = option(help=_SOURCE)
    methods: list[str] = option(help=_METHODS, nargs="+", metavar="METHOD")
    output: Path = option(help="directory of results; an earlier run there continues")
    decoding: list[str] = option(["greedy"], "'greedy', 'T=1', 'T=0.7' (greedy)", nargs="+")
    batch_size: list[int] = option([1], "prompts per call (1)", nargs="+", read=count)
    new_tokens: int = option(128, "per answer, at most (%(default)s)", read=count)
    per_category: int | None = option(None, _EACH, read=count)
    seconds: float | None = option(None, "time after which nothing is begun")
    device: str = option("cpu", "such as cpu or cuda (%(default)s)")
    threads: int | None = option(None, "of PyTorch", read=count)
    seed: int = option(0, "of the samples (%(default)s)")
    raw: bool = option(False, _RAW)
    no_thinking: bool = option(False, _NO_THINKING)
    force_length: bool = option(False, "let no answer end early; such texts often loop")
    ignore_columns: list[str] | None = option(None, _IGNORED, nargs="+", metavar="NAME")
    skip_broken: bool = option(False, "leave out lines that hold no prompt")
    no_expected: bool = option(False, "expect no calls along the plain texts")
    quality: bool = option(False, "score answers by the file's references: exact match of numbers, BLEU of texts")


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
    samples: int = option(4000, "texts that are drawn for each distribution (%(default)s)", read=count)
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


@dataclass(frozen=True)
class PublishRequest:
    """Options of `tokenahead publish-generate`."""

    folder: Path = option(help="directory to write", positional=True)
    drafters: list[str] = option(
        help="of ngram, suffix, recycling, lookahead; and of eagle, block, heads, student, which read trained ones",
        flag="--with", nargs="+", metavar="NAME",
    )  # fmt: skip
    name: str | None = option(None, "its name on the Hub (owner/name), for the examples in README.md")
