"""Counted continuations against a plain count, and what a drafter does with them in batches, calls and threads."""

import copy
import pickle
import threading
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.backbones import backbone, prompts
from tests.models import left_padded
from tokenahead import AssistantDrafter, DrafterCascade, NgramDrafter, SuffixDrafter
from tokenahead.generation.lookups.suffix_counts import Reader, SuffixCounts

DEPTH = 5
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4)


def counts_of(texts, max_nodes=10_000):
    counts = SuffixCounts(DEPTH, max_nodes)
    readers = [Reader() for _ in texts]
    for step in range(max(map(len, texts), default=0)):  # by turns, as a batch is written
        for reader, text in zip(readers, texts):
            counts.read(reader, text[step : step + 1])
    return counts, readers


def runs(texts):
    """How often every run of at most DEPTH tokens stands in the texts."""
    return Counter(
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, min(start + DEPTH, len(text)) + 1)
    )


def runs_in(counts):
    tokens, parents, numbers = counts.flat()
    found = []
    for token, parent in zip(tokens, parents):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return Counter(dict(zip(found, numbers)))


@given(TEXTS)
@settings(max_examples=60, deadline=None)
def test_every_run_is_counted(texts):
    assert runs_in(counts_of(texts)[0]) == runs(texts)


@given(TEXTS, st.integers(1, 6), st.integers(1, 3), st.sampled_from([0.0, 0.3]))
@settings(max_examples=60, deadline=None)
def test_a_draft_follows_the_likeliest_continuations_of_the_best_run(texts, length, width, least):
    counts, readers = counts_of(texts)
    known, factor = runs(texts), 2.0
    for reader, text in zip(readers, texts):
        draft, expected = counts.draft(reader.tail, length, 8, width, factor, least)
        paths = []
        for token, parent in draft:
            assert parent < len(paths)
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert len(set(paths)) == len(paths) and all(len(path) <= length for path in paths)
        children = Counter(parent for _, parent in draft)
        assert max(children.values(), default=0) <= width
        if not draft:
            continue
        # the most likely next token after one of the runs that end the text comes first
        ends = [tuple(text[-n:]) for n in range(1, min(len(text), DEPTH - 1) + 1)]
        nexts = [{run[-1]: n for run, n in known.items() if run[:-1] == end} for end in ends]
        assert any(found and found.get(draft[0][0]) == max(found.values()) for found in nexts)
        assert len(draft) <= factor * (DEPTH - 1) and 0 < expected <= len(draft)


def test_long_runs_draft_more_than_short_ones():
    counts, _ = counts_of([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])
    assert [token for token, _ in counts.draft([3], 10, 10, 1, 1.0, 0.1)[0]] == [4]
    assert [token for token, _ in counts.draft([1, 2, 3], 10, 10, 1, 1.0, 0.1)[0]] == [4, 5]  # runs have DEPTH tokens
    assert counts.draft([99], 10, 10, 1, 1.0, 0.1) == ([], 0.0)


def test_memory_is_bounded_and_what_is_new_is_known():
    counts, reader = SuffixCounts(DEPTH, 1000), Reader()
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        counts.read(reader, torch.randint(0, 1000, (100,), generator=generator).tolist())
        assert len(counts.flat()[0]) <= 1000
    newest = [5, 6, 7, 8]
    counts.read(reader, newest)
    assert counts.draft(newest[:3], 4, 4, 1, 1.0, 0.1)[0][0] == (8, -1)


def test_other_sequences_of_the_batch_are_read():
    model, ids = backbone(), prompts(1, seed=5)[0][None]
    ahead = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    batch = left_padded([ids[0], ahead[0]])  # the second sequence has written what the first one will write
    accepted = {}
    for name, rows in (("alone", slice(0, 1)), ("together", slice(0, 2))):
        drafter = SuffixDrafter().attach(model)
        inputs = {key: value[rows] for key, value in batch.items()}
        options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, assistant_model=drafter)
        out = model.generate(**inputs, **options, return_dict_in_generate=True)
        accepted[name] = sum(out.speculation.rows_accepted[0]), len(out.speculation.rows_accepted[0])
    assert accepted["together"][1] < accepted["alone"][1]


def test_saved_copied_and_pickled_drafters_draft_the_same(tmp_path):
    drafter = SuffixDrafter(depth=6, num_tokens=5, max_nodes=5000)
    drafter.add([[1, 2, 3, 4, 5, 6, 7], [3, 4, 8]])
    drafter.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["suffixes.safetensors"]
    tail = [1, 2, 3, 4]
    want = drafter.counts.draft(tail, 4, 8, 2, 1.0, 0.1)
    assert want[0]
    for other in (SuffixDrafter.from_pretrained(tmp_path), copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert other.counts.draft(tail, 4, 8, 2, 1.0, 0.1) == want
        assert (other.depth, other.num_tokens, other.max_nodes) == (6, 5, 5000)


def test_threads_share_a_drafter():
    drafter, failures = SuffixDrafter(max_nodes=2000), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(30):
                drafter.add(torch.randint(0, 9, (40,), generator=generator))
                drafter.counts.draft([1, 2], 8, 8, 2, 2.0, 0.1)
        except Exception as error:  # reported by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(drafter.counts.flat()[0]) <= 2000


def calls(model, ids, drafter, **options):
    """How many cycles each sequence of a call took."""
    fixed = dict(max_new_tokens=20, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    out = model.generate(ids, **fixed, assistant_model=drafter, **options)
    return [len(counts) for counts in out.speculation.rows_accepted]


def test_a_scope_tells_nothing_of_the_text_of_others():
    for make in [lambda each: each, lambda each: DrafterCascade([each, NgramDrafter()])]:
        model, ids = backbone(), prompts(1, seed=5)[0][None]
        inner = SuffixDrafter()
        drafter = make(inner).attach(model)
        (first,) = calls(model, ids, drafter, scope="one")
        before = inner.counts.flat()
        for other in ("two", 3):  # as in the first call, nobody has sent it
            assert calls(model, ids, drafter, scope=other) == [first]
        assert calls(model, ids, drafter, scope="one")[0] < first
        assert inner.counts.flat() == before == ([], [], [])
        (fresh,) = calls(model, ids, drafter)  # nor does what has no scope read the others
        assert fresh == first and inner.counts.flat()[0]
        assert calls(model, ids, drafter, scope="four") == [first]


def test_a_batch_has_a_scope_for_each_prompt():
    model, ids = backbone(), prompts(1, seed=5)[0][None]
    drafter = SuffixDrafter().attach(model)
    alone = calls(model, ids, drafter, scope="alone")
    assert calls(model, ids.repeat(2, 1), drafter, scope=["a", "b"]) == alone * 2
    again = calls(model, ids.repeat(2, 1), drafter, scope=["a", "c"])
    assert again[0] < again[1] == alone[0]
    options = dict(max_new_tokens=4, do_sample=True, pad_token_id=0, num_return_sequences=2)
    model.generate(ids, **options, assistant_model=drafter, scope=["d"])
    assert {*drafter.scopes} == {"alone", "a", "b", "c", "d"} and drafter.counts.flat() == ([], [], [])


def test_a_drafter_that_only_reads_keeps_nothing_of_calls(tmp_path):
    model, ids = backbone(), prompts(1, seed=5)[0][None]
    text = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    drafter = SuffixDrafter(read_only=True).attach(model)
    unknown = calls(model, ids, drafter)
    assert calls(model, ids, drafter) == unknown == [20 - 1] and drafter.counts.flat() == ([], [], [])
    drafter.add(text)
    known = drafter.counts.flat()
    assert calls(model, ids, drafter)[0] < unknown[0] and drafter.counts.flat() == known
    drafter.save_pretrained(tmp_path)
    assert SuffixDrafter.from_pretrained(tmp_path).read_only


def test_scopes_are_kept_bounded_and_forgotten(tmp_path):
    drafter, generator = SuffixDrafter(depth=4, max_nodes=1000), torch.Generator().manual_seed(0)
    for user in range(40):
        drafter.add(torch.randint(0, 500, (60,), generator=generator), scope=user)
        drafter.store(0)  # is in use
        assert sum(each.size for each in drafter.scopes.values()) <= 1000 + 60 * 4
    assert 0 in drafter.scopes and 39 in drafter.scopes and 1 not in drafter.scopes
    for each in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert each.scopes[39].flat() == drafter.scopes[39].flat()
    restore, kept = drafter.restore_point(), drafter.scopes[39].flat()
    drafter.add([1, 2, 3], scope=39)
    drafter.add([1, 2, 3], scope="new")
    restore()
    assert drafter.scopes[39].flat() == kept and "new" not in drafter.scopes
    drafter.forget(39)
    assert 39 not in drafter.scopes and 0 in drafter.scopes
    drafter.save_pretrained(tmp_path)
    assert SuffixDrafter.from_pretrained(tmp_path).counts.flat() == ([], [], [])
    drafter.forget()
    assert not drafter.scopes


def test_a_scope_that_is_none_is_named():
    for scope in [["a", "b", "c"], [], ["a", None]]:
        model = backbone()
        with pytest.raises(ValueError, match="scope="):
            calls(model, torch.tensor([[3, 4], [5, 6]]), SuffixDrafter().attach(model), scope=scope)


def test_text_of_another_vocabulary_is_refused(tmp_path):
    drafter, small, large = SuffixDrafter(), backbone(vocabulary=40), backbone(vocabulary=64)
    drafter.add([[1, 2, 60, 3], [1, 2]])
    drafter.save_pretrained(tmp_path)
    loaded = SuffixDrafter.from_pretrained(tmp_path)
    for each in (drafter, loaded, DrafterCascade([loaded, AssistantDrafter(small)])):
        with pytest.raises(ValueError, match="ids.*60.*39.*vocabulary of LlamaForCausalLM"):
            each.attach(small)
        assert not each.is_attached and "generate" not in vars(small)
    drafter.attach(large)
    with pytest.raises(ValueError, match="ids.*64.*63"):
        drafter.add([[5, 6, 7], [64]])
    assert drafter.counts.draft([5], 3, 3, 1, 9.0, 0.0) == ([], 0.0)
    with pytest.raises(ValueError, match="ids.*-1"):
        SuffixDrafter().add([3, -1])
    drafter.forget()
    drafter.detach().attach(small)


def test_a_vocabulary_that_shrinks_later_is_noticed():
    model, drafter = backbone(vocabulary=64), SuffixDrafter()
    drafter.attach(model).add([1, 2, 60, 3])
    model.resize_token_embeddings(40)
    with pytest.raises(ValueError, match="ids.*60.*39"):
        model.generate(torch.tensor([[1, 2]]), assistant_model=drafter, max_new_tokens=4)


DAMAGES = {
    "cut": lambda file, parts: file.write_bytes(file.read_bytes()[:-9]),
    "a page": lambda file, parts: file.write_text("<html>not found</html>"),
    "empty": lambda file, parts: file.write_bytes(b""),
    "another file": lambda file, parts: save_file({"weight": torch.ones(2)}, file),
    "no options": lambda file, parts: save_file(parts, file),
    "other options": lambda file, parts: save_file(parts, file, {"options": '{"width": 3}'}),
    "no counts": lambda file, parts: save_file({name: parts[name] for name in ("tokens", "parents")}, file, OPTIONS),
    "lengths": lambda file, parts: save_file(parts | {"counts": parts["counts"][:-1].clone()}, file, OPTIONS),
    "parents": lambda file, parts: save_file(parts | {"parents": parts["parents"] + 9}, file, OPTIONS),
    "tokens": lambda file, parts: save_file(parts | {"tokens": -parts["tokens"]}, file, OPTIONS),
    "factor": lambda file, parts: save_file(parts, file, {"options": '{"factor": Infinity}'}),
    "depth": lambda file, parts: save_file(parts, file, {"options": '{"depth": 1000000000}'}),
    "sums": lambda file, parts: save_file(parts | {"counts": parts["counts"] * 2**62}, file, OPTIONS),
    "numbers": lambda file, parts: save_file(parts | {"tokens": parts["tokens"].float()}, file, OPTIONS),
}
OPTIONS = {"options": "{}"}


@pytest.mark.by_day(most=4)
def test_a_damaged_file_is_named(tmp_path):
    for damage in DAMAGES:
        drafter, file = SuffixDrafter(), tmp_path / "suffixes.safetensors"
        drafter.add([1, 2, 3, 4, 2, 3])
        drafter.save_pretrained(tmp_path)
        DAMAGES[damage](file, load_file(file))
        with pytest.raises(ValueError, match=file.name):
            SuffixDrafter.from_pretrained(tmp_path)
