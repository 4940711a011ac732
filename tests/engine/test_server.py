"""The printed commands, walked: `vllm serve` is started as the report says, and asked as an OpenAI client would.

A token is a character here, so that texts are compared token for token. Every kind is a separate server, which takes
a minute or two to start on two cores.
"""

import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.engine.vllm_server import Server
from tokenahead import EagleHead, MTPHeads
from tokenahead.model_cards.export import export

NEW, STEPS = 24, 120
GREEDY = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "max_tokens": NEW, "ignore_eos": True}
SURE = {"temperature": 0.8, "top_k": 1, "max_tokens": NEW, "ignore_eos": True}  # sampled, but only the best token
KINDS = ("retrofit", "official", "medusa", "circuit", "eagle3")


@pytest.fixture(scope="module")
def tiny(benchmarks, tmp_path_factory):
    """A trained backbone with its tokenizer, in a directory whose name has a space."""
    from serving_models import VOCABULARY, backbone

    characters = Tokenizer(models.WordLevel({chr(256 + i): i for i in range(VOCABULARY)}, unk_token=chr(256)))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    folder = tmp_path_factory.mktemp("a backbone")
    backbone("llama", STEPS, num_hidden_layers=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


def exported(kind, tiny, folder):
    """What is served, and the model that says what it must write."""
    from serving_models import train, unsettle, with_modules

    source, tokenizer = tiny
    if kind in ("retrofit", "official"):
        model = with_modules("llama" if kind == "retrofit" else "glm4_moe", STEPS)
        return export(model, folder, tokenizer=tokenizer), model.main
    base = AutoModelForCausalLM.from_pretrained(source).requires_grad_(False)
    torch.manual_seed(0)
    if kind == "eagle3":
        drafter = EagleHead.from_backbone(base, version=3, aux_layers=[1, 2, 3])
    else:
        options = {"head_type": "medusa"} if kind == "medusa" else {"head_type": "btree", "rank": 4}
        drafter = MTPHeads.from_backbone(base, window=4, **options)
    return export(unsettle(train(drafter, STEPS)), folder), base


@pytest.mark.parametrize("kind", KINDS)
def test_the_printed_command_serves_what_is_written_here(kind, tiny, interpreter, tmp_path):
    from serving_cases import PROMPTS

    report, model = exported(kind, tiny, tmp_path / "it's served")
    assert str(tmp_path) in report.command and "BACKBONE" not in shlex.split(report.command)
    tokenizer, expected = tiny[1], []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        expected.append(tokenizer.decode(out[0, len(prompt) :]))
    with Server(report.command, interpreter, tmp_path / "log") as server:
        assert [server.complete(prompt, **GREEDY) for prompt in PROMPTS] == expected
        assert server.accepted() > 0
        asked = tokenizer.decode(PROMPTS[2])
        assert server.complete(asked, **GREEDY) == server.chat(asked, **GREEDY) == expected[2]
        pieces = server.stream(asked, **GREEDY)
        assert len(pieces) > 1 and "".join(pieces) == expected[2]
        assert len(server.complete(asked, **SAMPLED)) == NEW
        assert server.complete(asked, **SURE) == expected[2]
        with ThreadPoolExecutor(8) as pool:
            calls = [(prompt, options) for options in (GREEDY, SAMPLED, SURE) for prompt in PROMPTS]
            texts = list(pool.map(lambda call: server.complete(call[0], **call[1]), calls))
        assert texts[: len(PROMPTS)] == texts[2 * len(PROMPTS) :] == expected
        assert {len(text) for text in texts} == {NEW}
    assert server.process.poll() is not None
