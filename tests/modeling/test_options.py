"""Misspelt options: a configuration would store them without a word, so the methods that pass them on refuse them."""

import pytest

from tests.families import family_model
from tests.models import TRAINED, tiny_model
from tests.ptp_models import backbone
from tokenahead import DeepSeekMTP, EvaByteForMTPC, MTPHeads, PTPForCausalLM

CALLS = {
    "head_type misspelt": lambda: MTPHeads.from_backbone(backbone(), headtype="btree"),
    "a dict of options": lambda: MTPHeads.from_backbone(backbone(), mtp_head={"head_type": "btree"}),
    "set_head": lambda: tiny_model().set_head(head_typ="btree", rank=2),
    "mtp_head of from_pretrained": lambda: EvaByteForMTPC.from_pretrained(TRAINED, mtp_head={"headtype": "cp"}),
    "parallel prediction": lambda: PTPForCausalLM.from_backbone(backbone(), num_slot=3),
    "modules": lambda: DeepSeekMTP.from_backbone(family_model("llama").main, num_module=2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_unknown_options_are_refused_by_name(call):
    with pytest.raises(TypeError, match="'(headtype|mtp_head|head_typ|num_slot|num_module)'"):
        call()


def test_a_refused_head_leaves_the_old_one():
    model = tiny_model()
    with pytest.raises(TypeError):
        model.set_head(head_type="btree", ranks=2)
    assert model.config.mtp_head.head_type == "ff" and model.mtp_head is None
