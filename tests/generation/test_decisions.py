"""Every decision between drawing and verifying keeps the target's distribution: the table of docs/verification.md.

Two cycles, a vocabulary of three tokens, all random choices enumerated in float64.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from tests.branches import Branches, continued
from tokenahead.extending import AttachableDrafter, AutomatonProcessor, DraftSession, DraftTree
from tokenahead.generation.call.costs import POSITIONS, BlockCosts
from tokenahead.generation.call.options import DraftOptions, block_chain, grow_chain
from tokenahead.generation.call.sequences import Sequences
from tokenahead.generation.candidates import CandidateAdapter
from tokenahead.generation.contract import VerificationResult
from tokenahead.generation.forced import ForcedSession
from tokenahead.generation.lookups.cascade import CascadeSession, LookupCalibration
from tokenahead.generation.trees.building import drawn_tree, dynamic_tree, of_real
from tokenahead.generation.trees.growth import grow
from tokenahead.generation.verification.rules import verify
from tokenahead.generation.verification.verifiers import SampledVerifier, Uniforms

V, NEW, LENGTH, PROMPT = 3, 3, 2, (1, 2)
RULES = ["token", "block"]


def rows(seed):
    """A random distribution's logits by the two last tokens."""
    table = 1.5 * torch.randn(V, V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return lambda text: table[text[-2], text[-1]]


TARGET, DRAFTER = rows(0), rows(1)


def options_of(processors=(), **changes):
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=V))
    values = dict(speculates=True, do_sample=True, num_assistant_tokens=LENGTH, max_length=20)
    values |= dict(prompt=torch.tensor([PROMPT]))
    return DraftOptions(
        backbone=SimpleNamespace(config=config), processors=LogitsProcessorList(processors), **values | changes
    )


class Drawing(DraftSession):
    """Draws chains and trees from rows of its own with the library's own growth."""

    num_tokens = LENGTH

    def __init__(self, options, logits=DRAFTER, whole=False, draft_ids=None):
        self.options, self.logits, self.whole, self.draft_ids, self.vocab_size = options, logits, whole, draft_ids, V

    def propose(self, tokens, length):
        self.text = tuple(tokens.ids[0, : tokens.lengths[0]].tolist())
        masks = self.options.masks(tokens)
        if not length:
            return DraftTree.chain(tokens.ids[:, :0])
        if self.options.draft_tree is not None:
            self.paths = [()]
            return grow(self, self.options, length, masks)
        if self.whole:  # rows that no draft changes
            return block_chain(torch.stack([self.columns(self.text + (0,) * n) for n in range(length)])[None],
                               self.options, masks, self.draft_ids, V)  # fmt: skip
        self.path = ()
        return grow_chain(lambda token: self.step(token, masks), self.options, length)

    def step(self, token, masks):
        self.path += () if token is None else (int(token),)
        return self.options.choose(self.columns(self.text + self.path)[None], self.draft_ids, V, masks)

    def columns(self, text):
        return self.logits(text) if self.draft_ids is None else self.logits(text)[self.draft_ids]

    def first(self):
        return self.columns(self.text)[None]

    def after(self, tokens, parents):
        before = [self.paths[max(parent, 0)] for parent in parents[0].tolist()]
        self.paths = [(*path, token) for path, token in zip(before, tokens[0].tolist())]
        return torch.stack([self.columns(self.text + path) for path in self.paths])[None]


class Independent(Drawing):
    """Grows trees from rows that no draft changes."""

    def propose(self, tokens, length):
        self.text = tuple(tokens.ids[0, : tokens.lengths[0]].tolist())
        self.rows = torch.stack([self.columns(self.text + (0,) * n) for n in range(LENGTH)])[None]
        return grow(self, self.options, length) if length else DraftTree.chain(tokens.ids[:, :0])


class Looking(DraftSession):
    """A look-up's drafts: a function of the text."""

    num_tokens, expected = LENGTH, 0.0

    def __init__(self, branches=1):
        self.branches = branches

    def propose(self, tokens, length):
        last = int(tokens.last())
        if self.branches == 1:
            return DraftTree.chain(torch.tensor([last, (last + 1) % V][:length], dtype=torch.long)[None])
        nodes = [last, last, (last + 1) % V, last][: 2 * length]  # the second repeats the first
        parents = torch.tensor([-1, -1, 0, 1][: len(nodes)], dtype=torch.long)
        return DraftTree(torch.tensor(nodes, dtype=torch.long)[None], parents[None], depth=length)


class Guess(AutomatonProcessor):
    """Excludes nothing but after token 1, guesses, and forces token 2 after two tokens of which the last is 0."""

    start = (0,)

    def step(self, state, token):
        return (*state, token)[-2:]

    def allowed(self, state):
        return torch.arange(V) == 2 if state[-1] == 0 and len(state) > 1 else torch.ones(V, dtype=torch.bool)

    def likely(self, state):
        return {0: 1, 1: 0, 2: 2}[state[-1]]


class Sure(Drawing):
    """Leaves out nodes by an estimate that reads the token before, as block drafters with a confidence head do."""

    def propose(self, tokens, length):
        tree = super().propose(tokens, length)
        known = torch.cat([tokens.last()[:, None], tree.tokens], 1).gather(1, tree.parents + 1)
        real = ((known != 0)[:, None] | ~tree.mask()[:, 1:, 1:]).all(-1)
        return of_real(tree, real) if length else tree


class LooksBehind(Sure):
    """What no drafter may do: it leaves out tokens by what they are."""

    def propose(self, tokens, length):
        tree = Drawing.propose(self, tokens, length)
        return of_real(tree, (tree.tokens != 0).cumprod(1).bool()) if length else tree


class Faulty(Drawing):
    """Has no numbers after token 2."""

    def columns(self, text):
        found = super().columns(text)
        return torch.full_like(found, torch.nan) if text[-1] == 2 and len(text) > len(self.text) else found


TREE = {"depth": 1, "top_k": 2, "total_tokens": 4}
BUDGET = {"depth": 1, "top_k": 5, "total_tokens": 5}


def paying():
    """Options of a call in which a tree has as many nodes as pay, of which each costs a third of a plain cycle."""
    options = options_of(draft_tree=None, do_sample=False)
    vars(options)["block"] = BlockCosts(tuple(1 + (width - 1) / 3 for width in POSITIONS))
    return options


def cascade(joins):
    sessions = [Looking(), Drawing(options_of())]
    return CascadeSession(sessions, [LookupCalibration()], 2.0, joins)


SESSIONS = {
    "length": lambda: Drawing(options_of()),
    "threshold of a chain": lambda: Drawing(options_of(threshold=0.4)),
    "threshold of a whole draft": lambda: Drawing(options_of(threshold=0.4), whole=True),
    "draft vocabulary": lambda: Drawing(options_of(), draft_ids=torch.tensor([0, 2])),
    "drawn tree": lambda: Drawing(options_of(draft_tree=TREE)),
    "drawn tree of a draft vocabulary": lambda: Drawing(options_of(draft_tree=TREE), draft_ids=torch.tensor([0, 2])),
    "likely tree": lambda: Drawing(options_of(draft_tree=BUDGET, do_sample=False)),
    "likely tree of independent places": lambda: Independent(options_of(draft_tree=BUDGET, do_sample=False)),
    "as many nodes as pay": lambda: Independent(paying()),
    "fixed tree": lambda: Drawing(options_of(draft_tree={"choices": [(0,), (1,), (0, 1)]})),
    "confidence, chain": lambda: Sure(options_of()),
    "confidence, tree": lambda: Sure(options_of(draft_tree=TREE)),
    "repeated siblings": lambda: Looking(2),
    "cascade": lambda: cascade(False),
    "joined cascade": lambda: cascade(True),
    "no numbers, chain": lambda: Faulty(options_of()),
    "no numbers, tree": lambda: Faulty(options_of(draft_tree=TREE)),
    "no numbers, draft vocabulary": lambda: Faulty(options_of(), draft_ids=torch.tensor([0, 2])),
    "guesses": lambda: ForcedSession(Drawing(options_of([GUESS])), options_of([GUESS])),
    "guesses, look-up": lambda: ForcedSession(Looking(), options_of([GUESS])),
    "guesses, whole draft": lambda: ForcedSession(Drawing(options_of([GUESS]), whole=True), options_of([GUESS])),
    "guesses, no numbers": lambda: ForcedSession(Faulty(options_of([GUESS])), options_of([GUESS])),
}
GUESS = Guess()


def target_of(name):
    def target(text):
        state = Guess.start
        for token in text[len(PROMPT) :]:
            state = GUESS.step(state, token)
        is_bound = name.startswith("guesses")
        scores = TARGET(text).masked_fill(~GUESS.allowed(state), -torch.inf) if is_bound else TARGET(text)
        return scores.softmax(-1)

    return target


def cycle(session, verifier, p, text):
    """What a cycle adds to a text."""
    tokens, left = Sequences(torch.tensor([PROMPT + text])), NEW - len(text)
    tokens.prompt_length = len(PROMPT)
    tree = session.propose(tokens, min(session.num_tokens, left - 1))
    paths = [tuple(tree.tokens[0][row[1:]].tolist()) for row in tree.mask()[0]]
    result = verifier.verify(tree, torch.stack([p(PROMPT + text + path) for path in paths]).log()[None])
    return tuple(result.tokens[0, : int(result.num_accepted) + 1].tolist()[:left])


def gap(monkeypatch, session, rule, p):
    """The largest difference between the law of the text and the target's."""
    branches, found = Branches(monkeypatch), {(): 1.0}
    for length in range(NEW):
        for text in [text for text in found if len(text) == length]:
            chance = found.pop(text)
            for more, share in branches.law(lambda: cycle(session(), SampledVerifier(rule), p, text)).items():  # noqa: B023
                found[text + more] = found.get(text + more, 0.0) + chance * share
    want = continued(p, list(itertools.product(range(V), repeat=NEW)), PROMPT)
    assert abs(sum(found.values()) - 1) < 1e-12
    return max(abs(found.get(text, 0.0) - want[text]) for text in want)


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SESSIONS)
def test_the_text_has_the_targets_distribution(name, rule, monkeypatch):
    assert gap(monkeypatch, SESSIONS[name], rule, target_of(name)) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_decision_that_looks_at_the_token_it_drops_is_seen(rule, monkeypatch):
    assert gap(monkeypatch, lambda: LooksBehind(options_of()), rule, target_of("length")) > 1e-3


class Drafter(AttachableDrafter):
    """Attaches sessions of this file to a backbone."""

    window, drafts_trees = LENGTH + 1, True

    def __init__(self, session):
        self.session_of = session

    def start(self, options):
        return self.session_of(options)


def llama():
    torch.manual_seed(0)
    sizes = dict(vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **ids, initializer_range=0.5)).eval().double()


class Switch(LogitsProcessor):
    """Token 2 after the prompt turns a switch, of its row or of all, and then token 1 becomes rare."""

    def __init__(self):
        self.seen = [False] * 2

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            self.seen[row] |= len(ids) > len(PROMPT) and ids[-1] == 2
            scores[row, 1] -= 2.0 * self.seen[row]
        return scores


def closure():
    """A switch in a closure."""
    seen = {}

    def processor(input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            if len(ids) > len(PROMPT) and ids[-1] == 2:
                seen[row] = True
            scores[row, 1] -= 2.0 * (row in seen)
        return scores

    return processor


@torch.no_grad()
def switched(model):
    """The rows of a backbone under a switch."""
    known = {}

    def target(text):
        if text not in known:
            scores = model(torch.tensor([text])).logits[0, -1].float()
            known[text] = Switch()(torch.tensor([text]), scores[None])[0] if text[-1] == 2 else scores
            if 2 in text[len(PROMPT) : -1] and text[-1] != 2:
                known[text] = scores - 2.0 * torch.nn.functional.one_hot(torch.tensor(1), V)
        return known[text].softmax(-1)

    return target


CALLS = {
    "state": (lambda options: Drawing(options, draft_ids=torch.tensor([0, 2])), Switch),
    "state, closure": (lambda options: Drawing(options, draft_ids=torch.tensor([2, 1])), closure),
    "state, whole draft": (lambda options: Drawing(options, whole=True, draft_ids=torch.tensor([0, 2])), Switch),
    "state, look-up": (lambda options: Looking(), Switch),
    "no numbers": (lambda options: Faulty(options, draft_ids=torch.tensor([0, 2])), None),
    "state, tree": (lambda options: Drawing(options, draft_ids=torch.tensor([0, 2])), Switch),
}


@pytest.mark.by_day("state-token", "no numbers-block", "state, tree-block")
@pytest.mark.parametrize(
    ("name", "rule"), [*((name, "block") for name in CALLS), ("state", "token"), ("no numbers", "token")]
)
def test_calls_have_the_backbones_distribution(name, rule, monkeypatch):
    """Whole calls of `generate`: a state that moves on a drafted token, and numbers that are none after one."""
    model, (session, processor) = llama().requires_grad_(False), CALLS[name]
    drafter, options = (
        Drafter(session).attach(model),
        dict(do_sample=True, top_k=0, max_new_tokens=4, verification=rule),
    )

    def run():
        own = {} if processor is None else {"logits_processor": [processor()]}
        own |= {"draft_tree": TREE} if "tree" in name else {}
        return tuple(model.generate(torch.tensor([PROMPT]), assistant_model=drafter, **options, **own)[0, 2:].tolist())

    found = Branches(monkeypatch, given=[0]).law(run)
    target = (
        switched(model) if processor else lambda text: model(torch.tensor([text])).logits[0, -1].float().softmax(-1)
    )
    want = continued(target, list(itertools.product(range(V), repeat=3)), (*PROMPT, 0))
    assert max(abs(found[(0, *text)] - want[text]) for text in want) < 1e-6


def test_candidates_end_before_numbers_that_are_none():
    """transformers' own loop verifies what was drawn before them, and gets no more drafts."""
    model, prompt, lengths = llama().requires_grad_(False), torch.tensor([PROMPT]), set()
    for seed in range(8):
        torch.manual_seed(seed)
        options = options_of()
        adapter = CandidateAdapter(Faulty(options), options)
        ids, log_q = adapter.get_candidates(prompt, model(prompt, output_hidden_states=True), False)
        draft = ids[0, 2:].tolist()
        assert draft.index(2) == len(draft) - 1 if 2 in draft[:1] else len(draft) == LENGTH
        assert log_q.shape == (1, len(draft), V) and log_q.exp().sum(-1).sub(1).abs().max() < 1e-12
        again, _ = adapter.get_candidates(prompt, None, False) if len(draft) < LENGTH else (prompt, None)
        assert again.equal(prompt)
        lengths.add(len(draft))
    assert lengths == {1, 2}


def test_uniforms_of_cycles_are_fresh():
    fresh = Uniforms(2, torch.device("cpu"), seed=3, stay=False)
    numbers = torch.cat([fresh.fresh(3), fresh.fresh(4)], 1)
    assert numbers.unique().numel() == numbers.numel()


def test_drafts_of_the_target_itself_are_all_kept():
    for uniform in (0.0, 0.5):
        p = torch.tensor([[[0.25, 0.5, 0.25]] * 3])
        accepted, _, _ = verify(torch.tensor([[1, 0]]), p[:, :2], p, "block", tests=torch.full((1, 2), uniform))
        assert accepted.tolist() == [2]


def test_the_first_tokens_of_a_result():
    path = torch.tensor([[0, 1, 3, 4], [0, 2, 2, 2]])
    result = VerificationResult(torch.tensor([3, 1]), torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0]]), path)
    first = result.first(torch.tensor([2, 3]))
    assert first.num_accepted.tolist() == [1, 1] and first.added.tolist() == [6, 6]
    assert first.path.tolist() == [[0, 1, 1, 1], [0, 2, 2, 2]]


def test_no_child_is_better_than_its_parent():
    """Rounding may give log-probabilities above 0."""
    better = lambda tokens, parents: torch.full((1, tokens.shape[1], V), 1e-3)  # noqa: E731
    tree = dynamic_tree(torch.tensor([[-5.0, -1.0, -9.0]]), better, depth=1, top_k=2, total_tokens=2)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([[1]], [[-1]])


def test_a_second_draw_is_likely_where_nothing_else_is_left():
    q = torch.tensor([[0.5, 0.5, 0.0]])
    expand = lambda tokens, parents: q[:, None].expand(-1, tokens.shape[1], -1)  # noqa: E731
    tree = drawn_tree(q, expand, depth=1, top_k=2, total_tokens=5)
    assert tree.parents.tolist() == [[-1, -1, 0, 1]]


class Late(LogitsProcessor):
    """Counts its calls after five ids, and excludes a token by their number."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += input_ids.shape[1] > 4
        return scores.index_fill(1, torch.tensor([self.calls % V]), -torch.inf)


def test_a_state_is_put_back_where_a_block_is_read_again():
    """The scores of a block are none, for what is drafted in it, while a state moves."""
    model, prompt, options = llama(), torch.tensor([PROMPT]), dict(max_new_tokens=9, do_sample=False)
    want = model.generate(prompt, logits_processor=[Late()], **options)
    model.lm_head.register_forward_hook(
        lambda module, args, out: out * torch.nan if out.shape[1] > 1 and args[0].shape[1] > 1 else out
    )
    drafter = Drafter(lambda options: FromThree()).attach(model)
    assert model.generate(prompt, logits_processor=[Late()], assistant_model=drafter, **options).equal(want)


class FromThree(Looking):
    """Drafts nothing before there are five ids."""

    def propose(self, tokens, length):
        return super().propose(tokens, length if tokens.lengths[0] > 4 else 0)
