"""`draft_tree="auto"`: the tree with the most tokens per second, chosen once."""

import pytest
import torch

from tests.backbones import backbone, check_greedy, prompts, train_heads
from tokenahead import MTPHeads, Speculation
from tokenahead.generation.trees import choice
from tokenahead.generation.trees.choice import chain_options, fastest_tree


def stats(tree, seconds, accepted):
    """Statistics of so many cycles of a tree; each took the same time."""
    drafts = [[0] * (tree["depth"] + 1)] * len(accepted)
    return Speculation([accepted], [drafts], cycle_seconds=seconds * len(accepted))


def all_accepted(tree):
    return [tree["depth"] + 1] * 6


def some_accepted(tree):
    """The first draft in half of the cycles, and never the next one."""
    return [0, 1] * 6


def test_the_fastest_tree_is_chosen_and_trials_are_few():
    asked = []

    def fastest(seconds, accepted, longest=8):
        def trial(tree):
            asked.append(tree)
            return stats(tree, seconds(tree), accepted(tree))

        asked.clear()
        return fastest_tree(trial, longest)

    assert fastest(lambda tree: float(tree["total_tokens"]), some_accepted) == chain_options(1) and len(asked) == 15
    assert fastest(lambda tree: float(tree["top_k"]), all_accepted) == chain_options(8)
    wide = fastest(lambda tree: 1.0 / tree["total_tokens"], some_accepted, longest=3)
    assert wide == {"depth": 2, "top_k": 8, "total_tokens": 48}
    assert max(tree["depth"] for tree in asked) == 2
    assert fastest_tree(lambda tree: None, 3) is None


def test_a_length_before_a_step_of_the_costs_is_found():
    def trial(tree):
        length = tree["depth"] + 1
        return stats(tree, 1.0 if length <= 3 else 0.4 * length, [min(length, 4)] * 20)

    # on the line between 2 and 4 tokens, 3 would take 1.3 and yield as many tokens a second as 2
    assert fastest_tree(trial, 8) == chain_options(3)


@pytest.mark.by_day("slow0")
@pytest.mark.parametrize("slow", [range(1, 3), range(1, 5), range(3, 5), range(4, 7), range(9, 12)])
def test_a_machine_that_is_slow_for_a_while_does_not_decide(slow):
    numbers = iter(range(100))

    def trial(tree):
        length, is_slow = tree["depth"] + 1, next(numbers) in slow
        seconds = (1.6 if is_slow else 1.0) * (1.0 + 0.1 * length) * (1 if tree["top_k"] == 1 else 2)
        return stats(tree, seconds, [min(count, length) for count in (0, 0, 0, 0, 0, 1, 1, 2, 2, 3)] * 2)

    assert fastest_tree(trial, 8)["depth"] + 1 in (2, 3)


def test_a_lucky_trial_of_a_wider_tree_is_not_believed():
    def trial(tree):
        is_chain = tree["top_k"] == 1
        return stats(tree, 1.0, [0, 2] * 8 if is_chain else [0, 2] * 7 + [2, 2])

    # the tree yields 2.13 tokens a cycle, with a standard error of 0.26, and the chain 2
    assert fastest_tree(trial, 2) == chain_options(2)
    assert fastest_tree(lambda tree: stats(tree, 1.0, [1] * 9 if tree["top_k"] == 1 else [2, 3] * 5), 2)["top_k"] > 1


@pytest.mark.by_day("True")
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


def test_trials_draw_other_numbers_than_the_call(monkeypatch):
    model, drawn = backbone(), []
    heads, prompt = MTPHeads.from_backbone(model, window=3), prompts(1)[0][None]
    monkeypatch.setattr(choice, "fastest_tree", lambda trial, longest, budgets: drawn.append(torch.rand(4)))
    torch.manual_seed(5)
    own = torch.rand(4)
    torch.manual_seed(5)
    options = choice.CallOptions(draft_tree="auto", speculates=True)
    choice.choose_tree(None, heads, options, model.generation_config, prompt, None, {})
    assert torch.rand(4).equal(own) and not drawn[0].equal(own)
