"""GRPO and RLOO of TRL with drafts: fewer forwards, and the losses, rewards and log-probabilities of plain rollouts."""

from collections import Counter

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

from tests.backbones import train_heads
from tests.training.test_evaluation_loss import llama
from tokenahead import DrafterCascade, EagleHead, NgramDrafter, SuffixDrafter
from tokenahead.testing import continuation_distribution, continuation_p_value
from tokenahead.training import OnlineDrafterTraining

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


def rollouts(method, drafter, folder, adapt=False, given=(), watcher=None, **options):
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
    watchers = [gradients := Gradients(), *([] if watcher is None else [watcher])]
    trainer = kind(model, [reward], config, data, processing_class=tokenizer(), callbacks=callbacks + watchers)
    write = trainer._generate_single_turn

    def noted(*args, **kwargs):
        written.append(waiting.pop(0) if waiting else write(*args, **kwargs))
        return written[-1]

    trainer._generate_single_turn = noted
    torch.manual_seed(0)
    trainer.train()
    assert all(len(online.curve) == 3 and len(online.buffer) >= 24 for online in callbacks)
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


@pytest.mark.nightly
@pytest.mark.parametrize("adapt", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("drafter", ["ngrams", "suffix", "heads", "cascade", "eagle"])
def test_a_policy_in_float32_under_the_trainers_own_autocast(drafter, adapt, tmp_path):
    if adapt and drafter == "eagle":
        pytest.skip("it learns beside whole policies here")
    log, forwards, written = rollouts("grpo", drafter, tmp_path, adapt, learning_rate=1e-3, bf16=None)
    _, most, _ = rollouts("grpo", "plain", tmp_path, adapt, learning_rate=1e-3, bf16=None)
    same, _, _ = rollouts("grpo", "plain", tmp_path, adapt, learning_rate=1e-3, bf16=None, given=written)
    assert forwards <= most and any(row["loss"] for row in log)
    for name in ("loss", "reward", "entropy"):
        assert [row[name] for row in log] == pytest.approx([row[name] for row in same], rel=1e-2, abs=1e-3)


class Told(NgramDrafter):
    """Notes how many tokens it is asked for."""

    lengths = []

    def start(self, options):
        self.lengths.append(options.num_tokens)
        return super().start(options)


@pytest.mark.by_day("given1-1")
@pytest.mark.parametrize(("given", "wanted"), [({}, 3), ({"num_assistant_tokens": 1}, 1)])
def test_the_trainers_config_says_how_many_tokens_are_drafted(given, wanted, tmp_path, monkeypatch):
    monkeypatch.setitem(DRAFTERS, "told", lambda model: Told(longest=1, num_tokens=3))
    monkeypatch.setattr(Told, "lengths", [])
    rollouts("grpo", "told", tmp_path, generation_kwargs=given)
    assert Told.lengths and set(Told.lengths) == {wanted}


class Draws(TrainerCallback):
    """Draws texts in the middle of the training, of the policy as it is then, with the drafter as it is then."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step != 2:
            return
        prompt = torch.tensor([[3, 5, 7]])
        options = dict(top_k=4, suppress_tokens=[1])  # nothing ends
        self.exact = continuation_distribution(model, prompt, 3, **options)
        batch, torch_state = prompt.expand(100, -1), torch.get_rng_state()
        torch.manual_seed(5)
        common = dict(attention_mask=torch.ones_like(batch), max_new_tokens=3, do_sample=True, **options)
        drawn = [model.generate(batch, **common, return_dict_in_generate=True) for _ in range(6)]
        torch.set_rng_state(torch_state)
        assert sum(len(draft) for out in drawn for row in out.speculation.rows_drafts for draft in row) > 100
        self.drawn = torch.cat([out.sequences[:, 3:] for out in drawn])


@pytest.mark.by_day("eagle")
@pytest.mark.parametrize("drafter", ["eagle", "online", "cascade"])
def test_texts_in_the_middle_of_the_training_follow_the_policy(drafter, tmp_path):
    draws, start = Draws(), llama(num_hidden_layers=2)
    rollouts("grpo", drafter, tmp_path, learning_rate=1e-2, watcher=draws)
    exact = {text: probability for text, probability in draws.exact.items() if probability > 0}
    before = continuation_distribution(start, torch.tensor([[3, 5, 7]]), 3, top_k=4)
    assert sum(abs(before.get(text, 0) - probability) for text, probability in exact.items()) > 0.1, "it has moved"
    assert continuation_p_value(draws.drawn, exact) > 1e-3


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
    _, fewer, same = rollouts("grpo", drafter, tmp_path, **options)
    assert [step[0] for step in same] == [step[0] for step in texts] and fewer < forwards


def test_online_dpo_drafts_and_learns_from_the_same_texts(tmp_path):
    """With gradient checkpointing this trainer forbids `generate` a cache, and text is decoded plainly."""
    found = {}
    for name in ("plain", "cascade"):
        base, forwards = llama(num_hidden_layers=2), Counter()
        if (made := DRAFTERS[name](base)) is not None:
            made.attach(base, default=True)
        base.register_forward_pre_hook(lambda *_, forwards=forwards: forwards.update([torch.is_grad_enabled()]))
        config = OnlineDPOConfig(
            str(tmp_path), max_new_tokens=12, max_length=64, per_device_train_batch_size=4, max_steps=3, report_to=[],
            use_cpu=True, save_strategy="no", bf16=False, logging_steps=1, learning_rate=1e-3,
            gradient_checkpointing=False, generation_kwargs={"do_sample": False},
        )  # fmt: skip
        trainer = OnlineDPOTrainer(
            base, reward_funcs=lambda completions, **_: [float(len(text) % 3) for text in completions], args=config,
            train_dataset=Dataset.from_dict({"prompt": ["a c d c d", "e f g"] * 4}), processing_class=tokenizer(),
        )  # fmt: skip
        trainer.train()
        found[name] = forwards[False], [row for row in trainer.state.log_history if "logps/chosen" in row]
    assert found["cascade"][0] < found["plain"][0]
    for row, same in zip(found["cascade"][1], found["plain"][1], strict=True):
        assert row["logps/chosen"] == pytest.approx(same["logps/chosen"], rel=1e-6)
        assert row["objective/scores"] == same["objective/scores"]
