"""`train_only("drafter")` means the same for every model."""

import pytest

from tests.families import family_model
from tests.models import tiny_model
from tests.ptp_models import student


def trained(model) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def circuits():
    model = tiny_model()
    model.set_head(head_type="cp", rank=2, window=4)
    return model


@pytest.mark.parametrize(
    ("make", "is_drafter"),
    [
        (tiny_model, lambda name: name.startswith("draft_heads")),
        (circuits, lambda name: name.startswith("mtp_head")),
        (lambda: family_model("deepseek_v3"), lambda name: name.startswith("mtp.")),
        (student, lambda name: "lora_" in name or name.startswith("uniform_embedding")),
    ],
    ids=["ff", "circuit", "modules", "student"],
)
def test_the_drafter_alone_is_trained(make, is_drafter):
    model = make()
    model.train_only("all")
    idle = {"draft_heads.weight"} if make is circuits else set()
    assert {name for name, is_trained in trained(model).items() if not is_trained} == idle
    model.train_only("drafter")
    assert trained(model) == {name: is_drafter(name) for name in trained(model)}


@pytest.mark.parametrize("make", [tiny_model, lambda: family_model("qwen2"), student], ids=["heads", "modules", "ptp"])
def test_another_word_is_refused_with_the_right_ones(make):
    with pytest.raises(ValueError, match="'backbone'.*'all'.*'drafter'"):
        make().train_only("backbone")
