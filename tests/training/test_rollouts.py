"""GRPO and RLOO of TRL with drafts: fewer forwards, and the losses, rewards and log-probabilities of plain rollouts."""

from collections import Counter

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from tests.backbones import train_heads
from tests.training.test_evaluation_loss import llama
from tokenahead import DrafterCascade, EagleHead, NgramDrafter, SuffixDrafter
from tokenahead.training import OnlineDrafterTraining, log_drafts

TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
DRAFTERS = {
    "plain": lambda model: None,
    "ngrams": lambda model: NgramDrafter(longest=1, num_tokens=3),
    "suffix": lambda model: SuffixDrafter(factor=2.0),
    "heads": lambda model: train_heads(model, steps=3).detach(),
    "cascade": lambda model: DrafterCascade([SuffixDrafter(factor=2.0), train_heads(model, steps=3).detach()]),
}

DRAFTERS["online"] = DRAFTERS["heads"]
DRAFTERS["eagle"] = lambda model: EagleHead.from_backbone(model, aux_layers=[0, 1], loss_options={"steps": 3})


def tokenizer():
    words = Tokenizer(models.WordLevel({chr(97 + index): index for index in range(26)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b")


class Gradients(TrainerCallback):
    """Keeps the policy's gradients of every step."""

    def __init__(self):
        self.found = []

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.found.append([parameter.grad.clone() for parameter in learning])


def rollouts(method, drafter, folder, adapt=False, given=(), **options):
    """The log of a short training, how many forwards had no gradient, and what every step wrote.

    `given` takes the place of what would be written. The rows of the log have the policy's gradients, too.
    """
    kind, config_kind = TRAINERS[method]
    base = llama(num_hidden_layers=2)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")) if adapt else base
    made = DRAFTERS[drafter](base)
    if made is not None:
        made.attach(model, default=True)
    forwards, waiting, written = Counter(), list(given), []
    base.register_forward_pre_hook(lambda *_: forwards.update([torch.is_grad_enabled()]))

    def reward(completion_ids, **_):
        return [float(index % 2 + sum(ids) % 3) for index, ids in enumerate(completion_ids)]

    defaults = dict(
        num_generations=4, max_completion_length=12, per_device_train_batch_size=8, max_steps=3, report_to=[],
        use_cpu=True, save_strategy="no", bf16=False, logging_steps=1, beta=0.0,
    )  # fmt: skip
    config = config_kind(str(folder), **defaults | options)
    data = Dataset.from_dict({"prompt": ["a c d c d", "e f g"] * 4})
    callbacks = [OnlineDrafterTraining(made, learning_rate=1e-2)] if drafter in ("online", "eagle") else []
    callbacks, online = [*callbacks, gradients := Gradients()], callbacks
    trainer = kind(model, [reward], config, data, processing_class=tokenizer(), callbacks=callbacks)
    write = trainer._generate_single_turn

    def noted(*args, **kwargs):
        written.append(waiting.pop(0) if waiting else write(*args, **kwargs))
        return written[-1]

    trainer._generate_single_turn = noted
    if made is not None:
        log_drafts(trainer, made)
    torch.manual_seed(0)
    trainer.train()
    assert all(len(each.curve) == 3 and len(each.buffer) >= 24 for each in online)
    log = [row for row in trainer.state.log_history if "loss" in row]
    return [row | {"gradients": each} for row, each in zip(log, gradients.found)], forwards[False], written


def check_equal_logs(one, other):
    for name in ("loss", "reward", "reward_std", "grad_norm", "entropy"):
        assert [row[name] for row in one] == pytest.approx([row[name] for row in other], rel=1e-6, abs=1e-6)
    for row, same in zip(one, other, strict=True):
        torch.testing.assert_close(row["gradients"], same["gradients"], rtol=1e-6, atol=1e-6)


@pytest.mark.by_day("rloo-online")
@pytest.mark.parametrize("drafter", ["ngrams", "suffix", "heads", "cascade", "online", "eagle"])
@pytest.mark.parametrize("method", TRAINERS)
def test_texts_that_were_drafted_are_learned_from_as_plain_ones(method, drafter, tmp_path):
    log, _, written = rollouts(method, drafter, tmp_path, learning_rate=1e-3)
    plain, _, _ = rollouts(method, "plain", tmp_path, learning_rate=1e-3, given=written)
    assert any(row["loss"] for row in log) and any(row["grad_norm"] > 1e-3 for row in log)
    check_equal_logs(log, plain)


@pytest.mark.by_day("cascade-iterations")
@pytest.mark.parametrize(
    "options",
    [{}, {"adapt": True}, {"gradient_checkpointing": True}, {"num_iterations": 2}],
    ids=["whole", "peft", "checkpointing", "iterations"],
)
@pytest.mark.parametrize("drafter", ["suffix", "cascade"])
def test_rollouts_draft_and_write_the_same_texts(drafter, options, tmp_path):
    options = options | {"top_k": 1, "learning_rate": 0.0}  # of drawn texts the seeds would be others
    _, forwards, texts = rollouts("grpo", "plain", tmp_path, **options)
    log, fewer, same = rollouts("grpo", drafter, tmp_path, **options)
    drafted = [row for row in log if "drafts/accepted" in row]  # those of steps that wrote something
    assert max(row["drafts/tokens_per_call"] for row in drafted) > 1
    assert all((row["drafts/tokens_per_call"] > 1) == (row["drafts/accepted"] > 0) for row in drafted)
    assert [step[0] for step in same] == [step[0] for step in texts] and fewer < forwards
