"""`draft_tree="auto"`: the tree with the most expected tokens per second, chosen once."""

import copy
import itertools
import pickle

import pytest
import torch

from tests.backbones import backbone, check_greedy, prompts, train_heads
from tests.internals import (
    CycleSeconds,
    DraftTree,
    Trial,
    WatchedVerifier,
    best_tree,
    choices_from_accuracies,
    expected_tokens,
    measured_tree,
    rates_of,
)
from tokenahead import EagleHead, MTPHeads

RATES = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.1, 0.1]]


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_certain_trees_yield_what_the_best_tree_of_their_size_yields(size):
    paths = choices_from_accuracies(torch.tensor(RATES), size)
    want = 1.0
    for path in paths:
        value = 1.0
        for depth, rank in enumerate(path):
            value *= RATES[depth][rank]
        want += value
    assert expected_tokens(RATES, 2, 3, size + 1, is_drawn=False) == pytest.approx(want)


def test_drawn_trees_have_levels_of_their_own_sizes():
    assert expected_tokens(RATES, 1, 2, 5, is_drawn=True) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4 + 0.5 * 0.2)
    for total in range(2, 12):
        drawn, certain = (expected_tokens(RATES, 2, 3, total, is_drawn) for is_drawn in (True, False))
        assert 1 < drawn <= certain + 1e-12


def test_the_best_tree_is_the_best_of_all():
    rates = [row + [0.01] * 5 for row in RATES]

    def seconds(depth, total):
        return 1 + 0.1 * depth + 0.02 * total

    for is_drawn in (False, True):
        best = best_tree(rates, seconds, 2, is_drawn)
        sizes = best["depth"], best["top_k"], best["total_tokens"]
        speed = expected_tokens(rates, *sizes, is_drawn) / seconds(sizes[0], sizes[2])
        for depth, top_k, total in itertools.product(range(3), (1, 2, 3, 8), (3, 4, 8, 16, 60)):
            assert speed >= expected_tokens(rates, depth, top_k, total, is_drawn) / seconds(depth, total) - 1e-9
    dear = best_tree(rates, lambda depth, total: float(total), 2, False)
    free = best_tree(rates, lambda depth, total: 1.0, 2, False)
    assert dear["total_tokens"] <= 3 and free["depth"] == 2 and free["total_tokens"] >= 16


def test_seconds_lie_on_lines_between_what_was_measured():
    seconds = CycleSeconds({60: 4.0, 16: 2.0, 4: 1.4}, depth=2, level=0.2)
    assert [seconds(2, total) for total in (4, 10, 16, 38, 60)] == pytest.approx([1.4, 1.7, 2.0, 3.0, 4.0])
    assert seconds(0, 16) == pytest.approx(1.6)
    assert CycleSeconds({60: 1.0, 16: 2.0, 4: 1.4}, 2, 0.0)(2, 60) == pytest.approx(2.0)


def test_rates_are_counted_by_depth_and_rank():
    kept = [([0, 1], False)] * 200 + [([0], True)] * 100 + [([], True)] * 100
    rates = rates_of(kept, 2)
    assert rates[0][0] == pytest.approx(0.75, abs=0.02) and rates[1][1] == pytest.approx(2 / 3, abs=0.02)
    assert rates[0][1] < 0.02 and rates[1][0] < 0.02
    assert all(rate == 0 for row in rates_of([], 3) for rate in row)


def test_a_watched_rule_sees_ranks_and_ends():
    tree = DraftTree(torch.zeros(2, 5, dtype=torch.long), torch.tensor([[-1, -1, 0, 1, 1], [-1, 0, 0, 1, -1]]))

    class Fixed:
        def verify(self, tree, scores):
            from types import SimpleNamespace

            return SimpleNamespace(nodes=torch.tensor([[1, 4, -1], [0, -1, -1]]))

    rule = WatchedVerifier(Fixed())
    rule.verify(tree, None), rule.verify(tree, None)
    trial = rule.trial([[2, 2], [1]])
    assert trial.kept == [([1, 1], False), ([0], True), ([1, 1], False)] and len(trial.seconds) == 1


def test_trials_are_few_and_of_the_drafters_depth():
    asked = []

    def decode(tree, tokens):
        asked.append((tree, tokens))
        return Trial([([0, 0, 0], False)] * 9, [0.1, 0.2])

    assert measured_tree(decode, 3, True)["depth"] <= 2
    assert len(asked) == 4 and sum(tokens for _, tokens in asked) < 100
    assert {tree["depth"] for tree, _ in asked} == {0, 2}
    assert measured_tree(lambda *_: Trial([([0, 0, 0], False)], []), 3, True) is None


@pytest.mark.parametrize(
    ("own", "asked"), [({"use_mtp": False}, {"use_mtp": True}), ({"num_beams": 2}, {"num_beams": 1})]
)
def test_trials_are_those_of_the_call_and_not_of_the_models_own_config(own, asked):
    model, prompt = backbone(), torch.randint(2, 48, (1, 5))
    heads = MTPHeads.from_backbone(model, window=3)
    model.generation_config.update(**own)
    common = dict(max_new_tokens=6, do_sample=False, **asked)
    text = model.generate(prompt, assistant_model=heads, draft_tree="auto", **common)
    assert set(heads.tree_choices) == {False}
    assert torch.equal(text, model.generate(prompt, **common | {"use_mtp": None}))


def test_a_copy_chooses_its_own_tree():
    model = backbone()
    heads = MTPHeads.from_backbone(model, window=3)
    heads.tree_choices[False] = {"depth": 1, "top_k": 1, "total_tokens": 3}
    assert copy.deepcopy(heads).tree_choices == {} == pickle.loads(pickle.dumps(heads)).tree_choices


@pytest.mark.parametrize("tree", [[["a"]], [[0.5]], [[True]], ["0"], [], [[]], {"choices": "ab"}])
def test_paths_that_are_none_are_refused_as_they_were_given(tree):
    model = backbone()
    heads = MTPHeads.from_backbone(model, window=3)
    with pytest.raises(ValueError, match="list of paths"):
        model.generate(torch.tensor([[3, 4]]), assistant_model=heads, draft_tree=tree, max_new_tokens=3)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_tree_is_chosen_once_and_then_decodes_as_if_it_had_been_given(do_sample):
    model = backbone()
    heads, prompt = train_heads(model, steps=15), torch.randint(2, 48, (3, 5))
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    common = dict(
        attention_mask=torch.ones_like(prompt), assistant_model=heads, do_sample=do_sample, max_new_tokens=12,
        return_dict_in_generate=True,
    )  # fmt: skip
    outs, counts = [], []
    for tree in ("auto", "auto", None):
        calls.clear()
        torch.manual_seed(7)
        given = heads.tree_choices[do_sample] if tree is None else tree
        outs.append(model.generate(prompt, draft_tree=given, **common))
        counts.append(len(calls))
    assert set(heads.tree_choices) == {do_sample}
    assert torch.equal(outs[0].sequences, outs[1].sequences) and torch.equal(outs[0].sequences, outs[2].sequences)
    assert counts[0] > counts[1] == counts[2] == outs[0].speculation.backbone_calls
    heads.detach()
    assert heads.attach(model).tree_choices == {}


def test_eagle_heads_choose_too_and_write_the_backbones_text():
    model = backbone()
    head = EagleHead.from_backbone(model, version=1).eval()
    prompt = torch.randint(2, 48, (1, 6))
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False)
    got = model.generate(prompt, assistant_model=head, draft_tree="auto", num_assistant_tokens=3, **options)
    assert torch.equal(got, model.generate(prompt, **options)) and set(head.tree_choices) == {False}


def test_a_text_that_ends_at_once_is_not_remembered():
    model = backbone()
    heads = train_heads(model, steps=2)
    prompt = torch.randint(2, 48, (1, 6))
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    plain = model.generate(prompt, **options)
    model.generation_config.eos_token_id = int(plain[0, 6])
    got = model.generate(prompt, assistant_model=heads, draft_tree="auto", pad_token_id=0, **options)
    assert got.tolist() == plain[:, :7].tolist() and heads.tree_choices == {}


def test_near_the_end_of_the_positions_nothing_is_measured():
    model = backbone()
    heads = train_heads(model, steps=2)
    prompt = torch.randint(2, 48, (1, 252))
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
    got = model.generate(prompt, assistant_model=heads, draft_tree="auto", **options)
    assert torch.equal(got, model.generate(prompt, **options)) and heads.tree_choices == {}


def test_chosen_trees_are_lossless_in_ragged_batches():
    model = backbone("mistral")
    heads = train_heads(model, steps=20)
    assert len(check_greedy(model, heads, prompts(8), new=16, draft_tree="auto")) > 1
