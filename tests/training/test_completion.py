"""What `tokenahead generate` writes: the text as it comes, statistics apart or as JSON."""

import io
import json
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.families import family_config, shake
from tests.ptp_models import student
from tests.test_cli import run
from tests.training.conftest import small_model
from tokenahead import DeepSeekMTP, EagleHead, EvaByteTokenizer, MTPHeads, PTPForCausalLM
from tokenahead.modeling.heads.attached import HeadSession
from tokenahead.training.completion import complete
from tokenahead.training.requests import GenerateRequest

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


def text_of(folder, prompt="def f(", **options) -> str:
    return complete(GenerateRequest(str(folder), prompt, **options)).text


def pipe(monkeypatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_the_text_comes_on_the_output_and_the_statistics_stand_apart(capsys, folder):
    assert run("generate", "--model", folder, "def f(", "--max-new-tokens", 30) == 0
    captured = capsys.readouterr()
    assert captured.out == text_of(folder, max_new_tokens=30) + "\n"
    assert len(captured.err.splitlines()) == 1 and captured.err.startswith("30 bytes in ")
    assert "backbone calls" in captured.err and "bytes per call" in captured.err


@pytest.mark.core
def test_the_prompt_may_come_through_a_pipe(capsys, monkeypatch, folder):
    for arguments in ([], ["-"]):
        pipe(monkeypatch, "n\u00e9 = 1\n".encode())
        assert run("generate", "--model", folder, "--max-new-tokens", 12, *arguments) == 0
        assert capsys.readouterr().out == text_of(folder, "n\u00e9 = 1\n", max_new_tokens=12) + "\n"


def test_json_is_one_object_with_text_and_statistics(capsys, folder):
    assert run("generate", "--model", folder, "def f(", "--max-new-tokens", 30, "--json") == 0
    captured = capsys.readouterr()
    values = json.loads(captured.out)
    assert captured.err == "" and len(captured.out.splitlines()) == 1
    assert values["text"] == text_of(folder, max_new_tokens=30)
    assert (values["new_tokens"], values["prompt_tokens"], values["unit"]) == (30, 7, "byte")
    assert values["backbone_calls"] * values["tokens_per_call"] == pytest.approx(30)
    assert len(values["accepted_by_position"]) == 3 and values["tokens_per_second"] > 0


def test_plain_decoding_gives_the_same_bytes(capsys, folder):
    outputs = []
    for flags in ([], ["--plain"], ["--temperature", "0"]):
        assert run("generate", "--model", folder, "class ", "--max-new-tokens", 25, *flags) == 0
        outputs.append(capsys.readouterr())
    assert len({captured.out for captured in outputs}) == 1
    assert "one byte per backbone call" in outputs[1].err and "one byte per" not in outputs[0].err


def test_samples_follow_from_the_seed_and_the_options(folder):
    def data(**options):
        return text_of(folder, "x = ", max_new_tokens=40, **options)

    assert data(temperature=1.0, seed=1) == data(temperature=1.0, seed=1) != data(temperature=1.0, seed=2)
    assert data(top_k=1, seed=1) == data(top_k=1, seed=2) == data()
    assert data(top_p=1e-6, seed=3) == data()


def test_chat_puts_the_prompt_into_the_template(folder):
    tokenizer = EvaByteTokenizer()
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi \u00e9"}], tokenize=False, add_generation_prompt=True
    )
    bare = rendered.removeprefix("<bos>")
    assert text_of(folder, "hi \u00e9", chat=True, max_new_tokens=9) == text_of(folder, bare, max_new_tokens=9)


def test_fewer_drafts_can_be_asked_for(folder):
    done = complete(GenerateRequest(str(folder), "x", num_assistant_tokens=1, max_new_tokens=9))
    assert len(done.accepted_by_position) == 1
    assert len(complete(GenerateRequest(str(folder), "x", max_new_tokens=9)).accepted_by_position) == 3


def test_a_plain_model_is_completed_one_token_at_a_time(llama):
    done = complete(GenerateRequest(str(llama), "def", max_new_tokens=5))
    assert "one byte per backbone call" in done.statistics() and done.run.forwards == 5


def test_a_model_of_words_streams_words(words, capsys):
    done = complete(GenerateRequest(str(words), "a be sea", max_new_tokens=8), shows=True)
    assert capsys.readouterr().out == done.text + "\n" and len(done.text.split()) == 8
    assert done.unit == "token" and done.statistics().startswith("8 tokens in ")


def test_heads_are_attached_to_a_plain_model(llama, tmp_path, capsys, monkeypatch):
    backbone = LlamaForCausalLM.from_pretrained(llama)
    MTPHeads.from_backbone(backbone, window=3).save_pretrained(tmp_path)
    drafting = []
    propose = HeadSession.propose
    monkeypatch.setattr(HeadSession, "propose", lambda self, *asked: drafting.append(1) or propose(self, *asked))
    assert run("generate", "--model", llama, "--heads", tmp_path, "--max-new-tokens", 20, "--", "--x") == 0
    captured = capsys.readouterr()
    assert captured.out == text_of(llama, "--x", max_new_tokens=20) + "\n" and drafting
    assert "one byte per backbone call" not in captured.err
    drafting.clear()
    done = complete(GenerateRequest(str(llama), "x", heads=str(tmp_path), dtype="bfloat16", max_new_tokens=9))
    assert done.run.new_tokens == 9 and drafting


def test_an_eagle_head_that_was_trained_drafts(llama, tmp_path):
    EagleHead.from_backbone(LlamaForCausalLM.from_pretrained(llama), version=1).save_pretrained(tmp_path)
    done = complete(GenerateRequest(str(llama), "x", heads=str(tmp_path), max_new_tokens=9))
    assert done.text == text_of(llama, "x", max_new_tokens=9) and done.accepted_by_position
    with pytest.raises(ValueError, match="--heads"):
        complete(GenerateRequest(str(tmp_path), "x"))


def test_modules_of_an_official_folder_draft(tmp_path):
    torch.manual_seed(0)
    model = shake(DeepSeekMTP(family_config("deepseek_v3", vocab_size=320))).eval()
    save(tmp_path, model)
    done = complete(GenerateRequest(str(tmp_path), "def", max_new_tokens=12))
    assert len(done.accepted_by_position) >= 1
    assert done.text == text_of(tmp_path, "def", max_new_tokens=12, plain=True)


def test_a_student_of_parallel_prediction_drafts(tmp_path):
    torch.manual_seed(0)
    backbone = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.3)).eval()
    save(tmp_path, student(base=backbone))
    assert isinstance(PTPForCausalLM.from_pretrained(tmp_path), PTPForCausalLM)
    done = complete(GenerateRequest(str(tmp_path), "def", max_new_tokens=12))
    assert done.accepted_by_position and done.text == text_of(tmp_path, "def", max_new_tokens=12, plain=True)
