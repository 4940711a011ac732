"""A student in a separate directory, attached to a plain backbone, writes what the whole model writes."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, pipeline

from tests.assisted import assisted_generate
from tests.models import left_padded
from tests.ptp_models import CONFIGS, backbone, ids, student
from tokenahead import PTPForCausalLM, PTPStudent
from tokenahead.testing import letters

BATCH = left_padded([ids(n, seed=n) for n in (5, 2, 9)])
HOW = {"greedy": {}, "coupled": {"do_sample": True, "seed": 3, "verification": "coupled"},
       "block": {"do_sample": True, "seed": 3, "verification": "block"},
       "best": {"do_sample": True, "seed": 3, "verification": "coupled", "best_of": 2}}  # fmt: skip


def write(model, **options):
    return model.generate(**BATCH, **({"max_new_tokens": 12, "pad_token_id": 0} | options))


def pair(variant="one_hot", base=None):
    """A whole model, and its student, saved and loaded, on another copy of the backbone."""
    base = backbone(seed=2).double() if base is None else base
    whole = student(variant, base).eval()
    return whole, PTPStudent.from_model(copy.deepcopy(whole)), copy.deepcopy(base)


@pytest.mark.by_day("categorical")
@pytest.mark.parametrize("variant", ["one_hot", "categorical", "mask"])
def test_a_folder_of_its_own(variant, tmp_path):
    whole, apart, base = pair(variant)
    apart.save_pretrained(tmp_path)
    names = {name for name, _ in apart.named_parameters()}
    made = ("mask_embedding", "sampler") if variant == "mask" else ("uniform_embedding",)
    assert names and all(".lora_" in name or name.startswith(made) for name in names)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    for kind in (PTPStudent, AutoModel):
        loaded = kind.from_pretrained(tmp_path).attach(base)
        for how in (how for how in HOW.values() if variant != "mask" or "best_of" not in how):
            assert torch.equal(write(base, assistant_model=loaded, **how), write(whole, **how))
        out = write(base, assistant_model=loaded, return_dict_in_generate=True)
        assert sum(map(sum, out.speculation.rows_accepted)) and torch.equal(out.sequences, write(base))
        loaded.detach()
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
    assert "generate" not in vars(base)


@pytest.mark.by_day("gpt2")
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_other_backbones(family):
    whole, apart, base = pair(base=backbone(CONFIGS[family]()).double())
    apart.attach(base)
    assert torch.equal(write(base, assistant_model=apart, **HOW["coupled"]), write(whole, **HOW["coupled"]))


def test_what_the_model_learns_is_the_students(tmp_path):
    base = backbone(seed=2)
    apart = PTPStudent.from_backbone(base, num_slots=3, lora_rank=2)
    assert isinstance(apart.whole, PTPForCausalLM)
    optimizer = torch.optim.SGD([p for p in apart.whole.parameters() if p.requires_grad], lr=0.1)
    tokens, uniforms = ids(2, 5), torch.rand(2, 3)
    for _ in range(2):
        apart.whole(tokens, uniforms=uniforms).logits[:, 5:].logsumexp(-1).sum().backward()
        optimizer.step()
    assert all(parameter.grad is not None for parameter in apart.parameters())
    assert all(parameter.grad is None for parameter in base.parameters())
    apart.save_pretrained(tmp_path)
    again = PTPStudent.from_pretrained(tmp_path).attach(copy.deepcopy(base))
    with torch.no_grad():
        assert torch.equal(again(tokens, uniforms=uniforms).logits, apart.whole(tokens, uniforms=uniforms).logits)


def test_the_student_follows_a_backbone_that_changes():
    _, apart, base = pair()
    apart.attach(base)
    base.float()
    assert torch.equal(write(base, assistant_model=apart), write(base))
    base.bfloat16()
    assert write(base, assistant_model=apart).shape == (3, 21)
    assert {p.dtype for p in apart.parameters()} == {torch.float64}
    base.double()
    base.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    first = write(base)
    assert torch.equal(write(base, assistant_model=apart), first)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "lora_" in name:
                parameter.mul_(-3)
    assert not torch.equal(write(base), first) and torch.equal(write(base, assistant_model=apart), write(base))


def test_within_a_model_of_peft():
    _, apart, base = pair()
    wrapped = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    apart.attach(wrapped)
    assert torch.equal(write(wrapped, assistant_model=apart), write(wrapped))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301 - our own
def test_copies_are_detached(way):
    _, apart, base = pair()
    apart.attach(base)
    want = write(base, assistant_model=apart, **HOW["coupled"])
    again, plain = way(apart), way(base)
    assert not again.is_attached
    assert torch.equal(write(plain), write(base))
    assert torch.equal(write(plain, assistant_model=again.attach(plain), **HOW["coupled"]), want)


def test_a_pipeline_takes_it():
    _, apart, base = pair()
    tokenizer = letters(11)
    texts = pipeline("text-generation", model=base, tokenizer=tokenizer)
    helped = pipeline("text-generation", model=base, tokenizer=tokenizer, assistant_model=apart.attach(base))
    how = {"max_new_tokens": 8, "do_sample": False}
    assert helped("abcd", **how) == texts("abcd", **how)


def test_what_is_refused():
    _, apart, base = pair()
    with pytest.raises(RuntimeError, match=r"attach\(backbone\)"):
        write(base, assistant_model=apart)
    with pytest.raises(RuntimeError, match="not attached"):
        apart(ids(1, 3))
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="num_hidden_layers.*2"):
        apart.attach(backbone(config))
    config = CONFIGS["llama"]()
    config.intermediate_size += 4
    with pytest.raises(ValueError, match="intermediate_size"):
        apart.attach(backbone(config))
    with pytest.raises(ValueError, match="model_type.*'llama'"):
        apart.attach(backbone(CONFIGS["qwen2"]()))
    with pytest.raises(ValueError, match="PTPStudent.*vocab_size=11"):
        apart.resize_token_embeddings(12)
    with pytest.raises(ValueError, match="backbone_config"):
        PTPStudent(type(apart.config)())


@pytest.mark.by_day("one_hot")
@pytest.mark.parametrize("variant", ["one_hot", "categorical", "mask"])
def test_the_assisted_loop_of_transformers_is_refused_by_name(variant):
    whole, apart, base = pair(variant)
    other = backbone(seed=5).double()
    for drafter, name in ((whole, "PTPForCausalLM"), (apart, "PTPStudent"), (apart.attach(base), "PTPStudent")):
        for how in ({}, {"do_sample": True}, {"num_assistant_tokens": 2}):
            with pytest.raises(RuntimeError, match=f"{name}.*attach"):
                other.generate(ids(1, 5), assistant_model=drafter, max_new_tokens=8, pad_token_id=0, **how)
    with pytest.raises(ValueError, match="PTPStudent.*slots"):
        assisted_generate(base, ids(1, 5), apart, max_new_tokens=8, pad_token_id=0)
