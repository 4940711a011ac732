"""PTPTrainer and masks: what they learn, from which rows, and that they learn it."""

import pytest
import torch
from torch.nn import functional as F

from tests.ptp_models import backbone, ids, student
from tests.training.ptp.test_exactness import Places, gradients
from tests.training.ptp.test_trainer import texts, trainer
from tokenahead import PTPForCausalLM
from tokenahead.training.ptp.tasks import MaskReader


def masked(**options):
    return student("mask", backbone().double(), **options)


@pytest.mark.by_day("True")
@pytest.mark.parametrize("learns_backbone", [False, True])
def test_the_loss_is_that_of_a_forward_by_hand(learns_backbone, tmp_path):
    """Every completion alone: its prefix, then masks; the rows that it is compared with read the true tokens."""
    model, rows = masked(lcm_weight=0.3), texts(backbone())[:3]
    model.train_only("all" if learns_backbone else "drafter")
    own = trainer(model, tmp_path, rows, completions=4, base_weight=0.5 * learns_backbone)
    inputs = own.data_collator(rows)
    task, loss = own._task(model, inputs, False), own.compute_loss(model.eval(), inputs)
    head, embed, total = model.get_output_embeddings(), model.get_input_embeddings(), 0.0
    for row, completion, slot in task.valid.nonzero().tolist():
        start, text = int(task.completions.starts[row, completion]), task.packed.sequences.tokens[row : row + 1]
        masks = torch.arange(slot + 1)[None]
        state = model(text[:, :start], masks=masks, output_hidden_states=-1).hidden_states[-1][0, -1]
        anchor = model(text, output_hidden_states=-1).hidden_states[-1][0, start + slot].detach()
        token, previous = text[0, start + slot + 1], embed(text[0, start + slot])
        seen = (state, model.sampler(state, previous), model.sampler(anchor, previous))
        total = total + sum(F.cross_entropy(head(read), token) for read in seen)
        total = total + 0.3 * (state - anchor).square().sum()
    total = total / task.valid.sum()
    if learns_backbone:
        logits, mask = model(inputs["input_ids"]).logits[:, :-1], inputs["attention_mask"][:, 1:].bool()
        total = total + 0.5 * F.cross_entropy(logits[mask], inputs["input_ids"][:, 1:][mask])
    torch.testing.assert_close(loss, total.to(loss), rtol=1e-5, atol=1e-5)
    learning = [p for p in model.parameters() if p.requires_grad]
    for got, want in zip(torch.autograd.grad(loss, learning), torch.autograd.grad(total, learning), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.core
def test_micro_batches_give_the_gradient_of_the_whole(tmp_path):
    model, row = masked(), ids(1, 9)[0]
    rows = [{"input_ids": row[:n], "labels": row[:n]} for n in (9, 3, 4, 2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenahead.training.ptp.trainer.RandomDraws", lambda _: Places())
        whole, cut = (gradients(model, tmp_path, rows, size, completions=50, loss="kl") for size in (4, 1))
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    for one, other in zip(whole[1], cut[1], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


@pytest.mark.nightly
def test_masks_learn_a_chain_whose_next_token_is_known(tmp_path):
    """Texts that count: the sampler sees the last token, and after few steps drafts are right and accepted."""
    torch.manual_seed(0)
    base = backbone()
    rows = [{"input_ids": (torch.arange(14) + shift) % 11} for shift in range(11)]
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-2)
    for _ in range(60):
        batch = torch.stack([row["input_ids"] for row in rows])
        base(batch, labels=batch).loss.backward()
        optimizer.step(), optimizer.zero_grad()
    model = PTPForCausalLM.from_backbone(base, "mask", num_slots=3, lora_rank=4)
    own = trainer(model, tmp_path, rows, steps=60, rate=1e-2, completions=8, eval_dataset=rows)
    before = own.evaluate()
    own.train()
    after = own.evaluate()
    assert after["eval_num_correct"] > 2.5 > 1 > before["eval_num_correct"]
    assert after["eval_loss"] < before["eval_loss"] / 2
    out = model.generate(rows[0]["input_ids"][None, :4], max_new_tokens=16, slot_budget="quadratic", do_sample=False,
                         pad_token_id=0, return_dict_in_generate=True)  # fmt: skip
    assert torch.equal(out.sequences[0], torch.arange(20) % 11) and out.speculation.backbone_calls <= 7


def test_no_gradient_reaches_the_states_that_masks_are_matched_with(tmp_path):
    model, rows = masked(), texts(backbone())[:3]
    own = trainer(model, tmp_path, rows, completions=4)
    task = own._task(model, own.data_collator(rows), True)
    assert not task.anchors.requires_grad
    length, slots = task.packed.sequences.tokens.shape[1], task.tokens[0].numel()
    hidden = torch.randn(3, length + slots, 16, dtype=torch.float64, requires_grad=True)
    found = {}
    for weight in (0.0, 1.0):
        model.config.lcm_weight = weight
        reader = MaskReader(task, own.options, own._counts(task), None, model)
        loss, _, _ = reader(hidden, model.get_output_embeddings())
        (found[weight],) = torch.autograd.grad(loss, hidden)
    assert (found[1.0][:, :length] == 0).all()
    moved = (found[1.0] - found[0.0])[:, length:].unflatten(1, task.tokens.shape[1:])
    distance = hidden[:, length:].unflatten(1, task.tokens.shape[1:]) - task.anchors
    torch.testing.assert_close(moved, 2 * distance * task.valid[..., None] / task.valid.sum())
    with torch.no_grad():  # anchors are the states of the rows that predict the slots' tokens
        states = model(task.packed.sequences.tokens, output_hidden_states=-1).hidden_states[-1]
    row, completion = 0, int(task.valid[0, :, 1].nonzero()[0])
    start = int(task.completions.starts[row, completion])
    torch.testing.assert_close(task.anchors[row, completion, :2], states[row, start : start + 2])
    assert task.tokens[row, completion, 1] == task.packed.sequences.tokens[row, start + 2]
