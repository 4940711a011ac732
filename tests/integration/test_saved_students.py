"""A student in a separate directory, attached to a plain backbone, writes what the whole model writes."""

import copy

import torch
from peft import LoraConfig

from tests.models import left_padded
from tests.ptp_models import backbone, ids, student
from tokenahead import PTPForCausalLM, PTPStudent

BATCH = left_padded([ids(n, seed=n) for n in (5, 2, 9)])


def write(model, **options):
    return model.generate(**BATCH, **({"max_new_tokens": 12, "pad_token_id": 0} | options))


def pair(variant="one_hot", base=None):
    """A whole model, and its student, saved and loaded, on another copy of the backbone."""
    base = backbone(seed=2).double() if base is None else base
    whole = student(variant, base).eval()
    return whole, PTPStudent.from_model(copy.deepcopy(whole)), copy.deepcopy(base)


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
