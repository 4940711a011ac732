"""TRL: the heads really learn, alone or with the backbone, packed or not."""

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from tests.models import tiny_model
from tokenahead import EvaByteTokenizer
from tokenahead.training import MTPSFTTrainer

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "import os\n",
    "class A:\n    pass\n\n\nprint(A)\n",
    "# a comment\nx = [1, 2]\n",
] * 4


def trainer_of(model, folder, trainer=MTPSFTTrainer, dataset=None, **options):
    settings = dict(
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        max_length=64,
        gradient_checkpointing=False,
        seed=0,
    )
    data = Dataset.from_dict({"text": TEXTS}) if dataset is None else dataset
    config = SFTConfig(str(folder), **(settings | options))
    return trainer(model, config, train_dataset=data, processing_class=EvaByteTokenizer())


def moved(model, before):
    return {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("head", [{"head_type": "ff"}, {"head_type": "btree", "rank": 2}], ids=["ff", "btree"])
def test_heads_move_and_the_backbone_does_not(head, tmp_path):
    model = tiny_model()
    model.set_head(**head)
    model.train_only("drafter")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = trainer_of(model, tmp_path)
    trainer.train()
    changed = moved(model, before)
    if head["head_type"] == "ff":
        assert changed == {"draft_heads.weight"}
        rows = (model.draft_heads.weight != before["draft_heads.weight"]).view(7, 320, -1).any(-1).any(-1)
        assert rows.all()
    else:
        assert changed and all(name.startswith("mtp_head.") for name in changed)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 3 and all(f"loss_head_{depth}" in logged[0] for depth in range(1, 9))
    assert logged[-1]["loss_head_2"] < logged[0]["loss_head_2"]


def test_plain_sft_leaves_the_heads_untouched(tmp_path):
    """The reason for this trainer; if TRL ever changes, it may go."""
    model = tiny_model()
    model.set_head(head_type="btree", rank=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer_of(model, tmp_path, SFTTrainer).train()
    changed = moved(model, before)
    assert changed and not any(name.startswith("mtp_head.") for name in changed)


def test_updates_are_the_same_accumulated_or_without_padding(tmp_path):
    """One SGD step over 4 rows, as 4 x 1 and 1 x 4, and as one row of TRL's."""
    weights = []
    for rows, steps, options in ((4, 1, {}), (1, 4, {}), (4, 1, {"padding_free": True, "max_length": None})):
        model = tiny_model()
        options |= dict(per_device_train_batch_size=rows, gradient_accumulation_steps=steps, max_steps=1, optim="sgd")
        trainer_of(model, tmp_path, dataset=Dataset.from_dict({"text": TEXTS[:4]}), **options).train()
        weights.append(model.lm_head.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(weights[2], weights[0], atol=1e-6, rtol=0)


@pytest.mark.core
def test_only_the_assistant_is_learned(tmp_path):
    chats = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    data = Dataset.from_dict({"messages": [chats] * 4})
    model = tiny_model()
    trainer = trainer_of(model, tmp_path, dataset=data, assistant_only_loss=True, max_length=256)
    batch = next(iter(trainer.get_train_dataloader()))
    learned = batch["input_ids"][0][batch["labels"][0] != -100]
    assert EvaByteTokenizer().decode(learned) == "hello<|eot_id|>"
    trainer.train()
    assert trainer.state.global_step == 3
