"""PTPTrainer: what a step learns from, that it learns, and what it refuses."""

import pytest
import torch
from transformers import TrainingArguments

from tests.models import checkpoint_activations
from tests.ptp_models import CONFIGS, VOCABULARY, backbone, ids, student
from tokenahead import PTPForCausalLM
from tokenahead.generation.tensors.sampling import pick
from tokenahead.training import PTPOptions, PTPTrainer, regenerate
from tokenahead.training.ptp.forwards import PackedBatch, Sequences, Teacher, draw_starts
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
    """The batch of one step, its completions, and the trainer."""
    own = trainer(model, tmp_path, **({"greedy_share": 0.0} | options))
    found = own._task(model, own.data_collator(rows), is_training)
    return found.packed.sequences, found.completions, own


@pytest.mark.by_day(
    *("one_hot-ce-dataset", "one_hot-bce-student", "categorical-kl-student", "categorical-reverse_kl-dataset"),
    *("mask-ce-dataset", "mask none-kl-dataset"),
)
@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("variant", [*VARIANTS, "mask", "mask none"])
def test_every_loss_and_source_trains_the_student_alone(variant, loss, sequences, tmp_path):
    variant, _, sampler = variant.partition(" ")
    model = student(variant, sampling=FOLDED, sampler=sampler or "mlp")
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
    batch, completions, _ = task(model, tmp_path, rows, sequences=sequences, completions=4)
    u, reached = completions.uniforms, completions.reached
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
    _, completions, own = task(model, tmp_path, [{"input_ids": row[0]}], completions=11)
    possible = row[:, 1:] == best[:, :-1]
    for completion, start in enumerate(completions.starts[0].tolist()):
        run = possible[0, start - 1 : start + 2].long().cumprod(0).sum()
        assert int(completions.reached[0, completion].sum()) == int(run)
    assert not own._task(model, {"input_ids": row}, True).valid.all()


def test_completions_stay_in_their_document_and_start_at_targets(tmp_path):
    model = student()
    row = {
        "input_ids": ids(12),
        "labels": torch.tensor([-100] * 3 + [1] * 9),
        "position_ids": torch.tensor([*range(7), *range(5)]),
    }
    batch, completions, _ = task(model, tmp_path, [row], completions=20)
    assert batch.documents[0].tolist() == [1] * 7 + [2] * 5
    starts = completions.starts[0][completions.scored[0, :, 0]].tolist()
    assert sorted(starts) == [3, 4, 5, 6, 8, 9, 10, 11]  # 7 begins a document
    for completion, start in enumerate(completions.starts[0].tolist()):
        end = 7 if start < 7 else 12
        assert int(completions.scored[0, completion].sum()) in (0, min(3, end - start))


def test_tokens_without_a_label_teach_nothing(tmp_path):
    labels = torch.tensor([1] * 6 + [-100] * 2 + [1] * 4)
    own = trainer(student(), tmp_path, greedy_share=0.0, completions=20)
    found = own._task(own.model, own.data_collator([{"input_ids": ids(12), "labels": labels}]), True)
    columns = found.completions.starts[0, :, None] + torch.arange(found.valid.shape[-1])  # [C, K]
    taught = found.valid[0]
    assert taught.any() and {*columns[taught].tolist()} == {*range(1, 6), *range(8, 12)}


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


def test_a_teacher_of_its_own(tmp_path):
    teacher, model = backbone(seed=3), student()
    rows = texts(backbone())
    batch, completions, _ = task(model, tmp_path, rows, False, teacher=teacher, completions=2)
    for row, completion in completions.reached[..., 0].nonzero().tolist():
        start, end = (int(completions.starts[row, completion]) + step for step in (0, 3))
        distribution = teacher(batch.tokens[row : row + 1, :end]).logits[0, start - 1 : -1].softmax(-1)
        known = completions.reached[row, completion]
        picked = pick(completions.uniforms[row, completion][: len(distribution)], distribution)
        assert torch.equal(picked[known[: len(picked)]], batch.tokens[row, start:end][known[: len(picked)]])
    other = backbone()
    other.config.vocab_size = VOCABULARY + 1
    with pytest.raises(ValueError, match="vocabulary.*12.*11"):
        trainer(student(), tmp_path, teacher=other)
    model.train_only("all")
    with pytest.raises(ValueError, match="base_weight=0.*teacher="):
        trainer(model, tmp_path)
    before = model.get_output_embeddings().weight.detach().clone()
    trainer(model, tmp_path, teacher=teacher).train()
    assert not torch.equal(model.get_output_embeddings().weight, before)


def test_evaluation_is_logged_and_the_student_survives_a_folder(tmp_path):
    model = student(sampling=FOLDED)
    data = texts(backbone(), **FOLDED)
    own = trainer(model, tmp_path, data, eval_dataset=data, gradient_accumulation_steps=2)
    own.train()
    assert 0 <= own.evaluate()["eval_num_correct"] <= 3 and 0 <= own.state.log_history[0]["num_correct"] <= 3
    own.save_model(tmp_path / "saved")
    with pytest.raises(TypeError, match="LlamaForCausalLM"):
        trainer(backbone(), tmp_path, data)
    again = PTPForCausalLM.from_pretrained(tmp_path / "saved").eval()
    tokens, uniforms = ids(2, 5), torch.rand(2, 3)
    assert again.config.sampling == FOLDED
    assert torch.equal(again(tokens, uniforms=uniforms).logits, model.eval()(tokens, uniforms=uniforms).logits)


def test_texts_are_those_of_the_backbone_whatever_its_adapters(tmp_path):
    prompts, model = [ids(n, seed=n).tolist() for n in (3, 1, 4)], student(sampling={"top_k": 1})
    written = regenerate(model, prompts, tmp_path, max_new_tokens=4, do_sample=True, top_k=1)
    for prompt, row in zip(prompts, written):
        greedy = backbone().generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)
        assert row["input_ids"].tolist() == greedy[0].tolist()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert regenerate(model, prompts, tmp_path, max_new_tokens=4, do_sample=True, top_k=1).rows == written.rows


def test_arguments_that_would_not_do(tmp_path):
    for name in ("label_smoothing_factor", "neftune_noise_alpha"):
        arguments = TrainingArguments(tmp_path, max_steps=1, report_to=[], use_cpu=True, **{name: 0.5})
        with pytest.raises(ValueError, match=name):
            PTPTrainer(student(), arguments, train_dataset=[{"input_ids": ids(8)}] * 4)
    row = {"input_ids": ids(8), "labels": torch.full((8,), -100)}
    arguments = TrainingArguments(tmp_path, max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    own = PTPTrainer(student(), arguments, train_dataset=[row] * 4)
    assert own.args.learning_rate == 2e-3 and arguments.learning_rate == 5e-5
    with pytest.raises(ValueError, match="train_dataset.*labels"):
        own.train()


def sequences(positions, mask=None):
    positions = torch.tensor([positions])
    inputs = {"input_ids": ids(1, positions.shape[1]), "position_ids": positions}
    return Sequences.of(inputs if mask is None else inputs | {"attention_mask": torch.tensor([mask])})


@pytest.mark.core
def test_documents_begin_where_positions_do_not_go_on():
    found = sequences([7, 8, 9, 3, 4, 0, 1])
    assert found.documents.tolist() == [[1, 1, 1, 2, 2, 3, 3]]
    assert found.positions.tolist() == [[7, 8, 9, 3, 4, 0, 1]]
    assert sequences([0, 1, 0, 1, 1], [1, 1, 1, 1, 0]).documents.tolist() == [[1, 1, 2, 2, 0]]
    assert sequences([0, 0, 0, 1, 2], [0, 0, 1, 1, 1]).documents.tolist() == [[0, 0, 1, 1, 1]]
    assert sequences([5, 6, 7, 8]).startable.tolist() == [[False, True, True, True]]


@torch.no_grad()
def test_the_teacher_reads_the_positions_that_were_given():
    """A table of learned positions tells where a document begins."""
    model = student(base=backbone(CONFIGS["gpt2"]()))
    found = sequences([9, 10, 11, 12])
    rows = PackedBatch(model, found, torch.tensor([[2]]), model.config)
    scores = rows.read()
    want = model(found.tokens, position_ids=found.positions, output_hidden_states=-1).hidden_states[-1]
    torch.testing.assert_close(scores.states, want)
    assert rows._layout(2)[1].tolist() == [[9, 10, 11, 12, 10, 11]]


def test_drafts_are_judged_as_their_texts_are():
    model = student("categorical", backbone().double(), sampling=FOLDED)
    batch = Sequences.of({"input_ids": ids(2, 7)})
    starts, exists = draw_starts(batch.startable, 3, torch.rand(2, 7))
    rows = PackedBatch(model, batch, starts, model.config)
    written = rows.written(rows.read(), torch.rand(2, 3, 4))
    assert written.shape == (2, 3, 4)
    judged = Teacher(model, FOLDED).drafts(batch, starts, exists, written, torch.rand(2, 3, 4))
    logits = judged.scores.logits(judged.scores.states)
    for row in range(2):
        for completion in range(3):
            start = int(starts[row, completion])
            text = torch.cat([batch.tokens[row, :start], written[row, completion]])[None]
            distribution = target_probs(model(text).logits[:, start - 1 : -1], **FOLDED)[0]
            torch.testing.assert_close(target_probs(logits[row, completion], **FOLDED), distribution)
