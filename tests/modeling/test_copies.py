"""`copy.deepcopy`, `pickle` and `save_pretrained` keep what a model does, and tie a copy to nothing of the original."""

import copy
import pickle

import pytest
import torch

from tests.every_model import NAMES, every_model, llama, moved_heads, prompt_for, same_texts, texts
from tokenahead import PTPStudent

COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}  # noqa: S301 - our own


def drafts(model: torch.nn.Module) -> list:
    """What it drafts and accepts, which is where copies go wrong that still write the right text."""
    out = model.generate(
        prompt_for(model), max_new_tokens=9, do_sample=False, pad_token_id=0, return_dict_in_generate=True
    )
    return out.speculation.rows_drafts


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_drafts_as_the_original_and_reads_nothing_of_it(name, how):
    model = every_model(name)
    expected, written, twin = drafts(model), texts(model), COPIES[how](model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert drafts(twin) == expected and same_texts(twin, written)
    twin.bfloat16().generate(prompt_for(twin), max_new_tokens=4, pad_token_id=0)


@pytest.mark.by_day(most=3)
@pytest.mark.parametrize("name", NAMES)
def test_a_folder_keeps_texts_and_drafts(name, tmp_path):
    model = every_model(name)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert drafts(again) == drafts(model) and same_texts(again, texts(model))


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_dtypes_as_everywhere(name, dtype, tmp_path):
    model = every_model(name).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=dtype)
    assert again.dtype == torch.bfloat16
    again.generate(prompt_for(again), max_new_tokens=4, pad_token_id=0)


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("unembedding", ["shared", "own"])
def test_a_copy_of_heads_is_detached(unembedding, how):
    base = llama()
    heads = moved_heads(base, unembedding)
    twin = COPIES[how](heads)
    with pytest.raises(RuntimeError, match="not attached"):
        twin(prompt_for(base))
    assert not any("layers" in name for name, _ in twin.named_modules())
    states = base(prompt_for(base), output_hidden_states=-1).hidden_states[-1]
    other = copy.deepcopy(heads.detach()).attach(llama())
    expected = heads.attach(base).window_distribution(states).greedy()
    assert torch.equal(other.window_distribution(states).greedy(), expected)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_a_backbone_with_heads_decodes_plainly(how):
    base = llama()
    expected = base.generate(prompt_for(base), max_new_tokens=6, do_sample=False)
    heads = moved_heads(base)
    twin = COPIES[how](base)
    assert torch.equal(twin.generate(prompt_for(base), max_new_tokens=6, do_sample=False), expected)
    with pytest.raises((RuntimeError, ValueError), match=r"attach"):
        twin.generate(prompt_for(base)[:1], assistant_model=heads, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize("attached", [True, False])
def test_a_backbone_that_has_drafted_can_be_pickled(attached):
    base = llama()
    heads = moved_heads(base)
    options = dict(max_new_tokens=6, do_sample=False)
    expected = base.generate(prompt_for(base), assistant_model=heads, **options)
    if not attached:
        heads.detach()
    twin = COPIES["pickle"](base)
    assert torch.equal(twin.generate(prompt_for(base), **options), expected)
    for model, drafter in ((twin, moved_heads(twin)), (base, heads.attach(base))):
        assert torch.equal(model.generate(prompt_for(base), assistant_model=drafter, **options), expected)


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["backbone first", "drafter first"])
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["heads", "student"])
def test_a_copy_of_a_pair_stays_a_pair(kind, how, order):
    base = llama()
    drafter = moved_heads(base, "shared") if kind == "heads" else PTPStudent.from_backbone(base, num_slots=3)
    pair = base, drafter
    copied = COPIES[how](tuple(pair[index] for index in order))
    twin, other = copied[order[0]], copied[order[1]]
    assert other.backbone is twin is not base and drafter.backbone is base
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    text = twin.generate(prompt_for(twin), assistant_model=other, **options)
    assert torch.equal(text, base.generate(prompt_for(base), **options))
    other.detach()
    assert "generate" not in vars(twin) and "generate" in vars(base)
    alone = COPIES[how](drafter)
    assert not alone.is_attached and not COPIES[how](base).generate.drafters
