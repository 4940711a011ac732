"""`tokenahead demo --web`: a page of Gradio that writes text, and shows who wrote each token in colours."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from ipaddress import ip_address
from typing import Any

from transformers import TextIteratorStreamer

from .demo import described, load_methods, spans
from .evaluation.decoding import GREEDY, Row, decode, drafted_flags, sampled
from .evaluation.prompts import Prompt, PromptEncoder
from .utils import needs_extra

_CODE, _WORDS = 'import json\n\n\ndef read_lines(path):\n    """', "Write a short story about a lighthouse keeper."
_LARGEST = 1 << 20  # bytes of a request
_DAY = 86_400  # seconds
_DRAFTED, _OWN = "drafted and accepted", "the backbone's own"
Coloured = list[tuple[str, str | None]]
"""Pieces of a text, and who wrote them; None: the user, or nobody knows yet."""


class Author:
    """A model with a drafter, which writes one text at a time; see `build`."""

    def __init__(self, model: str | None = None, drafter: str | None = None, dtype: str = "auto") -> None:
        tokenizer, self.plain, self.method = load_methods(model, drafter, dtype)
        self.writer = PromptEncoder(tokenizer, chats=bool(model))
        self.example, self.temperature = (_WORDS, 0.0) if model else (_CODE, 0.7)  # the box repeats itself where greedy
        self.name = described(model, [self.method])
        self.worker = ThreadPoolExecutor(1)  # visitors take turns, also after one who left in the middle

    def write(self, prompt: str, new_tokens: int, temperature: float, seed: int) -> Iterator[tuple[Coloured, str]]:
        """Yield the text so far, and what is said of it; colours come when the text is whole."""
        if not prompt.strip():
            raise ValueError("prompt: it is empty")
        batch = self.writer.batch([Prompt("", (prompt,))], [[]], self.plain.model.device)
        asked = batch, sampled(temperature) if temperature else GREEDY, int(new_tokens), int(seed or 0)
        streamer = TextIteratorStreamer(self.writer.tokenizer, skip_prompt=True)

        def written() -> Row:
            try:
                return decode(replace(self.method, options=self.method.options | {"streamer": streamer}), *asked)
            finally:
                streamer.end()  # of a call that failed, too

        running, shown, before = self.worker.submit(written), "", (f"{prompt}{self.writer.gap}", None)
        for piece in streamer:
            shown += piece
            yield [before, (shown, None)], "Writing ..."
        run = running.result()
        flags = drafted_flags(run.accepted[0] if run.accepted else [0] * run.new_tokens, run.new_tokens)
        parts = spans(self.writer.tokenizer, run.ids[0], flags)
        text = [before, *((piece, _DRAFTED if is_drafted else _OWN) for piece, is_drafted in parts)]
        words = f"{run.new_tokens / run.forwards:.2f} tokens per call of the backbone: {run.new_tokens} tokens, "
        words += f"{run.forwards} calls, {run.seconds:.1f} s; plain decoding"
        yield text, f"{words} ..."
        plain = self.worker.submit(decode, self.plain, *asked).result()
        yield text, f"{words}: {plain.new_tokens} tokens, {plain.seconds:.1f} s (once, on this machine)"


def guard(app: Callable[..., Any], names: Collection[str] | None = None) -> Callable[..., Any]:
    """Return an app that refuses files, long requests, and hosts other than addresses and `names` (None: any may be).

    A page of somebody else's site that is open in a visitor's browser would else reach this one under that site's name
    (DNS rebinding); it has no way to do that under an address.
    """

    async def guarded(scope: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        left = _LARGEST

        async def counted() -> Any:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:  # whatever its headers say
                words = f"This page takes requests of at most {_LARGEST} bytes."
                raise import_module("fastapi").HTTPException(413, words, {"connection": "close"})
            return message

        status, reason = fault(dict(scope.get("headers", ())), names)
        answer = import_module("starlette.responses").PlainTextResponse(reason, status, {"connection": "close"})
        await (answer if reason and scope["type"] in ("http", "websocket") else app)(scope, counted, send)

    return guarded


def fault(headers: dict[bytes, bytes], names: Collection[str] | None) -> tuple[int, str]:
    """Return the status of a refusal and its reason, which is empty where there is none; see `guard`."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if headers.get(b"content-type", b"").strip().lower().startswith(b"multipart/"):
        return 403, "This page takes no files."
    with suppress(ValueError):
        _ = names is None or name in map(str.lower, names) or ip_address(name)  # a ValueError where it is no address
        return 200, ""
    return 421, "This page answers to the names of its machine alone."


def build(model: str | None = None, drafter: str | None = None, dtype: str = "auto") -> Any:
    """Return the page of a model and a drafter (see `load_methods`), whose `launch` puts a `guard` before it."""
    with needs_extra("web", "tokenahead demo --web"):
        gr = import_module("gradio")
    author = Author(model, drafter, dtype)

    def write(*options: Any) -> Iterator[tuple[Coloured, str]]:
        try:
            yield from author.write(*options)
        except (ValueError, OSError, RuntimeError) as error:
            yield [], str(error)

    def launch(*arguments: Any, **options: Any) -> Any:
        names = {"localhost", socket.gethostname(), socket.getfqdn(), os.environ.get("SPACE_HOST", "localhost")}
        names.add(options.get("server_name") or "localhost")
        middleware = import_module("starlette.middleware").Middleware(guard, names=names)
        app = {"middleware": [middleware]} | (options.pop("app_kwargs", None) or {})
        return show(*arguments, **{"max_file_size": "1kb"} | options, app_kwargs=app)

    colours = {_DRAFTED: "green", _OWN: "orange"}
    asked = [
        gr.Textbox(author.example, label="Prompt", lines=6),
        gr.Slider(16, 512, 128, step=16, label="New tokens"),
        gr.Slider(0, 1.5, author.temperature, step=0.1, label="Temperature (0: greedy)"),
        gr.Number(0, label="Seed", precision=0, minimum=0),
    ]
    shown = gr.HighlightedText(label=author.name, color_map=colours, show_legend=True), gr.Textbox(label="Calls")
    options = {"analytics_enabled": False, "delete_cache": (_DAY, _DAY), "concurrency_limit": 1}
    page = gr.Interface(write, asked, [*shown], submit_btn="Write", flagging_mode="never", api_name="write", **options)
    show, page.title, page.launch = page.launch, "tokenahead", launch
    return page


def serve(model: str | None, drafter: str | None, dtype: str, address: str) -> int:
    """Serve the page at `HOST:PORT` until Ctrl-C; the defaults are 127.0.0.1, and a free port."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    try:  # before a model is loaded
        number = int(port or 0)
        socket.create_server((host, number), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"--web {address}, which is HOST:PORT: {error}") from error
    page = build(model, drafter, dtype)
    page.launch(server_name=host, server_port=number or None, footer_links=[], share=False)
    return 0
