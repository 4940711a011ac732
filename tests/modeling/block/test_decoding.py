"""Calls of `generate` with block drafters: recorded cycles, batches, recurrent backbones, cascades, samples."""

import copy

import pytest
import torch

from tests.backbones import backbone, prompts
from tests.fake_graphs import FakeGraph
from tests.generation.test_fixed_shapes import WAYS, batch_of, generated, same
from tests.modeling.block.test_golden import pair
from tests.models import left_padded
from tokenahead import BlockDrafter, free_buffers
from tokenahead.generation import graphs as graphs_module
from tokenahead.generation.call import costs
from tokenahead.modeling.block.network import BlockSession, seen_rows
from tokenahead.testing import continuation_distribution, continuation_p_value

LAWS = {
    "independent": {},
    "markov": {"rank": 6},
    "domino": {"rank": 6, "state_size": 5},
    "selector": {"rank": 6, "top_k": 5},
    "cp": {"rank": 2, "leaf_rank": 4, "markov_rank": 4},
    "hmm": {"rank": 2, "leaf_rank": 4, "markov_rank": 4, "reads_last": True},
    "btree": {"rank": 2, "leaf_rank": 4, "markov_rank": 4},
}


def drafter_of(model, law="markov", **options):
    """A drafter with random weights everywhere."""
    options = dict(layers=2, block_size=4, law_options=LAWS[law]) | options
    torch.manual_seed(2)
    drafter = BlockDrafter.from_backbone(model, law=law, **options)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if not bool(parameter.any()):
                parameter.normal_(std=0.3)
    return drafter.eval()


@pytest.fixture
def fake(monkeypatch):
    """Regions are recorded, and replayed by a fake that compares."""
    monkeypatch.setitem(graphs_module.GRAPHS, "cpu", FakeGraph)


@pytest.fixture
def model():
    model = backbone().double()
    yield model
    free_buffers(model)


@pytest.mark.by_day(
    "3-independent-greedy", "3-markov-drawn tree", "3-selector-sampled", "3-cp-fixed tree", "3-hmm-budget",
    "3-btree-processors", "1-markov-greedy", "1-domino-sampled", "3-domino-greedy",
)  # fmt: skip
@pytest.mark.parametrize("way", ["greedy", "sampled", "processors", "fixed tree", "drawn tree", "budget"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rows", [3, 1])
def test_cycles_of_all_laws_repeat_themselves(model, law, rows, way, fake):
    windows = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=5, sample_from_anchor=False)
    drafter = drafter_of(model, law, **(windows if rows == 3 else {}))
    out = generated(model, drafter, batch_of(rows), **WAYS[way], cache_implementation="static")
    told = out.speculation.graphs
    assert told.replayed["cycle"] and not told.reasons
    if way == "greedy":
        assert same(out, generated(model, drafter, batch_of(rows), **WAYS[way]))


@pytest.mark.parametrize("name", ["specforge_domino", "deepspec_gemma4"])
def test_ragged_batches_write_the_backbones_text(name):
    base, drafter = pair(name)
    inputs, options = left_padded(prompts(3)), dict(max_new_tokens=16, do_sample=False, pad_token_id=0)
    for tree in (None, {"depth": 3, "top_k": 3, "total_tokens": 12}):
        out = base.generate(**inputs, **options, assistant_model=drafter, draft_tree=tree)
        assert out.equal(base.generate(**inputs, **options))


@pytest.mark.by_day(
    *("zlab_dflash2-block-drawn", "deepspec_dspark_gated-token-argmax"),
    *("specforge_domino-block-drawn", "deepspec_gemma4-token-drawn"),
)
@pytest.mark.parametrize("sampling", ["drawn", "argmax"])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "name", ["speculators_dspark", "zlab_dflash2", "deepspec_dspark_gated", "specforge_domino", "deepspec_gemma4"]
)
def test_sampled_text_follows_the_backbone(name, rule, sampling):
    base, drafter = pair(name)
    drafter.draft_sampling = sampling
    if name == "deepspec_dspark_gated":
        drafter.confidence_threshold = 0.45
    warped = dict(temperature=0.8, top_k=4)
    batch = [torch.tensor([5, 9, 33, 17, 46, 9, 19]), torch.tensor([17, 31])]
    torch.manual_seed(0)
    out = base.generate(
        **left_padded(batch * 600), do_sample=True, max_new_tokens=5, assistant_model=drafter, verification=rule,
        pad_token_id=0, return_dict_in_generate=True, **warped,
    )  # fmt: skip
    for row, prompt in enumerate(batch):
        expected = continuation_distribution(base, prompt[None], 2, **warped)
        assert continuation_p_value(out.sequences[row::2, 7:9], expected) > 0.001
    firsts = {}  # drafts behind the same text
    for row, drafts in enumerate(out.speculation.rows_drafts):
        firsts.setdefault((row % 2, int(out.sequences[row, 7])), set()).add(tuple(drafts[0]))
    assert all(len(found) == 1 for found in firsts.values()) == (sampling == "argmax")


@pytest.mark.by_day("zlab_dflash2-static")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["zlab_llama", "zlab_dflash2"])
def test_layers_with_a_window_keep_what_they_see_of_long_texts(name, cache):
    """Every draft of a ragged batch is that of its block behind the whole context."""
    base, drafter = pair(name)
    batch, new = [torch.tensor([5, 9, 33, 17, 46, 9, 19]), torch.tensor([17, 31])], 150
    out = base.generate(
        **left_padded(batch), max_new_tokens=new, do_sample=False, pad_token_id=0, assistant_model=drafter,
        cache_implementation=cache, return_dict_in_generate=True,
    )  # fmt: skip
    for row, prompt in enumerate(batch):
        text, place = torch.cat([prompt, out.sequences[row, -new:]]), len(prompt)
        with torch.no_grad():
            context = drafter.fuse(base(text[None], output_hidden_states=True).hidden_states)
            for draft, accepted in zip(out.speculation.rows_drafts[row], out.speculation.rows_accepted[row]):
                wanted = drafter.block(context[:, :place], text[place][None]).distribution.greedy()[0].tolist()
                assert draft == wanted[: len(draft)]
                place += accepted + 1


def test_a_cut_comes_before_unlikely_drafts_in_each_sequence():
    base, drafter = pair("deepspec_dspark_gated")
    inputs, options = left_padded(prompts(5)), dict(max_new_tokens=24, do_sample=False, pad_token_id=0)
    lengths = {}
    for least in (None, 0.45, 1.0):
        drafter.confidence_threshold = least
        out = base.generate(**inputs, **options, assistant_model=drafter, return_dict_in_generate=True)
        assert out.sequences.equal(base.generate(**inputs, **options))
        lengths[least] = [[len(draft) for draft in row] for row in out.speculation.rows_drafts]
    assert max(map(max, lengths[None])) == 5 and len({tuple(row) for row in lengths[0.45]}) > 1
    assert not any(map(sum, lengths[1.0]))
    with pytest.raises(ValueError, match="confidence_threshold=0.5.*confidence head"):
        pair("zlab_llama")[1].confidence_threshold = 0.5


TREE = {"depth": 3, "top_k": 3, "total_tokens": 12}


@pytest.mark.by_day("False-None", "True-static")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("sampled", [False, True])
def test_trees_lose_unlikely_drafts_and_what_is_below_them(sampled, cache, monkeypatch):
    base, drafter = pair("deepspec_dspark_gated")
    drafter.confidence_threshold, cut, seen = 0.5, BlockSession._sure, []

    def spy(session, block, tree):
        found = cut(session, block, tree)
        seen.append((drafter.confidence(block, tree).sigmoid(), tree, found))
        return found

    monkeypatch.setattr(BlockSession, "_sure", spy)
    inputs, options = left_padded(prompts(5)), dict(max_new_tokens=10, do_sample=sampled, pad_token_id=0)
    with torch.no_grad():
        out = base.generate(**inputs, **options, assistant_model=drafter, draft_tree=TREE, cache_implementation=cache)
    if not sampled:
        assert out.equal(base.generate(**inputs, **options))
    assert cache or len({count for _, _, found in seen for count in found.num_nodes.tolist()}) > 1
    for likely, tree, found in seen:
        for row, count in enumerate(found.num_nodes.tolist()):
            paths, kept = [], []
            for token, parent, sure in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), likely[row] >= 0.5):
                paths.append(None if not sure or (parent >= 0 and not paths[parent]) else
                             (*(paths[parent] if parent >= 0 else ()), token))  # fmt: skip
            for token, parent in zip(found.tokens[row, :count].tolist(), found.parents[row, :count].tolist()):
                kept.append((*kept[parent], token) if parent >= 0 else (token,))
            assert kept == [path for path in paths if path]


@pytest.mark.by_day("independent-None")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("law", ["independent", "markov", "selector"])
@torch.no_grad()
def test_a_budget_drafts_the_likeliest_prefixes(law, cache):
    """Behind every cycle's text, of a ragged batch; greedy text is plain decoding's."""
    words, size = 6, 20
    model = backbone(vocabulary=words).double()
    drafter, batch = drafter_of(model, law), [ids % words for ids in prompts(3)]
    how = left_padded(batch) | dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    out = model.generate(
        **how, assistant_model=drafter, draft_tree={"total_tokens": size}, cache_implementation=cache,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.sequences.equal(model.generate(**how))
    free_buffers(model)
    windows = torch.cartesian_prod(*[torch.arange(words)] * drafter.num_drafts)  # [N, m]
    for row, prompt in enumerate(batch):
        text, place = torch.cat([prompt, out.sequences[row, -12:]]), len(prompt)
        context = drafter.fuse(model(text[None], output_hidden_states=True).hidden_states)
        for draft, accepted in zip(out.speculation.rows_drafts[row], out.speculation.rows_accepted[row]):
            if place + drafter.num_drafts + 1 < len(text):  # later paths are cut
                found = drafter.block(context[:, :place], text[place][None]).of_tree().prefix_log_prob(windows[None])[0]
                worth = {
                    tuple(window[:length]): chances[length - 1]
                    for window, chances in zip(windows.tolist(), found.tolist())
                    for length in range(1, drafter.num_drafts + 1)
                }
                best = sorted(worth, key=worth.__getitem__, reverse=True)[: size - 1]
                assert sorted(draft) == sorted(path[-1] for path in best)
            place += accepted + 1


def test_as_many_nodes_as_pay_are_the_default_of_independent_rows(model, monkeypatch):
    line = {1: tuple(1 + 0.02 * (width - 1) for width in costs.POSITIONS)}  # a node that is likelier pays
    monkeypatch.setattr(costs, "COSTS", {"float64": {(1, 1000): line}})
    drafter, inputs = drafter_of(model, "independent"), left_padded(prompts(3))
    how = dict(max_new_tokens=16, pad_token_id=0, return_dict_in_generate=True, assistant_model=drafter)
    how |= dict(num_assistant_tokens_schedule="expected", do_sample=False)
    out = model.generate(**inputs, **how)
    assert out.sequences.equal(model.generate(**inputs, max_new_tokens=16, pad_token_id=0, do_sample=False))
    sizes = {len(draft) for row in out.speculation.rows_drafts for draft in row}
    assert max(sizes) > drafter.num_drafts
    drafter.draft_sampling = "argmax"  # and in sampled calls
    many = {name: value.repeat_interleave(40, 0) for name, value in inputs.items()}
    torch.manual_seed(0)
    sampled = model.generate(**many, **how | dict(do_sample=True, top_k=4, max_new_tokens=4))
    assert max(len(draft) for draft in sampled.speculation.rows_drafts[0]) > drafter.num_drafts
    for row, prompt in enumerate(prompts(3)):
        expected = continuation_distribution(model, prompt[None], 2, top_k=4)
        texts = sampled.sequences[40 * row : 40 * (row + 1), -4:-2]
        assert continuation_p_value(texts, expected) > 0.001


def test_copies_draft_alike_and_keep_their_options(tmp_path):
    base, drafter = pair("speculators_dspark")
    drafter.draft_sampling = "argmax"
    drafter.config.layout = "tokenahead"
    drafter.save_pretrained(tmp_path)
    again = BlockDrafter.from_pretrained(tmp_path)
    moved = {"_name_or_path": None}
    assert again.draft_sampling == "argmax" and again.config.to_dict() | moved == drafter.config.to_dict() | moved
    inputs, options = left_padded(prompts(3)), dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    found = []
    for each in (drafter, copy.deepcopy(drafter), again):
        out = base.generate(**inputs, **options, assistant_model=each.attach(base), return_dict_in_generate=True)
        found.append(out.speculation.rows_drafts)
    assert found[0] == found[1] == found[2]


def test_a_window_of_two_is_a_row_and_its_neighbours(model):
    drafter = drafter_of(model, layer_types=["sliding_attention", "full_attention"], sliding_window=2)
    seen = seen_rows(drafter.config, "sliding_attention", torch.device("cpu"))
    rows = torch.arange(drafter.config.block_size)
    assert seen.equal((rows[:, None] - rows).abs() <= 1)
    assert seen_rows(drafter.config, "full_attention", torch.device("cpu")).all()
