"""docs/minimal_loop.py decodes what the product decodes: batch 1, greedy, and sampled by token verification."""

import runpy
from pathlib import Path

import pytest
import torch

from tests.backbones import backbone
from tests.test_extending import BigramDrafter, table_of
from tokenahead import NgramDrafter
from tokenahead.testing import continuation_distribution, continuation_p_value

LOOP = runpy.run_path(str(Path(__file__).resolve().parents[1] / "docs" / "minimal_loop.py"))
PROMPT = torch.tensor([5, 6, 7, 8, 5, 6])


@pytest.mark.parametrize("kind", ["bigrams", "look-up"])
def test_greedy_tokens_and_accepted_drafts_are_the_products(kind):
    model = backbone()
    if kind == "bigrams":
        drafter, ours = BigramDrafter(table_of(model)).attach(model), LOOP["bigrams"](table_of(model))
    else:
        drafter, ours = NgramDrafter().attach(model), LOOP["repeated"]
    tokens, accepted = LOOP["generate"](model, PROMPT, ours, new_tokens=24)
    out = model.generate(
        PROMPT[None], attention_mask=torch.ones(1, 6), max_new_tokens=24, do_sample=False, assistant_model=drafter,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert tokens.tolist() == out.sequences[0].tolist()
    if kind == "bigrams":  # the product's look-up drafts by more than one token
        assert sum(accepted) > 0 and accepted == out.speculation.accepted


@pytest.mark.by_day(most=1)
@pytest.mark.parametrize("kind", ["bigrams", "look-up"])
def test_sampled_tokens_have_the_backbones_distribution_as_the_products(kind):
    model, prompt = backbone(vocabulary=5, seed=2), torch.tensor([1, 3, 2, 4, 3])
    table = table_of(model)
    ours = LOOP["bigrams"](table) if kind == "bigrams" else LOOP["repeated"]
    exact = continuation_distribution(model, prompt[None], 2, temperature=0.8, top_k=0)
    torch.manual_seed(0)
    drawn = [LOOP["generate"](model, prompt, ours, new_tokens=3, temperature=0.8)[0][5:7] for _ in range(500)]
    assert continuation_p_value(torch.stack(drawn), exact) > 0.001
    drafter = BigramDrafter(table).attach(model)
    options = dict(do_sample=True, temperature=0.8, top_k=0, verification="token", max_new_tokens=3)
    out = model.generate(prompt.expand(500, -1), assistant_model=drafter, **options)
    assert continuation_p_value(out[:, 5:7], exact) > 0.001
