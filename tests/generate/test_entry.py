"""The entry of `generate`: what transformers drops for a callable, and fields that it would misread, on configs too."""

import itertools

import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from tests.every_model import llama, moved_heads
from tests.models import tiny_model
from tokenahead import EvaByteTokenizer
from tokenahead.generation import generate as generate_module

IDS = torch.tensor([[72, 105, 40, 41, 99, 100], [101, 102, 70, 72, 80, 81]])
GREEDY = dict(attention_mask=torch.ones_like(IDS), max_new_tokens=16, do_sample=False, pad_token_id=0)
DICT = dict(return_dict_in_generate=True)


def speculating(kind):
    """A model that knows bytes, what its calls need to speculate, and what they need not to."""
    if kind == "evabyte":
        return tiny_model(), {}, {"use_mtp": False}
    model = llama(vocab_size=320)
    return model, {"assistant_model": moved_heads(model)}, {}


@pytest.fixture(params=["evabyte", "heads"])
def pair(request):
    return speculating(request.param)


def fields_on(place, model, **fields):
    """The fields of a call, as keyword arguments, on a config that is passed, or on the model's own."""
    if place == "call":
        return fields
    if place == "passed":
        options = {name: value for name, value in GREEDY.items() if name != "attention_mask"}
        return {"generation_config": GenerationConfig(**(options | fields))}
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return {}


PLACES = ["call", "passed", "own"]


@pytest.mark.by_day("heads")
def test_stop_strings(pair):
    for place in PLACES:
        model, extra, plain = pair
        tokenizer = EvaByteTokenizer()
        mask = {"attention_mask": GREEDY["attention_mask"][:1]}
        text = tokenizer.decode(model.generate(IDS[:1], **(GREEDY | mask), **plain)[0, 6:])
        fields = fields_on(place, model, stop_strings=[next(c for c in text[3:] if " " < c < "~")]) | mask
        common = fields if place == "passed" else GREEDY | fields
        want = model.generate(IDS[:1], tokenizer=tokenizer, **common, **plain)
        out = model.generate(IDS[:1], tokenizer=tokenizer, **common, **extra, **DICT)
        assert torch.equal(out.sequences, want) and want.shape[1] < 22 and len(out.speculation.rows_drafts[0]) > 0
        with pytest.raises(ValueError, match="tokenizer"):
            model.generate(IDS[:1], **common, **extra)


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("managed", [False, True])
def test_peers_of_sharded_models_are_found_as_transformers_does(pair, managed, monkeypatch):
    model, extra, _ = pair
    synced, name = [], "_has_unfinished_sequences"
    monkeypatch.setattr(type(model), name, lambda self, done, given, device: synced.append(given) or not done)
    for name, value in {"is_available": True, "is_initialized": True, "get_world_size": 2}.items():
        monkeypatch.setattr(generate_module.torch.distributed, name, lambda *args, value=value: value)
    monkeypatch.setattr(generate_module, "is_fsdp_managed_module", lambda module: managed)
    model.generate(IDS, **GREEDY, **extra)
    model.generate(IDS, **GREEDY, **extra, synced_gpus=not managed)
    assert [given for given, _ in itertools.groupby(synced)] == [managed, not managed]


class OwnGenerate(LlamaForCausalLM):
    """A class that defines `generate`, as thirty of transformers have."""

    def generate(self, inputs=None, *args, scale=1, **kwargs):
        self.calls = [*getattr(self, "calls", []), scale]
        return super().generate(inputs, *args, **kwargs)


def test_a_generate_of_the_backbones_class_is_called():
    model = OwnGenerate(llama().config).eval()
    want = model.generate(IDS % 60, **GREEDY)
    heads = moved_heads(model)  # attached before `generate` is looked up
    out = model.generate(IDS % 60, assistant_model=heads, scale=2, **GREEDY, **DICT)
    assert torch.equal(out.sequences, want) and model.calls == [1, 2] and out.speculation.backbone_calls > 1


def test_a_call_leaves_nothing_behind(pair):
    model, extra, _ = pair
    before, config = dict(vars(model)), GenerationConfig(max_new_tokens=4, use_mtp=True, pad_token_id=0)
    fields = config.to_dict()
    model.generate(IDS, config, attention_mask=GREEDY["attention_mask"], **extra)
    assert vars(model).keys() == before.keys() and config.to_dict() == fields


def test_a_users_own_decoding_method_is_called(pair):
    model, extra, plain = pair
    want = model.generate(IDS, **GREEDY, **plain)
    calls = []

    def method(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        calls.append(generation_config.max_length)
        return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)

    assert torch.equal(model.generate(IDS, custom_generate=method, **GREEDY, **extra), want) and calls == [22]
