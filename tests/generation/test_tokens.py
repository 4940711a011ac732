"""Token rows: ragged writes, growth, padding."""

import itertools

import torch

from tokenahead.generation.call.sequences import NewTokens, Sequences

CPU = torch.device("cpu")


def simulate(batch: int, cycles: int, widest: int, seed: int) -> tuple[Sequences, list[list[int]]]:
    """Random cycles of writing and keeping, and the same on plain lists; rows may keep nothing."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    prompt = torch.randint(1, 90, (batch, 5), generator=generator)
    rows, tokens = prompt.tolist(), Sequences(prompt)
    for _ in range(cycles):
        width = number(1, widest)
        draft = torch.randint(100, 190, (batch, width), generator=generator)
        tokens.write(draft)
        new = torch.randint(200, 290, (batch, width + 1), generator=generator)
        tokens.write(new)  # what verification says replaces the draft
        counts = [number(0, width + 1) for _ in range(batch)]
        tokens.keep(NewTokens(counts, CPU))
        for row, count, ids in zip(rows, counts, new.tolist()):
            row += ids[:count]
    return tokens, rows


def assert_rows(tokens: Sequences, rows: list[list[int]]) -> None:
    assert tokens.lengths == [len(row) for row in rows]
    for index, row in enumerate(rows):
        assert tokens.ids[index, : len(row)].tolist() == row


def test_rows_grow_at_their_own_pace():
    for batch, seed in itertools.product([1, 2, 5], range(4)):
        tokens, rows = simulate(batch, cycles=25, widest=6, seed=seed)
        assert_rows(tokens, rows)
        assert tokens.prompt_length == 5
        assert tokens.last().tolist() == [row[-1] for row in rows]
        if batch > 1:
            assert len(set(tokens.lengths)) > 1


def test_buffer_grows_beyond_its_first_size():
    tokens, rows = simulate(batch=3, cycles=300, widest=8, seed=9)
    assert min(tokens.lengths) > 600
    assert_rows(tokens, rows)
    tokens, rows = simulate(batch=1, cycles=3, widest=2000, seed=1)
    assert_rows(tokens, rows)


def test_prefix_shows_every_row_at_one_length():
    tokens, rows = simulate(batch=4, cycles=5, widest=4, seed=3)
    short, long = min(tokens.lengths), max(tokens.lengths) + 2
    assert short < long - 2
    nothing = [0] * 4
    assert tokens.prefix(short, nothing).tolist() == [row[:short] for row in rows]
    more = torch.full((4, 2), 555)
    tokens.write(more)
    written = [2, 0, 1, 2]
    rows = [row + [555] * count for row, count in zip(rows, written)]
    want = [([77] * (long - len(row)) + row)[:long] for row in rows]
    assert tokens.prefix(long, written, pad=77).tolist() == want


def test_lengths_on_the_device_follow_those_on_the_host():
    tokens, rows = simulate(batch=4, cycles=7, widest=4, seed=5)
    assert tokens.ends.tolist() == tokens.lengths == [len(row) for row in rows]
    count = min(tokens.lengths)
    assert tokens.newest(count).tolist() == [row[len(row) - count :] for row in rows]


def test_columns_are_padded_behind_a_rows_end():
    for start in [0, 5, 7]:
        tokens, rows = simulate(batch=4, cycles=6, widest=5, seed=4)
        tokens.write(torch.full((4, 3), 555))  # written, but not kept
        longest, shortest = max(map(len, rows)), min(map(len, rows))
        assert start < shortest < longest
        want = [row + [77] * (longest - len(row)) for row in rows]
        assert tokens.columns(start, longest, 77).tolist() == [row[start:] for row in want]
        assert tokens.columns(start, shortest, 77).tolist() == [row[start:shortest] for row in rows]
        assert tokens.columns(start, start, 77).shape == (4, 0)
        assert_rows(tokens, rows)


def test_columns_do_not_change_with_the_rows():
    """A streamer or a caller may keep what it was given."""
    tokens = Sequences(torch.zeros(2, 1, dtype=torch.long))
    tokens.write(torch.ones(2, 3, dtype=torch.long))
    tokens.keep(NewTokens([3, 3], CPU))
    held = tokens.columns(0, 4, 0)
    tokens.ids.fill_(9)
    assert held.tolist() == [[0, 1, 1, 1]] * 2
