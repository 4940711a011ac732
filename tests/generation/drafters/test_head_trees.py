"""Trees of drafts from window distributions: what follows a path, greedy equality, the distribution of sampled text,
and refusals."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, LogitsProcessorList

from tests.backbones import backbone, check_greedy, prompts, train_heads
from tests.modeling.heads.backbones import shaken
from tests.tree_worlds import WARPS, V, World, chance_of_pairs, emitted_distribution, first_of_length
from tokenahead import EvaByteConfig, EvaByteForMTPC, MTPHeads
from tokenahead.generation.call.options import NumberCheck
from tokenahead.generation.call.processing import Processing
from tokenahead.generation.trees import building as growth
from tokenahead.modeling.heads.attached import WindowGrowth

KINDS = {
    "ff": dict(unembedding="own"),
    "cp": dict(head_type="cp", rank=3, unembedding="own"),
    "hmm": dict(head_type="hmm", rank=3, unembedding="own"),
    "btree": dict(head_type="btree", rank=3, unembedding="own"),
    "ff-context": dict(unembedding="own", context=2, context_rank=4),
    "hmm-context": dict(head_type="hmm", rank=3, unembedding="own", context=1, transition_context=True),
    "medusa": dict(head_type="medusa", unembedding=None),
    "hydra": dict(head_type="hydra", unembedding=None),
    "hydra++": dict(head_type="hydra", arch="prefix-mlp", unembedding=None),
    "layer": dict(head_type="layer", unembedding=None),
}
TINY_EVA = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, window_size=32, chunk_size=4,
    num_pred_heads=8,
)  # fmt: skip
TEXTS = torch.tensor([[0, 2, 1, 1], [2, 2, 0, 1]])
CHOICES = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]


def tiny(kind, vocabulary=V, dtype=torch.float64, base=LlamaConfig, **changes):
    """Heads with noise on every weight, on a random backbone of few tokens."""
    torch.manual_seed(4)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2) | changes
    config = base(vocab_size=vocabulary, initializer_range=0.4, pad_token_id=0, eos_token_id=None, **sizes)
    base = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    return shaken(MTPHeads.from_backbone(base, window=4, **KINDS[kind]), 0.3).eval()


def test_what_follows_a_path_is_the_exact_conditional():
    for kind in KINDS:
        heads = tiny(kind, vocabulary=5)
        states = heads.distribution(torch.randint(5, (3, 6))).condition(torch.randint(5, (3, 6)))
        paths = torch.randint(5, (3, 6, 3))
        want = states.conditional_log_probs(paths)
        for length in range(3):
            found = states.next_log_probs(paths[..., :length]).log_softmax(-1)
            torch.testing.assert_close(found, want[..., length, :], atol=1e-12, rtol=0)


@pytest.mark.by_day("ff-1", "hmm-context-2", "hydra++-1", "btree-3")
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_draft_reads_the_distribution_of_the_whole_window(kind, length):
    """What lies behind the draft, or is known already, is not computed, and the draft's own distribution does not
    notice."""
    heads = tiny(kind, vocabulary=5)
    features = heads.features(heads._run_backbone(torch.randint(5, (3, 6)), None, None).hidden_states)
    last, drafts = torch.randint(5, (3, 6)), torch.randint(5, (3, 6, 3))
    want = heads.distribution_of_features(features).condition(last)
    distribution = heads.distribution_after(features, last, length)
    found = distribution.conditional_log_probs(drafts[..., : distribution.window])[..., :length, :]
    torch.testing.assert_close(found, want.conditional_log_probs(drafts)[..., :length, :], atol=1e-12, rtol=0)
    assert torch.equal(distribution.greedy(length), want.greedy(length))
    tokens, q = distribution.sample_with_probs(length)
    again = torch.nn.functional.pad(tokens, (0, 3 - length))
    torch.testing.assert_close(q, want.conditional_log_probs(again)[..., :length, :].exp(), atol=1e-12, rtol=0)


def test_what_no_draft_reads_is_not_computed():
    """Of a window of 8, a draft of two tokens reads the leaves of two positions, and of three where b's own counts."""
    for kind, places in (("ff", 2), ("cp", 3)):
        model = EvaByteForMTPC(EvaByteConfig(**TINY_EVA)).eval()
        model.set_head(head_type=kind, window=8, **({} if kind == "ff" else {"rank": 2}))
        with FlopCounterMode(display=False) as counter:
            model.distribution_after(torch.randn(1, 32), torch.tensor([70]), 2)
        rank = 1 if kind == "ff" else 2
        sums = 0 if kind == "ff" else 2 * 32 * rank
        assert counter.get_total_flops() == 2 * 32 * 320 * places * rank + sums


def test_every_node_has_the_distribution_of_its_own_path():
    for kind in ["ff", "btree", "hydra", "hmm-context"]:
        heads = tiny(kind, vocabulary=5)
        features = heads.features(heads._run_backbone(torch.randint(5, (2, 6)), None, None).hidden_states)[:, -1]
        last = torch.tensor([3, 1])
        grown = WindowGrowth(heads.distribution_after(features[:, None], last[:, None], 3), last[:, None])
        first = torch.tensor([[0, 4, 2], [1, 2, 3]])
        parents, second = torch.tensor([[2, 2, 0], [1, 0, 1]]), torch.tensor([[1, 3, 3], [0, 0, 4]])
        grown.first(), grown.after(first, torch.full_like(first, -1))
        got = grown.after(second, parents).log_softmax(-1)
        for row, node in itertools.product(range(2), range(3)):
            path = [int(last[row]), int(first[row, parents[row, node]]), int(second[row, node])]
            alone = heads.distribution_of_features(features[row])
            for token in path:
                alone = alone.condition(torch.tensor(token))
            want = alone.conditional_log_probs(torch.zeros(1, dtype=torch.long))[0]
            torch.testing.assert_close(got[row, node], want, atol=1e-12, rtol=0)


class _BehindPrompts(World):
    """A backbone behind two prompts, as a table."""

    def __init__(self, model, texts, processing):
        numbers = [list(path) for length in range(3) for path in itertools.product(range(V), repeat=length)]
        rows = [[model(torch.tensor([[*text, *path]])).logits[0, -1] for path in numbers] for text in texts.tolist()]
        self.p = processing.warp(torch.stack([torch.stack(row) for row in rows]).softmax(-1))
        self.depth = 2
        assert self.p.shape == (2, first_of_length(3), V)


@pytest.mark.by_day(each=1)
@torch.no_grad()
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("kind", ["ff", "hydra", "btree", "ff-context", "hmm-context"])
def test_text_from_drawn_trees_has_the_backbones_distribution(kind, warp, rule, monkeypatch):
    heads, processing = tiny(kind), Processing(LogitsProcessorList(WARPS[warp]))
    world, tree, chance = _all_draws(heads, processing, monkeypatch)
    assert (emitted_distribution(world, tree, chance, rule) - world.target()).abs().max() < 1e-12


@pytest.mark.by_day("hmm-4-token", "btree-8-block")
@torch.no_grad()
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("window", [3, 4, 5, 8])
@pytest.mark.parametrize("kind", ["ff", "hmm", "btree"])
def test_text_from_drawn_trees_on_evabyte_has_its_distribution(kind, window, rule, monkeypatch):
    """With what one forward of the trees gives; a window closes before b, behind it, or behind its children."""
    windows = dict(window_size=window, chunk_size=window if window % 2 else 2, num_pred_heads=1, fp32_logits=False)
    heads = tiny(kind, base=EvaByteConfig, **windows)
    world, tree, chance = _all_draws(heads, Processing(LogitsProcessorList([])), monkeypatch)
    texts = TEXTS.repeat_interleave(len(chance) // 2, dim=0)
    cache = heads.backbone(texts[:, :-1]).past_key_values
    block = torch.cat([texts[:, -1:], tree.tokens], dim=1)
    p = heads.backbone(block, past_key_values=cache, draft_tree=tree).logits.softmax(-1)
    # summaries and norms are computed in float32
    assert (emitted_distribution(world, tree, chance, rule, p) - world.target()).abs().max() < 1e-6


def _all_draws(heads, processing, monkeypatch):
    """Every way to draw a tree from the heads, and its probability: two of three tokens for b, then three children for
    the two."""
    texts = TEXTS
    pairs = torch.tensor(list(itertools.permutations(range(V), 2)))
    draws = torch.tensor(list(itertools.product(range(len(pairs)), repeat=3))).repeat(2, 1)
    kept, used = [pairs[draws[:, :1]], pairs[draws[:, 1:]]], []

    def dictate(q, count, generator):
        used.append(q)
        return kept[len(used) - 1]

    monkeypatch.setattr(growth, "race_order", dictate)
    options = SimpleNamespace(
        num_tokens=3,
        do_sample=True,
        processing=processing,
        draft_tree=dict(depth=1, top_k=2, total_tokens=6),
        has_likely_tree=False,
        masks=lambda tokens: None,
        numbers=NumberCheck(),
    )
    drafter, row = heads.start(options), torch.arange(2).repeat_interleave(len(draws) // 2)
    states = heads._run_backbone(texts[:, :-1], None, None).hidden_states
    drafter.hidden = heads.features(states)[row, -1]
    tree = drafter.propose(SimpleNamespace(last=lambda: texts[row, -1]), 3)
    assert tree.tokens.shape[1] == 5 and tree.probs.dtype == torch.float64 and len(used) == 2
    chance = chance_of_pairs(used, kept)
    torch.testing.assert_close(chance.view(2, -1).sum(1), torch.ones(2, dtype=torch.float64))
    return _BehindPrompts(heads.backbone, texts, processing), tree, chance


def test_a_fixed_shape_is_drafted_and_keeps_paths_of_every_length():
    model = backbone()
    heads = train_heads(model, steps=30, **KINDS["cp"])
    assert check_greedy(model, heads, prompts(8), new=20, draft_tree=CHOICES) == {0, 1, 2, 3}
