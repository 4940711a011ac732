"""The EVA cache: blocks across borders, rows of different lengths, rollback, and what it refuses."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.models import GOLDENS, left_padded, tiny_model
from tokenahead import EvaByteCache, EvaByteForMTPC, NgramDrafter

MODEL = tiny_model()
WINDOW = MODEL.config.window_size
TEXT = torch.randint(64, 320, (4, 300), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def full_logits(ids):
    return MODEL(ids, use_cache=False).logits


@pytest.mark.parametrize("case", sorted(path.name for path in GOLDENS.glob("vis_*")))
@torch.no_grad()
def test_speculative_blocks_of_the_official_goldens(case):
    model = EvaByteForMTPC.from_pretrained(GOLDENS / case, dtype=torch.float32).eval()
    gold = load_file(GOLDENS / case / "golden.safetensors")
    schedule, read, rows = gold["block.schedule"].tolist(), 0, []
    cache = model(gold["block.true_ids"][None, : schedule[0][0]]).past_key_values
    crossings = 0
    for start, count, kept in schedule:
        block = gold["block.tokens"][None, read : read + count]
        rows.append(model(block, past_key_values=cache, output_hidden_states=-1).hidden_states[-1][0])
        cache.crop(kept - count)
        read += count
        crossings += start // model.config.window_size != (start + count - 1) // model.config.window_size
    assert crossings > 0
    torch.testing.assert_close(torch.cat(rows), gold["block.hidden"], atol=5e-5, rtol=0)


@settings(max_examples=12, deadline=None)
@given(
    prefill=st.integers(1, 100),
    steps=st.lists(st.tuples(st.integers(1, 80), st.floats(0, 1)), min_size=1, max_size=8),
    recording=st.booleans(),
)
@torch.no_grad()
def test_any_schedule_of_blocks_and_rollbacks_equals_the_full_forward(prefill, steps, recording):
    """Blocks of wrong tokens, of any length, with some true prefix that is kept."""
    truth = TEXT[:1]
    cache = EvaByteCache(MODEL.config)
    if recording:
        cache.activate_past_recording()
    MODEL(truth[:, :prefill], past_key_values=cache)
    at = prefill
    for length, share in steps:
        longest = length if recording else min(length, WINDOW)
        rollback = longest - int(share * longest)
        block = truth[:, at : at + length].clone()
        block[:, length - rollback :] = block[:, length - rollback :].flip(1)
        if block.shape[1] < length:
            break
        logits = MODEL(block, past_key_values=cache).logits
        expected = full_logits(torch.cat([truth[:, :at], block], dim=1))[:, at:]
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)
        cache.crop(-rollback)
        at += length - rollback
        assert cache.get_seq_length() == at == cache.lengths[0]


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=2, max_size=4),
    steps=st.lists(st.tuples(st.integers(1, 80), st.lists(st.floats(0, 1), min_size=4, max_size=4)), max_size=6),
)
@example(lengths=[17, 1], steps=[(3, [0.75] * 4), (15, [0.8125] * 4), (33, [0.0] * 4)])
@torch.no_grad()
def test_sequences_keep_different_numbers_of_tokens(lengths, steps):
    cache = EvaByteCache(MODEL.config)
    cache.activate_past_recording()
    MODEL(**left_padded([row[:n] for row, n in zip(TEXT, lengths)]), past_key_values=cache)
    at = list(lengths)
    for length, shares in steps:
        block = torch.stack([row[n : n + length] for row, n in zip(TEXT, at)])
        logits = MODEL(block, past_key_values=cache).logits
        for row, n in enumerate(at):
            expected = full_logits(TEXT[row : row + 1, : n + length])[0, n:]
            torch.testing.assert_close(logits[row], expected, atol=2e-5, rtol=0)
        kept = [int(share * length) for share in shares[: len(at)]]
        cache.crop(torch.tensor(kept) - length)
        at = [n + keep for n, keep in zip(at, kept)]
        assert cache.lengths == at


@pytest.mark.core
@torch.no_grad()
def test_reorder_repeat_select_and_reset():
    lengths = [40, 70, 33]
    cache = EvaByteCache(MODEL.config)
    MODEL(**left_padded([row[:n] for row, n in zip(TEXT, lengths)]), past_key_values=cache)
    rows = [0, 1, 2]
    for change, expected in (
        (lambda: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda: cache.batch_repeat_interleave(2), [2, 2, 0, 0, 0, 0]),
        (lambda: cache.batch_select_indices(torch.tensor([1, 4, 5])), [2, 0, 0]),
        (lambda: cache.batch_select_indices(torch.tensor([True, True, False])), [2, 0]),
    ):
        change()
        rows = expected
        assert cache.lengths == [lengths[row] for row in rows] and cache.batch_size == len(rows)
        block = torch.stack([TEXT[row, lengths[row] : lengths[row] + 5] for row in rows])
        logits = MODEL(block, past_key_values=cache).logits
        for i, row in enumerate(rows):
            expected_logits = full_logits(TEXT[row : row + 1, : lengths[row] + 5])[0, -5:]
            torch.testing.assert_close(logits[i], expected_logits, atol=2e-5, rtol=0)
        cache.crop(-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    logits = MODEL(TEXT[:1, :50], past_key_values=cache).logits
    torch.testing.assert_close(logits, full_logits(TEXT[:1, :50]), atol=2e-5, rtol=0)


@torch.no_grad()
def test_memory_is_the_open_window_and_summaries():
    cache = EvaByteCache(MODEL.config)
    MODEL(TEXT[:1, :200], past_key_values=cache)
    for position in range(200, 300):
        MODEL(TEXT[:1, position : position + 1], past_key_values=cache)
        summaries = position // MODEL.config.chunk_size
        assert all(layer.keys.shape[2] <= summaries + 2 * WINDOW + 64 for layer in cache.layers)
    assert cache.layers[0].keys.shape[2] < 200


@torch.no_grad()
def test_crop_refuses_what_is_folded_away_and_changes_nothing():
    cache = EvaByteCache(MODEL.config)
    MODEL(TEXT[:1, :40], past_key_values=cache)
    MODEL(TEXT[:1, 40:45], past_key_values=cache)
    with pytest.raises(ValueError, match="cannot.*14.*0.*13"):
        cache.crop(-14)
    assert cache.lengths == [45]
    cache.crop(-13)
    assert cache.lengths == [32]
    with pytest.raises(ValueError, match="crop"):
        cache.crop(1)


@torch.no_grad()
def test_recording_lets_several_forwards_be_rolled_back_together():
    cache = EvaByteCache(MODEL.config)
    MODEL(TEXT[:1, :28], past_key_values=cache)
    cache.activate_past_recording()
    for start in (28, 32, 36):
        MODEL(TEXT[:1, start : start + 4], past_key_values=cache)
    cache.crop(-12)
    assert cache.lengths == [28]
    logits = MODEL(TEXT[:1, 28:60], past_key_values=cache).logits
    torch.testing.assert_close(logits, full_logits(TEXT[:1, :60])[:, 28:], atol=2e-5, rtol=0)


@pytest.mark.by_day("3")
@pytest.mark.parametrize("batch", [1, 3])
def test_drafts_longer_than_a_window(batch):
    prompt = TEXT[:1, :7].repeat(batch, 6)
    options = {"max_new_tokens": 90, "do_sample": False, "pad_token_id": 0}
    model = tiny_model()
    plain = model.generate(prompt, use_mtp=False, **options)
    drafter = NgramDrafter(num_tokens=2 * WINDOW + 5).attach(model)
    found = model.generate(prompt, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert torch.equal(found.sequences, plain)
    drafts = found.speculation.drafts if batch == 1 else found.speculation.drafts[0]
    assert max(map(len, drafts)) > WINDOW


@torch.no_grad()
def test_a_long_prompt_is_folded_at_once():
    cache = EvaByteCache(MODEL.config)
    cache.activate_past_recording()
    MODEL(TEXT[:1], past_key_values=cache)
    assert cache.layers[0].keys.shape[2] < 200


def test_a_batch_of_another_size_is_refused():
    cache = MODEL(TEXT[:2, :5]).past_key_values
    with pytest.raises(ValueError, match="holds.*2.*3"):
        MODEL(TEXT[:3, :5], past_key_values=cache)


@pytest.mark.core
def test_a_row_that_ended_windows_ago_cannot_be_continued_and_that_is_said():
    """What plain decoding fed to it since is folded away, and with it what its text would need."""
    model = tiny_model()
    window = model.config.window_size
    ids = torch.randint(64, 320, (2, 3 * window))
    cache = model(ids).past_key_values
    mask = torch.ones(2, 3 * window, dtype=torch.long)
    mask[0, window // 2 :] = 0
    longer = torch.nn.functional.pad(ids, (0, 2), value=70)
    with pytest.raises(ValueError, match="crop"):
        model.generate(
            longer,
            attention_mask=torch.nn.functional.pad(mask, (0, 2), value=1),
            past_key_values=cache,
            max_new_tokens=3,
        )
