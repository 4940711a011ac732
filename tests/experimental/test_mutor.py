"""Registers: where they stand and what they see, what they cost the tokens (nothing), and what is left of them."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, TrainerState, TrainingArguments

from tests.ptp_models import CONFIGS, VOCABULARY, backbone, ids
from tests.training.conftest import small_model
from tokenahead import PTPForCausalLM
from tokenahead.experimental.mutor import REGISTER, MuToROptions, MuToRTrainer, RegisterModel, Registers
from tokenahead.modeling.ptp.inputs import packed_mask, packed_positions
from tokenahead.training.ptp.forwards import Sequences

LAYOUTS = Path(__file__).parents[1] / "data" / "ptp" / "mutor_layout.json"


def registers(rows, offsets, **columns) -> Registers:
    inputs = {"input_ids": rows} | {name: torch.as_tensor(column) for name, column in columns.items()}
    return Registers.of(Sequences.of(inputs), torch.tensor(offsets))


def check_layout_of_the_public_code(case):
    """Interleaved there, packed behind the tokens here: the same places, targets, positions and views."""
    tokens, question = torch.tensor([case["ids"]]), case["question_len"]
    labels = tokens.masked_fill(torch.arange(tokens.shape[1]) < question, -100)
    found = registers(tokens, [case["d"]], labels=labels)
    documents = found.sequences.documents
    seen = packed_mask(documents, found.starts, 1)[0, 0]
    positions = packed_positions(documents, found.starts, 1, found.offsets[:, None, None] - 2)[0]
    flags = torch.tensor(case["is_register"]).bool()
    columns, theirs = (~flags).nonzero()[:, 0], torch.tensor(case["mask"]).bool()
    assert positions[: tokens.shape[1]].tolist() == torch.tensor(case["position_ids"])[columns].tolist()
    assert not seen[: tokens.shape[1], tokens.shape[1] :].any() and not theirs[columns][:, flags].any()
    wanted = [place for place in flags.nonzero()[:, 0].tolist() if case["labels_unshifted"][place] != -100]
    exists = (found.targets[0] != -100).nonzero()[:, 0].tolist()
    assert len(wanted) == len(exists)
    for place, own in zip(wanted, exists):
        assert int(found.targets[0, own]) == case["labels_unshifted"][place]
        assert int(positions[tokens.shape[1] + own]) == case["position_ids"][place]
        assert seen[tokens.shape[1] + own, : tokens.shape[1]].tolist() == theirs[place, columns].tolist()
        others = seen[tokens.shape[1] + own, tokens.shape[1] :]
        assert others.nonzero().tolist() == [[own]] and theirs[place, flags].sum() == 1


def test_the_layout_of_the_public_code():
    for case in json.loads(LAYOUTS.read_text()):
        check_layout_of_the_public_code(case)


def test_packed_documents_padding_and_prompts_have_no_targets_of_others():
    tokens = torch.arange(9)[None].repeat(2, 1)
    mask = torch.tensor([[1] * 9, [0, 0, 1, 1, 1, 1, 1, 0, 0]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 4, 0, 0]])
    labels = tokens.masked_fill(torch.arange(9) == 5, -100)
    found = registers(tokens, [2, 3], attention_mask=mask, position_ids=positions, labels=labels)
    pairs = [
        {(int(s) - 1, int(t)) for s, t in zip(starts, targets) if t != -100}
        for starts, targets in zip(found.starts, found.targets)
    ]
    assert pairs[0] == {(0, 2), (1, 3), (5, 7), (6, 8)}  # 4 stands before a prompt's token
    assert pairs[1] == {(3, 6)}  # 5, which 2 would predict, is no target
    own = packed_positions(found.sequences.documents, found.starts, 1, found.offsets[:, None, None] - 2, positions)
    for row, offset in enumerate((2, 3)):
        for place, (start, target) in enumerate(zip(found.starts[row], found.targets[row])):
            if target != -100:
                assert int(own[row, 9 + place]) == int(positions[row, start - 1]) + offset - 1


def disturb(module, args, kwargs):
    """Move the embedding of the second register."""
    kwargs["inputs_embeds"][:, 9] += 1
    return args, kwargs


@pytest.mark.by_day("gpt2")
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@torch.no_grad()
def test_tokens_do_not_depend_on_registers_nor_registers_on_each_other(name):
    base = backbone(CONFIGS[name]())
    model, tokens = RegisterModel(base).eval(), ids(2, 8)
    found = registers(tokens, [2, 3])

    given = found.sequences
    once = model(tokens, given.documents, given.positions, found.starts, found.offsets)
    hook = base.get_decoder().register_forward_pre_hook(disturb, with_kwargs=True)
    changed = (model(tokens, given.documents, given.positions, found.starts, found.offsets) != once).any(-1)
    hook.remove()
    assert changed[:, 9].all() and changed.sum() == 2
    torch.testing.assert_close(once[:, :8], base(tokens).logits, atol=1e-5, rtol=1e-5)
    for row in range(2):  # a register is one row behind its own prefix, at its own position
        start, offset = int(found.starts[row, 2]), int(found.offsets[row])
        alone = torch.cat([base.get_input_embeddings()(tokens[row : row + 1, :start]), model.register[None]], dim=1)
        places = torch.tensor([[*range(start), start + offset - 2]])
        want = base(inputs_embeds=alone, position_ids=places).logits[0, -1]
        torch.testing.assert_close(once[row, 10], want, atol=1e-5, rtol=1e-5)


def rows(count=8):
    return [{"input_ids": ids(12 - index % 3, seed=index)} for index in range(count)]


def trainer(model, folder, data=None, steps=2, options=None, evaluation=None, **arguments):
    how = TrainingArguments(
        folder, max_steps=steps, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        lr_scheduler_type="constant", **({"save_strategy": "no", "per_device_train_batch_size": 4} | arguments),
    )  # fmt: skip
    return MuToRTrainer(model, how, options=options, train_dataset=data or rows(), eval_dataset=evaluation)


@pytest.mark.core
def test_the_loss_of_tokens_is_the_plain_loss_bit_for_bit_and_both_weigh_as_said(tmp_path):
    base = backbone()
    own = trainer(base, tmp_path, options=MuToROptions(max_offset=3, weight=0.25))
    batch = own.data_collator(rows(4))
    loss, outputs = own.compute_loss(own.model.eval(), batch, return_outputs=True)
    task = own._task(own.model, batch, False)
    logits, length = outputs["logits"], batch["input_ids"].shape[1]
    targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    tokens = F.cross_entropy(logits[:, : length - 1].flatten(0, 1), targets[:, 1:].flatten())
    behind = F.cross_entropy(logits[:, length:].flatten(0, 1), task.targets.flatten())
    torch.testing.assert_close(loss, 0.75 * tokens + 0.25 * behind)
    assert (task.targets != -100).sum(1).tolist() == [
        int(row["attention_mask"].sum()) - int(offset) for row, offset in zip(rows_of(batch), task.offsets)
    ]
    alone = Registers(task.sequences, task.offsets, task.starts, task.targets.fill_(-100))
    plain, _ = own._learn(own.model, alone, own._counts(alone), own._counts(alone))
    with torch.no_grad():
        own.model.register.add_(1)
        again = own._learn(own.model, alone, own._counts(alone), own._counts(alone))[0]
    assert torch.equal(plain, again) and torch.equal(plain, 0.75 * tokens)
    want = base(batch["input_ids"], attention_mask=batch["attention_mask"], labels=targets).loss
    torch.testing.assert_close(plain / 0.75, want)


def rows_of(batch):
    return [{name: column[row] for name, column in batch.items()} for row in range(len(batch["input_ids"]))]


def test_training_leaves_a_plain_model_and_goes_on_where_it_stopped(tmp_path):
    whole, cut = (tmp_path / name for name in ("whole", "cut"))
    base = backbone()
    before = copy.deepcopy(base)
    own = trainer(base, whole, steps=4)
    own.train()
    own.save_model(whole / "last")
    log = own.state.log_history[0]
    assert log["loss"] == pytest.approx(0.7 * log["next_token_loss"] + 0.3 * log["register_loss"], rel=1e-4)
    tokens = ids(2, 6)
    plain = AutoModelForCausalLM.from_pretrained(whole / "last").eval()
    assert (whole / "last" / REGISTER).exists() and "register" not in plain.state_dict()
    assert torch.equal(plain(tokens).logits, base.eval()(tokens).logits)
    assert torch.equal(plain.generate(tokens, max_new_tokens=3), base.generate(tokens, max_new_tokens=3))
    assert not torch.equal(before(tokens).logits, plain(tokens).logits)
    trainer(backbone(), cut, steps=2, save_strategy="steps", save_steps=2).train()
    resumed = trainer(backbone(), cut, steps=4)
    resumed.train(resume_from_checkpoint=str(cut / "checkpoint-2"))
    assert torch.equal(resumed._owner.register, own._owner.register)
    for one, other in zip(resumed._owner.backbone.parameters(), base.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.by_day("mine")
@pytest.mark.parametrize("name", ["default", "mine"])
def test_adapters_of_peft_learn_without_a_gate(name, tmp_path):
    def adapted():
        return get_peft_model(backbone(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), adapter_name=name)

    model = adapted()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    own = trainer(model, tmp_path)
    start = own._owner.register.detach().clone()
    own.train()
    own.save_model(tmp_path / "last")
    assert len([*(tmp_path / "last").rglob("adapter_model.safetensors")]) == 1
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    again = trainer(adapted(), tmp_path)
    again._owner.load_checkpoint(tmp_path / "last")
    assert not torch.equal(start, again._owner.register) and torch.equal(own._owner.register, again._owner.register)
    tokens = ids(1, 5)
    assert torch.equal(model.eval()(tokens).logits, again._owner.backbone.eval()(tokens).logits)


def test_micro_batches_and_evaluation_do_not_depend_on_how_they_are_cut(tmp_path):
    model, data = backbone().double(), [{"input_ids": ids(n, seed=n)} for n in (9, 3, 7, 2)]
    found = []
    for size in (4, 1):
        own = trainer(model, tmp_path, data, evaluation=data, per_device_eval_batch_size=size)
        batches = [own.data_collator(data[start : start + size]) for start in range(0, 4, size)]
        tasks = [own._task(model, batch, False) for batch in batches]
        totals = sum(own._counts(task) for task in tasks)
        model.zero_grad()
        loss = sum(own._learn(own.model, task, totals, own._counts(task))[0] for task in tasks)
        loss.backward()
        own._means[own.model.training].take(own.accelerator)
        state = torch.get_rng_state()
        found.append((loss, own.evaluate()["eval_loss"], [p.grad.clone() for p in model.parameters()]))
        assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(found[0][0], found[1][0])
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-6) == pytest.approx(found[0][0].item(), rel=1e-5)
    for one, other in zip(found[0][2], found[1][2], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.nightly
def test_registers_learn_to_look_ahead(tmp_path):
    data = [{"input_ids": (torch.arange(14) + shift) % VOCABULARY} for shift in range(VOCABULARY)]
    own = trainer(backbone(), tmp_path, data, steps=80, evaluation=data)
    before = own.evaluate()
    own.train()
    after = own.evaluate()
    # who does not know d has one of four tokens to choose from: log 4 = 1.39
    assert after["eval_register_loss"] < 1.0 < 1.39 < before["eval_register_loss"]
    assert after["eval_next_token_loss"] < 0.2


def test_bad_input(tmp_path):
    for wrong in ({"max_offset": 0}, {"weight": 1.0}, {"weight": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MuToROptions(**wrong)
    small = dict(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    sliding = AutoModelForCausalLM.from_config(MistralConfig(**small, num_key_value_heads=1, sliding_window=4))
    for model, message in ((sliding, "sliding_window=4"), (small_model(), "EvaByteForMTPC")):
        with pytest.raises(ValueError, match=message):
            trainer(model, tmp_path)
    with pytest.raises(ValueError, match="evabyte.*cache"):
        PTPForCausalLM.from_backbone(small_model())
    other = AutoModelForCausalLM.from_config(LlamaConfig(**small))
    RegisterModel(other).save_pretrained(tmp_path / "other")
    TrainerState().save_to_json(str(tmp_path / "other" / "trainer_state.json"))
    with pytest.raises(ValueError, match="num_hidden_layers=1.* 2"):
        trainer(backbone(), tmp_path).train(resume_from_checkpoint=str(tmp_path / "other"))
