"""What is kept of calls, and what drafters learn from it: the backbone's own states, and the losses of training."""

import copy

import pytest
import torch

from tests.backbones import backbone, prompts
from tests.families import VOCABULARY, family_model, random_ids
from tests.models import left_padded, tiny_model
from tokenahead import DrafterCascade, EagleHead, MTPHeads, SuffixDrafter
from tokenahead.modeling.common.online import OnlineBuffer, OnlineLearner
from tokenahead.training.features import FeatureDataset

DRAFTERS = {
    "heads": lambda model: MTPHeads.from_backbone(model, window=3),
    "attending heads": lambda model: MTPHeads.from_backbone(model, window=3, head_type="layer"),
    "draft layers": lambda model: MTPHeads.from_backbone(model, window=3, draft_layers=1),
    "eagle 1": lambda model: EagleHead.from_backbone(model, version=1),
    "eagle 3": lambda model: EagleHead.from_backbone(model, version=3, aux_layers=[1, 2]),
}
TREE = {"depth": 1, "top_k": 2, "total_tokens": 4}


def learned(drafter, capacity=2**12, **options):
    """A learner, and what two calls wrote."""
    learner, texts = OnlineLearner(drafter, capacity=capacity, rows=100), []
    for number in range(2):
        torch.manual_seed(number)
        batch = left_padded(prompts(4, seed=number))
        common = dict(max_new_tokens=12, assistant_model=drafter, do_sample=True, top_k=0)
        out = drafter.backbone.generate(**batch, **common | options)
        texts += [ids[mask:].tolist() for ids, mask in zip(out, (1 - batch["attention_mask"]).sum(1))]
    return learner, texts


def kept(learner):
    return learner.buffer.sample(100, torch.Generator())


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("options", [{}, {"draft_tree": TREE}], ids=["chains", "trees"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_are_what_the_backbone_gives_for_the_same_texts(name, options):
    drafter = DRAFTERS[name](backbone())
    options = {} if drafter.attends and isinstance(drafter, MTPHeads) else options
    learner, texts = learned(drafter, **options)
    rows = kept(learner)
    found = {tuple(row["input_ids"].tolist()) for row in rows}
    assert found == {tuple(text if drafter.attends else text[-13:]) for text in texts}
    for row in rows:
        text = next(text for text in texts if text[-13:] == row["input_ids"].tolist()[-13:])
        assert row["position_ids"].tolist() == list(range(len(text)))[-len(row["input_ids"]) :]
        assert row["labels"].tolist() == [-100] * (len(row["labels"]) - 12) + text[-12:]
        outputs = drafter._run_backbone(torch.tensor([text]), None, None)
        states = torch.stack([outputs.hidden_states[layer][0] for layer in drafter.learning_layers], 1)
        real = slice(-len(row["input_ids"]), -1)
        torch.testing.assert_close(row["cached_states"][:-1], states[real], atol=1e-4, rtol=1e-4)


@pytest.mark.by_day("attending heads", "eagle 3")
@pytest.mark.parametrize("name", ["attending heads", "draft layers", "eagle 1", "eagle 3"])
def test_the_loss_is_that_of_training_on_the_texts(name):
    drafter = DRAFTERS[name](backbone())
    learner, texts = learned(drafter)
    rows = [{"input_ids": torch.tensor(text), "labels": torch.tensor(text)} for text in texts]
    for row in rows:
        row["labels"] = torch.cat([torch.full_like(row["labels"][:-12], -100), row["labels"][-12:]])
    with torch.no_grad():
        plain = drafter(**FeatureDataset.collate(rows)).loss
        found = drafter(**FeatureDataset.collate(kept(learner))).loss
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5)


def test_a_buffer_holds_the_newest_tokens():
    buffer, device = OnlineBuffer(capacity=10), torch.device("cpu")
    for start, size in ((0, 4), (10, 3), (20, 6)):
        ids = torch.arange(start, start + size + 1)
        columns = {"input_ids": ids, "labels": ids, "position_ids": ids}
        buffer.add([columns | {"cached_states": ids[:, None, None].float()}])
    assert [row["input_ids"].tolist() for row in buffer.rows] == [[3, 4], [10, 11, 12, 13], [*range(20, 27)]]
    assert buffer.rows[0]["labels"].tolist() == [-100, 4] and buffer.rows[0]["cached_states"].flatten().tolist() == [
        3,
        4,
    ]
    other = OnlineBuffer(capacity=10)
    other.load_state_dict(buffer.state_dict(), device)
    assert len(other) == len(buffer) == 3
    assert all(torch.equal(row[name], same[name]) for row, same in zip(buffer.rows, other.rows) for name in row)


@pytest.mark.by_day("7", "40")
@pytest.mark.parametrize("capacity", [2, 7, 40, 200])
def test_a_call_of_more_tokens_than_the_buffer_holds(capacity):
    learner, texts = learned(DRAFTERS["eagle 3"](backbone()), capacity)
    rows = kept(learner)
    assert rows and sum(len(row["input_ids"]) - 1 for row in rows) <= capacity
    for row in rows:
        ids = row["input_ids"].tolist()
        assert any(ids == text[start : start + len(ids)] for text in texts for start in range(len(text)))
    assert learner.update() is not None


def test_sequences_that_have_ended_take_no_room():
    """All but the first end after three tokens."""
    drafter, batch = EagleHead.from_backbone(backbone(), aux_layers=[1, 2]), left_padded(prompts(4, seed=5))
    learner, width = OnlineLearner(drafter, capacity=72), batch["input_ids"].shape[1]
    asked = dict(max_new_tokens=24, do_sample=False, assistant_model=drafter, pad_token_id=0)
    plain = drafter.backbone.generate(**batch, **asked | {"assistant_model": None})
    out = drafter.backbone.generate(**batch, **asked, eos_token_id=plain[1:, width + 2].tolist())
    assert out.shape == plain.shape and not out[1:, width + 3 :].any()
    assert out[0, -20:].tolist() in [row["input_ids"][-20:].tolist() for row in kept(learner)]


def test_nothing_but_the_drafter_changes():
    model = backbone()
    head = EagleHead.from_backbone(model, aux_layers=[1, 2]).eval()
    learner, _ = learned(head)
    before, own = copy.deepcopy(model.state_dict()), copy.deepcopy(head.state_dict())
    assert [learner.update() for _ in range(3)][2] < learner.curve[0]["loss"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert any(not torch.equal(tensor, own[name]) for name, tensor in head.state_dict().items())
    assert not head.training and [entry["updates"] for entry in learner.curve] == [1, 2, 3]


def test_a_drafter_in_half_precision_learns_in_single_precision():
    model = backbone().to(torch.bfloat16)
    heads = MTPHeads.from_backbone(model, window=3)
    learner = OnlineLearner(heads, learning_rate=1e-5)
    model.generate(prompts(3)[2][None], max_new_tokens=12, assistant_model=heads)
    learner.update()
    moved = [master - parameter.float() for master, parameter in zip(learner.masters, learner.parameters)]
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.bfloat16}
    assert any(part.abs().max() > 0 for part in moved), "a step that bfloat16 rounds off is not lost"


@pytest.mark.core
def test_own_traffic_teaches_within_its_budget():
    model = backbone()
    heads = MTPHeads.from_backbone(model, window=3)
    learner = heads.learn_while_decoding(every=20, budget=1.0, learning_rate=1e-2)
    call = dict(max_new_tokens=12, assistant_model=heads)
    ids = prompts(3)[2][None]
    for _ in range(4):
        with torch.inference_mode():
            model.generate(ids, **call)
    assert [entry["tokens"] for entry in learner.curve] == [24, 48]
    learner.budget = 0.0
    for _ in range(2):
        model.generate(ids, **call)
    assert len(learner.curve) == 2
    learner.freeze()
    model.generate(ids, **call)
    assert learner.is_frozen and learner.tokens == 72 and learner.update() is None
    learner.unfreeze()
    model.generate(ids, **call)
    assert learner.tokens == 84 and learner.update() is not None


def test_text_is_not_lost_where_the_drafter_can_learn_no_more():
    model = backbone()
    heads = MTPHeads.from_backbone(model, window=3)
    ids = prompts(3)[2][None]
    want = model.generate(ids, max_new_tokens=12)
    learner = heads.learn_while_decoding(every=2, budget=1.0)
    heads.requires_grad_(False)
    with pytest.warns(UserWarning, match="requires_grad"):
        found = model.generate(ids, max_new_tokens=12, assistant_model=heads)
    assert torch.equal(found, want) and learner.is_frozen and not learner.curve


def test_the_last_of_a_cascade_learns():
    model = backbone()
    heads = MTPHeads.from_backbone(model, window=3)
    cascade = DrafterCascade([SuffixDrafter(), heads]).attach(model)
    learner, texts = OnlineLearner(heads, rows=100), []
    for _ in range(2):
        out = model.generate(**left_padded(prompts(3)), max_new_tokens=12, assistant_model=cascade)
        texts += out[:, -12:].tolist()
    assert sorted(row["labels"][1:].tolist() for row in kept(learner)) == sorted(texts)
    assert learner.tokens == 72


def test_copies_do_not_learn():
    model = backbone()
    heads = MTPHeads.from_backbone(model, window=3)
    OnlineLearner(heads)
    assert copy.deepcopy((model, heads))[1].recorder is None and heads.recorder is not None


@pytest.mark.parametrize("head", [{}, {"head_type": "cp", "rank": 2}], ids=["ff", "cp"])
def test_of_a_model_that_drafts_for_itself_the_drafting_heads_alone_learn(head):
    model = tiny_model(num_pred_heads=4, mtp_head=head or None)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learner = OnlineLearner(model, learning_rate=1e-2, rows=100)
    batch = left_padded(prompts(4, vocabulary=64))
    out = model.generate(**batch, max_new_tokens=12, do_sample=True, top_k=0, pad_token_id=0)
    rows = kept(learner)
    assert sorted(row["labels"][1:].tolist() for row in rows) == sorted(out[:, -12:].tolist())
    found = {tuple(row["labels"][1:].tolist()): row["cached_states"][:-1, 0] for row in rows}
    for ids, mask in zip(out, batch["attention_mask"]):
        text = ids[(1 - mask).sum() :]
        states = model.model(text[None]).last_hidden_state[0, -13:-1]
        torch.testing.assert_close(found[tuple(text[-12:].tolist())], states, atol=1e-4, rtol=1e-4)
    assert [learner.update() for _ in range(3)][2] < learner.curve[0]["loss"]
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, own[name])}
    assert moved and all(name.startswith(("mtp_head.", "draft_heads.")) for name in moved)


@pytest.mark.by_day("llama", "deepseek_v4")
@pytest.mark.parametrize("name", ["llama", "dots3_note_text", "qwen4_exp_text", "deepseek_v4"])
def test_of_sequential_modules_the_modules_alone_learn(name):
    """Also of those that read the state before the last norm, and of those with embeddings of their own."""
    model = family_model(name, num_nextn_predict_layers=2 if name == "llama" else 1)
    model.generation_config.eos_token_id = None
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learner, texts = OnlineLearner(model, learning_rate=1e-2, rows=100), []
    for seed in range(2):
        torch.manual_seed(seed)
        given = prompts(4, VOCABULARY, seed)
        batch = left_padded(random_ids(4, 8, seed) if name == "deepseek_v4" else given)  # its states know of padding
        out = model.generate(**batch, max_new_tokens=12, do_sample=True, top_k=0, pad_token_id=0)
        texts += [ids[mask:] for ids, mask in zip(out, (1 - batch["attention_mask"]).sum(1))]
    rows = kept(learner)
    assert sorted(row["input_ids"].tolist() for row in rows) == sorted(text.tolist() for text in texts)
    rows.sort(key=lambda row: row["input_ids"].tolist())
    texts.sort(key=torch.Tensor.tolist)
    for row, text in zip(rows, texts):
        found = model(text[None], output_hidden_states=True).hidden_states[-1][0, :-1]
        torch.testing.assert_close(row["cached_states"][:-1, 0], found, atol=1e-4, rtol=1e-4)
    labels = [torch.cat([torch.full_like(text[:-12], -100), text[-12:]]) for text in texts]
    batch = FeatureDataset.collate([{"input_ids": ids, "labels": label} for ids, label in zip(texts, labels)])
    plain = model(**batch)
    found = learner.drafter.learning_loss(FeatureDataset.collate(rows))
    torch.testing.assert_close(found, plain.loss, rtol=1e-4, atol=1e-5)
    losses = [learner.update() for _ in range(3)]
    assert losses[2] < losses[0] and all(parameter.grad is None for parameter in model.parameters())
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, own[name])}
    assert moved and all(name.startswith("mtp.") for name in moved)
    assert all(parameter.requires_grad for parameter in model.main.parameters())


def test_a_model_that_drafts_by_layers_of_its_own_is_refused():
    model = tiny_model(num_pred_heads=4, mtp_head={"head_type": "cp", "rank": 2, "draft_layers": 1})
    with pytest.raises(ValueError, match="draft_layers"):
        OnlineLearner(model)
