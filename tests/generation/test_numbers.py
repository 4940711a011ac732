"""Numbers that are not finite: a drafter's never change the text, and the backbone's are an error."""

import logging

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from tests import backbones, models
from tests.generation.test_replay import recurrent_model
from tokenahead import (
    AssistantDrafter,
    DeepSeekMTP,
    DrafterCascade,
    EagleHead,
    EvaByteForMTPC,
    MTPHeads,
    NgramDrafter,
    PTPForCausalLM,
    PTPStudent,
    SuffixDrafter,
)

VOCABULARY, NEW = 24, 10
PROMPT = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7], [3, 2, 9, 4]])
SLOTS = dict(num_slots=3, lora_rank=2)


def llama(layers: int = 2, **changes) -> LlamaForCausalLM:
    """A small random backbone."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=layers)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, initializer_range=0.4)
    ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids, **changes)).eval()


def head(kind: str, **options):
    """Makes heads of a family."""
    return lambda base: MTPHeads.from_backbone(base, window=4, head_type=kind, **options)


DRAFTERS = {
    "ff": head("ff"),
    "cp": head("cp", rank=2),
    "hmm": head("hmm", rank=2),
    "btree": head("btree", rank=2),
    "medusa": head("medusa", unembedding="own"),
    "hydra": head("hydra", unembedding="own"),
    "layer": head("layer"),
    "EAGLE-1": lambda base: EagleHead.from_backbone(base, version=1),
    "EAGLE-3": lambda base: EagleHead.from_backbone(base, version=3),
    "assistant": lambda base: AssistantDrafter(llama(1)).attach(base),
    "cascade": lambda base: DrafterCascade([SuffixDrafter(), EagleHead.from_backbone(base, version=1)]).attach(base),
    "student, one_hot": lambda base: PTPStudent.from_backbone(base, "one_hot", **SLOTS),
    "student, categorical": lambda base: PTPStudent.from_backbone(base, "categorical", **SLOTS),
    "student, mask": lambda base: PTPStudent.from_backbone(base, "mask", **SLOTS),
}
"""Drafters that stand apart."""
WITHIN = {
    "PTPForCausalLM": lambda: PTPForCausalLM.from_backbone(llama(), "categorical", **SLOTS),
    "DeepSeekMTP": lambda: DeepSeekMTP.from_backbone(llama(), 2),
    "EvaByteForMTPC": lambda: models.tiny_model(),
}
"""Models that draft for themselves."""
WAYS = {
    "few NaN": lambda p: p.view(-1)[:: max(1, p.numel() - 1)].fill_(float("nan")),
    "NaN": lambda p: p.fill_(float("nan")),
    "inf": lambda p: p.fill_(float("inf")),
    "-inf": lambda p: p.fill_(-float("inf")),
    "huge": lambda p: p.fill_(1e30),
    "zeros": lambda p: p.zero_(),
}


@torch.no_grad()
def hurt(parameters, way: str) -> None:
    """Overwrite parameters; of `few NaN`, in each the first and the last entry."""
    for parameter in parameters:
        WAYS[way](parameter.data)


def own_parameters(drafter):
    """The parameters that draft, and do nothing else."""
    if isinstance(drafter, AssistantDrafter):
        return list(drafter.model.parameters())
    if isinstance(drafter, DrafterCascade):
        return list(drafter.last.parameters())
    if isinstance(drafter, (DeepSeekMTP, EvaByteForMTPC, PTPForCausalLM)):
        parts = ("mtp.", "lora_", "uniform_embedding", "mask_embedding", "sampler", "mtp_head", "draft")
        return [p for name, p in drafter.named_parameters() if any(part in name for part in parts)]
    return list(drafter.parameters())


@pytest.fixture
def warned(caplog):
    """The warnings of numbers that are not finite, so far."""
    logging.getLogger("transformers").propagate = True
    yield lambda: [text for text in caplog.messages if "not finite" in text]
    logging.getLogger("transformers").propagate = False


@pytest.mark.by_day(
    "ff-few NaN", "hmm--inf", "layer-few NaN", "EAGLE-3-few NaN", "assistant-inf", "student, categorical-few NaN"
)
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in DRAFTERS for way in WAYS if way in ("few NaN", "inf") or name in ("ff", "hmm", "EAGLE-1")],
)
def test_numbers_of_a_drafter_leave_the_text_alone(name, way, warned):
    base = llama()
    prompts = [PROMPT, PROMPT[:1]]
    plain = [base.generate(prompt, max_new_tokens=NEW) for prompt in prompts]
    drafter = DRAFTERS[name](base)
    hurt(own_parameters(drafter), way)
    for prompt, text in zip(prompts, plain):
        assert base.generate(prompt, max_new_tokens=NEW, assistant_model=drafter).equal(text)
    assert len(warned()) <= 1 and all(type(drafter).__name__ in text for text in warned())
    if "NaN" in way:
        assert warned()
    sampled = base.generate(PROMPT, max_new_tokens=NEW, do_sample=True, assistant_model=drafter)
    assert sampled.shape == (3, 4 + NEW) and len(warned()) <= 1


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("way", ["few NaN", "inf", "zeros"])
@pytest.mark.parametrize("name", WITHIN)
def test_numbers_of_a_model_that_drafts_for_itself_leave_the_text_alone(name, way, warned):
    model = WITHIN[name]()
    plain = model.generate(PROMPT, max_new_tokens=NEW, use_mtp=False)
    assert own_parameters(model)
    hurt(own_parameters(model), way)
    assert model.generate(PROMPT, max_new_tokens=NEW).equal(plain)
    assert len(warned()) == (way != "zeros") and all(name in text for text in warned())
    model.generate(PROMPT, max_new_tokens=NEW, do_sample=True)


CACHES = {
    "llama": {}, "llama, static": {"cache_implementation": "static"}, "mistral": {}, "gemma3": {}, "evabyte": {},
    "qwen3_next": {},
}  # fmt: skip


@pytest.mark.by_day("llama, static", "gemma3", "qwen3_next")
@pytest.mark.parametrize("name", CACHES)
def test_a_drafted_token_that_overflows_the_backbone_leaves_the_text_alone(name, warned):
    kind = name.partition(",")[0]
    model, prompt = backbones.backbone(kind) if kind in backbones.CONFIGS else recurrent_model(kind), PROMPT
    plain = model.generate(prompt, max_new_tokens=2 * NEW, do_sample=False)
    bad = next(token for token in range(2, 40) if token not in plain.flatten().tolist())
    model.get_input_embeddings().register_forward_hook(
        lambda module, ids, states: states.masked_fill((ids[0] == bad)[..., None], float("nan"))
    )
    drafter = SuffixDrafter().attach(model)
    drafter.add([[*row[:9].tolist(), bad, bad, bad] for row in plain])
    options = dict(max_new_tokens=2 * NEW, do_sample=False, assistant_model=drafter, return_dict_in_generate=True)
    out = model.generate(prompt, **options, **CACHES[name])
    assert out.sequences.equal(plain)
    assert len(warned()) == 1 and "SuffixDrafter" in warned()[0]


class Fault:
    """Gives one sequence scores that are not finite, from the call number `first` of the backbone's head on."""

    def __init__(self, model, value: float, row: int, first: int = 0) -> None:
        self.value, self.row, self.left = value, row, first
        self.handle = model.lm_head.register_forward_hook(self)

    def __call__(self, module, args, logits):
        """The hook."""
        self.left -= 1
        if self.left < 0:
            logits = logits.clone()
            logits[self.row] = self.value
        return logits


GREEDY = [{}, {"repetition_penalty": 1.1}]
SAMPLED = [{"do_sample": True}, {"do_sample": True, "top_k": 3}]


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("options", GREEDY + SAMPLED, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["n-grams", "EAGLE-1", "student, one_hot"])
def test_a_backbone_that_is_not_finite_is_an_error(name, value, options, warned):
    base = llama()
    drafter = NgramDrafter().attach(base) if name == "n-grams" else DRAFTERS[name](base)
    for row, first in ((1, 0), (2, 3)):  # in the prefill, and later
        fault = Fault(base, value, row, first)
        with pytest.raises(ValueError, match=f"sequence {row}: the scores of the backbone.*not finite"):
            base.generate(PROMPT, max_new_tokens=40, assistant_model=drafter, **options)
        fault.handle.remove()
    assert not warned()
    assert base.generate(PROMPT, max_new_tokens=4, assistant_model=drafter).shape == (3, 8)


def test_sequences_that_have_ended_may_hold_anything():
    base = llama()
    plain = base.generate(PROMPT, max_new_tokens=NEW)
    end = int(plain[1, 5])
    want = base.generate(PROMPT, max_new_tokens=NEW, eos_token_id=end)
    drafter = NgramDrafter().attach(base)
    assert (want[1, 6:] == 0).all()
    Fault(base, float("nan"), 1, 2)  # the row has ended by then
    assert base.generate(PROMPT, max_new_tokens=NEW, eos_token_id=end, assistant_model=drafter).equal(want)


def test_masks_in_scores_are_no_fault(warned):
    for options in ({}, {"cache_implementation": "static"}):
        base = llama()
        base.lm_head.register_forward_hook(
            lambda module, args, logits: logits.index_fill(-1, torch.tensor([3]), -torch.inf)
        )
        drafter = NgramDrafter().attach(base)
        for more in ({}, {"suppress_tokens": list(range(8, VOCABULARY))}, {"suppress_tokens": list(range(VOCABULARY))}):
            want = base.generate(PROMPT, max_new_tokens=NEW, **more, **options)
            assert base.generate(PROMPT, max_new_tokens=NEW, assistant_model=drafter, **more, **options).equal(want)
        assert not warned()


class Forces(LogitsProcessor):
    """Gives the token after the last one an infinite score, as some users' processors do."""

    def __call__(self, input_ids, scores):
        """See `LogitsProcessor`."""
        return scores.scatter(1, (input_ids[:, -1:] + 1) % VOCABULARY, torch.inf)


def test_infinite_scores_of_processors_decide_as_in_plain_decoding(warned):
    for name in ("ff", "student, one_hot"):
        base = llama()
        forces = LogitsProcessorList([Forces()])
        want = base.generate(PROMPT, max_new_tokens=NEW, logits_processor=forces)
        drafter = DRAFTERS[name](base)
        assert base.generate(PROMPT, max_new_tokens=NEW, logits_processor=forces, assistant_model=drafter).equal(want)
        assert not warned()
