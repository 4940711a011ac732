"""The loss of block drafters against its formulas with all logits at once; blocks, counts, stored and joined rows."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from tests.modeling.heads.backbones import shaken
from tokenahead import BlockDrafter
from tokenahead.modeling.block import model as block_model
from tokenahead.modeling.block.losses import BlockBatch, block_rows
from tokenahead.modeling.common import chunks
from tokenahead.modeling.common.teacher import divergence
from tokenahead.training.trainer import MTPTrainer

V, D = 48, 16
LAWS = {
    "independent": {},
    "markov": dict(law_options=dict(rank=4)),
    "rnn": dict(law="markov", law_options=dict(rank=4, kind="rnn"), sample_from_anchor=False),
    "domino": dict(law_options=dict(rank=4, state_size=6, free_places=1)),
    "selector": dict(law_options=dict(rank=4, top_k=6), sample_from_anchor=False),
    "cp": dict(law_options=dict(rank=2, leaf_rank=4, markov_rank=4)),
    "hmm": dict(law_options=dict(rank=2, leaf_rank=4, markov_rank=4, reads_last=True), sample_from_anchor=False),
    "btree": dict(law_options=dict(rank=2, leaf_rank=4, markov_rank=4)),
    "part": dict(law="markov", law_options=dict(rank=4), draft_ids=torch.arange(0, V, 2)),
    "gemma": dict(law="independent", body="gemma4", keys_are_values=True),
    "windows": dict(law="independent", layer_types=["sliding_attention", "full_attention"], sliding_window=4),
}
IDS = torch.randint(0, V - 1, (2, 14), generator=torch.Generator().manual_seed(1))


def backbone():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).double().eval().requires_grad_(False)


def drafter_of(kind, **options):
    torch.manual_seed(2)
    options = {"law": kind} | LAWS[kind] | options
    return shaken(BlockDrafter.from_backbone(backbone(), layers=2, block_size=4, **options), 0.3)


def laws_of(drafter, ids, anchors):
    """Log q of all places given the text, [A, m, V], block by block as decoding has it, and the places' columns."""
    states = drafter.backbone(ids[None], output_hidden_states=True).hidden_states
    context, found = drafter.fuse(states), []
    for anchor in anchors:
        block = drafter.block(context[:, :anchor], ids[None, anchor])
        text = torch.nn.functional.pad(ids, (0, drafter.num_drafts))[None, anchor + 1 : anchor + 1 + drafter.num_drafts]
        if drafter.law == "selector":
            found.append(block.logits[0].log_softmax(-1))
        else:
            found.append(block.distribution.conditional_log_probs(text)[0])
    return torch.stack(found), states[-1][0]


@pytest.mark.by_day("rnn", "domino", "selector", "hmm", "btree", "part", "gemma", "windows")
@pytest.mark.parametrize("kind", LAWS)
def test_terms_are_those_of_single_blocks_and_do_not_depend_on_chunks(kind, monkeypatch):
    drafter = drafter_of(kind).train()
    drafter.loss_options.update(terms={"labels": 0.3, "tv": 1.0, "selector": 0.0}, gamma=3.0)
    anchors = torch.tensor([[1, 4, 9, 12], [2, 3, 7, 8]])
    total = {"labels": 0.0, "tv": 0.0}
    norm, m = 0.0, drafter.num_drafts
    for row, ids in zip(anchors, IDS):
        log_q, last = laws_of(drafter, ids, row)
        log_p = drafter.backbone.lm_head(last).log_softmax(-1)
        for index, anchor in enumerate(row.tolist()):
            for place in range(min(m, len(ids) - 1 - anchor)):
                weight = torch.tensor(3.0).double().reciprocal().neg().exp() ** place
                q, p = log_q[index, place], log_p[anchor + place]
                label = q[ids[anchor + 1 + place]]
                total["labels"] = total["labels"] - weight * (label if label.isfinite() else 0)
                total["tv"] = total["tv"] + weight * divergence("tv", p, q)
                norm = norm + weight
    loss = (0.3 * total["labels"] + total["tv"]) / norm
    learning = [each for each in drafter.parameters() if each.requires_grad]
    want = torch.autograd.grad(loss, learning, allow_unused=True)
    for size in (1, 10**9):
        monkeypatch.setattr(chunks, "LOGITS_PER_CHUNK", size)
        output = drafter(IDS, loss_mask=torch.ones_like(IDS), anchors=anchors)
        torch.testing.assert_close(output.loss, loss, atol=1e-6, rtol=0)
        torch.testing.assert_close(output.terms["tv"], (total["tv"] / norm).detach(), atol=1e-6, rtol=0)
        for got, one in zip(torch.autograd.grad(output.loss, learning, allow_unused=True), want):
            assert (got is None and one is None) or float(
                (got - (0 if one is None else one)).abs().max()
            ) < 1e-7  # norms are in float32


@pytest.mark.by_day("hmm")
@pytest.mark.parametrize("kind", ["markov", "hmm"])
def test_padding_and_joined_rows_change_nothing(kind):
    drafter, anchors = drafter_of(kind).train(), torch.tensor([[2, 5, 8]])
    long, short = IDS[0], IDS[1, :9]
    one = drafter(long[None], labels=long[None], anchors=anchors)
    two = drafter(short[None], labels=short[None], anchors=anchors[:, :2])
    counts = [sum(len(text) - 1 - a > k for a in row) for k in range(drafter.num_drafts)
              for text, row in ((long, (2, 5, 8)), (short, (2, 5)))]  # fmt: skip
    rates = torch.exp(-torch.arange(drafter.num_drafts).double() / 4)
    first, second = (rates * torch.tensor(counts[0::2])).sum(), (rates * torch.tensor(counts[1::2])).sum()
    want = (one.loss * first + two.loss * second) / (first + second)
    padded = torch.stack([long, torch.nn.functional.pad(short, (5, 0))])
    mask = torch.stack([torch.ones_like(long), (torch.arange(14) >= 5).long()])
    keep = torch.tensor([[True, True, True], [True, True, False]])
    moved = torch.tensor([[2, 5, 8], [7, 10, 0]])
    got = drafter(padded, attention_mask=mask, labels=padded.masked_fill(mask == 0, -100), anchors=moved, keep=keep)
    torch.testing.assert_close(got.loss, want, atol=1e-6, rtol=0)
    joined = torch.cat([long, short])[None]
    positions = torch.cat([torch.arange(14), torch.arange(9)])[None]
    got = drafter(joined, position_ids=positions, labels=joined, anchors=torch.tensor([[2, 5, 8, 16, 19]]))
    torch.testing.assert_close(got.loss, want, atol=1e-6, rtol=0)


def test_rows_that_are_computed_again_have_the_same_gradients():
    drafter, anchors, found = drafter_of("markov").train(), torch.tensor([[1, 6], [2, 8]]), []
    for enable in (drafter.gradient_checkpointing_disable, drafter.gradient_checkpointing_enable):
        enable()
        drafter.zero_grad()
        drafter(IDS, labels=IDS, anchors=anchors).loss.backward()
        found.append([each.grad for each in drafter.parameters() if each.grad is not None])
    assert drafter.recomputes and not any(getattr(layer, "gradient_checkpointing", False) for layer in drafter.layers)
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)


def test_what_block_verification_accepts_is_a_loss():
    drafter = drafter_of("markov").train()
    drafter.loss_options.update(divergence="block", decay=1.0)
    anchors = torch.tensor([[1, 4], [2, 7]])
    output, want = drafter(IDS, labels=IDS, anchors=anchors), 0.0
    for row, ids in zip(anchors, IDS):
        log_q, last = laws_of(drafter, ids, row)
        log_p = drafter.backbone.lm_head(last).log_softmax(-1)
        for index, anchor in enumerate(row.tolist()):
            text = ids[anchor + 1 : anchor + 1 + drafter.num_drafts]
            places = torch.arange(len(text))
            ratios = log_q[index, places, text] - log_p[anchor + places, text]
            want = want - ratios.cumsum(0).cummin(0).values.clamp(max=0).exp().sum()
    torch.testing.assert_close(output.loss, want / (4 * drafter.num_drafts), atol=1e-6, rtol=0)
    output.loss.backward()
    assert drafter.markov_head.markov_w1.weight.grad.abs().sum() > 0


@pytest.mark.by_day("tokenahead", "speculators")
@pytest.mark.parametrize("layout", ["tokenahead", "z-lab", "deepspec", "speculators"])
def test_random_blocks_begin_where_a_recipe_lets_them_and_counts_are_expected_ones(layout):
    drafter = drafter_of("markov").train()
    drafter.loss_options.update(layout=layout, anchors=3)
    ids = torch.randint(0, V - 1, (2, 40))
    labels = ids.clone()
    labels[0, :12] = labels[1, 20:30] = -100
    recipe = drafter.loss_options.recipe("dspark")
    seen, counts = [], []
    for _ in range(300):
        batch = BlockBatch.of(ids, labels != -100, None, None).drawn(recipe, 4, 3, False)
        assert batch.may_begin(recipe, 4).gather(1, batch.anchors)[batch.keep].all()
        counts.append(batch.counted(recipe, drafter.config).sum((0, 1)).double())
        seen.append(batch.anchors)
    assert len(torch.cat(seen).unique()) > 20
    expected = drafter.loss_counts(labels)
    torch.testing.assert_close(torch.stack(counts).mean(0), expected.double(), atol=0.8, rtol=0)
    loss = drafter(ids, labels=labels).loss
    loss.backward()
    assert loss.isfinite()
    drafter.eval()
    assert drafter(ids, labels=labels).loss == drafter(ids, labels=labels).loss


def test_every_row_of_a_trainer_has_its_number_of_blocks(tmp_path, monkeypatch):
    drafter, found = drafter_of("markov"), []
    drafter.loss_options.update(anchors=5)
    rows = [{"input_ids": torch.arange(size), "labels": torch.arange(size)} for size in (9, 20, 13, 30)]
    monkeypatch.setattr(block_model, "block_rows", lambda *a: found.append(a[2].keep.sum(1)) or block_rows(*a))
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, save_strategy="no")
    MTPTrainer(drafter, args, train_dataset=rows).train()
    assert found[-1].tolist() == [5] * 4


def test_distributions_along_a_text_are_those_of_decoding():
    drafter = drafter_of("hmm").eval()
    found = drafter.distributions({"input_ids": IDS}, 3)
    rows, columns = torch.tensor([0, 1, 1, 0]), torch.tensor([3, 2, 7, 8])
    tokens = torch.stack([IDS[r, c + 1 : c + 5] for r, c in zip(rows, columns)])
    got = found.draft(rows, columns, tokens)
    for index, (row, column) in enumerate(zip(rows, columns)):
        want, _ = laws_of(drafter, IDS[row], [int(column) + 1])
        torch.testing.assert_close(got[index].double(), want[0, :3], atol=1e-5, rtol=1e-5)


def test_options_that_are_none_are_refused_by_name():
    for options, message in [
        (dict(layout="vllm"), "layout='vllm'"),
        (dict(terms={"hinge": 1.0}), "hinge"),
        (dict(weights="linear"), "weights='linear'"),
        (dict(gamma=0.0), "gamma=0"),
        (dict(position_weighting="expected_calls", divergence="block"), "position_weighting"),
    ]:
        drafter = drafter_of("markov")
        with pytest.raises(ValueError, match=message):
            drafter.loss_options.update(**options)


def test_dpace_passes_over_places_that_do_not_count():
    """Weights by hand: w_k sums, over the places from k on that count, the chance that a block reaches them."""

    def loss(scored, **options):
        drafter = BlockDrafter.from_backbone(backbone(), layers=1, block_size=4, loss_options=options)
        shaken(drafter.double().eval(), 0.2)
        labels = torch.full_like(IDS[:1], -100)
        labels[:, scored] = IDS[:1, scored]
        return float(drafter(IDS[:1], labels=labels, anchors=torch.tensor([[3]])).loss.detach())

    first, third = (loss([column], weights="decay", gamma=1.0, terms={"labels": 1.0}) for column in (4, 6))
    chances = [0.5 * torch.tensor(-each).exp().item() + 0.5 for each in (first, third)]
    reached = chances[0], chances[0] * chances[1]  # the place between them does not stop a block
    expected = ((reached[0] + reached[1]) * first + reached[1] * third) / 2
    assert loss([4, 6], weights="dpace", terms={"labels": 1.0}) == pytest.approx(expected, rel=1e-6)


@pytest.mark.by_day("True-tokenahead", "False-z-lab", "True-deepspec", "False-speculators")
@pytest.mark.parametrize("layout", ["tokenahead", "z-lab", "deepspec", "speculators"])
@pytest.mark.parametrize("from_anchor", [True, False])
def test_the_loss_of_a_row_does_not_depend_on_its_padding(layout, from_anchor):
    drafter = BlockDrafter.from_backbone(backbone(), layers=1, block_size=4, sample_from_anchor=from_anchor).eval()
    drafter.loss_options.update(layout=layout)
    ids, real = IDS[:1, :9], torch.ones_like(IDS[:1, :9])
    want, counts = drafter(ids, labels=ids).loss, drafter.loss_counts(ids)
    assert counts.sum() > 0
    for sides in ((0, 3), (0, 7), (5, 0)):
        padded, mask = (torch.nn.functional.pad(each, sides) for each in (ids, real))
        labels = padded.masked_fill(mask == 0, -100)
        torch.testing.assert_close(drafter(padded, attention_mask=mask, labels=labels).loss, want, atol=1e-9, rtol=0)
        assert torch.equal(drafter.loss_counts(labels, mask), counts)
