"""MTPTrainer trains every kind of head apart from its backbone; updates do not depend on how batches are cut."""

import copy

import pytest
import torch

from tests.modeling.heads.backbones import KINDS, backbone, shaken
from tests.training.conftest import ragged_rows, trainer_for
from tokenahead import MTPHeads


@pytest.mark.by_day("hydra++")
@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++", "layer"])
def test_accumulation_is_exact_and_the_backbone_stays(kind, tmp_path):
    base, rows, found = backbone(), ragged_rows(), []
    rows = [{name: value % 64 if name == "input_ids" else value for name, value in row.items()} for row in rows]
    rows = [row | {"labels": torch.where(row["labels"] < 0, row["labels"], row["input_ids"])} for row in rows]
    before = {name: value.clone() for name, value in base.state_dict().items()}
    made = shaken(MTPHeads.from_backbone(base, window=4, **KINDS[kind]), 0.05).detach()
    for size in (8, 2):
        heads = copy.deepcopy(made).attach(base)
        options = dict(optim="sgd", learning_rate=0.5, max_steps=1, gradient_accumulation_steps=len(rows) // size)
        trainer = trainer_for(heads, tmp_path, rows, per_device_train_batch_size=size, logging_steps=1, **options)
        trainer.train()
        found.append(heads.state_dict())
        first = 2 if kind.startswith(("medusa", "hydra")) else 1  # depth 1 is the backbone's own, and weighs nothing
        shown = {name for name in trainer.state.log_history[0] if name.startswith("loss_head_")}
        assert shown == {f"loss_head_{depth}" for depth in range(first, 5)}
        heads.detach()
    assert any((found[0][name] - value).abs().max() > 1e-3 for name, value in made.state_dict().items())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=2e-5, rtol=1e-3)
    assert all(torch.equal(value, before[name]) for name, value in base.state_dict().items())
