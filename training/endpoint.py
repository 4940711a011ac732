"""Completions from a server with OpenAI's interface, such as vLLM: many requests at once, and none lost.

Prompts are sent as token ids, and ids are asked for (`return_token_ids`, of vLLM 0.10.2 and later). What a server says
is checked before anybody sees it; its time, size and pauses are bounded. What fails or is cut is asked again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .utils import escaped, needs_extra, one_line

if TYPE_CHECKING:
    import httpx

logger = logging.get_logger(__name__)
T = TypeVar("T")
_FOR_NOW = (408, 409, 425, 429)  # statuses below 500 after which the same request may succeed
_LONGEST_PAUSE = 60.0  # seconds
_LARGEST = 1 << 24  # bytes of an answer, decoded
_CODINGS = ("identity", "gzip", "deflate")  # 64 KiB of these become 64 MiB at most
_LARGEST_VOCABULARY = 1 << 19  # more tokens than any known one has
_FAULTS = 16  # rows without a usable answer, one after the other, that end a run


class EndpointError(RuntimeError):
    """A server that cannot be used, or that gave no answer that can be used."""


@dataclass
class Endpoint:
    """A model on a server, in the place of the backbone of `regenerate`.

    Args:
        url: With the version, `http://host:8000/v1`.
        model: Name under which it is served; None: the only one.
        tokenizer: Of the model. Answers of a server that returns no ids are tokenised with it.
        api_key: Sent as a bearer's token.
        concurrency: Requests at a time.
        tries: Of every request.
        pause: Seconds after the first failure; each further pause is twice as long, up to a minute, and to `timeout`.
        timeout: Seconds in all until a request has failed that is not answered whole.
        vocab_size: Ids of answers are below it; None: the tokenizer's, or 2^19 without one.
    """

    url: str
    model: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 64
    tries: int = 8
    pause: float = 0.5
    timeout: float = 600.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        with needs_extra("train", "answers of a server"):
            import httpx

        address = httpx.URL(self.url)
        if address.scheme not in ("http", "https") or not address.host:
            raise ValueError(f"url={self.url!r} must be the address of a server, as http://host:8000/v1")
        self.url = self.url.rstrip("/")
        tls = address.scheme == "https" and httpx.create_ssl_context()  # once, for it reads all certificates
        headers = {"Accept-Encoding": "identity"}
        headers |= {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        tokens = getattr(self.tokenizer, "get_vocab", dict)().values()
        self._size = self.vocab_size or 1 + max(tokens, default=_LARGEST_VOCABULARY - 1)
        self._client = partial(httpx.AsyncClient, verify=tls, timeout=None, headers=headers)

    def served_model(self) -> str:
        """Return the name of the model that answers; refuse a server without it, or with several and none named."""
        served = self.answer("models", None, lambda answer, body: [str(each["id"]) for each in answer["data"]])
        self.model = served[0] if self.model is None and len(served) == 1 else self.model
        if self.model not in served:
            names = escaped(", ".join(served))[:300] or "nothing"
            raise EndpointError(f"{self.url} serves {names}: model={self.model!r} is none of it")
        return str(self.model)

    def completions(
        self, prompts: Mapping[int, Sequence[int]], max_new_tokens: int, seed: int, options: Mapping[str, Any]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield rows and the ids of their completions, as they come; row i is drawn with seed + i.

        An EndpointError names the first row without a usable answer, after all others, or after sixteen such in turn.
        """
        from anyio.from_thread import start_blocking_portal

        self.served_model()
        rows, running, errors, in_turn = iter(prompts), dict[Future[list[int]], int](), dict[int, BaseException](), 0
        with start_blocking_portal() as portal:
            while True:
                room = self.concurrency - len(running) if in_turn < _FAULTS else 0
                for _, row in zip(range(room), rows):
                    body = self.body(prompts[row], max_new_tokens, seed=seed + row, **options)
                    running[portal.start_task_soon(self._repeated, "completions", body, self._ids_of)] = row
                if not running:
                    break
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    row, error = running.pop(done), done.exception()
                    if error is None:
                        in_turn = 0
                        yield row, done.result()
                    else:
                        in_turn, errors[row] = in_turn + 1, error
        if errors:
            (row, first), *further = errors.items()
            others = f"; and {len(further)} further rows" if further else ""
            raise EndpointError(f"row {row}: {one_line(first)}{others}") from first

    def body(self, prompt: Sequence[int], most: int, **options: Any) -> dict[str, Any]:
        """Return the fields of a request for at most `most` tokens after a prompt."""
        return {"model": self.model, "prompt": [*prompt], "max_tokens": most, "return_token_ids": True, **options}

    def answer(self, path: str, body: Mapping[str, Any] | None, read: Callable[[Any, Any], T]) -> T:
        """Return what is read of the answer to a request; raise an `EndpointError` where none can be used."""
        from anyio.from_thread import start_blocking_portal

        with start_blocking_portal() as portal:
            return portal.call(self._repeated, path, body, read)

    def choice_of(self, answer: Any, body: Mapping[str, Any]) -> Any:
        """Return what was chosen; refuse an answer to another prompt than was sent, and one that is not whole."""
        choice, sent = answer["choices"][0], body["prompt"]
        prompt = choice.get("prompt_token_ids")
        read = (answer.get("usage") or {}).get("prompt_tokens", len(sent)) if prompt is None else len(prompt)
        if read != len(sent) or prompt not in (None, sent):
            raise EndpointError(f"{self.url} read another prompt than was sent, {read!s:.20} tokens for {len(sent)}")
        if choice["finish_reason"] not in ("stop", "length"):
            raise ValueError(f"finish_reason={choice['finish_reason']!s:.50}")
        return choice

    def _ids_of(self, answer: Any, body: Mapping[str, Any]) -> list[int]:
        """Return the ids of a completion: whole numbers of the vocabulary, at most as many as were asked for."""
        choice, most, tokenizer = self.choice_of(answer, body), body["max_tokens"], self.tokenizer
        ids, is_ended = choice.get("token_ids"), choice["finish_reason"] == "stop"
        if is_text := ids is None:
            if tokenizer is None:
                raise EndpointError(f"{self.url} returns no token_ids: pass tokenizer=, to tokenise its text")
            ids = tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
            ids += [tokenizer.eos_token_id] * (is_ended and tokenizer.eos_token_id is not None)
        is_right = isinstance(ids, list) and all(type(each) is int and 0 <= each < self._size for each in ids)
        if not is_right or len(ids) > (2 * most + 1 if is_text else most):
            raise EndpointError(f"{self.url} answers with {ids!s:.50}, not with {most} ids below {self._size} at most")
        if is_text:
            return ids[:most]  # a text may be spelt in more tokens than those that the model wrote
        is_short = not is_ended and len(ids) < most
        if is_short or (answer.get("usage") or {}).get("completion_tokens", len(ids)) != len(ids):
            raise ValueError("fewer tokens than it says")
        texts = () if tokenizer is None else (choice["text"], str(tokenizer.decode(ids, True)))
        if len({"".join(each.replace("\ufffd", "").split()) for each in texts}) > 1:  # decoders differ in spaces
            raise EndpointError(f"{self.url} has another tokenizer: its text is not that of its ids")
        return ids

    async def _repeated(self, path: str, body: Mapping[str, Any] | None, read: Callable[[Any, Any], T]) -> T:
        """Return what is read of the answer to a request, which is repeated while it fails."""
        import anyio
        import httpx

        fault, pause = "", 0.0
        for number in range(self.tries):
            if number:
                logger.warning_once(f"{self.url}/{path}: {fault}; such requests are repeated")
                doubled = self.pause * 2.0 ** min(number - 1, 32) * random.uniform(0.5, 1.0)  # not all at once again
                await anyio.sleep(min(max(pause, doubled), _LONGEST_PAUSE, self.timeout))
            pause = 0.0
            try:
                response, content = await self._asked(path, body)
            except (httpx.RequestError, TimeoutError) as error:
                fault = type(error).__name__
                continue
            if not response.is_success:
                fault, after = f"HTTP {response.status_code}", response.headers.get("Retry-After", "")
                pause = float(after) if after.isascii() and after.isdecimal() else 0.0
                if response.status_code < 500 and response.status_code not in _FOR_NOW:
                    words = escaped(content[:300].decode(errors="replace"))
                    raise EndpointError(f"{self.url}/{path} answers {fault}: {words}")
                continue
            try:
                return read(json.loads(content), body)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                fault = f"no whole answer in OpenAI's form: {one_line(error)[:80]}"
        raise EndpointError(f"{self.url}/{path} gave no whole answer in {self.tries} tries: {fault}")

    async def _asked(self, path: str, body: Mapping[str, Any] | None) -> tuple[httpx.Response, bytearray]:
        """Return the answer to a request, and its content; a POST where it has a body."""
        import anyio

        content, method = bytearray(), "GET" if body is None else "POST"
        with anyio.fail_after(self.timeout):
            async with self._client() as client, client.stream(method, f"{self.url}/{path}", json=body) as response:
                if (coding := response.headers.get("Content-Encoding", "identity").lower()) not in _CODINGS:
                    raise EndpointError(f"{self.url} answers in the Content-Encoding {escaped(coding)[:50]}")
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > _LARGEST:
                        raise EndpointError(f"{self.url} answers with more than {_LARGEST} bytes")
        return response, content
