"""Recipes of papers as they stand in examples/train/: every part takes effect, and what is saved drafts losslessly."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.models import left_padded
from tokenahead import BlockDrafter, EagleHead, MTPHeads
from tokenahead.training import regenerate
from tokenahead.training.commands.settings import read_settings
from tokenahead.training.commands.train import train
from tokenahead.training.trainer_base import drafter_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "train"
STEPS = 4


class Watch(TrainerCallback):
    """What moved in every step: parts of the model, by the first words of their parameters' names."""

    def __init__(self) -> None:
        self.moved, self.rates = [], []

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.before = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.moved.append({name for name, value in model.named_parameters() if not value.equal(self.before[name])})


@pytest.fixture
def run(folders, data, tmp_path):
    """Runs a file as it is, but for a tiny model, its data and the number of steps; the trainer and what was seen."""

    def follow(name):
        small = {
            "model_name_or_path": folders / "llama", "dataset_name": data["text"], "dtype": "float32",
            "max_steps": STEPS, "max_length": 48, "test_split_size": 0.25, "eval_steps": STEPS, "logging_steps": 1,
            "warmup_steps": 0, "save_strategy": "no", "acceptance": "false", "gradient_accumulation_steps": 1,
            "use_cpu": True, "output_dir": tmp_path / "run",
        }  # fmt: skip
        flags = [word for field, value in small.items() for word in (f"--{field}", str(value))]
        watch = Watch()
        return train(read_settings([str(EXAMPLES / name), *flags]), [watch]), watch

    return follow


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def check_lossless(backbone, heads, drafts):
    """Greedy text of a ragged batch is the backbone's own, with drafts that were looked at."""
    prompts = [torch.tensor(list(text.encode())) + 64 for text in ("import os", "def f(x):\n    ret", "x")]
    options = dict(max_new_tokens=16, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    plain = backbone.generate(**left_padded(prompts), **options)
    out = backbone.generate(**left_padded(prompts), assistant_model=heads, **options)
    assert torch.equal(out.sequences, plain.sequences) and len(out.speculation.rows_drafts[0][0]) == drafts


@pytest.mark.nightly
def test_medusa_2(run, folders, tmp_path):
    trainer, watch = run("medusa2.yaml")
    model = trainer.accelerator.unwrap_model(trainer.model)
    early, late = watch.moved[: STEPS // 2], watch.moved[STEPS // 2 :]
    assert all(names and all(name.startswith("heads.") for name in names) for names in early)
    assert all(any("lora_" in name for name in names) for names in late)
    assert all(name.startswith("heads.") or "lora_" in name for names in late for name in names)
    heads = {id(parameter) for parameter in drafter_of(model).parameters()}
    for group in trainer.optimizer.param_groups:
        rate = {2e-3 if id(parameter) in heads else 5e-4 for parameter in group["params"]}
        assert rate == {group["initial_lr"]}
    assert {rate for rates in watch.rates for rate in rates if rate == max(rates)} > {2e-3}, "a cosine goes down"
    assert model.heads.mtp_loss_weight == pytest.approx(0.2)
    assert len(logged(trainer, "loss_backbone")) == STEPS and logged(trainer, "loss_head_6")
    config = json.loads((tmp_path / "run" / "backbone" / "adapter_config.json").read_text())
    assert [config[name] for name in ("r", "lora_alpha", "lora_dropout")] == [32, 16, 0.05]
    assert len(config["target_modules"]) == 7
    base = AutoModelForCausalLM.from_pretrained(folders / "llama")
    trained = PeftModel.from_pretrained(base, tmp_path / "run" / "backbone").eval()
    ids = torch.arange(70, 90)[None]
    torch.testing.assert_close(trained(ids).logits, model.backbone.eval()(ids).logits)
    check_lossless(trained, MTPHeads.from_pretrained(tmp_path / "run").attach(trained), drafts=5)


def test_block(run, folders, tmp_path):
    trainer, watch = run("block.yaml")
    assert all(any(part in name for name in watch.moved[-1]) for part in ("fc", "layers.4", "markov", "confidence"))
    losses, kept = logged(trainer, "loss_place_1"), logged(trainer, "acceptance_place_7")
    assert len(losses) == len(kept) == STEPS and losses[-1] < losses[0]
    backbone = AutoModelForCausalLM.from_pretrained(folders / "llama").eval()
    drafter = BlockDrafter.from_pretrained(tmp_path / "run").attach(backbone)
    assert (drafter.law, drafter.num_drafts, drafter.loss_options.anchors) == ("markov", 7, 512)
    check_lossless(backbone, drafter, drafts=7)


@pytest.mark.core
def test_an_eagle_head_learns_text_that_its_backbone_wrote(folders, settings_of, tmp_path):
    """From the directory of `regenerate`: the backbone's distribution, and its words, on completions alone."""
    backbone = AutoModelForCausalLM.from_pretrained(folders / "llama").eval()
    prompts = torch.randint(70, 200, (12, 6), generator=torch.Generator().manual_seed(0))
    regenerate(backbone, prompts, tmp_path / "text", max_new_tokens=20, batch_size=4, do_sample=True, top_k=0)
    settings = settings_of(
        dataset_name=str(tmp_path / "text"), drafter="eagle", eval_strategy="steps", eval_steps=4, acceptance=False,
        loss_options={"steps": 2, "divergence": "lk"}, strategy={"loss": {"label_weight": 0.2}},
    )  # fmt: skip
    trainer = train(settings)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["labels"][:, :6].eq(-100).all() and batch["labels"][:, 6:].equal(batch["input_ids"][:, 6:])
    assert len(trainer.train_dataset) == 9 and len(logged(trainer, "acceptance_step_2")) == 4
    head = EagleHead.from_pretrained(tmp_path / "run")
    assert (head.loss_options.label_weight, head.loss_options.divergence, head.loss_options.steps) == (0.2, "lk", 2)
    check_lossless(backbone, head.attach(backbone), drafts=5)
