"""Where rows end: the same tokens as when transformers' criteria are asked after every single token."""

from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    StopStringCriteria,
)

from tokenahead.generation.call.sequences import NewTokens, Sequences
from tokenahead.generation.call.stopping import Stopping
from tokenahead.generation.contract import DraftTree, TargetOutput, VerificationResult
from tokenahead.generation.results import Cycle

PROMPT = 4
WORDS = ["<unk>", "st", "op", "stop", "sto", "pper", "x", "y", " "]


def rows_with(new: list[list[int]], growth: list[int] | None = None, width: int = 6) -> Sequences:
    """Rows that kept `growth[b]` tokens before, with `new[b]` behind, and rubbish behind that as in a real cycle."""
    tokens = Sequences(torch.randint(10, 90, (len(new), PROMPT)))
    if growth:
        tokens.write(torch.randint(10, 90, (len(new), 5)))
        tokens.keep(NewTokens(growth, tokens.ids.device))
    tokens.write(torch.tensor([ids + [99] * (width - len(ids)) for ids in new]))
    return tokens


def one_at_a_time(criteria: StoppingCriteriaList, tokens: Sequences, new: list[list[int]], done: list[bool]):
    """What plain decoding keeps of each row, and whether it has ended."""
    kept, ended = [], []
    for row, ids in enumerate(new):
        count, over = 0, done[row]
        while not over and count < len(ids):
            count += 1
            prefix = tokens.ids[row : row + 1, : tokens.lengths[row] + count]
            over = bool(criteria(prefix, None)[0])
        kept.append(count)
        ended.append(over)
    return kept, ended


def tokenizer() -> PreTrainedTokenizerFast:
    """Words of several letters; `StopStringCriteria` wants to encode the word `abcdef`."""
    vocabulary = {word: index for index, word in enumerate([*WORDS, "abcdef"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


CRITERIA = {
    "eos": lambda: [EosTokenCriteria([3, 7])],
    "length": lambda: [MaxLengthCriteria(PROMPT + 5)],
    "eos and length": lambda: [MaxLengthCriteria(PROMPT + 5), EosTokenCriteria(3)],
    "strings": lambda: [StopStringCriteria(tokenizer(), ["stop", "yy"])],
    "all": lambda: [MaxLengthCriteria(PROMPT + 6), StopStringCriteria(tokenizer(), ["stop"]), EosTokenCriteria([7])],
    "time": lambda: [MaxTimeCriteria(max_time=1.0, initial_timestamp=0.0)],
    "none": list,
}


def test_cut_equals_one_token_at_a_time():
    """Random ragged batches; some rows have ended before."""
    for name in CRITERIA:
        outcomes = set()
        for seed in range(40):
            torch.manual_seed(seed)
            batch = 1 + seed % 4
            lengths = torch.randint(1, 7, (batch,)).tolist()
            new = [torch.randint(1, 9, (length,)).tolist() for length in lengths]
            tokens = rows_with(new, growth=torch.randint(0, 5, (batch,)).tolist())
            done = (torch.rand(batch) < 0.2).tolist()
            got = Stopping(StoppingCriteriaList(CRITERIA[name]())).cut(tokens, new, done)
            assert got == one_at_a_time(StoppingCriteriaList(CRITERIA[name]()), tokens, new, done)
            assert all(type(ended) is bool for ended in got[1])
            outcomes |= {(kept > 0, ended) for kept, ended, over in zip(*got, done) if not over}
        possible = {"none": {(True, False)}, "time": {(True, True)}}
        assert outcomes == possible.get(name, {(True, False), (True, True)})


def test_eos_of_the_prompt_does_not_count():
    tokens = Sequences(torch.full((1, PROMPT), 2))
    tokens.write(torch.tensor([[5, 6]]))
    assert Stopping(StoppingCriteriaList([EosTokenCriteria(2)])).cut(tokens, [[5, 6]], [False]) == ([2], [False])


def test_the_smallest_length_counts():
    stopping = Stopping(StoppingCriteriaList([MaxLengthCriteria(9), MaxLengthCriteria(7), MaxLengthCriteria(8)]))
    assert (stopping.tokens_left(4), stopping.tokens_left(7)) == (3, 0)
    assert Stopping(StoppingCriteriaList()).tokens_left(10**6) > 10**6


def test_a_stop_string_may_begin_in_an_earlier_cycle():
    tokens = Sequences(torch.full((2, PROMPT), WORDS.index("y")))
    tokens.write(torch.tensor([[WORDS.index("st")], [WORDS.index("x")]]))
    tokens.keep(NewTokens([1, 1], tokens.ids.device))
    new = [[WORDS.index("op"), WORDS.index("x")]] * 2
    tokens.write(torch.tensor(new))
    stopping = Stopping(StoppingCriteriaList([StopStringCriteria(tokenizer(), ["stop"])]))
    assert stopping.cut(tokens, new, [False, False]) == ([1, 2], [True, False])


def test_no_sequence_gets_a_token_beside_an_open_one_at_fault():
    """A recorded cycle that must leave no trace; sequences that have ended may hold anything."""
    stopping = SimpleNamespace(eos_ids=torch.tensor([1]), limit=torch.tensor(20))
    result = VerificationResult(torch.tensor([1, 0, 2]), torch.tensor([[5, 6, 7], [5, 6, 7], [5, 1, 7]]))
    for faulty, expected in [(0, [0, 0, 0]), (1, [2, 0, 2]), (2, [0, 0, 0]), (None, [2, 0, 2])]:
        ended, sound = torch.tensor([False, True, False]), torch.ones(3, dtype=torch.bool)
        if faulty is not None:
            sound[faulty] = False
        tokens = SimpleNamespace(ended=ended, ends=torch.tensor([9, 9, 9]))
        assert Stopping.counts(stopping, tokens, result, sound).tolist() == expected
        assert tokens.ended.tolist() == [False, True, expected[2] == 2]


def test_faults_are_looked_for_along_accepted_drafts_alone():
    """Of three scores, those behind the first rejected draft are nobody's."""
    tree = DraftTree.chain(torch.tensor([[5, 6]]))
    for accepted, faulty, is_seen in [(0, 1, False), (0, 0, True), (1, 1, True), (1, 2, False), (2, 2, True)]:
        rows = torch.zeros(1, 3)
        rows[0, faulty] = torch.nan
        result = VerificationResult(torch.tensor([accepted]), torch.tensor([[5, 6, 7]]))
        cycle = Cycle(tree, tree, TargetOutput(rows[..., None]), rows[..., None], result)
        cycle.write(rows)
        cycle.read([False])
        assert cycle.faults == [0] * is_seen and cycle.accepted == [accepted]
