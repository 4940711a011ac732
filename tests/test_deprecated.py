"""Old public names work for one release, with a FutureWarning that names the new one."""

import importlib
import warnings

import pytest
import torch

import tokenahead
from tests.models import tiny_model
from tokenahead import deprecated
from tokenahead.extending import DraftTree, VerificationResult

PAIRS = [(*key, old, new) for key, pairs in deprecated._ATTRIBUTES.items() for old, new in pairs]


@pytest.mark.parametrize(("module", "name", "old", "new"), PAIRS, ids=lambda part: part)
def test_every_alias_leads_to_a_name_that_is_there(module, name, old, new):
    kind = getattr(importlib.import_module(f"tokenahead.{module}"), name)
    fields = getattr(kind, "__dataclass_fields__", {})
    assert new in fields or getattr(kind, new, None) is not None or new == "start"
    assert isinstance(vars(kind)[old], deprecated._Alias)


def test_old_fields_of_trees_and_results():
    tree = DraftTree.chain(torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2, 3))
    with pytest.warns(FutureWarning, match="DraftTree.laws .*DraftTree.probs"):
        assert tree.laws is tree.probs
    result = VerificationResult(torch.tensor([1]), torch.tensor([[4, 5]]))
    with pytest.warns(FutureWarning, match="num_accepted"):
        assert result.accepted is result.num_accepted
    with pytest.warns(FutureWarning, match="VerificationResult"):
        assert tokenahead.generation.trees.Verdict is VerificationResult
    with pytest.raises(AttributeError, match="nothing"):
        tokenahead.generation.trees.nothing  # noqa: B018


def test_old_methods_of_models():
    model = tiny_model()
    states = torch.zeros(1, model.config.hidden_size)
    with pytest.warns(FutureWarning, match="window_distribution"):
        old = model.window_law(states)
    torch.testing.assert_close(old.leaf_logits, model.window_distribution(states).leaf_logits)


def test_new_names_and_the_import_warn_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        importlib.reload(tokenahead)
        tiny_model().generate(torch.tensor([[70, 71, 72]]), max_new_tokens=4, do_sample=False)
