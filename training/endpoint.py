"""Completions from a server with OpenAI's interface, such as vLLM: many requests at once, and none lost.

Prompts are sent as token ids, and ids are asked for (`return_token_ids`, of vLLM 0.10.2 and later). A request that
fails, or whose answer is cut, is repeated after a pause; what a server would answer for good ends the run, which goes
on from there when it is started again.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .utils import needs_extra, one_line

logger = logging.get_logger(__name__)
_FOR_NOW = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may succeed."""
_LONGEST_PAUSE = 60.0


class EndpointError(RuntimeError):
    """A server that cannot be used, or that gave no whole answer in all tries."""


class _Passing(Exception):
    """What may be gone when a request is repeated; `pause` in seconds is what the server asks for."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


@dataclass
class Endpoint:
    """A model on a server, in the place of a backbone that `regenerate` runs itself.

    Args:
        url: With the version, `http://host:8000/v1`.
        model: Name under which it is served; None: the only one.
        tokenizer: Of the model. Answers of a server that returns no ids are tokenised with it.
        api_key: Sent as a bearer's token.
        concurrency: Requests at a time.
        tries: Of every request.
        pause: Seconds after the first failure; each further pause is twice as long.
        timeout: Seconds without a byte after which a request has failed.

    Example:
        >>> regenerate(Endpoint("http://localhost:8000/v1"), prompts, "answers", max_new_tokens=256)
    """

    url: str
    model: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 64
    tries: int = 8
    pause: float = 0.5
    timeout: float = 600.0
    failures: Counter[str] = field(default_factory=Counter, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("concurrency", "tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        self.url = self.url.rstrip("/")
        with needs_extra("train", "answers of a server"):
            import httpx

        self._lost = httpx.TransportError
        self._client = httpx.Client(
            headers={} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"},
            timeout=self.timeout,
            limits=httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency),
        )

    def served_model(self) -> str:
        """Return the name of the model that answers.

        Raises:
            EndpointError: The server does not answer, or has no such model, or several where none is named.
        """
        served = [str(each["id"]) for each in self._repeated("GET", "models", None)["data"]]
        if self.model is None and len(served) == 1:
            self.model = served[0]
        if self.model not in served:
            raise EndpointError(
                f"{self.url} serves {', '.join(served) or 'nothing'}: model={self.model!r} is none of it"
            )
        return str(self.model)

    def completions(
        self, prompts: Mapping[int, Sequence[int]], max_new_tokens: int, seed: int, options: Mapping[str, Any]
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield rows and the ids of their completions, as they come.

        Args:
            prompts: Token ids by row.
            max_new_tokens: Length of every completion, at most.
            seed: Row i is drawn with seed + i.
            options: Further fields of the requests, such as `temperature`.

        Raises:
            EndpointError: No whole answer in all tries, or one of another tokenizer; what others have answered until
                then comes first.
        """
        self.served_model()
        self.failures.clear()
        ids = iter(prompts)
        with ThreadPoolExecutor(self.concurrency) as pool:

            def started(rows: Iterable[int]) -> dict[Future[list[int]], int]:
                bodies = ((row, self._body(prompts[row], max_new_tokens, seed + row, options)) for row in rows)
                return {pool.submit(self._completion, body): row for row, body in bodies}

            running, error = started(row for _, row in zip(range(1), ids)), None  # the first alone, to be looked at
            while running:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    row = running.pop(done)
                    if (found := done.exception()) is None:
                        yield row, done.result()
                    else:
                        error = error or EndpointError(f"row {row}: {one_line(found)}")
                room = 0 if error else 2 * self.concurrency - len(running)
                running |= started(row for _, row in zip(range(room), ids))
        if self.failures:
            told = ", ".join(f"{count} x {reason}" for reason, count in self.failures.most_common())
            logger.warning(f"{self.url}: requests that failed and were repeated: {told}")
        if error is not None:
            raise error

    def states_file(self, prompt: Sequence[int]) -> str:
        """Return the path of the file with the hidden states of a prompt, which vLLM's connector has written.

        Raises:
            EndpointError: No whole answer in all tries, one to another prompt, or of a server that extracts nothing.
        """
        body = self._body(prompt, 1, 0, {})
        answer = self._repeated("POST", "completions", body)
        self._check_prompt(answer, body)
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if path is None:
            raise EndpointError(f"{self.url} returns no hidden_states_path: docs/scale.md says how vLLM is started")
        return str(path)

    def _body(self, prompt: Sequence[int], most: int, seed: int, options: Mapping[str, Any]) -> dict[str, Any]:
        asked = {"model": self.model, "prompt": list(prompt), "max_tokens": most, "seed": seed}
        return {**asked, "return_token_ids": True, **options}

    def _completion(self, body: Mapping[str, Any]) -> list[int]:
        answer = self._repeated("POST", "completions", body)
        self._check_prompt(answer, body)
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        if ids is not None:
            if self.tokenizer is not None and not _alike(choice["text"], str(self.tokenizer.decode(ids, True))):
                raise EndpointError(f"{self.url} has another tokenizer: its text is not that of its ids")
            return list(ids)
        if self.tokenizer is None:
            raise EndpointError(f"{self.url} returns no token_ids: pass tokenizer=, to tokenise its text")
        found: list[int] = self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return [*found, end] if isinstance(end, int) and choice["finish_reason"] == "stop" else found

    def _check_prompt(self, answer: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        """Refuse an answer to another prompt than was sent."""
        sent, prompt = body["prompt"], answer["choices"][0].get("prompt_token_ids")
        read = (answer.get("usage") or {}).get("prompt_tokens", len(sent)) if prompt is None else len(prompt)
        if read != len(sent) or (prompt is not None and prompt != sent):
            raise EndpointError(f"{self.url} read another prompt than was sent, {read} tokens for {len(sent)}")

    def _repeated(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the answer to a request, which is repeated while it fails."""
        for number in range(self.tries):
            try:
                return self._asked(method, path, body)
            except (_Passing, self._lost) as error:
                reason = one_line(error)
                self.failures[reason if isinstance(error, _Passing) else type(error).__name__] += 1
                longest = min(_LONGEST_PAUSE, self.pause * 2**number)
                asked = error.pause if isinstance(error, _Passing) else 0.0
                if number + 1 < self.tries:
                    time.sleep(max(asked, longest * random.uniform(0.5, 1.0)))  # not all at once again
        raise EndpointError(f"{self.url}/{path} gave no whole answer in {self.tries} tries: {reason}")

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        response = self._client.request(method, f"{self.url}/{path}", json=body)
        if response.status_code >= 500 or response.status_code in _FOR_NOW:
            asked = response.headers.get("Retry-After", "")
            raise _Passing(f"HTTP {response.status_code}", float(asked) if asked.isdigit() else 0.0)
        if response.is_error:
            raise EndpointError(f"{self.url}/{path} answers HTTP {response.status_code}: {response.text[:300]}")
        try:
            answer = response.json()
            if body is None:
                return answer
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            ids = choice.get("token_ids")
            if choice["finish_reason"] not in ("stop", "length"):
                raise _Passing(f"finish_reason={choice['finish_reason']!r}")
            is_short = choice["finish_reason"] == "length" and ids is not None and len(ids) < body["max_tokens"]
            if is_short or (ids is not None and usage.get("completion_tokens", len(ids)) != len(ids)):
                raise _Passing("fewer tokens than it says")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _Passing(f"no answer in OpenAI's form: {type(error).__name__}") from error
        return answer


def _alike(text: str, decoded: str) -> bool:
    """Return whether texts are the same but for spaces and broken characters, of which decoders make different ones."""
    first, second = ("".join(each.replace("\ufffd", "").split()) for each in (text, decoded))
    return first == second
