"""Forced tokens: drafted without the drafter, for every kind of it, and exact by enumeration."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessorList

from tests.backbones import backbone, prompts
from tests.matrix import models
from tokenahead.extending import AttachableDrafter, AutomatonProcessor, DraftSession, DraftTree, TableAutomaton
from tokenahead.generation.call.processing import Processing
from tokenahead.generation.call.sequences import Sequences
from tokenahead.generation.forced import MOST, ForcedSession
from tokenahead.generation.verification.rules import block_acceptance, token_acceptance

V, DEPTH, STATES, PROMPT = 4, 5, 5, [[1, 2]]


class Runs(AutomatonProcessor):
    """Every fourth token is free, and those between are forced by it."""

    start = 0

    def __init__(self, size: int):
        self.size = size

    def step(self, state, token):
        return 1 + 3 * (token % 7) if state % 3 == 0 else state + 1

    def allowed(self, state):
        mask = torch.zeros(self.size, dtype=torch.bool)
        mask[3 : self.size // 2 if state % 3 == 0 else None] = True
        return mask if state % 3 == 0 else mask & (torch.arange(self.size) == 3 + (5 * state) % (self.size - 3))


class Table(DraftSession):
    """Drafts that are dictated, with the distributions that they would be drawn from."""

    num_tokens = 2

    def __init__(self, world):
        self.world, self.calls = world, []

    def propose(self, tokens, length):
        self.calls.append(length)
        draft = self.world.dictated[:length]
        q = [self.world.q(draft[:index]) for index in range(length)]
        return DraftTree.chain(torch.tensor([draft], dtype=torch.long).view(1, -1), torch.stack(q)[None] if q else None)


class World:
    """A random target and a random drafter, both kept to a random automaton in which some states force a token."""

    def __init__(self, seed: int):
        draws = torch.Generator().manual_seed(seed)
        self.next = torch.randint(STATES, (STATES, V), generator=draws)
        self.masks = torch.rand(STATES, V, generator=draws) < 0.6
        for state in range(STATES):
            only = torch.arange(V) == int(torch.randint(V, (1,), generator=draws))
            self.masks[state] = only if (state + seed) % 2 else self.masks[state] | only
        texts = [text for length in range(DEPTH + 2) for text in itertools.product(range(V), repeat=length)]
        logits = torch.randn(2, len(texts), V, generator=draws, dtype=torch.float64)
        self.logits = {text: logits[:, index] for index, text in enumerate(texts)}
        processing = Processing(LogitsProcessorList([TableAutomaton(self.next, self.masks)]), prompt_length=2)
        self.options = SimpleNamespace(
            masks=lambda tokens, is_warped: processing.constraints.masks(tokens, is_warped),
            prompt=torch.tensor(PROMPT),
            draft_tree=None,
            backbone=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=V))),
        )

    def _probs(self, which, text):
        state = 0
        for token in text:
            state = int(self.next[state, token])
        return self.logits[tuple(text)][which].masked_fill(~self.masks[state], -torch.inf).softmax(-1)

    def p(self, text):
        return self._probs(0, text)

    def q(self, text):
        return self._probs(1, text)


@pytest.mark.by_day("4-token_acceptance", "8-block_acceptance")
@pytest.mark.parametrize("rule", [token_acceptance, block_acceptance])
@pytest.mark.parametrize("seed", [2, 4, 5, 8, 10])
def test_what_is_emitted_has_the_targets_distribution(rule, seed):
    """All drafts of two drawn tokens, and what is forced before and after them."""
    world, lengths = World(seed), set()
    output = dict.fromkeys(itertools.product(range(V), repeat=DEPTH), 0.0)
    for dictated in itertools.product(range(V), repeat=2):
        world.dictated = dictated
        chance = math.prod(float(world.q(dictated[:index])[token]) for index, token in enumerate(dictated))
        if not chance:
            continue
        inner = Table(world)
        tree = ForcedSession(inner, world.options).propose(Sequences(torch.tensor(PROMPT)), DEPTH - 1)
        draft, m = tree.tokens[0].tolist(), tree.tokens.shape[1]
        certain = [torch.nn.functional.one_hot(torch.tensor(token), V).double() for token in draft]
        q = torch.stack(certain)[None] if tree.probs is None else tree.probs
        p = torch.stack([world.p(draft[:index]) for index in range(m + 1)])[None]
        accept, residual = rule(tree.tokens, q, p)
        lengths.add((m, inner.calls[-1]))
        for n in range(m + 1):
            if rule is block_acceptance:  # the longest prefix whose test succeeds
                kept = float((accept[0, n - 1] if n else 1.0) * (1 - accept[0, n:]).prod())
            else:
                kept = float(accept[0, :n].prod() * (1 - accept[0, n] if n < m else 1.0))
            for rest in itertools.product(range(V), repeat=DEPTH - n) if kept else ():
                text = (*draft[:n], *rest)
                later = math.prod(float(world.p(text[:index])[text[index]]) for index in range(n + 1, DEPTH))
                output[text] += chance * kept * float(residual[0, n, rest[0]]) * later
    for text, found in output.items():
        assert abs(found - math.prod(float(world.p(text[:i])[text[i]]) for i in range(DEPTH))) < 1e-12
    assert max(length for length, _ in lengths) > 2


def test_what_is_forced_beyond_a_shorter_draft_replaces_it():
    world = World(2)
    session = ForcedSession(Table(world), world.options)
    tree = DraftTree.chain(torch.tensor([[3, 2], [3, 2]]), num_nodes=torch.tensor([1, 2]))
    joined = session._joined(torch.tensor([[3, 2, 0], [3, 2, 0]]), [3, 1], tree)
    assert joined.num_nodes.tolist() == [3, 2] and joined.tokens[0].tolist() == [3, 2, 0]


class Counted(AttachableDrafter):
    """A drafter that drafts one and the same token, and notes how often it is asked."""

    window = 3

    def __init__(self):
        self.asked = []

    def start(self, options):
        drafter = self

        class Session(DraftSession):
            num_tokens = options.num_tokens

            def propose(self, tokens, length):
                drafter.asked.append(length)
                return DraftTree.chain(tokens.ids.new_full((len(tokens.ids), length), 3))

        return Session()


def test_the_drafter_is_not_asked_where_a_run_is_longer_than_its_drafts():
    model, inputs = backbone(), models.left_padded(prompts(1))
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False, logits_processor=[Runs(48)])
    drafter = Counted().attach(model)
    options = dict(max_new_tokens=24, do_sample=False, return_dict_in_generate=True, assistant_model=drafter)
    out = model.generate(**inputs, **options, logits_processor=[Runs(48)])
    assert out.sequences.equal(plain)
    assert sum(length > 0 for length in drafter.asked) < len(drafter.asked)
    drafter.asked.clear()
    free = model.generate(**inputs, **options)
    assert 0 not in drafter.asked[:-1] and free.speculation.backbone_calls  # without a constraint it is asked always
    drafter.detach()


@pytest.mark.by_day(
    "suffix-mistral-greedy",
    "hydra-qwen3-certain",
    "deepseek-modules-greedy",
    "translation-llama-certain",
    "ptp-one_hot-greedy",
)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "certain"])
@pytest.mark.parametrize(
    "name",
    ["ngram-llama", "suffix-mistral", "eagle-llama", "heads-gemma3", "hydra-qwen3", "evabyte-hmm", "deepseek-modules",
     "assistant-llama", "translation-llama", "cascade-qwen3", "ptp-one_hot"],
)  # fmt: skip
def test_any_drafter(name, options):
    """The plain text, alone and in ragged batches, as chains and trees."""
    entry = models.entry(name)
    for rows, tree in ((1, None), (3, None), (3, entry.tree)):
        call = options | ({} if tree is None else {"draft_tree": tree})
        out = entry.generate(entry.inputs(rows), logits_processor=[Runs(entry.vocabulary)], max_new_tokens=20, **call)
        assert out.equal(entry.plain(entry.inputs(rows), logits_processor=[Runs(entry.vocabulary)], max_new_tokens=20))


def test_forced_runs_are_longer_than_drafts():
    entry = models.entry("ngram-llama")
    out = entry.generate(
        entry.inputs(1), logits_processor=[Long(entry.vocabulary)], max_new_tokens=60, num_assistant_tokens=1,
        return_dict_in_generate=True,
    )  # fmt: skip
    longest = max(out.speculation.rows_accepted[0])
    assert 1 + MOST >= longest > 4


class Long(Runs):
    """Runs of seven tokens, each another one."""

    def step(self, state, token):
        return 1 if state % 8 == 0 else state + 1

    def allowed(self, state):
        mask = torch.zeros(self.size, dtype=torch.bool)
        mask[3:40] = state % 8 == 0
        mask[3 + state % 8] = True
        return mask
