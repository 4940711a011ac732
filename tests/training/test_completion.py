"""What `tokenahead generate` writes: exact bytes, text on a terminal, statistics apart or as JSON."""

import base64
import io
import json
import os
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.families import family_config, shake
from tests.internals import HeadSession, Request, complete
from tests.internals import completion_module as completion
from tests.ptp_models import student
from tests.training.conftest import small_model
from tests.training.test_cli import Terminal, run
from tokenahead import DeepSeekMTP, EagleHead, EvaByteForMTPC, EvaByteTokenizer, MTPHeadConfig, MTPHeads, PTPForCausalLM

SIZES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=320)


def save(folder, model, tokenizer=None):
    """A directory with a model that never ends a text by itself."""
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    (tokenizer or EvaByteTokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("evabyte"), small_model())


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    return save(tmp_path_factory.mktemp("llama"), LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model whose tokens are words."""
    torch.manual_seed(0)
    vocabulary = {word: index for index, word in enumerate(["?", "a", "be", "sea", "dee", "e"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    model = LlamaForCausalLM(LlamaConfig(**(SIZES | {"vocab_size": 6}), initializer_range=0.3))
    return save(tmp_path_factory.mktemp("words"), model, PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def data_of(folder, prompt=b"def f(", **options) -> bytes:
    return complete(Request(str(folder), prompt, **options), lambda data: None).data


def pipe(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_pipe_gets_the_bytes_and_the_statistics_stand_apart(capsysbinary, folder):
    assert run("generate", "--model", folder, "def f(", "--max-new-tokens", 30) == 0
    captured = capsysbinary.readouterr()
    assert captured.out == data_of(folder, max_new_tokens=30) and len(captured.out) > 20
    line = captured.err.decode()
    assert len(line.splitlines()) == 1 and line.startswith("30 bytes in ")
    assert "backbone calls" in line and "bytes per call" in line


def test_a_terminal_gets_text_and_the_end_of_a_line(monkeypatch, folder):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    assert run("generate", "--model", folder, "def f(", "--max-new-tokens", 30) == 0
    shown = data_of(folder, max_new_tokens=30).decode("utf-8", "replace")
    assert screen.getvalue() == "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in shown) + "\n"


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_the_prompt_may_come_through_a_pipe(capsysbinary, monkeypatch, folder, arguments):
    prompt = b"x = '\xff\x80\n"
    pipe(monkeypatch, prompt)
    assert run("generate", "--model", folder, "--max-new-tokens", 12, *arguments) == 0
    assert capsysbinary.readouterr().out == data_of(folder, prompt, max_new_tokens=12)


def test_bytes_that_are_no_utf8_reach_the_model_and_come_back(capsysbinary, folder):
    prompt = b"n\xc3\xa9\xff"
    assert run("generate", "--model", folder, os.fsdecode(prompt), "--max-new-tokens", 60) == 0
    ids = torch.tensor([[1, *(byte + 64 for byte in prompt)]])
    tokens = EvaByteForMTPC.from_pretrained(folder).generate(ids, max_new_tokens=60, use_mtp=False)[0, 5:]
    expected = bytes(token - 64 for token in tokens.tolist() if token >= 64)
    out = capsysbinary.readouterr().out
    assert out == expected
    with pytest.raises(UnicodeDecodeError):
        out.decode()


def test_json_is_one_object_with_text_and_statistics(capsys, folder):
    assert run("generate", "--model", folder, "def f(", "--max-new-tokens", 30, "--json") == 0
    captured = capsys.readouterr()
    values, data = json.loads(captured.out), data_of(folder, max_new_tokens=30)
    assert captured.err == "" and len(captured.out.splitlines()) == 1
    assert base64.b64decode(values["base64"]) == data and values["text"] == data.decode("utf-8", "replace")
    assert (values["new_tokens"], values["prompt_tokens"], values["unit"]) == (30, 7, "byte")
    assert values["backbone_calls"] * values["tokens_per_call"] == pytest.approx(30)
    assert len(values["accepted_by_position"]) == 3 and values["tokens_per_second"] > 0


def test_pieces_come_one_by_one_while_they_are_written(folder):
    pieces = []
    done = complete(Request(str(folder), b"abc", max_new_tokens=12), pieces.append)
    assert len(pieces) == 12 and b"".join(pieces) == done.data


def test_plain_decoding_gives_the_same_bytes(capsysbinary, folder):
    outputs = []
    for flags in ([], ["--plain"], ["--temperature", "0"]):
        assert run("generate", "--model", folder, "class ", "--max-new-tokens", 25, *flags) == 0
        outputs.append(capsysbinary.readouterr())
    assert len({captured.out for captured in outputs}) == 1
    assert b"one byte per backbone call" in outputs[1].err and b"one byte per" not in outputs[0].err


def test_samples_follow_from_the_seed_and_the_options(folder):
    def data(**options):
        return data_of(folder, b"x = ", max_new_tokens=40, **options)

    assert data(temperature=1.0, seed=1) == data(temperature=1.0, seed=1) != data(temperature=1.0, seed=2)
    assert data(top_k=1, seed=1) == data(top_k=1, seed=2) == data()
    assert data(top_p=1e-6, seed=3) == data()


def test_chat_puts_the_prompt_into_the_template(folder):
    tokenizer = EvaByteTokenizer()
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi \u00e9"}], tokenize=False, add_generation_prompt=True
    )
    bare = rendered.removeprefix("<bos>").encode()
    assert data_of(folder, "hi \u00e9".encode(), chat=True, max_new_tokens=9) == data_of(folder, bare, max_new_tokens=9)
    done = complete(Request(str(folder), b"\xff", chat=True, max_new_tokens=2), lambda data: None)
    assert done.prompt_tokens == len(tokenizer(rendered, add_special_tokens=False)["input_ids"]) - len("hi ") - 1


def test_dtype_and_device_reach_the_model(folder, monkeypatch):
    seen = []

    def loads(*args, **kwargs):
        model, tokenizer = original(*args, **kwargs)
        seen.append((model.dtype, model.device.type))
        return model, tokenizer

    original = completion._load
    monkeypatch.setattr(completion, "_load", loads)
    for dtype in ("auto", "bfloat16"):
        data_of(folder, dtype=dtype, device="cpu", max_new_tokens=1)
    assert seen == [(torch.float32, "cpu"), (torch.bfloat16, "cpu")]


def test_fewer_drafts_can_be_asked_for(folder):
    done = complete(Request(str(folder), b"x", num_assistant_tokens=1, max_new_tokens=9), lambda data: None)
    assert len(done.accepted_by_position) == 1
    for options in ({"plain": True}, {"num_assistant_tokens": None}):
        request = Request(str(folder), b"x", **({"num_assistant_tokens": 1, "max_new_tokens": 9} | options))
        if options.get("plain"):
            with pytest.raises(ValueError, match="--num-assistant-tokens.*1"):
                complete(request, lambda data: None)
        else:
            assert len(complete(request, lambda data: None).accepted_by_position) == 3


def test_a_plain_model_is_completed_one_token_at_a_time(llama):
    done = complete(Request(str(llama), b"def", max_new_tokens=5), lambda data: None)
    assert "one byte per backbone call" in done.statistics() and done.backbone_calls == 5
    with pytest.raises(ValueError, match="nothing drafts here"):
        data_of(llama, num_assistant_tokens=2)


def test_a_model_of_words_streams_words(words):
    pieces = []
    done = complete(Request(str(words), b"a be sea", max_new_tokens=8), pieces.append)
    assert b"".join(pieces) == done.data and len(done.data.split()) == 8 and len(pieces) > 4
    assert done.unit == "token" and done.statistics().startswith("8 tokens in ")


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (b"a \xff", {}, "holds.*0.*2.*8"),
        (b"", {}, "the prompt is empty"),
        (b"a", {"chat": True}, "has no chat template"),
    ],
)
def test_what_a_model_of_words_cannot_take_is_named(words, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        data_of(words, prompt, **options)


def test_heads_are_attached_to_a_plain_model(llama, tmp_path, capsysbinary, monkeypatch):
    backbone = LlamaForCausalLM.from_pretrained(llama)
    MTPHeads.from_backbone(backbone, window=3).save_pretrained(tmp_path)
    drafting = []
    propose = HeadSession.propose
    monkeypatch.setattr(HeadSession, "propose", lambda self, *asked: drafting.append(1) or propose(self, *asked))
    assert run("generate", "--model", llama, "--heads", tmp_path, "--max-new-tokens", 20, "--", "--x") == 0
    captured = capsysbinary.readouterr()
    assert captured.out == data_of(llama, b"--x", max_new_tokens=20) and drafting
    assert b"one byte per backbone call" not in captured.err
    drafting.clear()
    done = complete(Request(str(llama), b"x", str(tmp_path), dtype="bfloat16", max_new_tokens=9), lambda data: None)
    assert done.new_tokens == 9 and drafting


def test_an_eagle_head_that_was_trained_drafts(llama, tmp_path):
    EagleHead.from_backbone(LlamaForCausalLM.from_pretrained(llama), version=1).save_pretrained(tmp_path)
    done = complete(Request(str(llama), b"x", str(tmp_path), max_new_tokens=9), lambda data: None)
    assert done.data == data_of(llama, b"x", max_new_tokens=9) and done.accepted_by_position
    with pytest.raises(ValueError, match="--heads"):
        complete(Request(str(tmp_path), b"x"), lambda data: None)


def test_heads_of_another_model_are_refused(llama, tmp_path, capsys):
    MTPHeads(MTPHeadConfig(window=2, hidden_size=8, vocab_size=320)).save_pretrained(tmp_path)
    assert run("generate", "--model", llama, "--heads", tmp_path, "x") == 1
    assert "hidden_size: this MTPHeads was made for 8, but LlamaForCausalLM has 16" in capsys.readouterr().err


def test_modules_of_an_official_folder_draft(tmp_path):
    torch.manual_seed(0)
    model = shake(DeepSeekMTP(family_config("deepseek_v3", vocab_size=320))).eval()
    save(tmp_path, model)
    done = complete(Request(str(tmp_path), b"def", max_new_tokens=12), lambda data: None)
    assert len(done.accepted_by_position) >= 1
    assert done.data == data_of(tmp_path, b"def", max_new_tokens=12, plain=True)


def test_a_student_of_parallel_prediction_drafts(tmp_path):
    torch.manual_seed(0)
    backbone = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).eval()
    save(tmp_path, student(base=backbone))
    assert isinstance(PTPForCausalLM.from_pretrained(tmp_path), PTPForCausalLM)
    done = complete(Request(str(tmp_path), b"def", max_new_tokens=12), lambda data: None)
    assert done.accepted_by_position and done.data == data_of(tmp_path, b"def", max_new_tokens=12, plain=True)
