"""Logits processors on ragged rows: what transformers' own list gives for each row's own ids, position by position."""

import itertools
from collections import Counter

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation import logits_process as library

from tokenahead.generation.call.processing import Processing
from tokenahead.generation.call.sequences import NewTokens, Sequences
from tokenahead.generation.contract import DraftTree

V, PROMPT, DRAFTS = 17, 6, 4
EOS = 2
GROWTHS = {
    "one row": [3],
    "equal rows": [2, 2, 2],
    "two groups": [1, 3, 1, 3],
    "all differ": [0, 4, 2, 1],
    "nothing generated": [0, 0],
}


class LastTokenBias(LogitsProcessor):
    """A user's own processor, which depends on the last token, the length and the scores, and writes in place."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        scores[torch.arange(len(scores)), (input_ids[:, -1] + input_ids.shape[1]) % V] += scores.amax(-1).abs()
        return scores


class HeatsWithLength(TemperatureLogitsWarper):
    """A subclass of a processor that needs no ids, which does need them."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores / (self.temperature * input_ids.shape[1])


def rows_of(growth: list[int], drafts: int = DRAFTS) -> tuple[Sequences, torch.Tensor, torch.Tensor]:
    """Rows that each kept `growth[b]` of the tokens of an earlier cycle, with drafts behind; drafts, and logits."""
    tokens = Sequences(torch.randint(3, V, (len(growth), PROMPT)))
    tokens.write(torch.randint(3, V, (len(growth), 5)))
    tokens.keep(NewTokens(growth, tokens.ids.device))
    draft = torch.randint(0, V, (len(growth), drafts))
    tokens.write(draft)
    return tokens, draft, 3 * torch.randn(len(growth), drafts + 1, V)


def true_prefix(tokens: Sequences, row: int, position: int) -> torch.Tensor:
    return tokens.ids[row, : tokens.lengths[row] + position]


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    """Tokens that row `row` may take: they differ by row, by length and by the last token."""
    return [(3 * row + len(ids) + int(ids[-1]) + step) % V for step in range(0, V, 2)]


def prefix_function(rows: list[int]) -> LogitsProcessor:
    return library.PrefixConstrainedLogitsProcessor(lambda batch_id, ids: allowed(rows[batch_id], ids), 1)


def ignored_prompts(rows: list[int]) -> torch.Tensor:
    """How much of the prompt a repetition penalty skips, which differs by row (as left padding does)."""
    return torch.tensor([row + 1 for row in rows])


MAKE = {
    "repetition penalty": lambda prompt, rows: library.RepetitionPenaltyLogitsProcessor(1.7),
    "penalty without prompt": lambda prompt, rows: library.RepetitionPenaltyLogitsProcessor(1.7, PROMPT),
    "penalty without padding": lambda prompt, rows: library.RepetitionPenaltyLogitsProcessor(
        1.7, ignored_prompts(rows)[0].item() if len(rows) == 1 else ignored_prompts(rows)
    ),
    "encoder penalty": lambda prompt, rows: library.EncoderRepetitionPenaltyLogitsProcessor(1.4, prompt),
    "encoder n-grams": lambda prompt, rows: library.EncoderNoRepeatNGramLogitsProcessor(2, prompt),
    "n-grams": lambda prompt, rows: library.NoRepeatNGramLogitsProcessor(2),
    "bad words": lambda prompt, rows: library.NoBadWordsLogitsProcessor([[5], [6, 7], [8, 8]], [EOS]),
    "sequence bias": lambda prompt, rows: library.SequenceBiasLogitsProcessor([[[4], 3.0], [[9, 10], -5.0]]),
    "min length": lambda prompt, rows: library.MinLengthLogitsProcessor(PROMPT + 4, [EOS]),
    "min new tokens": lambda prompt, rows: library.MinNewTokensLengthLogitsProcessor(PROMPT, 5, [EOS]),
    "forced eos": lambda prompt, rows: library.ForcedEOSTokenLogitsProcessor(PROMPT + 6, [EOS]),
    "length decay": lambda prompt, rows: library.ExponentialDecayLengthPenalty((1, 1.5), [EOS], PROMPT),
    "suppress at begin": lambda prompt, rows: library.SuppressTokensAtBeginLogitsProcessor([4, 5], PROMPT + 3),
    "watermark": lambda prompt, rows: library.WatermarkLogitsProcessor(V, "cpu", greenlist_ratio=0.4),
    "temperature": lambda prompt, rows: library.TemperatureLogitsWarper(0.6),
    "top-k": lambda prompt, rows: library.TopKLogitsWarper(9),
    "top-p": lambda prompt, rows: library.TopPLogitsWarper(0.8),
    "top-h": lambda prompt, rows: library.TopHLogitsWarper(0.7),
    "min-p": lambda prompt, rows: library.MinPLogitsWarper(0.02),
    "typical": lambda prompt, rows: library.TypicalLogitsWarper(0.9),
    "epsilon": lambda prompt, rows: library.EpsilonLogitsWarper(0.02),
    "eta": lambda prompt, rows: library.EtaLogitsWarper(0.02),
    "suppress": lambda prompt, rows: library.SuppressTokensLogitsProcessor([0, 3]),
    "no inf": lambda prompt, rows: library.InfNanRemoveLogitsProcessor(),
    "normalisation": lambda prompt, rows: library.LogitNormalization(),
    "in place": lambda prompt, rows: LastTokenBias(),
    "subclass": lambda prompt, rows: HeatsWithLength(0.2),
    "prefix function": lambda prompt, rows: prefix_function(rows),
}
"""Processors for the rows `rows` of a batch whose prompts are `prompt`."""


def processors_of(names: list[str], tokens: Sequences, rows: list[int]) -> LogitsProcessorList:
    return LogitsProcessorList(MAKE[name](tokens.ids[rows, :PROMPT], rows) for name in names)


def expected(names: list[str], tokens: Sequences, logits: torch.Tensor, only: int | None = None) -> torch.Tensor:
    """transformers' own list on every row alone, one position at a time, or at one position only."""
    output = logits.clone()
    for row in range(len(logits)):
        processors = processors_of(names, tokens, [row])
        for position in range(logits.shape[1]) if only is None else [only]:
            ids = true_prefix(tokens, row, position)[None]
            output[row, position] = processors(ids, logits[row, position][None].clone())[0]
    return output


def chain_of(tokens: Sequences, logits: torch.Tensor) -> DraftTree:
    """The drafts that stand behind every row."""
    length = logits.shape[1] - 1
    return DraftTree.chain(torch.stack([tokens.ids[row, n : n + length] for row, n in enumerate(tokens.lengths)]))


def applied(names: list[str], tokens: Sequences, logits: torch.Tensor) -> torch.Tensor:
    batch = len(logits)
    processing = Processing(processors_of(names, tokens, list(range(batch))))
    return processing(tokens, logits, chain_of(tokens, logits), [False] * batch)


MIXES = {
    "warpers last": [
        "penalty without padding", "n-grams", "bad words", "min new tokens", "temperature", "top-k", "top-p",
    ],
    "warpers first": ["temperature", "top-k", "repetition penalty", "prefix function", "in place"],
    "in between": ["n-grams", "temperature", "encoder n-grams", "encoder penalty", "top-k", "subclass", "no inf"],
    "normalised": ["min length", "sequence bias", "length decay", "typical", "normalisation"],
}  # fmt: skip


def reached(tokens: Sequences, want: torch.Tensor) -> torch.Tensor:
    """Positions that a draft can still be accepted to reach [B, k]: no drafted token before them is excluded."""
    drafts = torch.stack([tokens.ids[row, n : n + want.shape[1] - 1] for row, n in enumerate(tokens.lengths)])
    excluded = torch.finfo(want.dtype).min  # what "no inf" makes of -inf
    possible = want[:, :-1].gather(-1, drafts[..., None])[..., 0] > excluded
    return torch.cat([torch.ones_like(possible[:, :1]), possible.long().cumprod(1).bool()], dim=1)


def write_likely_drafts(names: list[str], tokens: Sequences, logits: torch.Tensor, draft: torch.Tensor) -> None:
    """Replaces drafts by what the processed scores prefer, but for a few: most positions can then be reached."""
    for position in range(DRAFTS):
        random = torch.arange(len(draft)) + position == 5
        preferred = expected(names, tokens, logits, position)[:, position].argmax(-1)
        draft[:, position] = torch.where(random, draft[:, position], preferred)
        tokens.write(draft)


def check_mix(names: list[str], growth: list[int]) -> None:
    tokens, draft, logits = rows_of(growth)
    write_likely_drafts(names, tokens, logits, draft)
    before = logits.clone()
    got, want = applied(names, tokens, logits), expected(names, tokens, logits)
    seen = reached(tokens, want)
    assert seen.float().mean() > 0.8
    torch.testing.assert_close(got[seen], want[seen], rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)  # the raw logits are recorded too


@pytest.mark.core
def test_mixed_lists():
    for growth, mix in itertools.product(GROWTHS.values(), MIXES):
        check_mix(MIXES[mix], growth)


def test_each_processor_alone():
    for growth, name in itertools.product([GROWTHS["two groups"], GROWTHS["equal rows"]], MAKE):
        check_mix([name], growth)


class RowRecorder(LogitsProcessor):
    """Remembers the ids that every row was shown, and adds another bias to every row."""

    def __init__(self, batch: int) -> None:
        self.seen = [Counter() for _ in range(batch)]
        self.bias = torch.arange(batch * V).view(batch, V) / 7

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        for seen, ids in zip(self.seen, input_ids.tolist(), strict=True):
            seen[tuple(ids)] += 1
        return scores + self.bias


@pytest.mark.core
def test_unknown_processors_see_all_rows_in_their_order():
    """Before every position its row's true prefix, at its row's index; what is said of other rows is dropped."""
    for growth in GROWTHS.values():
        tokens, draft, logits = rows_of(growth)
        recorder = RowRecorder(len(growth))
        got = Processing(LogitsProcessorList([recorder]))(
            tokens, logits, chain_of(tokens, logits), [False] * len(growth)
        )
        torch.testing.assert_close(got, logits + recorder.bias[:, None])
        for row, count in enumerate(growth):
            own = tokens.ids[row, : PROMPT + count].tolist()
            for position in range(DRAFTS + 1):
                assert recorder.seen[row][tuple(own + draft[row, :position].tolist())] >= 1


def test_ended_rows_are_not_asked_about():
    tokens, _, logits = rows_of([1, 3, 1, 0])
    names = ["repetition penalty", "in place", "penalty without padding"]
    processors, recorder = processors_of(names, tokens, [0, 1, 2, 3]), RowRecorder(4)
    done = [False, True, True, False]
    got = Processing(LogitsProcessorList([*processors, recorder]))(tokens, logits, chain_of(tokens, logits), done)
    lengths = {len(ids) for seen in recorder.seen for ids in seen}
    assert lengths == {tokens.lengths[row] + at for row in (0, 3) for at in range(DRAFTS + 1)}
    want = expected(names, tokens, logits) + recorder.bias[:, None]
    torch.testing.assert_close(got[[0, 3]], want[[0, 3]])


TREE = torch.tensor([-1, -1, 0, 0, 2, 1])
"""Parents: two children of b, two of the first, a grandchild, and a child of the second."""


def test_every_node_of_a_tree_sees_its_own_path():
    for growth, names in itertools.product(
        [[2, 2], [1, 3, 0]],
        [["n-grams", "repetition penalty", "min new tokens", "temperature"], ["penalty without padding", "in place"]],
    ):
        tokens, _, _ = rows_of(growth)
        draft = torch.randint(3, V, (len(growth), len(TREE)))
        tree, logits = (
            DraftTree(draft, TREE.expand(len(growth), -1), depth=3),
            torch.randn(len(growth), len(TREE) + 1, V),
        )
        processors = processors_of(names, tokens, list(range(len(growth))))
        got = Processing(processors)(tokens, logits, tree, [False] * len(growth))
        for row, length in enumerate(tokens.lengths):
            alone, excluded = processors_of(names, tokens, [row]), set()
            for place in range(len(TREE) + 1):
                path, node = [], place - 1
                while node >= 0:
                    path, node = [node, *path], int(TREE[node])
                ids = torch.cat([tokens.ids[row, :length], draft[row, path]])[None]
                want = alone(ids, logits[row, place][None].clone())[0]
                if not excluded & set(path):
                    torch.testing.assert_close(got[row, place], want, rtol=1e-6, atol=1e-6)
                excluded |= {
                    n for n in range(len(TREE)) if TREE[n] == place - 1 and torch.isneginf(want[draft[row, n]])
                }


def test_prefix_function_is_not_asked_what_follows_an_excluded_draft():
    """A trie has no answer for a path that it does not hold; no such draft can be accepted, so nobody needs one."""
    tokens, draft, logits = rows_of([0, 2])
    draft[:] = torch.tensor([[4, 4, 5, 4], [5, 4, 4, 4]])  # 5 is excluded
    tokens.write(draft)

    def trie(batch_id: int, ids: torch.Tensor) -> list[int]:
        drafted = ids[tokens.lengths[batch_id] :].tolist()
        return [] if 5 in drafted else [4]

    processor = library.PrefixConstrainedLogitsProcessor(trie, 1)
    output = Processing(LogitsProcessorList([processor]))(tokens, logits, chain_of(tokens, logits), [False, False])
    assert (output[0, :3].argmax(-1) == 4).all() and output[1, 0].argmax() == 4
    assert torch.isneginf(output[0, 2, 5]) and torch.isneginf(output[1, 0, 5])


def test_a_later_processor_may_allow_what_an_earlier_one_excluded():
    """`prefix_allowed_tokens_fn` wins where nothing else is left; those before it act on after that."""
    tokens = Sequences(torch.tensor([[4, 5, 4, 5]]))
    tokens.write(torch.tensor([[4, 6, 4]]))

    def only_fours_at_even_places(batch_id: int, ids: torch.Tensor) -> list[int]:
        return [5, 6, 7] if len(ids) % 2 else [4]

    processors = LogitsProcessorList(
        [
            library.NoRepeatNGramLogitsProcessor(1),
            library.PrefixConstrainedLogitsProcessor(only_fours_at_even_places, 1),
        ]
    )
    logits = torch.randn(1, 4, V)
    got = Processing(processors)(tokens, logits, chain_of(tokens, logits), [False])
    want = torch.stack([processors(tokens.ids[:, : 4 + at], logits[:, at]) for at in range(4)], dim=1)
    assert want[0, 0, 4] == 0 and torch.isneginf(want[0, 1, 5]) and want[0, 1, 6].isfinite()
    torch.testing.assert_close(got, want)


def test_draft_distributions_take_the_processors_that_need_no_ids():
    for names in [["top-k", "n-grams", "temperature"], ["temperature", "suppress", "top-p"], []]:
        tokens, _, logits = rows_of([1, 3])
        probs = logits.softmax(-1)
        probs[0, 0, 4:] = 0  # a drafter may exclude tokens, too
        probs /= probs.sum(-1, keepdim=True)
        before = probs.clone()
        got = Processing(processors_of(names, tokens, [0, 1])).warp(probs)
        pointwise = processors_of([name for name in names if name != "n-grams"], tokens, [0, 1])
        want = torch.stack([pointwise(None, row.log()) for row in probs]).softmax(-1)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(got.sum(-1), torch.ones(2, DRAFTS + 1))
        assert torch.equal(probs, before)
