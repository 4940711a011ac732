"""`tokenahead demo --web`: a page that streams text in the colours of its origin, with every draft as a tree."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from html import escape
from importlib import import_module
from ipaddress import ip_address
from statistics import median
from typing import Any

import torch

from ..configuration.fields import field
from ..generation.backbone.backbones import takes_dense_masks
from ..generation.call.sequences import Sequences
from ..generation.lookups.ngram import NgramDrafter
from ..generation.trees import DraftTree, VerificationResult
from ..generation.verification.verifiers import Verifier
from .demo_subjects import described, load_methods
from .evaluation.decoding import GREEDY, Run, decode, sampled
from .evaluation.prompts import Prompt, PromptEncoder
from .results import UNSTABLE
from .utils import needs_extra

_CODE, _WORDS = 'import json\n\n\ndef read_lines(path):\n    """', "Write a short story about a lighthouse keeper."
_TURNS, _SECONDS = 3, 20  # of measuring: runs of each method at most, and after so long no further ones
_PAUSE = 0.05  # seconds between two states of the text
_CONTEXT = 8  # tokens that decide how the next one is spelled
_LARGEST = 1 << 20  # bytes of a request
_DAY = 86_400  # seconds
_BLANKS = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})
_LEGEND = """<style>
.ta {font: 14px/1.7 ui-monospace, Menlo, Consolas, monospace; color: var(--body-text-color); overflow-x: auto}
.ta.text {white-space: pre-wrap; overflow-wrap: anywhere} .ta.alert {border-left: 4px solid #d33; padding: 6px 10px}
.ta span {unicode-bidi: isolate; border-radius: 3px; padding: 1px 0} .ta .prompt, .ta .rejected {opacity: .65}
.ta .drafted {background: #28a75a55} .ta .own {background: #f0aa0055; box-shadow: inset 0 -2px #dc8c00}
.ta .rejected {text-decoration: line-through; font-size: 12px} .ta meter {width: 40%; margin-right: 1em}
body:has(.ta input:checked) .ta.text .rejected {display: none}
.ta .node {display: flex; align-items: flex-start} .ta .node > span {padding: 0 5px; margin: 2px 0}
.ta .node .node::before {content: "─"; opacity: .5} .ta .node > div:has(> .node + .node) {border-left: 1px solid #888}
</style><div class="ta"><span class="prompt">prompt</span> · <span class="drafted">drafted and accepted</span> ·
<span class="own">the backbone's own</span> · <span class="rejected">rejected drafts</span>
<label><input type="checkbox"> hide rejected drafts</label></div>"""


@dataclass(frozen=True)
class Cycle:
    """One call of the model: drafted ids, the node before each (-1: none), accepted nodes, the backbone's own id."""

    drafts: list[int]
    parents: list[int]
    path: list[int]
    added: int

    def spans(self) -> list[tuple[str, list[int]]]:
        """Return accepted ids, those that the draft had after them (of siblings the first), and the backbone's own."""
        node, rejected = (self.path or [-1])[-1], []
        while node in self.parents:
            node = self.parents.index(node)
            rejected.append(self.drafts[node])
        return [("drafted", [self.drafts[node] for node in self.path]), ("rejected", rejected), ("own", [self.added])]


class _Observer:
    """A verifier that records the cycles of a call's first sequence; that of the prompt has no draft."""

    def __init__(self, verifier: Verifier, cycles: list[Cycle]) -> None:
        self.verifier, self.cycles = verifier, cycles
        cycles.clear()  # of the trials of draft_tree="auto"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.verifier, name)

    def first(self, scores: torch.Tensor, tokens: Sequences) -> torch.Tensor:
        added = self.verifier.first(scores, tokens)
        self.cycles.append(Cycle([], [], [], int(added[0])))
        return added

    def verify(self, tree: DraftTree, scores: torch.Tensor) -> VerificationResult:
        result = self.verifier.verify(tree, scores)
        size = tree.tokens.shape[1] if tree.num_nodes is None else int(tree.num_nodes[0])
        drafts, parents, path = tree.tokens[0, :size], tree.parents[0, :size], result.nodes[0]
        self.cycles.append(Cycle(drafts.tolist(), parents.tolist(), path[path >= 0].tolist(), int(result.added[0])))
        return result


class Author:
    """A model with a drafter, which writes one text at a time; see `build`."""

    def __init__(self, model: str | None = None, drafter: str | None = None, dtype: str = "auto") -> None:
        self.model, tokenizer, self.plain, self.method = load_methods(model, drafter, dtype)
        self.writer = PromptEncoder(tokenizer, chats=bool(model))
        self.example, self.temperature = (_WORDS, 0.0) if model else (_CODE, 0.7)  # the box repeats itself where greedy
        self.name = described(self.model, model, self.method)
        self.draws_trees = self.method.drafter.drafts_trees and takes_dense_masks(self.model)
        self.spelled = lru_cache(1 << 14)(lambda *ids: str(tokenizer.decode(list(ids))))
        self.worker = ThreadPoolExecutor(1)  # visitors take turns, also after one who left in the middle

    def write(
        self, prompt: str, new_tokens: int, temperature: float, seed: int, as_tree: bool
    ) -> Iterator[tuple[str, str, list[Cycle]]]:
        """Yield the text so far, a status, and its cycles; at the end the speeds, which are measured after the text.

        Raises:
            ValueError: An empty prompt, or one that is too long.
        """
        mode, drafter, cycles = sampled(temperature) if temperature else GREEDY, self.method.drafter, list[Cycle]()
        tree = {"top_k": 3} if isinstance(drafter, NgramDrafter) else {"top_k": 3, "total_tokens": 16}
        method = replace(self.method, options=self.method.options | ({"draft_tree": tree} if as_tree else {}))
        new_tokens, seed = int(new_tokens), int(seed or 0)
        batch = self.writer.batch([Prompt("", (prompt,))], [[]], self.model.device)
        before = batch["input_ids"][0].tolist()
        most = field(self.model.config.get_text_config(), "max_position_embeddings", default=math.inf) - new_tokens
        if not prompt.strip() or len(before) > most:
            what = f"{len(before)} tokens are more than the {most} that fit" if prompt.strip() else "it is empty"
            raise ValueError(f"prompt: {what}")

        def generate() -> list[int]:
            make = drafter.make_verifier
            vars(drafter)["make_verifier"] = lambda *arguments: _Observer(make(*arguments), cycles)
            try:
                torch.manual_seed(seed)
                return method.generate(**batch, **mode.options, max_new_tokens=new_tokens).sequences[0].tolist()
            finally:
                del drafter.make_verifier

        written = self.worker.submit(generate)
        while wait([written], _PAUSE).not_done:
            yield self.text(prompt, before, cycles), "Writing ...", cycles
        new = written.result()[len(before) :]
        cycles = cycles or [Cycle([], [], [], token) for token in new]  # where the model cannot draft
        text, calls = self.text(prompt, before, cycles, len(new)), len(cycles)
        words = f"<b>{len(new) / calls:.2f} tokens per call of the backbone</b>: {len(new)} tokens, {calls} calls.<br>"
        runs: dict[str, list[Run]] = {method.name: [], self.plain.name: []}
        turn, started = 0, time.monotonic()
        while turn < _TURNS and (not turn or time.monotonic() - started < _SECONDS):
            for each in (self.plain, method)[:: -1 if turn % 2 else 1]:
                yield text, f"{words}Measuring {each.name} ...", cycles
                runs[each.name].append(self.worker.submit(decode, each, batch, mode, new_tokens, seed).result())
            turn += 1
        yield text, words + _speeds(runs, mode.is_sampled), cycles

    def text(self, prompt: str, before: list[int], cycles: Sequence[Cycle], size: int = 1 << 30) -> str:
        """Return the prompt, whose ids are `before`, and the first `size` tokens of cycles as HTML."""
        ids, parts = list(before), [f'<span class="prompt">{escape(prompt)}{self.writer.gap}</span>']
        for origin, tokens in (span for cycle in tuple(cycles) for span in cycle.spans()):
            tokens = tokens[: len(before) + size - len(ids)]
            # an incomplete character belongs to the token that completes it
            known, whole = (self.spelled(*ids[-_CONTEXT:], *more).rstrip("\ufffd") for more in ([], tokens))
            shown = whole[len(known) :]
            if origin == "rejected":
                shown = shown.replace("\n", "⏎")
            else:
                ids += tokens
            parts.append(f'<span class="{origin}">{escape(shown)}</span>')
        return f'<div class="ta text">{"".join(parts)}</div>'

    def tree(self, cycles: Sequence[Cycle], number: int) -> str:
        """Return the draft of a cycle and the backbone's own token as HTML, with the accepted path on top."""
        cycle, last = cycles[number], cycles[number - 1].added
        labels, parents = [*cycle.drafts, cycle.added, last], [*cycle.parents, (cycle.path or [-1])[-1]]
        origins = dict.fromkeys(cycle.path, "drafted") | {-1: "own", len(cycle.drafts): "own"}

        def branch(node: int) -> str:
            children = [child for child, parent in enumerate(parents) if parent == node]
            children.sort(key=lambda child: origins.get(child, "rejected"), reverse=True)  # by the alphabet
            below = map(branch, reversed({labels[child]: child for child in children}.values()))
            label = escape(self.spelled(labels[node]).translate(_BLANKS))
            own = f'<span class="{origins.get(node, "rejected")}">{label}</span>'
            return f'<div class="node">{own}<div>{"".join(below)}</div></div>'

        return f'<div class="ta">{branch(-1)}</div>'


def _speeds(runs: dict[str, list[Run]], is_sampled: bool) -> str:
    drafted, plain = runs.values()
    speeds = [median(run.speed or 0.0 for run in several) for several in (drafted, plain)]
    ratio = f"{speeds[0] / speeds[1]:.2f} times plain decoding's speed" if speeds[1] else "Too short to be timed"
    slowest, fastest = (choose(run.speed or 0.0 for run in plain) for choose in (min, max))
    if speeds[1] and not speeds[1] / UNSTABLE <= slowest <= fastest <= speeds[1] * UNSTABLE:
        ratio = f"No speed-up is reported: plain decoding itself ran at {slowest:,.1f} to {fastest:,.1f} tokens/s"
    same = "the same text" if drafted[0].ids == plain[0].ids else "another text: rounding decides near-ties"
    texts = "texts of the same distribution" if is_sampled else same
    meters = (f'<meter value="{speed}" max="{max(speeds)}"></meter>{speed:,.1f} tokens/s, ' for speed in speeds)
    rows = "<br>".join(meter + escape(name) for meter, name in zip(meters, runs))
    return f"<b>{ratio}</b>, {texts} (measured after it, by turns, {len(plain)} × each)<br>{rows}"


class Guard:
    """Refuses requests under another name than the machine's, with files, or larger than a prompt can be.

    A page of somebody else's site that is open in a visitor's browser would else reach this one under that site's name
    (DNS rebinding); it has no way to do that under an address.

    Args:
        app: The application, as ASGI has it.
        names: Names that it answers to, and all addresses; None: all names.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], names: Collection[str] | None = None) -> None:
        self.app, self.names = app, None if names is None else {name.lower() for name in names}

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Callable[..., Any], send: Callable[..., Awaitable[None]]
    ) -> None:
        """Answer a request, or pass it on."""
        status, reason = self.fault(dict(scope.get("headers", ())))
        if not reason or scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": reason.encode()})

    def fault(self, headers: dict[bytes, bytes]) -> tuple[int, str]:
        """Return the status of a refusal and its reason, which is empty where there is none."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self.names is not None and _name_of(host) not in self.names and not _is_address(_name_of(host)):
            return 421, "This page answers to the names of its machine alone."
        if headers.get(b"content-type", b"").strip().lower().startswith(b"multipart/"):
            return 403, "This page takes no files."
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > _LARGEST:
            return 413, f"This page takes requests of at most {_LARGEST} bytes."
        return 200, ""


def _name_of(host: str) -> str:
    """Return the name, or the address, of a `Host` header."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


def _launch(launch: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Launch a page behind a `Guard`; with `share`, under any name."""
    own = {"localhost", socket.gethostname(), socket.getfqdn(), os.environ.get("SPACE_HOST", "localhost")}
    names = None if options.get("share") else own | {options.get("server_name") or "localhost"}
    guard = import_module("starlette.middleware").Middleware(Guard, names=names)
    app = {"middleware": [guard]} | (options.pop("app_kwargs", None) or {})
    return launch(*arguments, **{"max_file_size": "1kb"} | options, app_kwargs=app)


def build(model: str | None = None, drafter: str | None = None, dtype: str = "auto") -> Any:
    """Return the page of a model (None: the one in the box) and a method of `tokenahead bench`, a `gradio.Blocks`.

    `dtype` is that of the weights; `"auto"`: the checkpoint's, float32 of the model in the box. Its `launch` puts a
    `Guard` before it.

    Raises:
        MissingExtraError: There is no Gradio.
        OSError: No such directory, or what the Hub cannot give.
        ValueError: A drafter that does not fit.
    """
    with needs_extra("web", "tokenahead demo --web"):
        gr = import_module("gradio")
    author = Author(model, drafter, dtype)

    def write(*options: Any) -> Iterator[tuple[object, ...]]:
        try:
            for text, words, cycles in author.write(*options):
                words = f'<div class="ta">{words}</div>'
                yield text, words, cycles, gr.skip(), gr.skip()
            best = max(range(1, len(cycles)), key=lambda number: len(cycles[number].path), default=0)
            chosen = gr.Slider(maximum=max(len(cycles) - 1, 2), value=max(best, 1), visible=len(cycles) > 2)
            yield text, words, cycles, chosen, author.tree(cycles, best) if best else ""
        except (ValueError, OSError, RuntimeError) as error:
            alert = f'<div class="ta alert" role="alert">{escape(str(error))}</div>'
            yield alert, "", [], gr.Slider(visible=False), ""

    with gr.Blocks(title="tokenahead", analytics_enabled=False, delete_cache=(_DAY, _DAY)) as page:
        gr.HTML(f"<h2>tokenahead</h2>{escape(author.name)}{_LEGEND}")
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                fields = [
                    gr.Textbox(author.example, label="Prompt", lines=6),
                    gr.Slider(16, 512, 128, step=16, label="New tokens"),
                    gr.Slider(0, 1.5, author.temperature, step=0.1, label="Temperature (0: greedy)"),
                    gr.Number(0, label="Seed", precision=0, minimum=0),
                    gr.Checkbox(label="Draft trees", visible=author.draws_trees),
                ]
                button = gr.Button("Write", variant="primary")
            with gr.Column(scale=4, min_width=300):
                text, words, cycles = gr.HTML(), gr.HTML(), gr.State([])
                number = gr.Slider(1, 2, 1, step=1, label="Call of the backbone", visible=False)
                tree = gr.HTML()
        outputs = [text, words, cycles, number, tree]
        button.click(write, fields, outputs, api_name="write", concurrency_limit=1, show_progress_on=words)
        number.input(author.tree, [cycles, number], tree, queue=False, show_progress="hidden", api_visibility="private")
    page.launch = partial(_launch, page.launch)
    return page


def _checked(address: str) -> tuple[str, int | None]:
    """Return host and port of `HOST:PORT`; None is a free port.

    Raises:
        ValueError: None of both, or one that cannot be had; before a model is loaded.
    """
    host, _, port = address.rpartition(":")
    host = host or "127.0.0.1"
    if port and not (port.isascii() and port.isdecimal() and len(port) < 6 and int(port) < 1 << 16):
        raise ValueError(f"--web {address}: write HOST:PORT, such as 0.0.0.0:7860, with a port below 65536")
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port or 0), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(place)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--web {address}: {getattr(error, 'strerror', None) or error}") from error
    return host, int(port or 0) or None


def serve(model: str | None, drafter: str | None, dtype: str, address: str) -> int:
    """Serve the page at `HOST:PORT` until Ctrl-C; the defaults are 127.0.0.1, and a free port."""
    host, port = _checked(address)
    page = build(model, drafter, dtype)
    page.launch(server_name=host, server_port=port, footer_links=[], share=False)
    return 0
