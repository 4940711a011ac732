"""Calls of `generate` that once crashed, lied or drafted silently: they work now, or say what is wrong."""

import itertools
import json

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from tests.backbones import backbone, blurred
from tests.models import tiny_model
from tests.ptp_models import ids, student
from tokenahead import (
    AssistantDrafter,
    DrafterCascade,
    LookaheadDrafter,
    MTPHeads,
    NgramDrafter,
    RecyclingDrafter,
    SuffixDrafter,
)
from tokenahead.generation.verification.verifiers import SampledVerifier

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7], [9, 10, 11, 9, 10, 11, 9]])
OPTIONS = dict(attention_mask=torch.ones_like(PROMPT), max_new_tokens=12, do_sample=False)


MAKE = {
    "heads": lambda model: MTPHeads.from_backbone(model, window=4, unembedding="own"),
    "ngram": lambda model: NgramDrafter(),
    "assistant": lambda model: AssistantDrafter(blurred(model, 0.3)),
}


class Speculating:
    """A model that speculates with any drafter; `generate` is called the same way for all."""

    def __init__(self, kind: str) -> None:
        self.options = {}
        if kind == "evabyte":
            self.model = tiny_model()
            return
        self.model = backbone()
        self.options["assistant_model"] = MAKE[kind](self.model).attach(self.model)

    def generate(self, prompt=PROMPT, **options):
        return self.model.generate(prompt, **(OPTIONS | self.options | options))

    def plain(self, prompt=PROMPT, **options):
        if not self.options:
            options["use_mtp"] = False
        return self.model.generate(prompt, **(OPTIONS | options))


@pytest.fixture(params=["evabyte", *MAKE])
def speculating(request):
    return Speculating(request.param)


class Broken(LogitsProcessor):
    """Makes the scores of the last row no distribution, from some length on."""

    def __init__(self, value: float, length: int) -> None:
        self.value, self.length = value, length

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        if input_ids.shape[1] >= self.length:
            scores[-1] = self.value
        return scores


@pytest.mark.by_day("heads")
def test_ids_of_32_bits(speculating):
    for rows in [1, 2]:
        ids, mask = PROMPT[:rows].int(), {"attention_mask": torch.ones_like(PROMPT[:rows])}
        wanted, found = speculating.plain(ids, **mask), speculating.generate(ids, **mask)
        assert found.equal(wanted) and found.dtype == wanted.dtype


@pytest.mark.by_day("heads")
def test_sampling_from_no_distribution_raises(speculating):
    for length, value in itertools.product([7, 11], [float("nan"), float("-inf")]):
        with pytest.raises(ValueError, match="1.*NaN"):
            speculating.generate(do_sample=True, logits_processor=LogitsProcessorList([Broken(value, length)]))


@pytest.mark.by_day("heads")
def test_verification_of_a_saved_config_is_honoured(speculating, monkeypatch, tmp_path):
    rules, make = [], SampledVerifier.__init__
    monkeypatch.setattr(
        SampledVerifier, "__init__", lambda self, rule=None, *rest: make(self, rules.append(rule) or rule)
    )
    GenerationConfig(verification="token", do_sample=True, max_new_tokens=4).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["verification"] == "token"
    config = GenerationConfig.from_pretrained(tmp_path)
    inputs = dict(attention_mask=torch.ones_like(PROMPT), **speculating.options)
    speculating.model.generate(PROMPT, generation_config=config, **inputs)
    speculating.model.generate(PROMPT, generation_config=config, verification="block", **inputs)
    speculating.model.generation_config.verification = "token"
    speculating.generate(do_sample=True)
    assert rules == ["token", "block", "token"]


@pytest.mark.by_day("heads-2", "ngram-1")
@pytest.mark.parametrize("rows", [1, 2])
def test_a_prompt_of_embeddings(speculating, rows):
    """Drafts of heads and n-grams need no ids of the prompt; assistants do, and leave it to plain decoding."""
    model, more = speculating.model, dict(return_dict_in_generate=True)
    table = model.get_input_embeddings()
    mask = torch.ones_like(PROMPT)
    mask[0, :2] = 0
    asked = dict(attention_mask=mask[:rows], max_new_tokens=20)
    want = speculating.plain(PROMPT[:rows], **asked)
    embeds = table(PROMPT[:rows])
    out = speculating.generate(None, inputs_embeds=embeds, **asked, **more)
    assert torch.equal(out.sequences, want[:, 7:])
    assert hasattr(out, "speculation") != isinstance(speculating.options.get("assistant_model"), AssistantDrafter)
    whole = speculating.generate(None, input_ids=PROMPT[:rows], inputs_embeds=embeds, **asked, **more)
    assert torch.equal(whole.sequences, want) and whole.speculation.backbone_calls > 0
    again = torch.cat([PROMPT[:rows], out.sequences, torch.full((rows, 1), 9)], dim=1)
    mask = torch.nn.functional.pad(mask[:rows], (0, 21), value=1)
    cache = whole.past_key_values if isinstance(speculating.options.get("assistant_model"), AssistantDrafter) else None
    cache = out.past_key_values if cache is None else cache
    got = speculating.generate(again, past_key_values=cache, attention_mask=mask)
    assert torch.equal(got, speculating.plain(again, attention_mask=mask))


def test_parallel_prediction_takes_embeddings():
    for variant in ["one_hot", "categorical"]:
        model, prompt = student(variant), ids(2, 6)
        embeds, options = model.get_input_embeddings()(prompt), dict(max_new_tokens=8, do_sample=False)
        mask = torch.ones_like(prompt)
        want = model.generate(prompt, attention_mask=mask, use_mtp=False, **options)
        out = model.generate(inputs_embeds=embeds, attention_mask=mask, use_mtp=True, **options)
        assert torch.equal(out, want[:, 6:])
        with torch.no_grad():
            torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(prompt).logits)
            slots = torch.rand(2, 3)
            first, second = model(prompt, uniforms=slots), model(inputs_embeds=embeds, uniforms=slots)
        torch.testing.assert_close(first.logits, second.logits)


@pytest.mark.by_day("heads")
def test_a_cache_of_inference_mode_is_continued_outside(speculating):
    want = speculating.plain(max_new_tokens=16)
    for plainly in (False, True):
        run = speculating.plain if plainly else speculating.generate
        with torch.inference_mode():
            begun = run(max_new_tokens=6, return_dict_in_generate=True)
        sequences, mask = begun.sequences.clone(), torch.ones_like(begun.sequences)
        out = speculating.generate(
            sequences, attention_mask=mask, past_key_values=begun.past_key_values, max_new_tokens=10
        )
        assert torch.equal(out, want)


LOOK_UPS = {
    "ngram": NgramDrafter,
    "suffix": SuffixDrafter,
    "recycling": RecyclingDrafter,
    "lookahead": lambda: LookaheadDrafter(3, 3, 2),
    "cascade": lambda: DrafterCascade([SuffixDrafter(), LookaheadDrafter(4, 3, 3)]),
    "joined": lambda: DrafterCascade([SuffixDrafter(), RecyclingDrafter()], joins=True),
}


@pytest.mark.by_day("ngram-static-gemma3", "suffix-None-llama", "recycling-None-gemma3")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", LOOK_UPS)
def test_look_ups_draft_where_a_prompt_has_embeddings_alone(kind, cache, name):
    model = backbone(name)
    embeds = model.get_input_embeddings()(PROMPT[[0, 1, 0]])
    options = dict(inputs_embeds=embeds, max_new_tokens=20, cache_implementation=cache)
    want = model.generate(**options, do_sample=False)
    drafter = LOOK_UPS[kind]().attach(model)
    assert torch.equal(model.generate(**options, do_sample=False, assistant_model=drafter), want)
    assert model.generate(**options, do_sample=True, assistant_model=drafter).shape == want.shape
