"""The distribution of what is emitted under constraints, enumerated: all drafters that draw, both rules, chains and
trees, random automata and random prefix functions."""

import itertools
import random

import pytest
import torch
from transformers import LogitsProcessor

from tests.backbones import backbone
from tests.families import family_model
from tests.generation.drafters.test_head_trees import KINDS, tiny
from tests.integration.test_enumeration import ends_of
from tests.modeling.heads.backbones import shaken
from tests.tree_worlds import chance_of_pairs, ends
from tokenahead import AssistantDrafter, EagleHead
from tokenahead.extending import AutomatonProcessor, TableAutomaton
from tokenahead.generation.call import options as options_module
from tokenahead.generation.contract import DraftTree
from tokenahead.generation.trees import building as trees_module
from tokenahead.generation.verification import verifiers as verifiers_module
from tokenahead.generation.verification.tree_rules import tree_acceptance

V, DEPTH, STATES = 5, 3, 4
PROMPT, FIRST = torch.tensor([[1, 3, 2, 4, 3]]), 2
DRAFTS = torch.tensor(list(itertools.product(range(V), repeat=DEPTH)))
SAMPLING = dict(do_sample=True, temperature=0.8, top_k=3, pad_token_id=0)
TEXTS = [text for length in range(DEPTH + 1) for text in itertools.product(range(V), repeat=length)]
"""Texts after the prompt and the first token, in the order of their numbers."""


class Automaton:
    """A random automaton over the tokens after the prompt."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.next = torch.randint(STATES, (STATES, V), generator=generator)
        self.masks = torch.rand(STATES, V, generator=generator) < 0.55
        self.masks[torch.arange(STATES), torch.randint(V, (STATES,), generator=generator)] = True
        self.masks[0, FIRST] = True

    def mask(self, text):
        state = 0
        for token in text:
            state = int(self.next[state, token])
        return self.masks[state]


class Function:
    """Random sets of tokens, one for every text."""

    def __init__(self, seed):
        self.seed = seed

    def mask(self, text):
        chosen = random.Random(f"{self.seed} {text}").sample(range(V), 1 + len(text) % 2 + self.seed % 2)
        chosen = chosen if text else [FIRST]
        return torch.zeros(V, dtype=torch.bool).index_fill(0, torch.tensor(chosen), True)


class Hosted(AutomatonProcessor):
    def __init__(self, automaton):
        self.automaton, self.start = automaton, 0

    def step(self, state, token):
        return int(self.automaton.next[state, token])

    def allowed(self, state):
        return self.automaton.masks[state]


class Offering(LogitsProcessor):
    """A processor that overrides the call and offers its mask."""

    def __init__(self, constraint):
        self.constraint = constraint

    def allowed(self, sequences):
        return torch.stack([self.constraint.mask(tuple(ids)) for ids in sequences[:, PROMPT.shape[1] :].tolist()])

    def __call__(self, input_ids, scores):
        return scores.masked_fill(~self.allowed(input_ids), -torch.inf)


def as_function(constraint):
    mask = lambda row, ids: constraint.mask(tuple(ids[PROMPT.shape[1] :].tolist()))  # noqa: E731
    return {"prefix_allowed_tokens_fn": lambda row, ids: mask(row, ids).nonzero()[:, 0].tolist()}


WAYS = {
    "function": (Function, as_function),
    "table": (Automaton, lambda found: {"logits_processor": [TableAutomaton(found.next, found.masks)]}),
    "host": (Automaton, lambda found: {"logits_processor": [Hosted(found)]}),
    "mask": (Function, lambda found: {"logits_processor": [Offering(found)]}),
}


def drafter_of(kind):
    if kind in KINDS:
        return tiny(kind, vocabulary=V)
    if kind == "module":
        return shaken(family_model("llama", num_nextn_predict_layers=2, vocab_size=V).double(), 0.3).eval()
    model = shaken(backbone(vocabulary=V).double(), 0.3).eval()
    if kind == "assistant":
        return AssistantDrafter(shaken(backbone(vocabulary=V, seed=5).double(), 0.3).eval()).attach(model)
    return shaken(EagleHead.from_backbone(model, version=3), 0.3).eval()


class Captured(Exception):
    pass


def first_draft(monkeypatch, drafter, batch, drawn, **options):
    """The first draft of a call whose draws are dictated: the first token, then one token or some of every path."""
    model, draws, found = getattr(drafter, "backbone", None) or drafter, iter(drawn), []
    start = drafter.start

    def started(options):
        session = start(options)
        propose = session.propose

        def capture(tokens, length):
            found.append(propose(tokens, length))
            raise Captured

        session.propose = capture
        return session

    monkeypatch.setattr(drafter, "start", started)
    monkeypatch.setattr(verifiers_module, "draw", lambda probs: torch.full((len(probs),), FIRST))
    monkeypatch.setattr(options_module, "draw", lambda probs: next(draws))
    used = []
    monkeypatch.setattr(trees_module, "race_order", lambda q, count, generator: used.append(q) or next(draws))
    ids, own = PROMPT.expand(batch, -1), {} if model is drafter else {"assistant_model": drafter}
    with pytest.raises(Captured), torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, **SAMPLING, **own, **options)
    return found[0], used


def target_of(constraint, seed=0):
    """A random target after every text [texts, V], under the constraint and then warped, in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(len(TEXTS), V, generator=generator, dtype=torch.float64)
    mask = torch.stack([constraint.mask((FIRST, *text)) for text in TEXTS])
    logits = logits.masked_fill(~mask, -torch.inf) / SAMPLING["temperature"]
    least = logits.topk(SAMPLING["top_k"]).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf).softmax(-1)


def numbers_of(tree):
    """The number of the text that leads to every node, [N, m + 1]."""
    found = torch.zeros_like(torch.nn.functional.pad(tree.tokens, (1, 0)))
    for node in range(tree.tokens.shape[1]):
        found[:, node + 1] = V * found.gather(1, tree.parents[:, node, None] + 1)[:, 0] + 1 + tree.tokens[:, node]
    return found


def completed(p, begun, length):
    """The distribution of `length` tokens from that of shorter texts by number; the target goes on."""
    starts = [(V**n - 1) // (V - 1) for n in range(length + 2)]
    for start, end, last in zip(starts, starts[1:], starts[2:]):
        begun[end:last] += (begun[start:end, None] * p[start:end]).flatten()
    return begun[starts[-2] :]


def check_emitted(p, tree, mass, length):
    """Compares the distribution of `length` tokens with the target's; mass [N, m + 1, V]: the path ends at a node, and
    a token is added."""
    size = (V ** (length + 1) - 1) // (V - 1)
    added = V * numbers_of(tree)[..., None] + 1 + torch.arange(V)
    ours = torch.zeros(size, dtype=torch.float64).scatter_add_(0, added.flatten(), mass.flatten())
    theirs = torch.zeros(size, dtype=torch.float64)
    theirs[0] = 1
    assert (completed(p, ours, length) - completed(p, theirs, length)).abs().max() < 1e-12


@pytest.mark.by_day("ff-function", "hmm-host", "hydra++-table", "eagle-mask", "module-table", "assistant-host")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [*KINDS, "eagle", "module", "assistant"])
def test_chains(kind, way, monkeypatch):
    make, options = WAYS[way]
    for seed in range(2):
        constraint, drafter = make(seed), drafter_of(kind)
        tree, _ = first_draft(
            monkeypatch, drafter, len(DRAFTS), DRAFTS.t(), num_assistant_tokens=DEPTH, **options(constraint)
        )
        assert torch.equal(tree.tokens, DRAFTS) and tree.probs.dtype == torch.float64
        q, p = tree.probs[:, :DEPTH], target_of(constraint, seed)
        chance = q.gather(-1, DRAFTS[..., None])[..., 0].prod(1)
        torch.testing.assert_close(chance.sum(), torch.ones((), dtype=torch.float64))
        legal = [all(constraint.mask((FIRST, *text[:i]))[text[i]] for i in range(DEPTH)) for text in DRAFTS.tolist()]
        assert not chance[~torch.tensor(legal)].any()
        for rule in ("token", "block"):
            stopped, residual = ends_of(rule, DRAFTS, q, p[numbers_of(tree)])
            check_emitted(p, tree, chance[:, None, None] * stopped[..., None] * residual, DEPTH + 1)


@pytest.mark.by_day("module-function")
@pytest.mark.parametrize(
    ("kind", "way"),
    [*itertools.product(["ff", "btree", "hydra", "eagle", "module"], ["function"]), ("cp", "table"), ("hmm", "table")],
)
def test_drawn_trees(kind, way, monkeypatch):
    """Two of five tokens for b, then three children for the two."""
    make, options = WAYS[way]
    pairs = torch.tensor(list(itertools.permutations(range(V), 2)))
    draws = torch.tensor(list(itertools.product(range(len(pairs)), repeat=3)))
    kept, constraint = [pairs[draws[:, :1]], pairs[draws[:, 1:]]], make(1)
    tree, used = first_draft(
        monkeypatch, drafter_of(kind), len(draws), kept, draft_tree=dict(depth=1, top_k=2, total_tokens=6),
        **options(constraint),
    )  # fmt: skip
    assert tree.tokens.shape[1] == 5 and tree.probs.dtype == torch.float64
    chance = chance_of_pairs(used, kept)
    torch.testing.assert_close(chance.sum(), torch.ones((), dtype=torch.float64))
    p, drawn = target_of(constraint), chance > 0
    tree, chance = DraftTree(tree.tokens[drawn], tree.parents[drawn], tree.probs[drawn], depth=2), chance[drawn]
    for rule in ("token", "block"):
        accept, residual = tree_acceptance(tree, p[numbers_of(tree)], rule)
        check_emitted(p, tree, chance[:, None, None] * ends(tree, accept, rule)[..., None] * residual, DEPTH)


def test_a_drafter_that_is_the_target_loses_nothing(monkeypatch):
    """Masked conditionals of the target's own distribution are accepted for certain."""
    constraint, model = Automaton(3), backbone(vocabulary=V).eval()
    drafter = AssistantDrafter(model, num_tokens=3)
    same = backbone(vocabulary=V).eval()
    drafter.attach(same)
    torch.manual_seed(0)
    for options in (as_function(constraint), {"logits_processor": [TableAutomaton(constraint.next, constraint.masks)]}):
        out = same.generate(
            PROMPT.expand(4, -1), attention_mask=torch.ones(4, 5).long(), assistant_model=drafter, max_new_tokens=25,
            return_dict_in_generate=True, **SAMPLING, **options,
        )  # fmt: skip
        assert out.speculation.rows_accepted == [[3] * 6] * 4
        texts = [tuple(row) for row in out.sequences[:, 5:].tolist()]
        assert all(constraint.mask(text[:i])[text[i]] for text in texts for i in range(25))


def test_enumeration_notices_drafts_that_do_not_know_the_constraint(monkeypatch):
    """Distributions that were not masked are not those that the tokens follow."""
    constraint = Automaton(0)
    tree, _ = first_draft(
        monkeypatch, drafter_of("ff"), len(DRAFTS), DRAFTS.t(), num_assistant_tokens=DEPTH, **as_function(constraint)
    )
    q, p = tree.probs[:, :DEPTH], target_of(constraint)
    chance, claimed = q.gather(-1, DRAFTS[..., None])[..., 0].prod(1), 0.5 * q + 0.1
    stopped, residual = ends_of("token", DRAFTS, claimed, p[numbers_of(tree)])
    with pytest.raises(AssertionError):
        check_emitted(p, tree, chance[:, None, None] * stopped[..., None] * residual, DEPTH + 1)
