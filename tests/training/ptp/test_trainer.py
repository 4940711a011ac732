"""PTPTrainer: what a step learns from, that it learns, and what it refuses."""

import pytest
import torch
from transformers import TrainingArguments

from tests.models import checkpoint_activations
from tests.ptp_models import VOCABULARY, backbone, ids, student
from tokenahead import PTPForCausalLM
from tokenahead.generation.tensors.sampling import pick
from tokenahead.training import PTPOptions, PTPTrainer
from tokenahead.training.ptp.forwards import (
    PackedBatch,
    Sequences,
    SlotInputs,
    Teacher,
    draw_starts,
    student_drafts,
)
from tokenahead.training.ptp.losses import LOSSES, SEQUENCES, target_probs

FOLDED = {"temperature": 0.8, "top_k": 7, "top_p": 0.9}
VARIANTS = ("one_hot", "categorical")


def texts(teacher: torch.nn.Module, count: int = 16, length: int = 12, **sampling) -> list[dict]:
    """Texts of the verified distribution, of different lengths."""
    torch.manual_seed(0)
    tokens = ids(count, 2)
    with torch.no_grad():
        for _ in range(length - 2):
            distribution = target_probs(teacher(tokens).logits[:, -1], **sampling)
            tokens = torch.cat([tokens, pick(torch.rand(count), distribution)[:, None]], dim=1)
    return [{"input_ids": row[: length - index % 4]} for index, row in enumerate(tokens)]


def trainer(model, tmp_path, data=None, steps=2, rate=1e-2, **options) -> PTPTrainer:
    how = {name: options.pop(name) for name in ("teacher", "eval_dataset") if name in options}
    extra = {name: options.pop(name) for name in ("gradient_accumulation_steps",) if name in options}
    arguments = TrainingArguments(
        tmp_path, max_steps=steps, per_device_train_batch_size=4, learning_rate=rate, logging_steps=steps, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant", **extra,
    )  # fmt: skip
    data = texts(backbone()) if data is None else data
    return PTPTrainer(model, arguments, options=PTPOptions(**options), train_dataset=data, **how)


def task(model, tmp_path, rows, is_training=True, **options):
    """Sequences, completions and uniforms of one step."""
    own = trainer(model, tmp_path, **({"greedy_share": 0.0} | options))
    batch = own.data_collator(rows)
    with torch.no_grad():
        found = own._task(model, batch, is_training)
    return (found.sequences, found.packed, found.completions, (found.u, found.reached)), own


@pytest.mark.by_day(
    "one_hot-ce-dataset", "one_hot-bce-student", "categorical-kl-student", "categorical-reverse_kl-dataset"
)
@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_loss_and_source_trains_the_student_alone(variant, loss, sequences, tmp_path):
    model = student(variant, sampling=FOLDED)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    own = trainer(model, tmp_path, loss=loss, sequences=sequences, completions=3, greedy_share=0.5)
    own.train()
    assert own.state.log_history[0]["loss"] > 0
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


@pytest.mark.by_day("dataset-one_hot", "student-categorical")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_uniforms_pick_the_tokens_under_the_verified_distribution(variant, sequences, tmp_path):
    model = student(variant, backbone().double(), sampling=FOLDED)  # uniforms at borders ask for exact distributions
    rows = texts(backbone(), **FOLDED)
    (batch, _, completions, (u, reached)), _ = task(model, tmp_path, rows, sequences=sequences, completions=4)
    assert u.dtype == torch.float32 and reached.any()
    for row, completion in (reached[..., 0]).nonzero().tolist():
        start = int(completions.starts[row, completion])
        context = batch.tokens[row, :start][batch.documents[row, :start] > 0]
        for slot in range(int(reached[row, completion].sum())):
            tokens = completions.tokens[row, completion]
            distribution = target_probs(model(torch.cat([context, tokens[:slot]])[None]).logits[:, -1], **FOLDED)
            assert int(pick(u[row, completion, slot][None], distribution)) == int(tokens[slot])


def test_tokens_that_the_distribution_excludes_end_their_completions(tmp_path):
    model = student(sampling={"top_k": 1})  # only the most likely token is possible
    row = ids(1, 12)
    best = model(row).logits.argmax(-1)
    (_, _, completions, (_, reached)), own = task(model, tmp_path, [{"input_ids": row[0]}], completions=11)
    possible = row[:, 1:] == best[:, :-1]
    for completion, start in enumerate(completions.starts[0].tolist()):
        run = possible[0, start - 1 : start + 2].long().cumprod(0).sum()
        assert int(reached[0, completion].sum()) == int(run)
    assert not own._task(model, {"input_ids": row}, True).valid.all()


def test_completions_stay_in_their_document_and_start_at_targets(tmp_path):
    model = student()
    row = {
        "input_ids": ids(12),
        "labels": torch.tensor([-100] * 3 + [1] * 9),
        "position_ids": torch.tensor([*range(7), *range(5)]),
    }
    (batch, _, completions, (_, reached)), own = task(model, tmp_path, [row], completions=20)
    assert batch.documents[0].tolist() == [1] * 7 + [2] * 5
    starts = completions.starts[0][completions.known[0, :, 0]].tolist()
    assert sorted(starts) == [3, 4, 5, 6, 8, 9, 10, 11]  # 7 begins a document
    for completion, start in enumerate(completions.starts[0].tolist()):
        end = 7 if start < 7 else 12
        assert int(completions.known[0, completion].sum()) in (0, min(3, end - start))


def logits_of(hidden: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
    return head(hidden)


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_ways_through_the_model_agree(variant):
    model = student(variant, backbone().double())
    batch = Sequences.of({"input_ids": ids(2, 8), "attention_mask": torch.tensor([[1] * 8, [1] * 6 + [0] * 2])})
    starts, _ = draw_starts(batch.startable, 4, torch.rand(2, 8))
    rows = PackedBatch(model, batch, starts, variant == "one_hot")
    inputs = SlotInputs(torch.rand(2, 4, 3))
    own = rows.read()
    cached = rows.slots(inputs, logits_of)
    logits = rows.everything(inputs, logits_of)
    torch.testing.assert_close(cached, logits[:, 8:])
    torch.testing.assert_close(rows.slots(inputs, logits_of), cached)  # the cache was left as it was
    torch.testing.assert_close(own.logits(own.states)[0], logits[0, :8])


def test_checkpointed_activations_and_plain_ones_give_the_same_loss(tmp_path):
    losses = []
    for checkpointed in (False, True):
        model = student()
        if checkpointed:
            checkpoint_activations(model)
        own = trainer(model, tmp_path)
        torch.manual_seed(4)
        loss = own.compute_loss(model.train(), own.data_collator(texts(backbone())[:4]))
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        losses.append((loss, grads))
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.nightly
def test_a_one_hot_student_learns_what_uniforms_pick(tmp_path):
    data = texts(backbone(), count=64, length=16)
    model = PTPForCausalLM.from_backbone(backbone(), features="threshold", num_slots=3, lora_rank=8)
    own = trainer(model, tmp_path, data, steps=120, completions=15, eval_dataset=data)
    before = own.evaluate()
    own.train()
    after = own.evaluate()
    assert after["eval_loss"] < 0.7 * before["eval_loss"]
    assert after["eval_num_correct"] > before["eval_num_correct"] + 0.3


@pytest.mark.core
def test_uninformative_uniforms_are_all_alike(tmp_path):
    model, seen = student(informative=False), []
    own = trainer(model, tmp_path)
    model.uniform_embedding.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    own.compute_loss(model, own.data_collator(texts(backbone())[:4]))
    assert seen and all((u == 0.5).all() for u in seen)


def test_a_teacher_of_its_own(tmp_path):
    teacher, model = backbone(seed=3), student()
    rows = texts(backbone())
    (batch, _, completions, _), own = task(model, tmp_path, rows, teacher=teacher, completions=2)
    judged = Teacher(teacher, model.config.sampling).of_sequences(batch)
    exists = torch.ones_like(completions.starts, dtype=torch.bool)
    expected = Teacher(teacher, model.config.sampling).pieces(batch, judged, completions.starts, exists, 3)
    assert torch.equal(completions.low, expected.low)
    model.train_only("all")
    before = model.get_output_embeddings().weight.detach().clone()
    trainer(model, tmp_path, teacher=teacher).train()
    assert not torch.equal(model.get_output_embeddings().weight, before)


def test_drafts_are_judged_as_their_texts_are():
    model = student("categorical", backbone().double(), sampling=FOLDED)
    batch = Sequences.of({"input_ids": ids(2, 7)})
    starts, exists = draw_starts(batch.startable, 3, torch.rand(2, 7))
    rows = PackedBatch(model, batch, starts, False)
    written = student_drafts(rows, rows.read(), model.config, SlotInputs(torch.rand(2, 3, 4)))
    assert written.shape == (2, 3, 4)
    judged = Teacher(model, FOLDED).drafts(batch, starts, exists, written)
    for row in range(2):
        for completion in range(3):
            start = int(starts[row, completion])
            text = torch.cat([batch.tokens[row, :start], written[row, completion]])[None]
            distribution = target_probs(model(text).logits[:, start - 1 : -1], **FOLDED)[0]
            torch.testing.assert_close(target_probs(judged.scores.states[row, completion], **FOLDED), distribution)


def test_evaluation_is_logged_and_the_student_survives_a_folder(tmp_path):
    model = student(sampling=FOLDED)
    data = texts(backbone(), **FOLDED)
    own = trainer(model, tmp_path, data, eval_dataset=data, gradient_accumulation_steps=2)
    own.train()
    assert 0 <= own.evaluate()["eval_num_correct"] <= 3 and 0 <= own.state.log_history[0]["num_correct"] <= 3
    own.save_model(tmp_path / "saved")
    again = PTPForCausalLM.from_pretrained(tmp_path / "saved").eval()
    tokens, uniforms = ids(2, 5), torch.rand(2, 3)
    assert again.config.sampling == FOLDED
    assert torch.equal(again(tokens, uniforms=uniforms).logits, model.eval()(tokens, uniforms=uniforms).logits)


def moving() -> PTPForCausalLM:
    model = student()
    model.train_only("all")
    return model


def test_bad_combinations(tmp_path):
    for make, options, error, message in [
        (backbone, {}, TypeError, "LlamaForCausalLM"),
        (moving, {}, ValueError, "base_weight=0.*teacher="),
    ]:
        with pytest.raises(error, match=message):
            trainer(make(), tmp_path, data=[], **options)


def test_bad_teachers_and_data(tmp_path):
    other = backbone()
    other.config.vocab_size = VOCABULARY + 1
    with pytest.raises(ValueError, match="vocabulary.*12.*11"):
        trainer(student(), tmp_path, teacher=other)
    assert not Sequences.of({"input_ids": ids(2, 1)}).startable.any()
