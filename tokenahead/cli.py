"""The command line: `tokenahead demo`, `generate`, `bench`, `card`, `train` and others. Errors are one line.

Knows arguments and messages; the commands themselves are defined elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub.errors import StrictDataclassError

from . import __version__
from .training.requests import (
    NAME,
    OF_WEIGHTS,
    SECONDS,
    SEED,
    BenchRequest,
    CardRequest,
    GenerateRequest,
    add_options,
    whole,
)
from .training.utils import MissingExtraError, needs_extra, one_line

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
_APART = {
    "train": ("train", "train", "train heads, an EAGLE head, modules or a PTP student, by a YAML file"),
    "lm-eval": ("harness", "eval", "the tasks of lm-eval (its own arguments), written with drafts"),
}
"""Commands that read their own arguments: module, extra and help."""
_OF_VALIDATORS = re.compile(r"^Class validation error for validator '\w+': \w+: ")
"""The prefix of messages of our configs, which tells a user nothing."""
_SEED = 13  # of a first text that does not repeat itself, greedily, as the small model's mostly do
_THREADS = 4  # on matrices as small as the demo's, further ones would only wait for one another


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and ends the process.

    Args:
        argv: Arguments; None takes those of the process.

    Raises:
        SystemExit: Always: 0, or 1 after an error, 2 after wrong arguments, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _with_own_arguments(words) if words and words[0] in _APART else _parse(words)
    try:
        raise SystemExit(arguments.run(arguments))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of our output has closed it: else the flush at exit would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (ValueError, OSError, MissingExtraError, StrictDataclassError) as error:
        message = _OF_VALIDATORS.sub("", one_line(error))
        print(f"tokenahead {arguments.command}: {message}", file=sys.stderr)
        raise SystemExit(1) from None


def _with_own_arguments(words: list[str]) -> argparse.Namespace:
    """Return a command that reads its own arguments."""

    def run(arguments: argparse.Namespace) -> int:
        module, extra, _ = _APART[words[0]]
        with needs_extra(extra, f"tokenahead {words[0]}"):
            command = import_module(f".training.commands.{module}", __package__)
        from transformers.utils import logging

        logging.set_verbosity_error()
        return command.main(words[1:])

    return argparse.Namespace(command=words[0], run=run)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, where argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tokenahead", description="Lossless multi-token prediction for Hugging Face transformers.")
    parser.add_argument("--version", action="version", version=f"tokenahead {__version__}")
    names = ",".join((*_COMMANDS, *_APART))
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{names}}}")
    for name, (help_text, run) in _COMMANDS.items():
        description = f"{help_text[0].upper()}{help_text[1:]}."
        command = commands.add_parser(name, help=help_text, description=description)
        command.set_defaults(run=run)
        if name == "demo":
            _add_demo(command)
        else:
            add_options(command, _REQUESTS[name], *(("heads", "plain") if name == "generate" else ()))
        if name == "generate":
            command.add_argument("--json", action="store_true", help="write one JSON object: the text and statistics")
    for name, (_, _, help_text) in _APART.items():
        commands.add_parser(name, help=help_text)
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--seconds", type=SECONDS, default=40.0, help="time for measuring (%(default)g)")
    words = "per completion, at most; bytes of the model in the box (%(default)s)"
    demo.add_argument("--new-tokens", "--new-bytes", type=whole(1), default=128, help=words)
    demo.add_argument("--batch-size", type=whole(1), default=1, help="measure batches of so many prompts, too")
    demo.add_argument("--output", type=Path, default=Path("tokenahead-demo"), help="directory of results (%(default)s)")
    words = "of prompts and samples (%(default)s)"
    demo.add_argument("--seed", type=SEED, default=_SEED, help=words)
    demo.add_argument("--overwrite", action="store_true", help="write into a directory that no demo made")
    demo.add_argument("--web", nargs="?", const="", metavar="HOST:PORT", help="serve a page instead (at 127.0.0.1)")
    demo.add_argument("--model", help=f"{NAME}; the model in the box if left out")
    demo.add_argument("--dtype", default="auto", **OF_WEIGHTS)
    words = "a method of `tokenahead bench`; the model's own drafts, or ngram, if left out"
    demo.add_argument("--drafter", metavar="METHOD", help=words)
    for name in ("heads", "eagle"):
        words = f"short for --drafter {name}:SOURCE"
        demo.add_argument(f"--{name}", dest="drafter", type=f"{name}:{{}}".format, metavar="SOURCE", help=words)
    words = "file of prompts for --model, as `tokenahead bench` takes it; eight requests if left out"
    demo.add_argument("--prompts", type=Path, metavar="FILE", help=words)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Return the arguments; a prompt may begin with "-", or with "--" after a lone "--".

    argparse takes such a prompt for an option, and before Python 3.12 it loses an optional prompt that follows an
    option: both come back as unknown words.
    """
    parser = _parser()
    end = argv.index("--") if "--" in argv else len(argv)
    arguments, words = parser.parse_known_args(argv[:end])
    unknown = [word for word in words if word.startswith("--")]
    words += argv[end + 1 :]
    prompts = [word for word in (vars(arguments).get("prompt"), *words) if word is not None]
    if unknown or len(prompts) > 1 or (words and arguments.command != "generate"):
        parser.error(
            f"unrecognized arguments: {' '.join(unknown or words)}; a prompt of several words needs quotes, "
            "one that begins with '-' a '--' before it"
        )
    arguments.prompt = prompts[0] if prompts else None
    return arguments


def _demo(arguments: argparse.Namespace) -> int:
    if arguments.prompts and (arguments.web is not None or not arguments.model):
        raise ValueError("--prompts needs a --model that answers them, in the terminal: leave out --web")
    if arguments.web is not None:
        from .training.web import serve

        return serve(arguments.model, arguments.drafter, arguments.dtype, arguments.web)
    with needs_extra("demo", "the demo"):
        from .training.demo import Measurement, run_demo
        from .training.demo_subjects import box_model, named_model
    if not arguments.model:
        import torch

        torch.set_num_threads(min(torch.get_num_threads(), _THREADS))
    chosen = arguments.model, arguments.drafter, arguments.prompts
    dtype = arguments.dtype
    subject = named_model(*chosen, dtype) if any(chosen) else box_model(dtype=dtype)
    options = {name: vars(arguments)[name] for name in ("seconds", "new_tokens", "batch_size", "seed")}
    measured = run_demo(Measurement(**options), subject, arguments.output, arguments.overwrite)
    return 0 if all(row.is_lossless for row in measured.results) else 1


def _generate(arguments: argparse.Namespace) -> int:
    arguments.prompt = _prompt(arguments.prompt)  # before the slow imports, so that a missing one is refused at once
    from .training.completion import complete

    done = complete(_request(arguments), shows=not arguments.json)
    if arguments.json:
        print(json.dumps(done.as_dict()))
    else:
        print(done.statistics(), file=sys.stderr)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    with needs_extra("demo", "tokenahead bench"):
        from .training.commands.bench import run_bench

    return 0 if all(row.is_lossless for row in run_bench(_request(arguments)).results) else 1


def _card(arguments: argparse.Namespace) -> int:
    from .model_cards.command import make_card

    print(f"wrote {make_card(_request(arguments))}")
    return 0


_COMMANDS: dict[str, tuple[str, Callable[[argparse.Namespace], int]]] = {
    "demo": ("watch the model in the box write with and without drafts; about a minute, nothing is trained", _demo),
    "generate": ("complete a prompt with any checkpoint; the text comes as it is written, statistics last", _generate),
    "bench": ("measure methods side by side: speed, tokens per call, and whether outputs are plain decoding's", _bench),
    "card": ("write the card of a model or drafter, with the results of `tokenahead bench`", _card),
}
_REQUESTS: dict[str, type] = {"generate": GenerateRequest, "bench": BenchRequest, "card": CardRequest}


def _request(arguments: argparse.Namespace) -> Any:
    """Return the options of a command as a dataclass."""
    request_class = _REQUESTS[arguments.command]
    return request_class(**{entry.name: vars(arguments)[entry.name] for entry in fields(request_class)})


def _prompt(argument: str | None) -> str:
    """Return the prompt: the argument, or the whole standard input for "-" or without a terminal."""
    if argument is None and sys.stdin.isatty():
        _Parser(prog="tokenahead generate").error("a prompt is required: write it, or pipe it in")
    data = sys.stdin.buffer.read() if argument in (None, "-") else os.fsencode(argument)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is no UTF-8 ({error}): convert it") from error
