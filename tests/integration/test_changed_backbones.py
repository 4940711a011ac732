"""A student drafts for its backbone as it is now, after any change that a user made since it was attached."""

import copy
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import rescale_adapter_scale

from tests.models import left_padded
from tests.ptp_models import CONFIGS, VOCABULARY, backbone, ids, student
from tokenahead import PTPForCausalLM, PTPStudent

BATCH = left_padded([ids(n, seed=n) for n in (5, 2, 9)])
LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
VECTOR = torch.linspace(-2, 2, 16, dtype=torch.float64)


def attached(variant="one_hot", family="llama", lora=False):
    """A backbone (in a PeftModel with two adapters), and the student that is attached to it."""
    torch.manual_seed(4)
    base = backbone(CONFIGS[family](), seed=2).double()
    apart = PTPStudent.from_model(copy.deepcopy(student(variant, base).eval()))
    if lora:
        base = get_peft_model(base, LoraConfig(**LORA), adapter_name="a").eval()
        base.add_adapter("b", LoraConfig(**LORA))
    return base, apart.attach(base)


def write(model, **options):
    return model.generate(**BATCH, **({"max_new_tokens": 12, "pad_token_id": 0} | options))


def agrees(base, apart, **options):
    """The greedy text, which the student leaves as it is, and one of the same uniforms."""
    want = write(base, **options)
    out = write(base, assistant_model=apart, return_dict_in_generate=True, use_mtp=True, **options)
    assert torch.equal(out.sequences, want) and any(map(any, out.speculation.rows_drafts))
    coupled = {"do_sample": True, "seed": 3, "verification": "coupled", "assistant_model": apart} | options
    assert torch.equal(write(base, **coupled), write(base, use_mtp=False, **coupled))
    return want


def stop(ids, scores):
    raise RuntimeError("stop")


def layer_of(base):
    return base.model.layers[1]


def test_drafts_are_those_of_the_whole_model():
    for variant in ["one_hot", "categorical", "mask"]:
        base = backbone(seed=2).double()
        whole = student(variant, base).eval()
        want = write(whole, return_dict_in_generate=True).speculation.rows_drafts
        apart = PTPStudent.from_model(whole).attach(base)
        assert write(base, assistant_model=apart, return_dict_in_generate=True).speculation.rows_drafts == want


HOOKED = {
    "a layer": layer_of,
    "attention": lambda base: layer_of(base).self_attn.o_proj,
    "a linear layer": lambda base: layer_of(base).mlp.down_proj,
    "embeddings": lambda base: base.model.embed_tokens,
    "the decoder's norm": lambda base: base.model.norm,
}


@pytest.mark.by_day("a layer-one_hot", "a linear layer-categorical")
@pytest.mark.parametrize("variant", ["one_hot", "categorical", "mask"])
@pytest.mark.parametrize("place", HOOKED)
def test_hooks_that_come_and_go(variant, place):
    base, apart = attached(variant)
    before = agrees(base, apart)
    handle = HOOKED[place](base).register_forward_hook(lambda layer, args, out: out + VECTOR)
    assert not torch.equal(agrees(base, apart), before)
    handle.remove()
    assert torch.equal(agrees(base, apart), before)


@pytest.mark.by_day("gpt2")
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_hooks_on_the_model_itself(family):
    base, apart = attached(family=family)
    before = agrees(base, apart)
    bias = torch.linspace(0, 9, VOCABULARY, dtype=torch.float64).roll(4)

    def shift(model, args, out):
        out.logits = out.logits + bias
        return out

    handle = base.register_forward_hook(shift)
    assert not torch.equal(agrees(base, apart), before)
    handle.remove()
    assert torch.equal(agrees(base, apart), before)


def test_a_forward_of_its_own():
    base, apart = attached()
    before, kind = agrees(base, apart), type(base)

    class Sharper(kind):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = -out.logits
            return out

    base.__class__ = Sharper
    assert not torch.equal(agrees(base, apart), before)
    base.__class__ = kind
    forward = base.model.layers[0].mlp.forward
    base.model.layers[0].mlp.forward = lambda states: -forward(states)
    assert not torch.equal(agrees(base, apart), before)


def test_adapters_that_are_scaled_and_switched():
    base, apart = attached(lora=True)
    before = agrees(base, apart)
    with rescale_adapter_scale(base, -3.0):
        assert not torch.equal(agrees(base, apart), before)
    assert torch.equal(agrees(base, apart), before)
    base.set_adapter("b")
    assert not torch.equal(agrees(base, apart), before)
    with base.disable_adapter():
        agrees(base, apart)
    base.merge_adapter()
    agrees(base, apart)
    base.unmerge_adapter()
    base.delete_adapter("a")
    agrees(base, apart)
    agrees(base.unload(), apart)


def test_weights_that_are_written_to_below_an_adapter():
    base, apart = attached(lora=True)
    before, whole = agrees(base, apart), apart.whole
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if "base_layer" in name:
                parameter.mul_(-1.5)
    assert not torch.equal(agrees(base, apart), before) and apart.whole is not whole
    tokens = BATCH["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(apart.whole(tokens).logits, base(tokens).logits)
        again = apart.whole
        with rescale_adapter_scale(base, 0.5):
            torch.testing.assert_close(apart.whole(tokens).logits, base(tokens).logits)
    assert again is not whole


def test_an_adapter_per_sequence():
    base, apart = attached(lora=True)
    names = ["a", "__base__", "b"]
    mixed = agrees(base, apart, adapter_names=names)
    assert not torch.equal(mixed, agrees(base, apart))
    end = int(mixed[1, 12])
    agrees(base, apart, adapter_names=names, eos_token_id=end)


def test_nothing_stays_on_the_backbone():
    base, apart = attached()
    with pytest.raises(RuntimeError, match="stop"):
        write(base, assistant_model=apart, logits_processor=[stop])
    agrees(base, apart)
    assert not any(layer._forward_hooks for layer in base.modules() if isinstance(layer, torch.nn.Linear))
    plain = copy.deepcopy(base)
    assert torch.equal(write(plain), write(base))


def test_two_students_and_two_threads():
    base, apart = attached()
    other = PTPStudent.from_model(copy.deepcopy(student("categorical", base).eval())).attach(base)
    calls = [{"assistant_model": each, "return_dict_in_generate": True} for each in (apart, other, apart, other)]
    alone = [write(base, **call) for call in calls]
    together = {}
    threads = [
        threading.Thread(target=lambda at=at, call=call: together.update({at: write(base, **call)}))
        for at, call in enumerate(calls)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for at, want in enumerate(alone):
        assert torch.equal(together[at].sequences, want.sequences)
        assert together[at].speculation.rows_drafts == want.speculation.rows_drafts


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
    base, apart = attached()
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
