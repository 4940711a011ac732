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
from tokenahead import DeepSeekMTP, EagleHead, EvaByteTokenizer, MTPHeads
from tokenahead.training.completion import complete, statistics
from tokenahead.training.requests import GenerateRequest

SIZES = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, initializer_range=0.3)


def llama_model(vocab_size=320):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocab_size)).eval()


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
    return save(tmp_path_factory.mktemp("llama"), llama_model())


def done(folder, prompt="def f(", shows=False, **options):
    return complete(GenerateRequest(str(folder), prompt, **options), shows)


def text_of(*asked, **options) -> str:
    return done(*asked, **options)["text"]


def test_the_text_comes_on_the_output_and_the_statistics_stand_apart(capsys, folder):
    outputs = []
    for flags in ([], ["--plain"], ["--temperature", "0"]):
        assert run("generate", "--model", folder, "def f(", "--max-new-tokens", 30, *flags) == 0
        outputs.append(capsys.readouterr())
        assert outputs[-1].out == text_of(folder, max_new_tokens=30) + "\n"
        assert len(outputs[-1].err.splitlines()) == 1 and outputs[-1].err.startswith("30 bytes in ")
    assert "backbone calls" in outputs[0].err and "bytes per call" in outputs[0].err
    assert "one byte per backbone call" in outputs[1].err and "one byte per" not in outputs[0].err


@pytest.mark.core
def test_the_prompt_may_come_through_a_pipe(capsys, monkeypatch, folder):
    for arguments in ([], ["-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("n\u00e9 = 1\n".encode())))
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
    assert len(values["accepted_by_position"]) == 3
    assert values["tokens_per_second"] * values["seconds"] == pytest.approx(30)


def test_samples_follow_from_the_seed_and_the_options(folder):
    def data(**options):
        return text_of(folder, "x = ", max_new_tokens=40, **options)

    assert data(temperature=1.0, seed=1) == data(temperature=1.0, seed=1) != data(temperature=1.0, seed=2)
    assert data(top_k=1, seed=1) == data(top_k=1, seed=2) == data()
    assert data(top_p=1e-6, seed=3) == data()


def test_chat_puts_the_prompt_into_the_template(folder):
    chat = [{"role": "user", "content": "hi \u00e9"}]
    rendered = EvaByteTokenizer().apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    bare = rendered.removeprefix("<bos>")
    assert text_of(folder, "hi \u00e9", chat=True, max_new_tokens=9) == text_of(folder, bare, max_new_tokens=9)


def test_fewer_drafts_can_be_asked_for(folder):
    assert len(done(folder, "x", num_assistant_tokens=1, max_new_tokens=9)["accepted_by_position"]) == 1


def test_a_plain_model_of_words_streams_words(tmp_path, capsys):
    vocabulary = {word: index for index, word in enumerate(["?", "a", "be", "sea", "dee", "e"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    save(tmp_path, llama_model(6), PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    found = done(tmp_path, "a be sea", max_new_tokens=8, shows=True)
    assert capsys.readouterr().out == found["text"] + "\n" and len(found["text"].split()) == 8
    assert found["unit"] == "token" and found["backbone_calls"] == 8
    assert statistics(found).startswith("8 tokens in ") and statistics(found).endswith("one token per backbone call")


def test_heads_are_attached_to_a_plain_model(llama, tmp_path, capsys):
    MTPHeads.from_backbone(LlamaForCausalLM.from_pretrained(llama), window=3).save_pretrained(tmp_path)
    assert run("generate", "--model", llama, "--heads", tmp_path, "--max-new-tokens", 20, "--", "--x") == 0
    captured = capsys.readouterr()
    assert captured.out == text_of(llama, "--x", max_new_tokens=20) + "\n"
    assert "one byte per backbone call" not in captured.err
    found = done(llama, "x", heads=str(tmp_path), dtype="bfloat16", max_new_tokens=9)
    assert found["new_tokens"] == 9 and len(found["accepted_by_position"]) == 2


def test_an_eagle_head_that_was_trained_drafts(llama, tmp_path):
    EagleHead.from_backbone(LlamaForCausalLM.from_pretrained(llama), version=1).save_pretrained(tmp_path)
    found = done(llama, "x", heads=str(tmp_path), max_new_tokens=9)
    assert found["text"] == text_of(llama, "x", max_new_tokens=9) and found["accepted_by_position"]
    with pytest.raises(ValueError, match="--heads"):
        done(tmp_path, "x")


@pytest.mark.parametrize("kind", ["modules", "slots"])
def test_models_that_draft_for_themselves(kind, tmp_path):
    torch.manual_seed(0)
    modules = kind == "modules"
    save(
        tmp_path,
        shake(DeepSeekMTP(family_config("deepseek_v3", vocab_size=320))) if modules else student(base=llama_model()),
    )
    found = done(tmp_path, "def", max_new_tokens=12)
    assert found["accepted_by_position"] and found["text"] == text_of(tmp_path, "def", max_new_tokens=12, plain=True)
