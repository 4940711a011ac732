"""Criteria that are not known: they see every column once, as plain decoding shows it, and end what it ends."""

import random

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GPT2Config,
    GPT2LMHeadModel,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tests.every_model import llama
from tests.tree_drafters import KnowingChains, KnowingTrees
from tokenahead import NgramDrafter
from tokenahead.generation.call.sequences import NewTokens, Sequences
from tokenahead.generation.call.stopping import Stopping

PROMPT, EOS, PAD, LONGEST = 4, 2, 77, 24


class Watcher(StoppingCriteria):
    """Remembers what it is shown; `stops(row, index)` of any row, of all rows, or of each ends what it says."""

    def __init__(self, decide, start: int = PROMPT) -> None:
        self.decide, self.start, self.shown, self.done = decide, start, [], None

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append((input_ids.tolist(), scores and [each.tolist() for each in scores]))
        self.done = self.done or [False] * len(input_ids)
        for index, row in enumerate(input_ids[:, self.start :].tolist()):
            self.done[index] |= self.stops(row)
        return {"all": all, "any": any, "each": torch.tensor}[self.decide](self.done)

    def stops(self, row):
        return row[-1] % 7 == 3


class LastAlone(Watcher):
    """Remembers nothing."""

    def __call__(self, input_ids, scores, **kwargs):
        self.done = None
        return super().__call__(input_ids, scores)


class EndsAt(EosTokenCriteria):
    """A subclass that means something else by the same attributes."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.eos_token_id[0] + 9


class StopsAt(StoppingCriteria):
    """A plain bool for the whole batch."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.length


def plainly(criteria: StoppingCriteriaList, prompt: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """The loop of transformers, over known texts [B, n]."""
    has_ends = any(hasattr(each, "eos_token_id") for each in criteria)
    ids, is_open = prompt, torch.ones(len(prompt), dtype=torch.bool)
    for column in texts.unbind(1):
        ids = torch.cat([ids, torch.where(is_open | (not has_ends), column, PAD)[:, None]], dim=1)
        is_open = is_open & ~criteria(ids, None)
        if not is_open.any():
            break
    return ids


def in_cycles(stopping: Stopping, prompt: torch.Tensor, texts: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Our loop over the same texts; every row gets a few tokens in every cycle."""
    tokens, done = Sequences(prompt), [False] * len(prompt)
    while not all(done):
        spans = [(n, n + rng.randint(1, 6)) for n in tokens.num_new]
        new = [ids[slice(*span)] for ids, span in zip(texts.tolist(), spans)]
        tokens.write(torch.tensor([ids + [99] * (6 - len(ids)) for ids in new]))
        counts, done = stopping.cut(tokens, new, done)
        assert all(type(each) is bool for each in done)
        tokens.keep(NewTokens(counts, tokens.ids.device))
        assert not stopping.holds or max(tokens.lengths) == stopping.shown
    tokens.shorten(stopping.ends)
    return tokens.columns(0, max(tokens.lengths), PAD)


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("own", [Watcher, LastAlone, EndsAt])
@pytest.mark.parametrize("decide", ["all", "any", "each"])
def test_columns_are_those_of_plain_decoding(decide, own, holds):
    lengths = set()
    for seed in range(30):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        batch = 1 + seed % 4
        prompt = torch.randint(3, 60, (batch, PROMPT), generator=generator)
        texts = torch.randint(0, 60, (batch, 3 * LONGEST), generator=generator)

        ends = [EosTokenCriteria([EOS])] if seed % 3 else []
        ends.append(MaxLengthCriteria(PROMPT + LONGEST))
        first, second = (
            StoppingCriteriaList([*ends, Watcher("each"), own([EOS]) if own is EndsAt else own(decide)])
            for _ in range(2)
        )
        want = plainly(first, prompt, texts)
        stopping = Stopping(second, PAD)
        stopping.holds = holds
        assert in_cycles(stopping, prompt, texts, rng).equal(want)
        assert second[-2].shown == first[-2].shown
        lengths.add(want.shape[1])
    assert len(lengths) > 5


class Columns:
    """A streamer that collects what is put."""

    def __init__(self):
        self.columns = []

    def put(self, value):
        self.columns.append(value.tolist())

    def end(self):
        pass


DRAFTERS = {
    "chains": lambda model: KnowingChains(64).attach(model),
    "trees": lambda model: KnowingTrees(64).attach(model),
    "n-grams": lambda model: NgramDrafter(longest=1, num_tokens=4).attach(model),
}


def batch_of(seed: int, rows: int = 4):
    torch.manual_seed(seed)
    ids, mask = torch.randint(3, 64, (rows, 9)), torch.ones(rows, 9, dtype=torch.long)
    ids[1, :4], mask[1, :4] = 0, 0
    return dict(input_ids=ids, attention_mask=mask, max_new_tokens=30, pad_token_id=0, suppress_tokens=[0])


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("eos", [None, 5])
@pytest.mark.parametrize("decide", ["all", "any", "each"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_texts_are_those_of_plain_decoding(kind, decide, eos):
    """Text, columns, streams, scores and statistics, whether or not the cache is returned."""
    torch.manual_seed(0)
    model = llama(initializer_range=0.25)
    drafter = DRAFTERS[kind](model)
    for seed in range(3):
        batch = batch_of(seed) | {"eos_token_id": eos}
        drafter.texts = model.generate(**batch | {"eos_token_id": None}).tolist()
        runs = []
        for asked in ({}, {}, {"output_scores": True, "return_dict_in_generate": True}):
            asked |= {"assistant_model": drafter} if runs else {}
            own, streamer = Watcher(decide, 9), Columns()
            out = model.generate(**batch, **asked, stopping_criteria=[own], streamer=streamer)
            runs.append((out, own, streamer.columns))
        (want, plain, put), (ids, ours, _), (out, _, _) = runs
        assert ids.equal(want) and out.sequences.equal(want)
        assert ours.shown == plain.shown
        assert all(streamed == put for _, _, streamed in runs)
        assert len(out.scores) == want.shape[1] - 9
        stats = out.speculation
        for new, accepted in zip(out.sequences[:, 9:], stats.rows_accepted):
            length = len(new) if eos is None else int((new != 0).sum())
            assert len(accepted) < length <= 1 + sum(accepted) + len(accepted)
        for other in (stats.rows_drafts, stats.rows_depths):
            assert stats.rows_calls == [1 + len(each) for each in other]


def test_sequences_that_run_ahead_meet_no_end_of_a_table():
    """A table of positions is shorter than the limit, and not shorter than the text."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=30, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    drafter, batch = KnowingChains(64).attach(model), batch_of(1) | {"eos_token_id": None, "max_new_tokens": 40}
    drafter.texts = model.generate(**batch, stopping_criteria=[StopsAt(28)]).tolist()
    for stop in (20, 28):
        batch["stopping_criteria"] = [StopsAt(stop)]
        assert model.generate(**batch, assistant_model=drafter).equal(model.generate(**batch))
