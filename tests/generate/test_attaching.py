"""Habits of attached drafters: copies, pickles, saving, adapters, pipelines, two at a time, and no trace behind."""

import copy

import peft
import pytest
import torch
import transformers

from tests.backbones import backbone, blurred, word_tokenizer
from tokenahead import (
    AssistantDrafter,
    DrafterCascade,
    EagleHead,
    MTPHeads,
    NgramDrafter,
    PTPForCausalLM,
    PTPStudent,
    SuffixDrafter,
)

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7], [9, 10, 11, 9, 10, 11, 9]])
OPTIONS = dict(attention_mask=torch.ones_like(PROMPT), max_new_tokens=16, do_sample=False)
MAKE = {
    "heads": lambda model: MTPHeads.from_backbone(model, window=4, unembedding="own"),
    "ngram": lambda model: NgramDrafter().attach(model),
    "assistant": lambda model: AssistantDrafter(blurred(model, 0.3)).attach(model),
}
ADAPTER = peft.LoraConfig(target_modules=["q_proj"], r=2)


def test_a_drafter_that_drafts_for_another_model_is_refused():
    model = backbone()
    drafter = MAKE["ngram"](model)
    assert drafter.attach(model) is drafter
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM.*detach\(\)"):
        drafter.attach(backbone())


def test_drafters_follow_dtype_and_device():
    model = backbone().double()
    heads = MTPHeads.from_backbone(model, window=3, unembedding="own")
    assert heads.dtype == torch.float64
    heads.detach().attach(model.bfloat16())
    assert heads.dtype == torch.bfloat16
    plain = model.generate(PROMPT, **OPTIONS)
    assert plain.shape == model.generate(PROMPT, assistant_model=heads, **OPTIONS).shape


def test_what_was_learned_on_one_backbone_is_forgotten_on_the_next():
    model = backbone()
    drafter = MAKE["ngram"](model)
    model.generate(PROMPT, assistant_model=drafter, num_assistant_tokens_schedule="adaptive", **OPTIONS)
    drafter.tree_choices[False] = {"top_k": 2}
    assert drafter.schedules
    drafter.detach().attach(backbone(seed=2))
    assert not drafter.schedules and not drafter.tree_choices


@pytest.mark.by_day("<lambda>0")
@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: peft.get_peft_model(model, ADAPTER)])
def test_drafters_are_attached_to_the_model_within_a_compiled_one(wrap):
    model = backbone()
    compiled = torch.compile(wrap(model), backend="eager")
    plain = model.generate(PROMPT, **OPTIONS)
    drafters = [NgramDrafter().attach(compiled), MTPHeads.from_backbone(compiled)]
    for drafter in drafters:
        assert drafter.backbone is model
        for caller in (compiled, model):
            out = caller.generate(PROMPT, assistant_model=drafter, return_dict_in_generate=True, **OPTIONS)
            assert torch.equal(out.sequences, plain) and out.speculation.backbone_calls > 1
    for drafter in drafters:
        drafter.detach()
    assert "generate" not in vars(model) and torch.equal(compiled.generate(PROMPT, **OPTIONS), plain)
    slots = PTPForCausalLM.from_backbone(compiled, num_slots=3)
    assert torch.equal(slots.generate(PROMPT, **OPTIONS), plain)


WITHIN = MAKE | {
    "suffix": lambda model: SuffixDrafter().attach(model),
    "eagle": EagleHead.from_backbone,
    "student": lambda model: PTPStudent.from_backbone(model, num_slots=3),
    "cascade": lambda model: DrafterCascade([SuffixDrafter(), NgramDrafter()]).attach(model),
}


@pytest.mark.by_day("heads-greedy", "suffix-sampled", "student-greedy")
@pytest.mark.parametrize("more", [{}, {"do_sample": True, "num_return_sequences": 2}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", WITHIN)
def test_attach_within_the_call_is_refused_by_name(kind, more):
    """Python has looked `generate` up before the drafter lays its patch."""
    model = backbone()
    before = dict(vars(model))
    with pytest.raises(RuntimeError, match=r"within the call: call attach\(backbone\) before"):
        model.generate(PROMPT, assistant_model=(drafter := WITHIN[kind](model)), **OPTIONS | more)
    if kind != "cascade":
        plain = model.generate(PROMPT, **OPTIONS)
        assert model.generate(PROMPT, assistant_model=drafter, **OPTIONS).equal(plain)
        drafter.detach()
        assert vars(model).keys() == before.keys() and model.generate(PROMPT, **OPTIONS).equal(plain)


DEFAULTS = MAKE | {
    "eagle": lambda model: EagleHead.from_backbone(model),
    "student": lambda model: PTPStudent.from_backbone(model, num_slots=3),
    "parallel": lambda model: PTPForCausalLM.from_backbone(copy.deepcopy(model), num_slots=3),
}


@pytest.mark.by_day("heads", "student")
@pytest.mark.parametrize("kind", DEFAULTS)
def test_the_default_drafts_where_no_assistant_is_named(kind, tmp_path):
    model, told = backbone(), dict(return_dict_in_generate=True)
    plain = model.generate(PROMPT, **OPTIONS)
    drafter = DEFAULTS[kind](backbone() if kind == "parallel" else model)
    drafter = drafter.attach(model, default=True)
    for options in ({}, {"use_mtp": True}):
        out = model.generate(PROMPT, **OPTIONS, **told, **options)
        assert torch.equal(out.sequences, plain) and out.speculation.backbone_calls > 0
    assert not hasattr(model.generate(PROMPT, **OPTIONS, **told, use_mtp=False), "speculation")
    assert not hasattr(copy.deepcopy(model).generate(PROMPT, **OPTIONS, **told), "speculation")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert "generate" not in vars(again) and "default" not in (tmp_path / "generation_config.json").read_text()
    drafter.detach()
    assert not hasattr(model.generate(PROMPT, **OPTIONS, **told), "speculation")
    drafter.attach(model)
    assert not hasattr(model.generate(PROMPT, **OPTIONS, **told), "speculation")


def test_a_default_serves_pipelines_and_adapters_and_no_other_loop():
    model = backbone()
    plain = model.generate(PROMPT[:1], **OPTIONS | {"attention_mask": None})
    first, second = (NgramDrafter(num_tokens=count).attach(model, default=True) for count in (2, 4))
    out = model.generate(PROMPT, **OPTIONS, return_dict_in_generate=True)
    assert max(len(draft) for row in out.speculation.rows_drafts for draft in row) == 4
    out = model.generate(PROMPT, **OPTIONS, return_dict_in_generate=True, assistant_model=first)
    assert max(len(draft) for row in out.speculation.rows_drafts for draft in row) == 2
    adapted = peft.get_peft_model(model, ADAPTER)
    assert hasattr(adapted.generate(input_ids=PROMPT, **OPTIONS, return_dict_in_generate=True), "speculation")
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=word_tokenizer())
    text = pipe("w5. w6. w7. w5.", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    second.detach()
    assert pipe("w5. w6. w7. w5.", max_new_tokens=8, do_sample=False)[0]["generated_text"] == text
    larger, options = backbone(seed=2), dict(max_new_tokens=12, do_sample=False)
    first.attach(model, default=True)
    with_assistant = larger.generate(PROMPT[:1], **options, assistant_model=model)  # transformers' own assisted loop
    assert torch.equal(with_assistant, larger.generate(PROMPT[:1], **options))
    lookup = model.generate(PROMPT[:1], **OPTIONS | {"attention_mask": None}, prompt_lookup_num_tokens=2)
    assert torch.equal(lookup, plain)
