"""Drafters that learn while a policy does: what they accept, what texts follow, and runs that are stopped and go on."""

import copy
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.families import family_model
from tests.programs import Program
from tests.training.conftest import small_model
from tests.training.test_evaluation_loss import llama
from tokenahead import BlockDrafter, EagleHead, MTPHeads
from tokenahead.testing import continuation_distribution, continuation_p_value
from tokenahead.training import OnlineDrafterTraining

SIZE = 24
MAKERS = {
    "heads": lambda model: MTPHeads.from_backbone(model, window=3),
    "contexts": lambda model: MTPHeads.from_backbone(model, window=3, context=1, context_rank=8),
    "eagle": lambda model: EagleHead.from_backbone(model, aux_layers=[1, 2], loss_options={"steps": 3}),
    "block": lambda model: BlockDrafter.from_backbone(
        model, layers=1, block_size=3, law_options={"rank": 8}, loss_options={"anchors": 3}
    ),
}


def texts(step, count, length=14):
    """Texts of a style: every token is `step` more than the one before it."""
    return (torch.randint(0, SIZE, (count, 1)) + step * torch.arange(length)) % SIZE


def policy():
    torch.manual_seed(0)
    model = llama(num_hidden_layers=3, vocab_size=SIZE, eos_token_id=None, pad_token_id=0)
    model.generation_config.eos_token_id = None
    return model


def teach(model, learning, step, steps, rate):
    """Train parameters on texts of a style."""
    optimizer = torch.optim.AdamW(learning, rate)
    for _ in range(steps):
        ids = texts(step, 16)
        for parameter, gradient in zip(learning, torch.autograd.grad(model(ids, labels=ids).loss, learning)):
            parameter.grad = gradient
        optimizer.step()


def rollout(model, drafter, count=4, **options):
    """Sampled continuations, and the accepted drafts of their verifications."""
    prompt = texts(5, count)[:, :3]
    common = dict(max_new_tokens=12, do_sample=True, top_k=0, assistant_model=drafter, return_dict_in_generate=True)
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **common | options)
    accepted = sum(out.speculation.rows_accepted, [])
    return out.sequences, sum(accepted) / len(accepted)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["heads", "contexts", "eagle"])
def test_a_static_drafter_falls_behind_a_policy_that_moves_and_one_that_learns_does_not(kind):
    model = policy()
    teach(model, list(model.parameters()), 1, 40, 3e-3)
    drafter = MAKERS[kind](model)
    teach(drafter, [parameter for parameter in drafter.parameters() if parameter.requires_grad], 1, 40, 1e-2)
    static = copy.deepcopy(drafter.detach())
    drafter.attach(model)
    online = OnlineDrafterTraining(drafter, learning_rate=1e-2, capacity=512)
    for _ in range(24):
        teach(model, list(model.parameters()), 5, 3, 3e-3)
        rollout(model, drafter)
        online.update()
    learned, stale = rollout(model, drafter, 16)[1], rollout(model, static.attach(model), 16)[1]
    assert learned > 0.4 > 0.2 > stale  # seeds and machines give 0.6 to 2.9, and 0 to 0.05
    assert len(online.curve) == 24 and sum(entry["accepted"] for entry in online.curve[-8:]) > 8 * 0.3


@pytest.mark.by_day("eagle")
@pytest.mark.parametrize("kind", MAKERS)
def test_texts_follow_the_policy_while_the_drafter_learns(kind):
    model = policy()
    drafter = MAKERS[kind](model)
    online, drawn, prompt = OnlineDrafterTraining(drafter, learning_rate=1e-2, capacity=256), [], texts(5, 1)[:, :3]
    torch.manual_seed(3)
    batch = prompt.expand(50, -1)
    common = dict(attention_mask=torch.ones_like(batch), max_new_tokens=3, do_sample=True, assistant_model=drafter)
    for _ in range(12):
        out = model.generate(batch, top_k=4, **common)
        drawn.append(out[:, 3:])
        online.update()
    exact = continuation_distribution(model, prompt, 3, top_k=4)
    exact = {text: probability for text, probability in exact.items() if probability > 0}
    assert kind != "block" or online.curve[-1]["loss"] < 0.9 * online.curve[0]["loss"]
    assert len(online.curve) == 12 and continuation_p_value(torch.cat(drawn), exact) > 1e-3


class Rollouts(TrainerCallback):
    """A rollout before every step, as reinforcement learning has them."""

    def __init__(self, drafter):
        self.drafter = drafter

    def on_step_begin(self, args, state, control, **kwargs):
        rollout(self.drafter.backbone, self.drafter)


def run(folder, kind="eagle", resume=None, dtype=torch.float32, stop=None, **options):
    """A short run of a trainer whose policy rolls out; returns its callback."""
    model = policy().to(dtype)
    torch.manual_seed(1 if resume is None else 2)  # a resumed run may begin with any drafter
    drafter = MAKERS[kind](model).attach(model, default=True)
    online = OnlineDrafterTraining(drafter, learning_rate=1e-2, rows=2, capacity=64, **options)
    args = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=2, save_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no", learning_rate=1e-3, data_seed=0, bf16=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, SIZE, (16, 10), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in ids]
    callbacks = [Rollouts(drafter), online, *([] if stop is None else [stop])]
    Trainer(model, args, train_dataset=data, callbacks=callbacks).train(resume_from_checkpoint=resume)
    return online


def optimized(online):
    state = online.prepare().state_dict()["state"]
    moments = {f"{key}.{name}": each for key in state for name, each in state[key].items()}
    return moments | {str(number): each for number, each in enumerate(online.masters)}


def check_equal(one, other):
    assert one.curve == other.curve and one.tokens == other.tokens
    kept, same = (learner.buffer.state_dict() for learner in (one, other))
    assert all(torch.equal(tensor, same[name]) for name, tensor in kept.items())
    for left, right in ((one.drafter.state_dict(), other.drafter.state_dict()), (optimized(one), optimized(other))):
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.by_day("eagle-dtype0")
@pytest.mark.parametrize(("kind", "dtype"), [("eagle", torch.float32), ("heads", torch.bfloat16)])
def test_a_resumed_run_goes_on_with_the_same_drafter_and_buffer(kind, dtype, tmp_path):
    whole = run(tmp_path, kind, dtype=dtype)
    saved = tmp_path / "checkpoint-2"
    resumed = run(tmp_path, kind, resume=str(saved), dtype=dtype)
    assert len(whole.curve) == 4 and whole.tokens > 64
    check_equal(whole, resumed)
    again = type(whole.drafter).from_pretrained(saved / "online_drafter" / "drafter")
    assert again.attach(whole.drafter.backbone).is_attached


SCRIPT = """
import os, signal, sys
from transformers import TrainerCallback
from tests.training.test_online import run
from tokenahead.training import online

class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:  # in the middle of what is written
            online.save_file = lambda *args: os.kill(os.getpid(), signal.SIGKILL)

run(sys.argv[1], stop=Killed())
"""


@pytest.mark.nightly
def test_a_run_that_is_killed_while_it_writes_goes_on_from_the_checkpoint_before(tmp_path):
    Program("-c", SCRIPT, tmp_path).ended(code=-signal.SIGKILL)
    assert (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    with pytest.raises(FileNotFoundError, match="online_drafter"):
        run(tmp_path, resume=str(tmp_path / "checkpoint-4"))
    check_equal(run(tmp_path, resume=str(tmp_path / "checkpoint-2")), run(tmp_path / "whole"))


def test_a_folder_of_another_drafter_or_capacity_is_refused(tmp_path):
    model = policy()
    online = OnlineDrafterTraining(MAKERS["eagle"](model), capacity=64)
    rollout(model, online.drafter)
    online.save(tmp_path)
    with pytest.raises(FileNotFoundError, match="online_drafter"):
        online.load(tmp_path / "nowhere")
    with pytest.raises(RuntimeError, match="EagleHead"):
        OnlineDrafterTraining(EagleHead.from_backbone(policy(), version=1)).load(tmp_path)
    with pytest.raises(ValueError, match="capacity=32"):
        OnlineDrafterTraining(MAKERS["eagle"](policy()), capacity=32).load(tmp_path)
    with pytest.raises(ValueError, match="every_steps"):
        OnlineDrafterTraining(MAKERS["eagle"](policy()), every_steps=0)


OWN = {
    "heads": lambda: small_model(mtp_head={"head_type": "cp", "rank": 2}),
    "modules": lambda: family_model("llama", num_nextn_predict_layers=2),
}


@pytest.mark.parametrize("kind", OWN)
def test_of_a_model_that_drafts_for_itself_the_drafting_part_goes_on(kind, tmp_path):
    one, other = (OnlineDrafterTraining(OWN[kind](), learning_rate=1e-2, capacity=64) for _ in range(2))
    one.drafter.generate(texts(5, 2), max_new_tokens=12, use_mtp=True)
    assert one.update() is not None
    one.save(tmp_path)
    other.load(tmp_path)
    parts = (online.part.state_dict() for online in (one, other))
    assert all(torch.equal(*pair) for pair in zip(*(part.values() for part in parts)))
    assert other.update() == one.update() and other.curve == one.curve


PROCESS = """
import sys, torch, torch.distributed as dist
from safetensors.torch import save_file
from tests.training.test_online import MAKERS, policy, rollout
from tokenahead.training import OnlineDrafterTraining

folder, rank = sys.argv[1], int(sys.argv[2])
if len(sys.argv) > 3:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = policy()
torch.manual_seed(rank)
drafter = MAKERS["heads"](model)
online = OnlineDrafterTraining(drafter, learning_rate=1e-2, rows=100)
for step in range(3):
    torch.manual_seed(10 * step + rank)
    if rank == 0 or step > 0:  # at first one of them has nothing
        rollout(model, drafter)
    online.update()
online.save(folder)
online.load(folder)
save_file({name: tensor.clone() for name, tensor in drafter.state_dict().items()}, f"{folder}/{rank}.safetensors")
"""


def test_processes_with_the_same_rollouts_learn_what_one_learns(monkeypatch):
    losses, learned = [], []
    for processes in (1, 2):
        model = policy()
        torch.manual_seed(0)
        online = OnlineDrafterTraining(MAKERS["heads"](model), learning_rate=1e-2)
        rollout(model, online.drafter)
        with monkeypatch.context() as patch:
            if processes == 2:
                patch.setattr(distributed, "is_initialized", lambda: True)
                patch.setattr(distributed, "all_reduce", lambda sums: sums.mul_(2))
                patch.setattr(distributed, "broadcast", lambda tensor, source: None)
            losses.append([online.update() for _ in range(2)])
        learned.append(online.drafter.state_dict())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, tensor in learned[0].items():
        torch.testing.assert_close(tensor, learned[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_two_processes_have_one_drafter_and_learn_from_both_rollouts(tmp_path):
    started = [Program("-c", PROCESS, tmp_path, str(rank), "2") for rank in range(2)]
    for program in started:
        program.ended()
    one, other = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert {path.name for path in (tmp_path / "online_drafter").glob("buffer-*")} == {
        f"buffer-{rank}.safetensors" for rank in range(2)
    }
    check_mean(one)


def check_mean(found):
    """Compare with one process that takes the mean gradient of both rollouts."""
    model = policy()
    torch.manual_seed(0)
    drafter = MAKERS["heads"](model)
    learners = [OnlineDrafterTraining(drafter, learning_rate=1e-2, rows=100)]
    learners[0].freeze()
    learners.append(OnlineDrafterTraining(drafter, learning_rate=1e-2, rows=100))
    gradients = learners[0]._gradients
    learners[0]._gradients = lambda rows: mean([gradients(own.buffer.sample(100, own.generator)) for own in both])
    for step in range(3):
        both = learners if step else learners[:1]
        for rank, learner in enumerate(both):
            torch.manual_seed(10 * step + rank)
            for each in learners:
                each.freeze()
            learner.unfreeze()
            rollout(model, drafter)
        learners[1].freeze()
        learners[0].unfreeze()
        learners[0].update()
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)


def mean(found):
    gradients, losses = zip(*found)
    return [sum(each) / len(each) for each in zip(*gradients)], sum(losses) / len(losses)
