"""Answers of a server that is slow, fails, cuts what it says and is asked again: each row once, and nothing silent."""

import gzip
import json
import multiprocessing
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import pytest

from tokenahead.training import regenerate
from tokenahead.training import regeneration as regeneration_module
from tokenahead.training.endpoint import Endpoint, EndpointError
from tokenahead.training.parts import part_files

ROWS, TOKENS = 300, 6


def prompts(count: int) -> list[list[int]]:
    return [[3 + row % 50, 3 + row // 50] for row in range(count)]


def answer(prompt: list[int]) -> list[int]:
    """Some ids, as many as asked for or fewer."""
    return [(7 * sum(prompt) + step) % 97 for step in range(1 + sum(prompt) % TOKENS)]


class Handler(BaseHTTPRequestHandler):
    """One request of every twenty fails, each in another way, where not all of them do."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        models = self.server.models
        self.say({"data": [{"id": name} for name in models]} if isinstance(models, tuple) else models)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            number = len(self.server.asked)
        ids, prompt = answer(body["prompt"]), body["prompt"]
        reason = "length" if len(ids) == body["max_tokens"] else "stop"
        choice = {"text": "", "token_ids": ids, "prompt_token_ids": prompt, "finish_reason": reason}
        found = {"choices": [choice], "usage": {"completion_tokens": len(ids), "prompt_tokens": len(prompt)}}
        if self.server.changed is not None:
            self.server.changed(found)
        if self.server.instead is not None:
            self.close_connection = True
            with suppress(OSError):  # a client that has read enough is gone
                self.server.instead(self)
            return
        kind = number // 20 % 5 if number % 20 == 10 and self.server.status == 200 else None
        if kind == 0:
            self.say({}, status=503)
        elif kind == 1:
            self.say(found, cut=20)
        elif kind == 2:
            choice["finish_reason"] = None
            self.say(found)
        elif kind == 3:
            choice["token_ids"] = ids[:-1]
            self.say(found)
        else:
            time.sleep(0.05 if kind == 4 else 0)
            self.say(found, status=self.server.status)

    def say(self, value, status=200, cut=0):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text[: len(text) - cut])
        self.close_connection = bool(cut)


class Server(ThreadingHTTPServer):
    """Says nothing of connections that a killed client leaves."""

    request_queue_size, daemon_threads = 128, True

    def handle_error(self, request, client_address):
        pass


@contextmanager
def serving(models=("tiny",), changed=None, status=200, instead=None):
    """A server on the loopback, and its address."""
    server = Server(("127.0.0.1", 0), Handler)
    server.models, server.changed, server.status, server.instead = models, changed, status, instead
    server.lock, server.asked = threading.Lock(), []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def endpoint(url: str, **options) -> Endpoint:
    return Endpoint(url, **{"pause": 0.01, "concurrency": 16} | options)


def answered(url: str, folder: Path, count: int):
    return regenerate(endpoint(url), prompts(count), folder, max_new_tokens=TOKENS)


def test_every_row_is_there_once_after_failures_and_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(regeneration_module, "_SECONDS", 0.05)
    with serving() as (server, url):
        client = multiprocessing.get_context("fork").Process(target=answered, args=(url, tmp_path, ROWS))
        client.start()
        while len(server.asked) < ROWS // 2 or not part_files(tmp_path):
            assert client.is_alive()
            time.sleep(0.01)
        client.kill()
        client.join()
        before = len(server.asked)
        rows = answered(url, tmp_path, ROWS)
    assert rows.rows == [{"ids": prompt + answer(prompt), "prompt": 2} for prompt in prompts(ROWS)]
    assert before >= ROWS // 2 and len(server.asked) - before < ROWS  # what was written is not asked for again


def _other_prompt(found):
    found["choices"][0]["prompt_token_ids"] = [1, 5, 6]


def _no_ids(found):
    for name in ("token_ids", "prompt_token_ids"):
        del found["choices"][0][name]


def _longer_prompt(found):
    _no_ids(found)
    found["usage"]["prompt_tokens"] += 1


def _negative(found):
    found["choices"][0]["token_ids"] = [-1]


REFUSED = {
    "another prompt": ({"changed": _other_prompt}, {}, "another prompt.*3 tokens for 2"),
    "another count": ({"changed": _longer_prompt}, {}, "another prompt.*3 tokens for 2"),
    "no ids": ({"changed": _no_ids}, {}, "no token_ids.*tokenizer="),
    "another model": ({}, {"model": "large"}, "serves tiny.*model='large'"),
    "several models": ({"models": ("tiny", "small")}, {}, "serves tiny, small.*model=None"),
    "a refusal": ({"status": 400}, {}, r"row \d+: .*HTTP 400.*further rows"),
    "no server": ({"status": 500}, {"tries": 2}, r"row \d+: .*2 tries: HTTP 500"),
    "wrong ids": ({"changed": _negative}, {}, r"row \d+: .*\[-1\].*further rows"),
}


@pytest.mark.by_day("another prompt", "another count", "no ids", "several models", "a refusal")
@pytest.mark.parametrize("case", REFUSED)
def test_a_server_that_cannot_be_used_is_not_asked_for_all_rows(case, tmp_path):
    given, options, match = REFUSED[case]
    with serving(**given) as (server, url), pytest.raises(EndpointError, match=match):
        regenerate(endpoint(url, **options), prompts(200), tmp_path, max_new_tokens=TOKENS)
    assert len(server.asked) < 70 and not part_files(tmp_path)


class Letters:
    """A tokenizer of letters."""

    eos_token_id = 1

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(each) - 90 for each in text]}

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(90 + each) for each in ids if each != self.eos_token_id)


def test_text_is_tokenised_where_a_server_returns_no_ids(tmp_path):
    def as_text(found):
        found["choices"][0]["text"] = Letters().decode(found["choices"][0]["token_ids"], True)
        _no_ids(found)

    with serving(changed=as_text) as (server, url):
        asked = dict(max_new_tokens=TOKENS, seed=40, temperature=0.5)
        rows = regenerate(endpoint(url, tokenizer=Letters()), prompts(8), tmp_path, **asked)
    bodies = sorted(server.asked, key=lambda body: body["seed"])
    assert [body["prompt"] for body in bodies] == prompts(8) and [body["seed"] for body in bodies] == [*range(40, 48)]
    assert all(body["model"] == "tiny" and body["temperature"] == 0.5 and body["return_token_ids"] for body in bodies)
    for row, prompt in zip(rows.rows, prompts(8)):
        new = [each for each in answer(prompt) if each != 1]
        assert row["ids"] == prompt + new + [1] * (len(answer(prompt)) < TOKENS)


def test_ids_of_another_tokenizer_are_refused(tmp_path):
    with serving() as (_, url), pytest.raises(EndpointError, match="another tokenizer"):
        regenerate(endpoint(url, tokenizer=Letters()), prompts(3), tmp_path, max_new_tokens=TOKENS)


def _ids(wrong):
    def change(found):
        found["choices"][0]["token_ids"], found["usage"]["completion_tokens"] = wrong, len(wrong)

    return change


UNUSABLE = {
    **{f"{wrong}": _ids([wrong]) for wrong in (-3, 3.7, 3.0, True, 10**6, 10**40, "5", [5], None)},
    "too many ids": _ids([5] * 100_000),
    "no list of ids": _ids({"0": 5}),
    "a word": _ids("555"),
    "no choices": lambda found: found.update(choices=[]),
    "another prompt": _other_prompt,
    "no reason": lambda found: found["choices"][0].update(finish_reason=None),
    "no ids": lambda found: found["choices"][0].update(token_ids=None),
    "a usage that is none": lambda found: found.update(usage=[3]),
}


@pytest.mark.by_day("-3", "1000000", "True", "no list of ids", "no choices", "no reason", "a usage that is none")
@pytest.mark.parametrize("case", UNUSABLE)
def test_a_row_without_a_usable_answer_is_named_and_loses_no_other(case, tmp_path):
    row = 7 * (len(case) % 2)

    def changed(found):
        if found["choices"][0]["prompt_token_ids"] == prompts(20)[row]:
            UNUSABLE[case](found)

    with serving(changed=changed) as (server, url):
        with pytest.raises(EndpointError, match=f"row {row}: {url}"):
            regenerate(endpoint(url, tries=3), prompts(20), tmp_path, max_new_tokens=TOKENS)
        server.changed, asked = None, len(server.asked)
        rows = regenerate(endpoint(url), prompts(20), tmp_path, max_new_tokens=TOKENS)
    assert rows.rows == [{"ids": prompt + answer(prompt), "prompt": 2} for prompt in prompts(20)]
    assert len(server.asked) - asked < 4  # the row, and what failed on its way


def test_faults_between_answers_do_not_end_a_run():
    """Every second row fails, more of them than end a run in turn."""
    asked = dict(enumerate(prompts(60)))
    failing = [prompt for row, prompt in asked.items() if row % 2]

    def changed(found):
        if found["choices"][0]["prompt_token_ids"] in failing:
            found["choices"] = []

    answers = []
    with serving(changed=changed) as (_, url), pytest.raises(EndpointError, match="and 29 further rows"):
        for row, _ in endpoint(url, tries=1, concurrency=1).completions(asked, TOKENS, 0, {}):
            answers.append(row)
    assert answers == list(range(0, 60, 2))


def test_ids_lie_below_the_vocabulary_that_is_named(tmp_path):
    with serving(changed=lambda found: found["choices"][0].update(token_ids=[40, 50])) as (_, url):
        prompt = {0: [3]}
        options = dict(max_new_tokens=2, seed=0, options={})
        with pytest.raises(EndpointError, match="row 0.*50.*below 50"):
            list(endpoint(url, vocab_size=50).completions(prompt, **options))


def test_pauses_that_a_server_asks_for_are_bounded(monkeypatch):
    def refuses(handler):
        handler.send_response(429)
        handler.send_header("Retry-After", asked)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)
    for asked, most in (("9" * 9, 60), ("9" * 400, 60), ("7", 7), ("-1", 1), ("soon", 1), ("\xb2", 1)):
        pauses = []
        with serving(instead=refuses) as (_, url), pytest.raises(EndpointError, match="3 tries: HTTP 429"):
            list(endpoint(url, tries=3).completions({0: [3]}, 2, 0, {}))
        assert len(pauses) == 2 and max(pauses) <= most and (most < 7 or min(pauses) == most), asked


def drips(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.05)


def drips_later(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
    drips(handler)


@pytest.mark.by_day("drips_later")
@pytest.mark.parametrize("drip", [drips, drips_later])
def test_an_answer_that_comes_byte_by_byte_ends(drip):
    with serving(instead=drip) as (_, url), pytest.raises(EndpointError, match="2 tries: TimeoutError"):
        list(endpoint(url, tries=2, timeout=0.5).completions({0: [3]}, 2, 0, {}))


def endless(handler, piece=b" " * (1 << 20), headers=b""):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n")
    for _ in range(512):
        handler.wfile.write(piece)
        handler.server.asked.append(piece)


def test_an_answer_without_end_is_not_read_whole():
    with serving(instead=endless) as (server, url), pytest.raises(EndpointError, match="more than 16777216 bytes"):
        list(endpoint(url).completions({0: [3]}, 2, 0, {}))
    assert len(server.asked) < 100


@pytest.mark.by_day("gzip", "br")
@pytest.mark.parametrize("coding", ["gzip", "br", "gzip, gzip"])
def test_a_compressed_answer_is_bounded_by_what_it_holds(coding):
    bomb = gzip.compress(b" " * (1 << 26))

    def explodes(handler):
        handler.wfile.write(f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\n\r\n".encode() + bomb)

    match = "more than 16777216 bytes" if coding == "gzip" else "Content-Encoding"
    with serving(instead=explodes) as (_, url), pytest.raises(EndpointError, match=match):
        list(endpoint(url).completions({0: [3]}, 2, 0, {}))


def test_a_redirection_is_refused_and_not_followed():
    def redirects(handler):
        handler.send_response(302)
        handler.send_header("Location", f"{other}/completions")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    refused = pytest.raises(EndpointError, match="HTTP 302")
    with serving() as (away, other), serving(instead=redirects) as (_, url), refused:
        list(endpoint(url, api_key="secret").completions({0: [3]}, 2, 0, {}))
    assert not away.asked


def test_an_answer_of_another_form_is_named():
    for text in ("[" * 100_000, "null", "[]", '"x"', "9" * 5000, '{"choices": {}}', '{"choices": [3]}'):
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
        refused = pytest.raises(EndpointError, match="row 0.*OpenAI's form")
        with serving(instead=lambda handler, said=head: handler.wfile.write(said)) as (_, url), refused:
            list(endpoint(url, tries=1).completions({0: [3]}, 2, 0, {}))
