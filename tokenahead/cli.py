"""The command line: `tokenahead demo`, `generate`, `bench`, `doctor`, `card`, `train` and others. Errors are one line.

Knows arguments and messages; the commands themselves are defined elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from importlib import import_module, metadata
from typing import Any, NoReturn

from huggingface_hub.errors import StrictDataclassError

from .training import requests
from .training.utils import MissingExtraError, needs_extra, one_line

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
_EXTRAS = {"train": "train", "harness": "eval"}
"""Extras of the modules of commands; of others, `demo`."""
_THREADS = 4  # on matrices as small as the demo's, further ones would only wait for one another


def main(argv: Sequence[str] | None = None, enter: Callable[[], object] = lambda: None) -> NoReturn:
    """Runs a command and ends the process: with 0, 1 after an error, 2 after wrong arguments, 130 after Ctrl-C.

    Arguments are read first; `enter` imports the rest of the package where it is not yet.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    apart = [name for name, (request, *_) in _COMMANDS.items() if request is None]
    given = words[1:] if words and words[0] in apart else _parse(words)
    try:
        enter()
        raise SystemExit(_COMMANDS[words[0]][1](given))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of our output has closed it: else the flush at exit would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (ValueError, OSError, MissingExtraError, StrictDataclassError) as error:
        print(f"tokenahead {words[0]}: {one_line(error)}", file=sys.stderr)
        raise SystemExit(1) from None


def _command(name: str, home: str = "") -> Callable[..., int]:
    """Return what runs a command: MODULE[.FUNCTION] of `training.commands`, or `main` of the module of its name."""
    module, _, function = (home or name).partition(".")

    def run(given: object) -> int:
        with needs_extra(_EXTRAS.get(module, "demo"), f"tokenahead {name}"):
            command = import_module(f".training.commands.{module}", __package__)
        from transformers.utils import logging

        logging.set_verbosity_error()
        return getattr(command, function or "main")(given)

    return run


def _parse(argv: list[str]) -> Any:
    """Return the request of a command."""
    about = "Lossless multi-token prediction for Hugging Face transformers."
    parser = requests.RequestParser(prog="tokenahead", description=about)
    version = getattr(sys.modules["tokenahead"], "__version__", None) or metadata.version("tokenahead")
    parser.add_argument("--version", action="version", version=f"tokenahead {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{','.join(_COMMANDS)}}}")
    for name, (request, _, text) in _COMMANDS.items():
        described = f"{text[0].upper()}{text[1:]}."
        commands.add_parser(name, help=text, description=described, request_class=request)
    given, words = parser.parse_known_args(argv)
    kind: Any = _COMMANDS[given.command][0]
    # before Python 3.12, argparse loses an optional prompt that follows an option; one may begin with "-"
    words = [word for word in words if word != "--"]
    is_prompt = len(words) == 1 and ("--" in argv or not words[0].startswith("--"))
    if is_prompt and kind is requests.GenerateRequest and given.prompt is None:
        given.prompt = words.pop()
    if words:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    try:
        return kind(**{entry.name: getattr(given, entry.name) for entry in fields(kind)})
    except ValueError as error:  # of the request itself
        parser.error(str(error))


def _demo(request: requests.DemoRequest) -> int:
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
    subject = named_model(*chosen, request.dtype) if any(chosen) else box_model(dtype=request.dtype, seed=request.seed)
    measurement = Measurement(request.seconds, request.new_tokens, request.batch_size, request.seed)
    measured = run_demo(measurement, subject, request.output)
    return 0 if all(row.is_lossless for row in measured.results) else 1


def _generate(request: requests.GenerateRequest) -> int:
    if request.prompt is None and sys.stdin.isatty():
        raise ValueError("a prompt is required: write it, or pipe it in")
    prompt = sys.stdin.buffer.read().decode() if request.prompt in (None, "-") else request.prompt
    from .training.completion import complete, statistics

    done = complete(replace(request, prompt=prompt), shows=not request.json)
    if request.json:
        print(json.dumps(done))
    else:
        print(statistics(done), file=sys.stderr)
    return 0


def _card(request: requests.CardRequest) -> int:
    from .model_cards.card import make_card

    print(f"wrote {make_card(request)}")
    return 0


def _publish(request: requests.PublishRequest) -> int:
    from .model_cards import publish_generate

    print(f"wrote {publish_generate(request.folder, request.drafters, request.name)}")
    return 0


_COMMANDS: dict[str, tuple[type | None, Callable[..., int], str]] = {
    "demo": (requests.DemoRequest, _demo, "watch the model in the box write with and without drafts, for a minute"),
    "generate": (requests.GenerateRequest, _generate, "complete a prompt with any checkpoint, and count what it took"),
    "bench": (requests.BenchRequest, _command("bench"), "measure methods side by side: speed, calls, equal texts"),
    "doctor": (requests.DoctorRequest, _command("doctor"), "say why a drafter accepts little"),
    "verify": (requests.VerifyRequest, _command("verify"), "say whether decoding functions keep their model's text"),
    "card": (requests.CardRequest, _card, "write the card of a model or drafter, with results of `tokenahead bench`"),
    "publish-generate": (requests.PublishRequest, _publish, "write a repository for transformers' custom_generate"),
    "restore-modules": (requests.RestoreRequest, _command("restore-modules", "restore"), "give a base's modules back"),
    "train": (None, _command("train"), "train heads, an EAGLE head, modules or a PTP student, by a YAML file"),
    "regenerate": (
        None,
        _command("regenerate", "train.write_answers"),
        "let a backbone, or a server, write training text",
    ),
    "features": (None, _command("features", "train.write_states"), "store the states of a frozen backbone to train on"),
    "lm-eval": (None, _command("lm-eval", "harness"), "the tasks of lm-eval (its own arguments), written with drafts"),
}
"""Request (None: the command reads its own arguments), what runs it, and help."""
