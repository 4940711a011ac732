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
from tokenahead.generation.lookups.suffix_table import Reader, SuffixTable

DEPTH = 5
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=30), min_size=1, max_size=4)


def table_of(texts, max_tokens=10_000):
    table, readers = SuffixTable(DEPTH, max_tokens), [Reader() for _ in texts]
    for step in range(max(map(len, texts), default=0)):  # by turns, as a batch is written
        table.read(readers, [text[step : step + 1] for text in texts])
    return table, readers


@given(TEXTS, st.integers(1, 6), st.integers(1, 3), st.sampled_from([0.0, 0.3]), st.sampled_from([7, 20, 10_000]))
@settings(max_examples=80, deadline=None)
def test_a_draft_is_what_a_plain_count_of_all_runs_gives(texts, length, width, least, max_tokens):
    table, readers = table_of(texts, max_tokens)
    for reader, text in zip(readers, texts):
        assert reader.tail == text[-(DEPTH - 1) :]
        options = length, 8, width, 2.0, least
        assert table.draft(reader.tail, *options) == plain_draft(table.texts(), reader.tail, *options)


def plain_draft(texts, tail, length, nodes, width, factor, least):
    """The same by counting all that follows every run (texts so short that no place is left out)."""
    best, expected = [], 0.0
    for matched in range(len(tail), 0, -1):
        size, run = min(nodes, int(factor * matched)), tail[-matched:]
        rests = [t[i + matched :] for t in texts for i in range(len(t)) if t[i : i + matched] == run]
        draft, chances = [], []
        open_nodes = [(1.0, -1, [rest for rest in rests if rest], 1)]
        while len(draft) < size:
            options = []
            for chance, parent, below, depth in open_nodes:
                counts = Counter(rest[0] for rest in below)
                likeliest = sorted(counts, key=lambda token: (-counts[token], token))[:width]
                for rank, token in enumerate(likeliest if depth <= length else ()):
                    if (token, parent) not in draft:
                        rest = [each[1:] for each in below if each[0] == token and each[1:]]
                        own = chance * counts[token] / len(below)
                        options.append((-own, parent, rank, token, rest, depth))
            if not options or -min(options)[0] < least:
                break
            chance, parent, _, token, rest, depth = min(options)
            draft.append((token, parent))
            chances.append(-chance)
            open_nodes.append((-chance, len(draft) - 1, rest, depth + 1))
        if sum(chances) > expected:
            best, expected = draft, sum(chances)
    return best, pytest.approx(expected)


@given(TEXTS, st.integers(3, 40))
@settings(max_examples=60, deadline=None)
def test_the_newest_tokens_are_remembered(texts, max_tokens):
    table, _ = table_of(texts, max_tokens)
    order = sorted((step, row) for row, text in enumerate(texts) for step in range(len(text)))
    kept = order[-max_tokens:]
    want = [[texts[row][step] for step, own in kept if own == row] for row in dict.fromkeys(row for _, row in kept)]
    assert table.texts() == want and table.size == len(kept)


@pytest.mark.parametrize("max_tokens", [700, 4000])  # text is forgotten; arrays grow
def test_sequences_that_are_written_by_turns_stay_apart(max_tokens):
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 40, (3, 300), generator=generator).tolist()
    texts[2][100:200] = texts[0][50:150]
    table, _ = table_of(texts, max_tokens)
    whole = SuffixTable(DEPTH, max_tokens)
    whole.read([Reader() for _ in texts], texts)
    assert whole.texts() == table.texts() or max_tokens == 700  # what is forgotten depends on the turns
    for each in (table, whole):
        for end in range(4, 300, 7):
            tail = texts[2][end - 4 : end]
            assert each.draft(tail, 4, 8, 3, 2.0, 0.0) == plain_draft(each.texts(), tail, 4, 8, 3, 2.0, 0.0)


def test_long_runs_draft_more_than_short_ones():
    table, _ = table_of([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])
    assert [token for token, _ in table.draft([3], 10, 10, 1, 1.0, 0.1)[0]] == [4]
    assert [token for token, _ in table.draft([1, 2, 3], 10, 10, 1, 1.0, 0.1)[0]] == [4, 5, 6]
    assert table.draft([99], 10, 10, 1, 1.0, 0.1) == ([], 0.0)


def test_what_is_forgotten_is_not_drafted():
    table, reader = SuffixTable(DEPTH, 1000), Reader()
    table.read([reader], [[5, 6, 7, 8]])
    assert table.draft([5, 6, 7], 4, 4, 1, 1.0, 0.1)[0][0] == (8, -1)
    table.read([reader], [list(range(10, 1010))])
    assert table.size == 1000 and table.draft([5, 6, 7], 4, 4, 1, 1.0, 0.1) == ([], 0.0)
    table.read([reader], [[5, 6, 7, 9]])
    assert table.draft([5, 6, 7], 4, 4, 1, 1.0, 0.1)[0][0] == (9, -1)
    assert table.draft([10, 11, 12], 4, 4, 1, 1.0, 0.1) == ([], 0.0)


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


def test_padding_is_no_text():
    model, drafter = backbone(), SuffixDrafter()
    drafter.attach(model)
    inputs = left_padded(prompts(3, 40))
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False, assistant_model=drafter, pad_token_id=0)
    real = [ids[mask.sum().neg() - 8 :] for ids, mask in zip(out, inputs["attention_mask"])]
    assert drafter.table.texts() == [ids.tolist() for ids in real]


def test_saved_copied_and_pickled_drafters_draft_the_same(tmp_path):
    drafter = SuffixDrafter(depth=6, num_tokens=5, max_tokens=5000)
    drafter.add([[1, 2, 3, 4, 5, 6, 7], [3, 4, 8]])
    drafter.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["suffixes.safetensors"]
    tail = [1, 2, 3, 4]
    want = drafter.table.draft(tail, 4, 8, 2, 1.0, 0.1)
    assert want[0]
    for other in (SuffixDrafter.from_pretrained(tmp_path), copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert other.table.draft(tail, 4, 8, 2, 1.0, 0.1) == want
        assert (other.depth, other.num_tokens, other.max_tokens) == (6, 5, 5000)


def test_threads_share_a_drafter():
    drafter, failures = SuffixDrafter(max_tokens=2000), []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(30):
                drafter.add(torch.randint(0, 9, (40,), generator=generator))
                drafter.table.draft([1, 2], 8, 8, 2, 2.0, 0.1)
        except Exception as error:  # reported by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and drafter.table.size <= 2000


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
        before = inner.table.texts()
        for other in ("two", 3):  # as in the first call, nobody has sent it
            assert calls(model, ids, drafter, scope=other) == [first]
        assert calls(model, ids, drafter, scope="one")[0] < first
        assert inner.table.texts() == before == []
        (fresh,) = calls(model, ids, drafter)  # nor does what has no scope read the others
        assert fresh == first and inner.table.texts()
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
    assert {*drafter.scopes} == {"alone", "a", "b", "c", "d"} and drafter.table.texts() == []


def test_a_drafter_that_only_reads_keeps_nothing_of_calls(tmp_path):
    model, ids = backbone(), prompts(1, seed=5)[0][None]
    text = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    drafter = SuffixDrafter(read_only=True).attach(model)
    unknown = calls(model, ids, drafter)
    assert calls(model, ids, drafter) == unknown == [20 - 1] and drafter.table.texts() == []
    drafter.add(text)
    known = drafter.table.texts()
    assert calls(model, ids, drafter)[0] < unknown[0] and drafter.table.texts() == known
    drafter.save_pretrained(tmp_path)
    assert SuffixDrafter.from_pretrained(tmp_path).read_only


def test_scopes_are_kept_bounded_and_forgotten(tmp_path):
    drafter, generator = SuffixDrafter(depth=4, max_tokens=1000), torch.Generator().manual_seed(0)
    for user in range(40):
        drafter.add(torch.randint(0, 500, (60,), generator=generator), scope=user)
        drafter.store(0)  # is in use
        assert sum(each.size for each in drafter.scopes.values()) <= 1000 + 60
    assert 0 in drafter.scopes and 39 in drafter.scopes and 1 not in drafter.scopes
    for each in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        assert each.scopes[39].texts() == drafter.scopes[39].texts()
    restore, kept = drafter.restore_point(), drafter.scopes[39].texts()
    drafter.add([1, 2, 3], scope=39)
    drafter.add([1, 2, 3], scope="new")
    restore()
    assert drafter.scopes[39].texts() == kept and "new" not in drafter.scopes
    drafter.forget(39)
    assert 39 not in drafter.scopes and 0 in drafter.scopes
    drafter.save_pretrained(tmp_path)
    assert SuffixDrafter.from_pretrained(tmp_path).table.texts() == []
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
    assert drafter.table.draft([5], 3, 3, 1, 9.0, 0.0) == ([], 0.0)
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
    "no lengths": lambda file, parts: save_file({"tokens": parts["tokens"]}, file, OPTIONS),
    "lengths": lambda file, parts: save_file(parts | {"lengths": parts["lengths"] + 1}, file, OPTIONS),
    "no length": lambda file, parts: save_file(parts | {"lengths": torch.tensor([7, -1])}, file, OPTIONS),
    "tokens": lambda file, parts: save_file(parts | {"tokens": -parts["tokens"]}, file, OPTIONS),
    "factor": lambda file, parts: save_file(parts, file, {"options": '{"factor": Infinity}'}),
    "depth": lambda file, parts: save_file(parts, file, {"options": '{"depth": 1000000000}'}),
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
