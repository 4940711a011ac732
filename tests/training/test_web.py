"""The page of `tokenahead demo --web`: who wrote what, bad input, and requests over loopback."""

import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.training.conftest import small_model
from tokenahead import EvaByteTokenizer, MTPHeads, cli
from tokenahead.training import web
from tokenahead.training.demo import spans
from tokenahead.training.evaluation.decoding import drafted_flags

SIZES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=320)


def ids(text: str) -> list[int]:
    return [byte + 64 for byte in text.encode()]


def save(folder, model):
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    EvaByteTokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, initializer_range=0.3, max_position_embeddings=128)
    return save(tmp_path_factory.mktemp("llama"), LlamaForCausalLM(config))


@pytest.fixture(scope="module")
def author(llama):
    return web.Author(llama)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    return web.Author(save(tmp_path_factory.mktemp("evabyte"), small_model()))


@pytest.fixture(scope="module")
def heads(llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    MTPHeads.from_backbone(LlamaForCausalLM.from_pretrained(llama), window=3).save_pretrained(folder)
    return web.Author(llama, f"heads:{folder}")


def run(*words) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", *map(str, words)])
    return ended.value.code or 0


def test_what_the_model_writes_is_text(llama):
    text = ids("aé<")  # a character belongs to the token that completes it
    assert [*spans(EvaByteTokenizer(), text, [False, False, True, False])] == [("a", False), ("é", True), ("<", False)]
    assert [*spans(EvaByteTokenizer(), text[:2], [False, True])] == [("a", False)]
    pytest.importorskip("gradio")
    kinds = {type(block).__name__ for block in web.build(llama).blocks.values()}
    assert "HighlightedText" in kinds and not {"HTML", "Markdown"} & kinds


@pytest.mark.by_day("0.0-own", "1.0-author", "1.0-heads")
@pytest.mark.core
@pytest.mark.parametrize("name", ["author", "own", "heads"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_colours_are_what_speculation_counts(name, temperature, request):
    writer = request.getfixturevalue(name)
    *earlier, (text, words) = writer.write("abc abc ab", 24, temperature, 3)
    batch = writer.writer.batch([web.Prompt("", ("abc abc ab",))], [[]], "cpu")
    torch.manual_seed(3)
    mode = web.sampled(temperature) if temperature else web.GREEDY
    out = writer.method.generate(**batch, **mode.options, max_new_tokens=24)
    new = out.sequences[0, batch["input_ids"].shape[1] :].tolist()
    flags = drafted_flags(out.speculation.rows_accepted[0], 24)
    prompt, *parts = text
    assert prompt[0].startswith("abc abc ab") and prompt[1] is None
    assert [(piece, "drafted" in who) for piece, who in parts] == [*spans(EvaByteTokenizer(), new, flags)]
    assert "24 tokens" in words and f"{out.speculation.backbone_calls} calls" in words and "plain" in words
    assert earlier[0][0][0] == prompt


def test_a_missing_gradio_is_named_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert run("--web", "--model", "/nowhere") == 1
    assert "tokenahead[web]" in capsys.readouterr().err


def test_a_model_and_an_address_that_cannot_be_are_named(capsys, monkeypatch):
    pytest.importorskip("gradio")
    assert run("--web", "--model", "./nowhere") == 1 and "./nowhere" in capsys.readouterr().err
    for address in ("localhost", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:x"):
        assert run("--web", address) == 1 and address in capsys.readouterr().err


def test_a_call_that_fails_or_a_visitor_who_leaves_holds_up_nobody(own, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no such kernel")

    *_, alone = own.write("abc", 16, 0.0, 0)
    monkeypatch.setattr(web, "decode", fails)
    with pytest.raises(RuntimeError, match="no such kernel"):
        list(own.write("abc", 16, 0.0, 0))
    monkeypatch.undo()
    left = own.write("x", 200, 0.0, 0)
    next(left)
    left.close()
    *_, (text, _) = own.write("abc", 16, 0.0, 0)
    assert text == alone[0]


def answer(url, path="", **request):
    return httpx.request(request.pop("method", "GET"), url.rstrip("/") + path, timeout=60, **request).status_code


def check_guard(url):
    """A page on loopback takes no files and nothing long, and answers under no foreign name."""
    assert answer(url) == 200 and answer(url, headers={"Host": "localhost:7860"}) == 200
    for host in ("evil.example", "evil.example:7860", "127.0.0.1.evil.example", "localhost.evil.example", ""):
        assert answer(url, headers={"Host": host}) == 421
        assert answer(url, "/gradio_api/info", headers={"Host": host}) == 421
    for path in ("/gradio_api/upload", "/gradio_api/upload/", "/upload"):
        assert answer(url, path, method="POST", files={"files": b"x"}) == 403
    for content in (b" " * (1 << 20 | 1), iter([b" " * (1 << 20), b" "])):  # of iterators no length is sent
        assert answer(url, "/gradio_api/queue/join", method="POST", content=content) == 413


def test_hosts_of_other_names_are_refused():
    right = ("127.0.0.1", "127.0.0.1:7860", "[::1]:80", "LocalHost", "me.lan:1", "10.0.0.7")
    wrong = ("evil.example", "evil.example:80", "[evil", "::1:evil", "")
    for host, status in {**dict.fromkeys(right, 200), **dict.fromkeys(wrong, 421)}.items():
        assert web.fault({b"host": host.encode()}, ["localhost", "Me.lan"])[0] == status, host
        assert web.fault({b"host": host.encode()}, None)[0] == 200


def test_visitors_get_their_own_texts(llama, monkeypatch):
    pytest.importorskip("gradio")
    from gradio_client import Client

    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    page = web.build(llama)
    _, url, share = page.launch(server_name="127.0.0.1", quiet=True, prevent_thread_lock=True, share=False)
    try:
        check_guard(url)
        assert url.startswith("http://127.0.0.1:") and not share
        patient = dict(httpx_kwargs={"timeout": 60}, verbose=False, analytics_enabled=False)  # pandas comes first
        clients = [Client(url, **patient) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            asked = zip(clients, ("first <i>", "second"))
            jobs = [pool.submit(client.predict, prompt, 16, 0.0, 0, api_name="/write") for client, prompt in asked]
            first, second = (job.result(120) for job in jobs)
        texts = ["".join(piece["token"] for piece in found[0]) for found in (first, second)]
        assert "first <i>" in texts[0] and "second" not in texts[0] and "second" in texts[1]
        assert "16 tokens" in first[1] and "per call" in first[1]
        refused = clients[0].predict(" ", 16, 0.0, 0, api_name="/write")
        assert not refused[0] and "prompt" in refused[1]
    finally:
        page.close()
