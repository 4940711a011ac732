"""The command line: `tokenahead demo`, `generate`, `bench`, `doctor`, `card`, `train` and others. Errors are one line.

Knows arguments and messages; the commands themselves are defined elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NoReturn

from huggingface_hub.errors import StrictDataclassError

from . import __version__
from .training.requests import (
    BenchRequest,
    CardRequest,
    DemoRequest,
    DoctorRequest,
    GenerateRequest,
    RequestParser,
    VerifyRequest,
)
from .training.utils import MissingExtraError, needs_extra, one_line

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
_APART = {
    "train": ("train.main", "train", "train heads, an EAGLE head, modules or a PTP student, by a YAML file"),
    "regenerate": ("train.write_answers", "train", "let a backbone, or a server, write the answers to train on"),
    "features": ("train.write_states", "train", "store the states of a frozen backbone to train on"),
    "lm-eval": ("harness.main", "eval", "the tasks of lm-eval (its own arguments), written with drafts"),
}
"""Commands that read their own arguments: function, extra and help."""
_THREADS = 4  # on matrices as small as the demo's, further ones would only wait for one another


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and ends the process.

    Args:
        argv: Arguments; None takes those of the process.

    Raises:
        SystemExit: Always: 0, or 1 after an error, 2 after wrong arguments, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    request = None if words and words[0] in _APART else _parse(words)
    try:
        raise SystemExit(_run_apart(words) if request is None else _COMMANDS[words[0]][2](request))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of our output has closed it: else the flush at exit would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (ValueError, OSError, MissingExtraError, StrictDataclassError) as error:
        print(f"tokenahead {words[0]}: {one_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _run_apart(words: list[str]) -> int:
    """Run a command that reads its own arguments."""
    home, extra, _ = _APART[words[0]]
    module, _, function = home.partition(".")
    with needs_extra(extra, f"tokenahead {words[0]}"):
        command = import_module(f".training.commands.{module}", __package__)
    from transformers.utils import logging

    logging.set_verbosity_error()
    return getattr(command, function)(words[1:])


def _parse(argv: list[str]) -> Any:
    """Return the request of a command."""
    about = "Lossless multi-token prediction for Hugging Face transformers."
    names = RequestParser((), prog="tokenahead", description=about)
    names.add_argument("--version", action="version", version=f"tokenahead {__version__}")
    helps = {name: text for name, (text, *_) in _COMMANDS.items()} | {name: text for name, (*_, text) in _APART.items()}
    commands = names.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(helps)}}}")
    for name, text in helps.items():
        commands.add_parser(name, help=text, request_class=())
    command = names.parse_args(argv[:1]).command
    text, request_class, _ = _COMMANDS[command]
    parser = RequestParser(request_class, prog=f"tokenahead {command}", description=f"{text[0].upper()}{text[1:]}.")
    try:
        request, rest = parser.parse_args_into_dataclasses(argv[1:], True, look_for_args_file=False)
    except ValueError as error:  # of the request itself
        parser.error(str(error))
    words = [word for word in rest if word != "--"]
    # before Python 3.12, argparse loses an optional prompt that follows an option; one may begin with "-"
    is_prompt = len(words) == 1 and ("--" in argv or not words[0].startswith("--"))
    if is_prompt and request_class is GenerateRequest and request.prompt is None:
        return replace(request, prompt=words[0])
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    return request


def _demo(request: DemoRequest) -> int:
    if request.web is not None:
        from .training.web import serve

        return serve(request.model, request.method(), request.dtype, request.web)
    with needs_extra("demo", "the demo"):
        from .training.demo import Measurement, box_model, named_model, run_demo
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not request.model:
        import torch

        torch.set_num_threads(min(torch.get_num_threads(), _THREADS))
    chosen = request.model, request.method(), request.prompts
    subject = named_model(*chosen, request.dtype) if any(chosen) else box_model(dtype=request.dtype)
    measurement = Measurement(request.seconds, request.new_tokens, request.batch_size, request.seed)
    measured = run_demo(measurement, subject, request.output)
    return 0 if all(row.is_lossless for row in measured.results) else 1


def _generate(request: GenerateRequest) -> int:
    if request.prompt is None and sys.stdin.isatty():
        raise ValueError("a prompt is required: write it, or pipe it in")
    prompt = sys.stdin.buffer.read().decode() if request.prompt in (None, "-") else request.prompt
    from .training.completion import complete

    done = complete(replace(request, prompt=prompt), shows=not request.json)
    if request.json:
        print(json.dumps(done.as_dict()))
    else:
        print(done.statistics(), file=sys.stderr)
    return 0


def _bench(request: BenchRequest) -> int:
    with needs_extra("demo", "tokenahead bench"):
        from .training.commands.bench import run_bench

    return 0 if all(row.is_lossless for row in run_bench(request).results) else 1


def _doctor(request: DoctorRequest) -> int:
    with needs_extra("demo", "tokenahead doctor"):
        from .training.commands.doctor import run_doctor

    return 0 if run_doctor(request).is_well else 1


def _verify(request: VerifyRequest) -> int:
    with needs_extra("demo", "tokenahead verify"):
        from .training.commands.verify import is_others, run_verify

    found = run_verify(request)
    return 1 if any(each.result == "BROKEN" and not is_others(name) for name in found for each in found[name]) else 0


def _card(request: CardRequest) -> int:
    from .model_cards.card import make_card

    print(f"wrote {make_card(request)}")
    return 0


_COMMANDS: dict[str, tuple[str, type, Callable[[Any], int]]] = {
    "demo": (
        "watch the model in the box write with and without drafts; about a minute, nothing is trained",
        DemoRequest,
        _demo,
    ),
    "generate": (
        "complete a prompt with any checkpoint; the text comes as it is written, statistics last",
        GenerateRequest,
        _generate,
    ),
    "bench": (
        "measure methods side by side: speed, tokens per call, and whether outputs are plain decoding's",
        BenchRequest,
        _bench,
    ),
    "doctor": ("say why a drafter accepts little: its files, its drafts along known texts", DoctorRequest, _doctor),
    "verify": ("say whether decoding functions keep the text of their model", VerifyRequest, _verify),
    "card": ("write the card of a model or drafter, with the results of `tokenahead bench`", CardRequest, _card),
}
"""Help, request and what runs it."""
