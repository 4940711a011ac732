"""Laws of a block against sums over everything, in float64: m = 3 places, v = 5 columns, any of V = 7 before them."""

import inspect
import itertools

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from tests.modeling.heads.backbones import shaken
from tests.tree_worlds import V as WORDS
from tests.tree_worlds import World, all_trees, emitted_distribution
from tokenahead import BlockDrafter
from tokenahead.configuration.block import LAW_OPTIONS, BlockDrafterConfig
from tokenahead.modeling.block.laws import LAWS
from tokenahead.modeling.common.draft_vocabulary import DraftVocabulary
from tokenahead.modeling.heads.window_distribution import PartialDistribution

M, D, V = 3, 4, 7
KINDS = {
    "independent": {},
    "vanilla": dict(law="markov", rank=3),
    "gated": dict(law="markov", rank=3, kind="gated"),
    "rnn": dict(law="markov", rank=3, kind="rnn"),
    "domino": dict(rank=3, state_size=2),
    "domino-free": dict(law="domino", rank=3, state_size=2, free_places=1),
    "selector": dict(rank=3, top_k=3),
    "cp": dict(rank=2, leaf_rank=3, markov_rank=3),
    "hmm": dict(rank=2, leaf_rank=3, markov_rank=3, reads_last=True),
    "hmm-bare": dict(law="hmm", rank=2, leaf_rank=3, markov_rank=0),
    "hmm-gated": dict(law="hmm", rank=2, leaf_rank=3, markov_rank=3, markov_kind="gated"),
    "btree": dict(rank=3, leaf_rank=3, markov_rank=3),
    "btree-rnn": dict(law="btree", rank=2, leaf_rank=3, markov_rank=3, markov_kind="rnn"),
}
PART = DraftVocabulary([0, 2, 3, 5, 6], V)
EMBEDDINGS = torch.nn.Embedding(V, D, _weight=torch.randn(V, D, generator=torch.Generator().manual_seed(5)).double())
WHOLE = DraftVocabulary(range(5), 5)


def law_of(kind, vocabulary=PART, m=M, **changes):
    """A law with noise on every weight."""
    torch.manual_seed(3)
    options = {"law": kind} | KINDS[kind] | changes
    return shaken(build_law(options.pop("law"), vocabulary, m, **options).double(), 0.8)


def config_of(law, vocabulary=PART, m=M, **options):
    return BlockDrafterConfig(
        vocab_size=vocabulary.vocab_size, draft_vocab_size=len(vocabulary), own_unembedding=True, hidden_size=D,
        num_attention_heads=1, head_dim=4, block_size=m, feature_layers=[1], num_hidden_layers=1, law=law, **options,
    )  # fmt: skip


def build_law(law, vocabulary=PART, m=M, **options):
    return LAWS[law](config_of(law, vocabulary, m), **options)


def inputs_of(vocabulary=PART, count=1, m=M):
    """Rows, base logits, tokens before and b's rows."""
    torch.manual_seed(4)
    rows, logits = torch.randn(count, m, D).double(), torch.randn(count, m, len(vocabulary)).double()
    return rows, logits, torch.randint(vocabulary.vocab_size, (count,)), torch.randn(count, D).double()


def of(law, rows, logits, last, anchor, vocabulary=PART):
    """The distribution over all tokens, as a drafter has it."""
    return PartialDistribution(law.distribution(rows, logits, last, anchor, vocabulary, EMBEDDINGS), vocabulary)


def bias_of(law, rows, before, anchor, logits):
    """Biases [m, v] of one text, place by place, from ids [m] of the tokens before: the formulas of the papers."""
    if hasattr(law, "prefix_gru"):
        gru = torch.nn.GRU(D, law.prefix_gru.weight_hh_l0.shape[1], bias=False, batch_first=True).double()
        gru.load_state_dict(law.prefix_gru.state_dict())
        first, _, second = law.embed_proj
        read = torch.cat([rows, gru(EMBEDDINGS.weight[before])[0]], -1) @ first.weight.T  # [m, R]
        return (read * read.sigmoid() @ second.weight.T) * (torch.arange(len(rows)) >= law.free_places)[:, None]
    head = law if hasattr(law, "markov_w1") else getattr(law, "markov_head", None)
    if head is None:
        return torch.zeros_like(logits)
    e, w2, found = head.markov_w1.weight, head.markov_w2.weight, []
    state = torch.zeros(head.width).double()

    def step(row, token, state):
        g, c, o = (head.joint_proj.weight @ torch.cat([state, e[token], row]) + head.joint_proj.bias).chunk(3)
        return g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh(), o.tanh()

    if head.kind == "rnn" and anchor is not None:
        state, _ = step(anchor, before[0], state)
    for row, token in zip(rows, before):
        if head.kind == "vanilla":
            phi = e[token]
        elif head.kind == "gated":
            phi = (head.gate_proj.weight @ torch.cat([row, e[token]]) + head.gate_proj.bias).sigmoid() * e[token]
        else:
            state, phi = step(row, token, state)
        found.append(w2 @ phi)
    return torch.stack(found)


def joint_of(law, rows, logits, last, anchor, vocabulary=PART):
    """q of every block [v, v, v], by sums over all states."""
    m, size = logits.shape
    q = torch.zeros((size,) * m).double()
    for text in itertools.product(range(size), repeat=m):
        before = [int(last), *vocabulary.ids[list(text[:-1])].tolist()]
        places = range(m)
        if hasattr(law, "successor_codebook"):
            part, value = law, 1.0
            for k in places:
                found = logits[k].topk(law.top_k).indices.tolist()
                h = part.hidden_projection.weight @ rows[k]
                weights = {
                    y: logits[k, y] + (part.predecessor_codebook[before[k]] * h * part.successor_codebook[y]).sum()
                    for y in found
                }
                total = sum(weight.exp() for weight in weights.values())
                value = value * (weights[text[k]].exp() / total if text[k] in weights else 0.0)
            q[text] = value
            continue
        bias = bias_of(law, rows, before, anchor, logits)
        if not hasattr(law, "state_maps"):
            q[text] = torch.stack([(logits[k] + bias[k]).softmax(-1)[text[k]] for k in places]).prod()
            continue
        rank = law.rank
        maps = law.state_maps.weight.unflatten(0, (rank, -1))  # [r, R, d]

        def leaf(k, z, bias=bias, text=text, maps=maps):
            added = law.state_leaves.weight @ (maps[z] @ rows[k]) if k else 0
            return (logits[k] + added + bias[k]).softmax(-1)[text[k]]

        def sums(row, rank=rank):
            return (law.sums.weight @ row + law.sums.bias).view(rank, rank)

        root, total = (law.root.weight @ rows[0] + law.root.bias).softmax(-1), 0
        if law.kind == "cp":
            total = sum(root[z] * torch.stack([leaf(k, z) for k in places]).prod() for z in range(rank))
        elif law.kind == "hmm":
            moves = []
            for k in range(1, m):
                more = (
                    0
                    if law.transitions is None
                    else law.transitions.weight @ law.markov_head.markov_w1.weight[before[k]]
                )
                moves.append((sums(rows[k]) + (more.view(rank, rank) if torch.is_tensor(more) else 0)).softmax(-1))
            for z in itertools.product(range(rank), repeat=m):
                steps = [moves[k][z[k], z[k + 1]] for k in range(m - 1)]
                total = total + root[z[0]] * torch.stack([*steps, *(leaf(k, z[k]) for k in places)]).prod()
        else:  # three places: the first hangs on the root, the others on its one node
            node = sums(rows[1:].mean(0)).softmax(-1)
            for z, w in itertools.product(range(rank), repeat=2):
                total = total + root[z] * leaf(0, z) * node[z, w] * leaf(1, w) * leaf(2, w)
        q[text] = total
    return q


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def next_of(joint, prefix):
    part = joint[tuple(prefix)]
    part = part.flatten(1).sum(1) if part.dim() > 1 else part
    return part / part.sum()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_everything_equals_enumeration(kind):
    law, (rows, logits, last, anchor) = law_of(kind), inputs_of()
    joint = joint_of(law, rows[0], logits[0], last[0], anchor[0])
    assert abs(float(joint.sum()) - 1) < 1e-12
    codes = torch.tensor(list(itertools.product(range(5), repeat=M)))
    possible = joint[tuple(codes.T)] > 0  # a selector rules tokens out
    blocks = PART.ids[codes]
    many = [part.expand(len(blocks), *part.shape[1:]) for part in (rows, logits, last)]
    whole = of(law, *many, anchor.expand(len(blocks), -1))
    close(whole.log_prob(blocks).exp().view(joint.shape), joint)
    some, at = blocks[possible][::7], codes[possible][::7]
    want = torch.stack([torch.stack([next_of(joint, x[:i]) for i in range(M)]) for x in at.tolist()])  # [k, m, v]
    many = [part.expand(len(some), *part.shape[1:]) for part in (rows, logits, last)]
    whole = of(law, *many, anchor.expand(len(some), -1))
    close(whole.conditional_log_probs(some).exp(), PART.spread(want))
    trees = of(law, rows[:, None], logits[:, None], last[:, None], anchor[:, None])
    for length in range(M):  # many prefixes of one block
        found = trees.next_columns(some[None, :, :length])[0]
        close(found.softmax(-1).expand(len(some), -1), want[:, length])
    for bound in range(M):
        rest = whole
        for position in range(bound):
            rest = rest.condition(some[:, position])
        assert rest.window == M - bound
        close(rest.conditional_log_probs(some[:, bound:]).exp(), PART.spread(want[:, bound:]))
        if kind != "independent":  # whose places are drafted at once
            forced = iter(some[:, bound:].unbind(1))
            close(rest.draft(lambda probs, forced=forced: (next(forced), probs))[1], PART.spread(want[:, bound:]))
        greedy = rest.greedy()
        again = PART.codes(torch.cat([some[:, :bound], greedy], 1))
        best = torch.stack([next_of(joint, x[:i]) for x in again.tolist() for i in range(bound, M)])
        assert torch.equal(PART.ids[best.argmax(-1)], greedy.flatten())
        tokens, probs = rest.sample_with_probs(M - bound)
        close(probs, rest.conditional_log_probs(tokens).exp())


def check_text(world, tree, chance):
    """Both rules write the target's distribution."""
    for rule in ("token", "block"):
        assert (emitted_distribution(world, tree, chance, rule) - world.target()).abs().max() < 1e-12


@pytest.mark.by_day("gated", "domino-free", "selector", "hmm", "btree-rnn")
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_text_of_drawn_trees_has_the_targets_distribution(kind):
    """Two children of the root and one of each, every way to draw them by the conditionals of the law."""
    words = DraftVocabulary(range(WORDS), WORDS)
    law, world = law_of(kind, words), World("plain", 3)
    rows, logits, last, anchor = inputs_of(words, 2)
    block = law.distribution(rows[:, None], logits[:, None], last[:, None], anchor[:, None], embeddings=EMBEDDINGS)
    for length in range(M):  # the drafters' distributions after every text
        prefixes = torch.tensor([*itertools.product(range(WORDS), repeat=length)]).long().view(1, WORDS**length, length)
        first = sum(WORDS**k for k in range(length))
        found = block.next_log_probs(prefixes.expand(2, -1, -1)).softmax(-1)
        world.q[:, first : first + prefixes.shape[1]] = found
    check_text(world, *all_trees(world, [-1, -1, 0, 1], replacement=False))


def blocks_of(law, m=M):
    rows, logits, last, _ = inputs_of(WHOLE, m=m)
    blocks = torch.tensor(list(itertools.product(range(5), repeat=m)))
    many = [part.expand(len(blocks), *part.shape[1:]) for part in (rows, logits, last)]
    return law.distribution(*many, embeddings=EMBEDDINGS).prefix_log_prob(blocks)


@torch.no_grad()
def test_new_drafters_start_with_independent_places():
    for kind in KINDS.keys() - {"domino", "domino-free"}:  # whose authors draw all weights
        options = {"law": kind} | KINDS[kind] | ({"top_k": 5} if kind == "selector" else {})
        law = BlockDrafter(config_of(options.pop("law"), WHOLE, law_options=options)).joint_law
        close(blocks_of(law.double()), blocks_of(law_of("independent", WHOLE)))


def test_every_weight_learns():
    for kind in KINDS:
        law, (rows, logits, last, anchor) = law_of(kind), inputs_of(count=3)
        columns = logits.topk(3, -1).indices
        of(law, rows, logits.requires_grad_(), last, anchor).log_prob(PART.ids[columns[..., 1]]).sum().backward()
        for name, weight in law.named_parameters():
            assert weight.grad.isfinite().all() and weight.grad.abs().sum() > 0, (kind, name)


def test_options_that_do_not_fit_are_refused_by_name():
    for options, message in (
        (dict(law="markov", kind="lstm"), "kind='lstm'"),
        (dict(law="cp", reads_last=True), "reads_last=True.*cp"),
        (dict(law="hmm", reads_last=True, markov_rank=0), "reads_last=True.*markov_rank"),
    ):
        with pytest.raises(ValueError, match=message):
            build_law(**options)
    for options, message in (
        ({"law": "makrov"}, "law='makrov'.*'selector'"),
        ({"law": "markov", "law_options": {"rnk": 3}}, "law='markov' takes the law_options rank, kind"),
    ):
        with pytest.raises(StrictDataclassError, match=message):
            BlockDrafterConfig(feature_layers=[1], **options)


def test_the_configuration_knows_the_options_of_every_law():
    assert {law: tuple(inspect.signature(each).parameters)[1:] for law, each in LAWS.items()} == LAW_OPTIONS


def test_the_weakest_candidate_makes_room_for_a_label_that_is_none():
    law, (rows, logits, last, _) = law_of("selector"), inputs_of()
    weakest_first = logits[0, 0].argsort()
    for label, drafted in [(weakest_first[0], [*weakest_first[-2:], weakest_first[0]]), (weakest_first[-3], None)]:
        columns = torch.stack(list(weakest_first[-3:] if drafted is None else drafted))
        scores = logits[0, 0, columns] + law.scores(law.embed(last), rows[:, 0], columns[None])[0]
        expected = -scores.log_softmax(-1)[columns == label]
        found = law.choice_terms(rows[:, :1], logits[:, :1], last[:, None], label.view(1, 1))
        torch.testing.assert_close(found[0], expected)
