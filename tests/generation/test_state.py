"""Logits processors with a state that each call moves on: the text of plain decoding; others keep their drafts."""

import itertools
import random

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from tests.every_model import llama
from tests.tree_drafters import KnowingChains, KnowingTrees
from tokenahead import EvaByteTokenizer, GrammarConstraint, NgramDrafter

SHARED = {"calls": 0}
VOCABULARY, NEW = 64, 24


class Excludes(LogitsProcessor):
    """Excludes tokens by a number that its calls, or the ids of a sequence, move on."""

    def __init__(self) -> None:
        self.mask, self.names = torch.zeros(VOCABULARY), {token: str(token) for token in range(VOCABULARY)}

    def __call__(self, input_ids, scores):
        tokens = (7 * self.moved() + torch.arange(12)) % VOCABULARY
        return (scores + self.mask).index_fill(1, tokens, -torch.inf)

    def moved(self) -> int:
        raise NotImplementedError


class Counter(Excludes):
    calls = 1000

    def moved(self):
        self.calls += 1
        return self.calls


class Nested(Excludes):
    """The state lies in slots, in a list of a dict."""

    class Cell:
        __slots__ = ("value",)

    def __init__(self):
        super().__init__()
        self.cells = {"of": [self.Cell()]}
        self.cells["of"][0].value = 0

    def moved(self):
        self.cells["of"][0].value += 1
        return self.cells["of"][0].value


class InPlace(Excludes):
    def moved(self):
        self.mask.sub_(0.01 * torch.arange(VOCABULARY))
        return 0


class BehindItsBack(Excludes):
    """Writes to a tensor through numpy, which tensors do not count."""

    def moved(self):
        self.mask.numpy()[:] -= 0.01 * torch.arange(VOCABULARY).numpy()
        return 0


class OfTheClass(Excludes):
    calls = 0

    def moved(self):
        OfTheClass.calls += 1
        return OfTheClass.calls


class OfTheModule(Excludes):
    def moved(self):
        SHARED["calls"] += 1
        return SHARED["calls"]


class Iterator(Excludes):
    def __init__(self):
        super().__init__()
        self.count = itertools.count()

    def moved(self):
        return next(self.count)


class Drawing(Excludes):
    def __init__(self):
        super().__init__()
        self.random = random.Random(3)

    def moved(self):
        return self.random.randrange(9)


class ByTokens(LogitsProcessor):
    """Every sequence counts its own tokens of a kind, from an empty state on: it moves late."""

    def __init__(self) -> None:
        self.counts = [0] * 8

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for index, token in enumerate(input_ids[:, -1].tolist() if input_ids.shape[1] > 9 else ()):
            self.counts[index] += token % 7 == 3
            if self.counts[index]:
                scores[index, (5 * self.counts[index] + torch.arange(30)) % VOCABULARY] = -torch.inf
        return scores


def closure():
    calls = 0

    def processor(input_ids, scores):
        nonlocal calls
        calls += 1
        return scores.index_fill(1, torch.tensor([calls % VOCABULARY]), -torch.inf)

    return processor


MOVING = [Counter, Nested, InPlace, BehindItsBack, Iterator, Drawing, ByTokens, closure]


class Biased(LogitsProcessor):
    """Stateless, with tensors that it moves to the device of the scores."""

    def __init__(self) -> None:
        self.bias = torch.arange(VOCABULARY) / VOCABULARY

    def __call__(self, input_ids, scores):
        self.bias = self.bias.to(scores.device)
        return scores + self.bias


class Prepared(Biased):
    """Makes its tensor in the first call, and keeps it."""

    made = None

    def __call__(self, input_ids, scores):
        self.made = self.bias.clone() if self.made is None else self.made
        return scores + self.made


class Remembers(Biased):
    """Results that a cache holds are no state, which it says itself."""

    counts_calls = False

    def __init__(self):
        super().__init__()
        self.known = {}

    def __call__(self, input_ids, scores):
        self.known.setdefault(input_ids.shape[1], self.bias)
        return scores + self.known[input_ids.shape[1]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return llama(initializer_range=0.25)


def batch_of(rows: int, seed: int):
    ids = torch.randint(3, VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=0)


def generated(model, make, **asked):
    """The output with a new processor, and the calls of the backbone."""
    calls = []
    hook = model.register_forward_pre_hook(lambda *_: calls.append(1))
    torch.manual_seed(5)
    out = model.generate(**asked, logits_processor=LogitsProcessorList([make()]))
    hook.remove()
    return out, len(calls)


DRAFTERS = {
    "chains": lambda model: KnowingChains(VOCABULARY).attach(model),
    "trees": lambda model: KnowingTrees(VOCABULARY).attach(model),
    "n-grams": lambda model: NgramDrafter(longest=1, num_tokens=4).attach(model),
}


@pytest.mark.by_day("Counter-1", "InPlace-4", "BehindItsBack-1", "Drawing-4", "closure-4")
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("make", MOVING)
def test_texts_are_those_of_plain_decoding(model, make, rows):
    for (kind, attached), eos in zip(DRAFTERS.items(), (None, 5, 7)):
        drafter, asked = attached(model), batch_of(rows, len(kind)) | {"eos_token_id": eos}
        want, plain = generated(model, make, **asked)
        drafter.texts = want.tolist()
        drafted, calls = generated(model, make, **asked, assistant_model=drafter, return_dict_in_generate=True)
        assert drafted.sequences.equal(want) and calls <= plain + 1, kind
        drafter.detach()


def test_state_of_classes_and_modules(model):
    for make in [OfTheClass, OfTheModule]:
        drafter = NgramDrafter(longest=1, num_tokens=4).attach(model)
        texts = []
        for asked in ({}, {"assistant_model": drafter}):
            OfTheClass.calls = SHARED["calls"] = 0
            texts.append(generated(model, make, **batch_of(2, 1), **asked)[0])
        assert texts[0].equal(texts[1])
        drafter.detach()


def test_stateless_processors_keep_their_drafts(model):
    for rows, make in itertools.product([1, 4], [Biased, Prepared, Remembers]):
        drafter, asked = KnowingChains(VOCABULARY).attach(model), batch_of(rows, 2)
        want, plain = generated(model, make, **asked)
        drafter.texts = want.tolist()
        drafted, calls = generated(model, make, **asked, assistant_model=drafter)
        assert drafted.equal(want) and calls < 0.7 * plain
        drafter.detach()


def test_a_late_move_keeps_the_drafts_before_it(model):
    """What is drafted until then stays, and calls for drafts that were dropped leave no trace."""

    class Late(ByTokens):
        def __call__(self, input_ids, scores):
            return scores if input_ids.shape[1] < 24 else super().__call__(input_ids, scores)

    drafter, asked = KnowingChains(VOCABULARY).attach(model), batch_of(1, 3)
    want, plain = generated(model, Late, **asked)
    drafter.texts = want.tolist()
    drafted, calls = generated(model, Late, **asked, assistant_model=drafter)
    assert drafted.equal(want) and calls < plain
    drafter.detach()


def test_use_mtp_demands_drafts(model):
    drafter = NgramDrafter().attach(model)
    with pytest.raises(ValueError, match="use_mtp=.*Counter"):
        generated(model, Counter, **batch_of(1, 1), assistant_model=drafter, use_mtp=True)
    drafter.detach()


class Guided(LogitsProcessor):
    """Feeds a matcher per sequence, and has no other state."""

    def __init__(self) -> None:
        constraints = [GrammarConstraint(EvaByteTokenizer(), regex=r"([a-m]x|[n-z]yy)*") for _ in range(3)]
        self.matchers = [constraint.matcher for constraint in constraints]

    def __call__(self, input_ids, scores):
        masks = []
        for matcher, ids in zip(self.matchers, input_ids.tolist()):
            if len(ids) > 9:
                matcher.consume_token(ids[-1])
            bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
            masks.append((bits[:, None] >> torch.arange(8) & 1).bool().flatten()[: scores.shape[-1]])
        return scores.masked_fill(~torch.stack(masks), -torch.inf)


def test_matchers_of_compiled_extensions_are_known_by_their_methods():
    pytest.importorskip("llguidance")
    torch.manual_seed(0)
    model = llama(vocab_size=320, initializer_range=0.25)
    drafter, asked = NgramDrafter(longest=1, num_tokens=4).attach(model), batch_of(3, 1)
    want, plain = generated(model, Guided, **asked)
    drafted, calls = generated(model, Guided, **asked, assistant_model=drafter)
    assert drafted.equal(want) and calls == plain == NEW
