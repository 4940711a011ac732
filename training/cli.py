"""The command line: `tokenahead demo`, `generate`, `bench`, `card`, `train` and others. Errors are one line.

Knows arguments and messages; what the commands do is written elsewhere.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub.errors import StrictDataclassError

from .. import __version__
from .utils import MissingExtraError, needs_extra

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
TRAINING = {
    "train": "train heads, an EAGLE head, modules or a PTP student, as a YAML file says",
}
"""Commands whose arguments are those of TRL, and their help."""
HARNESS = "lm-eval"
_NO_EVALUATE = (
    "tokenahead evaluate is gone: `tokenahead bench` decodes and expects, `Trainer.evaluate()` has losses and "
    "acceptance\n"
)
_OF_VALIDATORS = re.compile(r"^Class validation error for validator '\w+': \w+: ")
"""What stands before a message of our configs, and says nothing to who reads it."""
_THREADS = 4  # on matrices as small as the demo's, further ones would only wait for one another
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_PROMPT = "the text to complete; '-', or none: the standard input; write '--' before a prompt that begins with '-'"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and ends the process.

    Args:
        argv: Arguments; None takes those of the process.

    Raises:
        SystemExit: Always: 0, or 1 after an error, 2 after wrong arguments, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["evaluate"]:
        _Parser(prog="tokenahead").exit(2, _NO_EVALUATE)
    is_apart = bool(words) and words[0] in (*TRAINING, HARNESS)
    arguments = _with_own_arguments(words) if is_apart else _parse(words)
    try:
        raise SystemExit(arguments.run(arguments))
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:  # whoever reads our output has closed it: else the flush at exit would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except (ValueError, OSError, MissingExtraError, StrictDataclassError) as error:
        message = _OF_VALIDATORS.sub("", " ".join(str(error).split())) or type(error).__name__
        print(f"tokenahead {arguments.command}: {message}", file=sys.stderr)
        raise SystemExit(1) from None


def _with_own_arguments(words: list[str]) -> argparse.Namespace:
    """A command whose arguments are read where it is carried out: fields of its settings, or lm-eval's own."""

    def run(arguments: argparse.Namespace) -> int:
        is_harness = words[0] == HARNESS
        with needs_extra("eval" if is_harness else "train", f"tokenahead {words[0]}"):
            command = import_module(f".commands.{'harness' if is_harness else words[0]}", __package__)
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        return command.main(words[1:])

    return argparse.Namespace(command=words[0], run=run)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="tokenahead", description="Lossless multi-token prediction for Hugging Face transformers.")
    parser.add_argument("--version", action="version", version=f"tokenahead {__version__}")
    names = ",".join(("demo", "generate", "bench", "card", *TRAINING, HARNESS))
    commands = parser.add_subparsers(dest="command", required=True, metavar=f"{{{names}}}")
    _add_demo(commands)
    _add_generate(commands)
    _add_bench(commands)
    _add_card(commands)
    for name, help_text in TRAINING.items():
        commands.add_parser(name, help=help_text)
    commands.add_parser(HARNESS, help="the tasks of lm-eval (its own arguments), written with drafts")
    return parser


def _add_demo(commands: argparse._SubParsersAction) -> None:
    help_text = "watch the model in the box write with and without drafts; about a minute, nothing is trained"
    positive = _number("above 0", lambda x: x > 0)
    demo = commands.add_parser("demo", help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    demo.add_argument("--seconds", type=positive, default=40.0, help="time for measuring (%(default)g)")
    demo.add_argument("--new-bytes", type=_whole(1), default=128, help="bytes per completion (%(default)s)")
    demo.add_argument("--batch-size", type=_whole(1), default=1, help="measure batches of so many prompts, too")
    demo.add_argument("--output", type=Path, default=Path("tokenahead-demo"), help="directory of results (%(default)s)")
    demo.add_argument("--seed", type=_SEED, default=0, help="of prompts and samples (%(default)s)")
    demo.add_argument("--overwrite", action="store_true", help="write into a directory that no demo made")
    demo.set_defaults(run=_demo)


def _add_generate(commands: argparse._SubParsersAction) -> None:
    help_text = "complete a prompt with any checkpoint; the text comes as it is written, statistics at the end"
    command = commands.add_parser("generate", help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    command.add_argument("prompt", nargs="?", help=_PROMPT)
    _add_model(command)
    _add_sampling(command)
    command.add_argument("--max-new-tokens", type=_whole(1), default=256, help="%(default)s if not given")
    command.add_argument("--num-assistant-tokens", type=_whole(1), help="tokens to draft; as many as fit if not given")
    command.add_argument("--json", action="store_true", help="write one JSON object: the text and the statistics")
    command.set_defaults(run=_generate)


def _add_bench(commands: argparse._SubParsersAction) -> None:
    help_text = "measure methods side by side: speed, tokens per call, and whether texts are plain decoding's"
    prompts = "Spec-Bench's or GSM8K's .jsonl, one of prompts or messages, or text with a prompt per line"
    methods = (
        "of plain, own, ngram, assistant:SOURCE, heads:SOURCE, eagle:SOURCE, student:SOURCE, "
        "transformers:prompt_lookup, transformers:assistant:SOURCE, transformers:use_mtp; NAME= before one names its "
        "row, and ?OPTION=VALUE&... behind it are options of generate"
    )
    description = f"{help_text[0].upper()}{help_text[1:]}."
    bench = commands.add_parser("bench", aliases=["analyze"], help=help_text, description=description)
    bench.add_argument("--model", required=True, help="directory, or name on the Hub (owner/name)")
    bench.add_argument("--prompts", type=Path, required=True, help=prompts)
    bench.add_argument("--methods", nargs="+", required=True, metavar="METHOD", help=methods)
    bench.add_argument("--decoding", nargs="+", default=["greedy"], help="'greedy', 'T=1', 'T=0.7' (greedy)")
    bench.add_argument("--batch-size", nargs="+", type=_whole(1), default=[1], help="prompts per call (1)")
    bench.add_argument("--new-tokens", type=_whole(1), default=128, help="per answer, at most (%(default)s)")
    bench.add_argument("--per-category", type=_whole(1), help="prompts of each category; all if not given")
    bench.add_argument("--seconds", type=_number("above 0", lambda x: x > 0), help="time after which nothing is begun")
    bench.add_argument("--output", type=Path, required=True, help="directory of results; a run there goes on")
    bench.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the weights (auto: the checkpoint's)")
    bench.add_argument("--device", default="cpu", help="such as cpu or cuda (%(default)s)")
    bench.add_argument("--threads", type=_whole(1), help="of PyTorch")
    bench.add_argument("--seed", type=_SEED, default=0, help="of the samples (%(default)s)")
    bench.add_argument("--raw", action="store_true", help="prompts as they are, without the chat template")
    bench.add_argument("--force-length", action="store_true", help="let no answer end early; such texts often loop")
    bench.add_argument("--skip-broken", action="store_true", help="leave out lines that hold no prompt")
    bench.add_argument("--no-expected", action="store_true", help="expect no calls along the plain texts")
    bench.add_argument("--recommend", action="store_true", help="say which method and length of drafts pay here")
    bench.set_defaults(run=_bench)


def _add_card(commands: argparse._SubParsersAction) -> None:
    help_text = "write the card of a model or drafter, with the figures that `tokenahead bench` has left"
    figures = "file of results of `tokenahead bench`; the one beside the card if not given"
    keeps = "; as the card there says if not given"
    card = commands.add_parser("card", help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    card.add_argument("model", help="directory, or name on the Hub (owner/name)")
    card.add_argument("--results", type=Path, metavar="FILE", help=figures)
    card.add_argument("--output", type=Path, help="directory of the card and the figures; the model's if not given")
    card.add_argument("--license", help=f"licence id of the weights{keeps}")
    card.add_argument("--language", nargs="+", help=f"codes of the languages that it writes{keeps}")
    card.add_argument("--base-model", help=f"name on the Hub of what it derives from{keeps}")
    card.add_argument("--template", type=Path, help="a Jinja file in place of the library's")
    card.add_argument("--overwrite", action="store_true", help="replace a README.md that a person wrote")
    card.set_defaults(run=_card)


def _add_model(command: argparse.ArgumentParser) -> None:
    drafter = command.add_mutually_exclusive_group()
    command.add_argument("--model", required=True, help="directory, or name on the Hub (owner/name)")
    drafter.add_argument("--heads", help="directory, or name on the Hub, of heads that were trained for this model")
    drafter.add_argument("--plain", action="store_true", help="one token at a time, without drafts")
    command.add_argument("--chat", action="store_true", help="put the prompt into the tokenizer's chat template")
    command.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the weights (auto: the checkpoint's)")
    command.add_argument("--device", help="such as cpu or cuda:1; a GPU where there is one if not given")


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--temperature", type=_number("at least 0", lambda x: x >= 0), help="sample; 0 is greedy, the default"
    )
    command.add_argument("--top-k", type=_whole(0), help="sample from the k most probable tokens (0: from all)")
    command.add_argument(
        "--top-p", type=_number("above 0 and at most 1", lambda x: 0 < x <= 1), help="sample from the nucleus"
    )
    command.add_argument("--seed", type=_SEED, default=0, help="of the samples (%(default)s)")


def _parse(argv: list[str]) -> argparse.Namespace:
    """Reads the arguments; a prompt may begin with "-", or with "--" where a lone "--" stands before it.

    argparse takes such a prompt for an option, and before Python 3.12 it loses an optional prompt that follows an
    option: both come back as words that it could not place.
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
    with needs_extra("demo", "the demo"):
        from .demo import BoxMeasurement, run_demo
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), _THREADS))
    asked = {name: vars(arguments)[name] for name in ("seconds", "new_bytes", "batch_size", "seed")}
    measured = run_demo(BoxMeasurement(**asked), arguments.output, overwrite=arguments.overwrite)
    return 0 if all(row.is_lossless for row in measured.results) else 1


def _generate(arguments: argparse.Namespace) -> int:
    prompt = _prompt(arguments.prompt)  # before the slow imports, so that a missing one is said at once
    from .completion import Request, complete

    given: dict[str, Any] = vars(arguments) | {"prompt": prompt}
    request = Request(**{field.name: given[field.name] for field in fields(Request)})
    done = complete(request, shows=not arguments.json)
    print(json.dumps(done.as_dict())) if arguments.json else print(done.statistics(), file=sys.stderr)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    with needs_extra("demo", "tokenahead bench"):
        from .commands.bench import BenchRequest, run_bench

    given = vars(arguments)
    measured = run_bench(BenchRequest(**{field.name: given[field.name] for field in fields(BenchRequest)}))
    return 0 if all(row.is_lossless for row in measured.results) else 1


def _card(arguments: argparse.Namespace) -> int:
    from ..model_cards.command import CardRequest, make_card

    given = vars(arguments)
    print(f"wrote {make_card(CardRequest(**{field.name: given[field.name] for field in fields(CardRequest)}))}")
    return 0


def _prompt(text: str | None) -> str:
    """Return the prompt: the argument, or the whole standard input for "-" or where it is no terminal."""
    if text is None and sys.stdin.isatty():
        _Parser(prog="tokenahead generate").error("a prompt is required: write it, or pipe it in")
    data = sys.stdin.buffer.read() if text in (None, "-") else os.fsencode(text)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt is no UTF-8 ({error}): convert it") from error


def _number(rule: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """A reader of finite numbers for which `holds` is true."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and holds(value)):
            raise argparse.ArgumentTypeError(f"{text!r} must be a number {rule}")
        return value

    return read


def _whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """A reader of whole numbers from `least` to `most`."""
    wanted = f"of at least {least}" if most == math.inf else f"from {least} to {most}"

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number {wanted}")
        return int(text)

    return read


_SEED = _whole(0, 2**32 - 1)
