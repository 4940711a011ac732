"""Leaves that read the tokens before them: enumeration of every family, and what heads do with their tables."""

import copy
import itertools

import pytest
import torch
from transformers import LogitsProcessorList

from tests.modeling.heads.backbones import backbone, shaken
from tests.tree_worlds import WARPS, World, emitted_distribution
from tests.tree_worlds import V as WORDS
from tokenahead import MTPHeadConfig, MTPHeads
from tokenahead.generation.call.processing import Processing
from tokenahead.generation.contract import DraftTree
from tokenahead.modeling.heads.family import build_head, distribution_after, window_distribution

V, D = 5, 4
FAMILIES = {"ff": {}, "cp": dict(rank=2), "hmm": dict(rank=2), "btree": dict(rank=2)}
CASES = [
    *((kind, count, {}) for kind in FAMILIES for count in range(4)),
    *(("hmm", count, dict(transition_context=True)) for count in (1, 2, 3)),
    ("hmm", 2, dict(transition_context=True, homogeneous=True)),
    ("cp", 2, dict(contextual=False)),
    *((kind, 0, dict(leaf_size=2)) for kind in ("cp", "hmm", "btree")),
    ("hmm", 3, dict(leaf_size=2, transition_context=True)),
]
N = 4


def head_of(kind, count, window=N, **options):
    """A head with noise on every weight, in float64, its config and two hidden states."""
    torch.manual_seed(2)
    options = FAMILIES[kind] | dict(context=count, context_rank=3) | options
    config = MTPHeadConfig(head_type=kind, window=window, unembedding="own", **options)
    head = shaken(build_head(config, D, V).double(), 0.8)
    return head, config, torch.randn(2, D, dtype=torch.float64)


def joint_of(head, config, state):
    """q of every window [V, V, ..], by sums over all states."""
    window, rank, texts = config.window, config.rank, torch.tensor([*itertools.product(range(V), repeat=config.window)])
    bias = torch.zeros(len(texts), window, V, dtype=torch.float64)  # of the tokens before, one by one
    if config.context:
        embedded = head.context.embedding[texts]  # [K, n, R]
        parts = head.context.weight  # [count, V, R]
        for k, j in itertools.product(range(window), range(1, config.context + 1)):
            if k - j >= 0:
                bias[:, k] += embedded[:, k - j] @ parts[j - 1].T
    if config.head_type == "ff":
        leaves = head(state)[:, None]  # [n, 1, V]
        root, sums = leaves.new_zeros(1), leaves.new_zeros(0, 1, 1)
    else:
        found = head(state)
        leaves, root = found["leaf_logits"], found["root_logits"]
        sums = next((found[name] for name in ("trans_logits", "node_logits") if name in found), root[:0])
    probs = (leaves + bias[:, :, None]).softmax(-1)  # [K, n, r, V]
    seen = torch.stack([probs[torch.arange(len(texts)), i, :, texts[:, i]] for i in range(window)], 1)  # [K, n, r]
    root = root.softmax(-1)
    if config.head_type in ("ff", "cp"):
        return (root * seen.prod(1)).sum(-1).view((V,) * window)
    if config.transition_context:
        more = embedded[:, :-1] @ head.context.transition.T
        sums = sums + more.unflatten(-1, (rank, rank))  # [K, n - 1, r, r]
    moves, total = sums.softmax(-1).expand(len(texts), -1, -1, -1), 0
    if config.head_type == "hmm":
        moves = moves.expand(-1, window - 1, -1, -1)
        for z in itertools.product(range(rank), repeat=window):
            steps = [moves[:, i, z[i], z[i + 1]] for i in range(window - 1)]
            total = total + root[z[0]] * torch.stack([*steps, *(seen[:, i, s] for i, s in enumerate(z))]).prod(0)
    else:  # of four positions: the root has two nodes, which own two positions each
        for z0, z1, z2 in itertools.product(range(rank), repeat=3):
            nodes = root[z0] * moves[:, 0, z0, z1] * moves[:, 1, z0, z2]
            total = total + nodes * seen[:, 0, z1] * seen[:, 1, z1] * seen[:, 2, z2] * seen[:, 3, z2]
    return total.view((V,) * window)


def next_of(joint, prefix):
    """q(. | prefix) of a joint, [V]."""
    part = joint[tuple(prefix)]
    part = part.flatten(1).sum(1) if part.dim() > 1 else part
    return part / part.sum()


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def name_of(value):
    return str(value) if not isinstance(value, dict) else "-".join(value) or "plain"


@torch.no_grad()
def test_everything_equals_enumeration():
    for kind, count, options in CASES:
        head, config, states = head_of(kind, count, **options)
        joint = joint_of(head, config, states[0])
        windows = torch.tensor(list(itertools.product(range(V), repeat=N)))
        distribution = window_distribution(head, config, states[:1].expand(len(windows), -1))
        close(distribution.log_prob(windows).exp().view(joint.shape), joint)
        assert abs(float(distribution.log_prob(windows).exp().sum()) - 1) < 1e-12
        some = windows[::37]
        want = torch.stack([torch.stack([next_of(joint, x[:i]) for i in range(N)]) for x in some.tolist()])  # [k, n, V]
        one = window_distribution(head, config, states[:1])
        whole = window_distribution(head, config, states[:1].expand(len(some), -1))
        close(whole.conditional_log_probs(some).exp(), want)
        at = want.gather(-1, some[..., None])[..., 0]
        close(whole.token_log_probs(some).exp(), at)
        close(whole.prefix_log_prob(some), at.log().cumsum(-1))
        for length in range(N):  # many prefixes of one distribution
            found = window_distribution(head, config, states[:1, None]).next_log_probs(some[None, :, :length])
            close(found[0].softmax(-1), want[:, length])
        for bound in range(1, N):
            rest = whole
            for position in range(bound):
                rest = rest.condition(some[:, position])
            assert rest.window == N - bound
            close(rest.conditional_log_probs(some[:, bound:]).exp(), want[:, bound:])
            forced = iter(some[:, bound:].unbind(1))
            if count or kind != "ff":  # independent positions are drafted at once
                close(rest.draft(lambda probs, forced=forced: (next(forced), probs))[1], want[:, bound:])
            greedy = rest.greedy()
            again = torch.cat([some[:, :bound], greedy], 1)
            best = torch.stack([next_of(joint, x[:i]) for x in again.tolist() for i in range(bound, N)])
            assert torch.equal(best.argmax(-1), greedy.flatten())
            tokens, probs = rest.sample_with_probs(N - bound)
            close(probs, rest.conditional_log_probs(tokens).exp())
        assert one.window == N


@torch.no_grad()
def test_a_short_draft_is_that_of_the_whole_window():
    for kind, count, options in CASES:
        head, config, states = head_of(kind, count, window=6, **options)
        last, text = torch.randint(V, (2,)), torch.randint(V, (2, 5))
        whole = window_distribution(head, config, states).condition(last)
        for length in range(1, 6):
            after = distribution_after(head, config, states, last, length)
            found = after.conditional_log_probs(text[:, : after.window])[:, :length]
            close(found, whole.conditional_log_probs(text)[:, :length])
            assert torch.equal(after.greedy(length), whole.greedy(length))
            paths = text[:, None, : length - 1]
            trees = distribution_after(head, config, states[:, None], last[:, None], length).next_log_probs(paths)
            close(trees[:, 0].log_softmax(-1), whole.conditional_log_probs(text)[:, length - 1])


@torch.no_grad()
def test_tables_of_zeros_change_nothing():
    for kind in FAMILIES:
        head, config, states = head_of(kind, 3)
        plain, bare, _ = head_of(kind, 0)
        plain.load_state_dict({name: value for name, value in head.state_dict().items() if "context" not in name})
        head.context.reset_head(0.02)
        text = torch.randint(V, (2, N))
        got, want = window_distribution(head, config, states), window_distribution(plain, bare, states)
        close(got.conditional_log_probs(text), want.conditional_log_probs(text))
        assert torch.equal(got.greedy(), want.greedy())


@pytest.mark.by_day("hmm")
@pytest.mark.parametrize("kind", ["ff", "cp", "hmm"])
def test_drafts_follow_the_joint(kind):
    head, config, states = head_of(kind, 2, window=3, transition_context=kind == "hmm")
    joint = joint_of(head, config, states[0]).flatten()
    with torch.no_grad():
        tokens = window_distribution(head, config, states[:1].expand(50_000, -1)).sample_with_probs(3)[0]
    counts = torch.bincount((tokens * V ** torch.arange(2, -1, -1)).sum(1), minlength=V**3)
    expected = joint * len(tokens)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor((V**3 - 1) / 2).double(), statistic / 2) > 1e-4


def test_an_unknown_token_before_a_known_one_is_refused():
    head, config, states = head_of("cp", 1)
    distribution = window_distribution(head, config, states)
    text = torch.zeros(2, N, dtype=torch.long)
    unknown = torch.tensor([False, True, False, False]).expand(2, -1)
    with pytest.raises(ValueError, match="unknown"):
        distribution.prefix_log_prob(text, unknown)
    unknown = torch.tensor([False, False, True, True]).expand(2, -1)
    close(distribution.token_log_probs(text, unknown)[:, :2], distribution.token_log_probs(text)[:, :2])


@torch.no_grad()
def test_text_of_chains_has_the_targets_distribution():
    """Every draft of three tokens, as a chain, with the warped conditionals that it is drawn from."""
    for kind in FAMILIES:
        for warp in ["plain", "temperature"]:
            for rule in ["token", "block"]:
                torch.manual_seed(5)
                options = FAMILIES[kind] | dict(context=2, context_rank=3, transition_context=kind == "hmm")
                config = MTPHeadConfig(head_type=kind, window=4, unembedding="own", **options)
                head, world = shaken(build_head(config, D, WORDS).double(), 0.8), World(warp, 3)
                drafts = torch.tensor(list(itertools.product(range(WORDS), repeat=3))).repeat(2, 1)
                row = torch.arange(2).repeat_interleave(len(drafts) // 2)
                after = distribution_after(head, config, torch.randn(2, D).double()[row], torch.tensor([0, 2])[row], 3)
                forced, processing = iter(drafts.unbind(1)), Processing(LogitsProcessorList(WARPS[warp]))
                probs = after.draft(lambda probs, forced=forced, warp=processing.warp: (next(forced), warp(probs)))[
                    1
                ]  # [K, 3, V]
                chance = probs.gather(-1, drafts[..., None])[..., 0].prod(-1)
                tree = DraftTree.chain(drafts, probs)
                assert (emitted_distribution(world, tree, chance, rule) - world.target()).abs().max() < 1e-12


HEADS = {
    "ff": dict(head_type="ff", context=2, context_rank=8),
    "part": dict(head_type="ff", unembedding="own", context=1, draft_ids=range(0, 64, 2)),
    "cp": dict(head_type="cp", rank=2, unembedding="own", context=3),
    "hmm": dict(
        head_type="hmm", rank=3, unembedding="own", context=3, transition_context=True, draft_ids=range(0, 64, 2)
    ),
    "layers": dict(head_type="btree", rank=2, unembedding="own", context=1, draft_layers=1),
}
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.by_day("part", "hmm")
@pytest.mark.parametrize("kind", HEADS)
def test_heads_draft_learn_and_come_back_from_disk(kind, tmp_path):
    base = backbone()
    heads = shaken(MTPHeads.from_backbone(base, window=5, **HEADS[kind]))
    plain = base.generate(IDS, max_new_tokens=12, do_sample=False)
    for options in ({}, dict(draft_tree=dict(top_k=3, total_tokens=12))):
        out = base.generate(IDS, max_new_tokens=12, do_sample=False, assistant_model=heads, **options)
        assert torch.equal(out, plain)
    base.generate(IDS, max_new_tokens=6, do_sample=True, temperature=0.7, top_p=0.9, assistant_model=heads)
    loss = heads.train()(IDS, labels=IDS).loss
    loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in heads.head.context.parameters())
    heads.save_pretrained(tmp_path)
    again = MTPHeads.from_pretrained(tmp_path).attach(base)
    own = dict(again.named_parameters())
    assert all(torch.equal(value, own[name]) for name, value in heads.named_parameters())
    assert again.config.context == heads.config.context and "before them" in again.config.describe()


def test_a_call_under_autocast_leaves_no_rounded_table():
    base = backbone()
    heads = shaken(MTPHeads.from_backbone(base, window=4, **HEADS["hmm"]), 0.3).attach(base)
    ask = {"assistant_model": heads, "max_new_tokens": 2, "do_sample": False}
    with torch.autocast("cpu", torch.bfloat16):
        base.generate(IDS, **ask)
    base.generate(IDS, **ask)
    kept, tables = heads.head.context._table, copy.deepcopy(heads).head.context
    tables._table = None
    with torch.no_grad():
        assert kept.dtype == torch.float32 and torch.equal(kept, tables.table())


def test_the_chunked_loss_is_that_of_the_distributions():
    base = backbone().double()
    heads = shaken(MTPHeads.from_backbone(base, window=4, **HEADS["cp"]), 0.3)
    heads.loss_options.update(decay=1.0)
    output = heads(IDS, labels=IDS)
    ahead = torch.nn.functional.pad(IDS, (0, 4)).unfold(1, 12, 1)[:, 1:].transpose(1, 2)  # [B, L, 4]
    terms = -heads.distribution(IDS).token_log_probs(ahead)
    means = [terms[:, : 12 - depth, depth - 1].mean() for depth in range(1, 5)]
    torch.testing.assert_close(output.head_losses, torch.stack(means).detach(), atol=1e-12, rtol=0)
    output.loss.backward()
    found = [value.grad for value in heads.head.context.parameters()]
    want = torch.autograd.grad(torch.stack(means).mean(), [*heads.head.context.parameters()])
    for got, one in zip(found, want):
        torch.testing.assert_close(got, one, atol=1e-12, rtol=0)


def test_tables_are_added_to_trained_heads():
    for kind in ["ff", "hmm"]:
        base, anything = backbone(), torch.zeros(2, 12, 5, dtype=torch.long)
        heads = MTPHeads.from_backbone(base, window=5, **HEADS[kind] | dict(context=0, transition_context=False))
        before = heads.distribution(IDS).conditional_log_probs(anything)
        heads.add_context(2, rank=8, transitions=kind == "hmm")
        torch.testing.assert_close(heads.distribution(IDS).conditional_log_probs(anything), before, atol=1e-5, rtol=0)
        assert heads.config.context == 2 and heads.head.context.weight.shape[0] == 2
        with pytest.raises(ValueError, match="context=2 exists"):
            heads.add_context(1)
        with pytest.raises(Exception, match="context=1.*hydra"):
            MTPHeads.from_backbone(base, window=5, head_type="hydra", unembedding=None).add_context(1)


def test_options_that_do_not_fit_are_refused_by_name():
    for options, message in [
        (dict(head_type="hydra", context=1), "context=1.*hydra"),
        (dict(head_type="medusa", context=1), "context=1.*medusa"),
        (dict(head_type="layer", context=1), "context=1.*layer"),
        (dict(window=8, context=4), "context=4"),
        (dict(window=8, context=-1), "context=-1"),
        (dict(window=8, context=1, context_rank=0), "context_rank=0"),
        (dict(head_type="cp", window=4, context=1, transition_context=True), "transition_context=True.*cp"),
    ]:
        with pytest.raises(Exception, match=message):
            MTPHeadConfig(**options)


def test_missing_tables_and_others_are_named(tmp_path):
    base = backbone()
    heads = MTPHeads.from_backbone(base, window=5, **HEADS["hmm"] | dict(context=0, transition_context=False))
    heads.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="head.context.weight"):
        MTPHeads.from_pretrained(tmp_path, context=1)
    heads.add_context(1)
    heads.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be loaded"):
        MTPHeads.from_pretrained(tmp_path, context=2)


def test_an_engine_that_reads_no_tokens_is_refused_by_name(tmp_path):
    heads = MTPHeads.from_backbone(backbone(), window=5, **HEADS["ff"])
    with pytest.raises(ValueError, match="layout='vllm'.*context=2"):
        heads.export(tmp_path / "heads", "vllm")
