"""What users of transformers do with `generate`: tests of every drafter, which compare with plain decoding."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, TextIteratorStreamer, pipeline

from tests.matrix.models import NEW_TOKENS, Entry
from tokenahead.testing import Decoder, verify_greedy

DICT = dict(return_dict_in_generate=True)


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """Messages of a logger, also those that are given once only."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.Logger.warning_once.cache_clear()
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def as_plain(entry: Entry, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """The text, speculated and plain, which must be one; returned."""
    plain = entry.plain(inputs, **options)
    assert torch.equal(entry.generate(inputs, **options), plain)
    return plain


def as_decoder(write: Callable[..., torch.Tensor]) -> Decoder:
    """A decoding function of the public kit, which writes with the entry's model."""
    return lambda model, ids, **options: write({"input_ids": ids}, **options)


def new_tokens(text: torch.Tensor, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """What was written behind the prompts."""
    return text[:, inputs["input_ids"].shape[1] :].tolist()


def inside_a_draft(entry: Entry, inputs: dict[str, torch.Tensor]) -> int:
    """The first token of a draft that is kept, with another one behind it; one that its row has not seen, if any."""
    out = entry.generate(inputs, **DICT)
    found = []
    for text, counts in zip(new_tokens(out.sequences, inputs), out.speculation.rows_accepted):
        starts = [1 + sum(counts[:cycle]) + cycle for cycle, count in enumerate(counts) if count]
        found += [(text[at] in text[:at], text[at]) for at in starts]
    return min(found)[1]


class DecodingConformance:
    """What users of transformers ask of `generate`; each test compares with plain decoding."""

    def test_greedy(self, entry: Entry) -> None:
        """The plain text in fewer calls, with some drafts kept and some not."""
        inputs = entry.inputs(1)
        out = entry.generate(inputs, max_new_tokens=24, **DICT)
        assert torch.equal(out.sequences, entry.plain(inputs, max_new_tokens=24))
        stats = out.speculation
        assert stats.backbone_calls <= 24 and 0 < sum(stats.accepted) < sum(map(len, stats.drafts))

    def test_sampled(self, entry: Entry) -> None:
        """A seed repeats a run, another one does not; where one token is possible, it is the greedy one."""
        runs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            runs.append(entry.generate(entry.inputs(2), do_sample=True, top_k=0, temperature=1.5))
        assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
        assert torch.equal(entry.generate(entry.inputs(2), do_sample=True, top_k=1), entry.text(2))

    def test_kit(self, entry: Entry) -> None:
        """What the public kit asks of greedy texts: alone and in ragged batches, ends, stop strings, processors."""
        found = verify_greedy(as_decoder(entry.generate), entry.model, entry.tokenizer, as_decoder(entry.plain))
        assert [each for each in found if each.result != "kept"] == []

    def test_end_inside_a_draft(self, entry: Entry) -> None:
        """At a draft that is kept, with another one behind it, of chains and trees."""
        inputs = entry.inputs(4)
        ends = inside_a_draft(entry, inputs)
        plain = as_plain(entry, inputs, eos_token_id=ends)
        if entry.tree is not None:
            assert torch.equal(entry.generate(inputs, eos_token_id=ends, draft_tree=entry.tree), plain)

    def test_streamers(self, entry: Entry) -> None:
        """Text of one row."""
        pieces = TextIteratorStreamer(entry.tokenizer, skip_prompt=True)
        out = entry.generate(entry.inputs(1), streamer=pieces)
        assert "".join(pieces) == entry.tokenizer.decode(out[0, -NEW_TOKENS:])

    @pytest.mark.parametrize(
        "options",
        [{"guidance_scale": 1.5}, {"num_beams": 2}, {"output_attentions": True}],
        ids=["guidance", "beams", "attentions"],
    )
    def test_what_decodes_plainly(self, entry: Entry, options: dict[str, Any]) -> None:
        """One warning however often it is asked for, and a refusal where drafts are asked for by name."""
        ((name, value),) = options.items()
        with warnings_of("tokenahead") as messages:
            texts = [entry.generate(entry.inputs(2), use_mtp=None, **options) for _ in range(2)]
        plain = entry.plain(entry.inputs(2), **options)
        assert all(torch.equal(text, plain) for text in texts)
        shown = f"{name}={value}"
        assert [message for message in messages if shown in message] == [
            f"Decoding one token at a time, without speculation, because of {shown}."
        ]
        with pytest.raises(ValueError, match=f"use_mtp=True cannot be combined with {shown}"):
            entry.generate(entry.inputs(2), **options)

    def test_continuation(self, entry: Entry) -> None:
        """The returned cache continues the text, of rows that accepted different numbers."""
        inputs = entry.inputs(4, even=True)
        whole = entry.plain(inputs, max_new_tokens=20)
        for max_new_tokens in (5, 9, 14):
            first = entry.generate(inputs, max_new_tokens=max_new_tokens, **DICT)
            assert torch.equal(first.sequences, whole[:, : first.sequences.shape[1]])
            assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
            longer = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
            options = {"past_key_values": first.past_key_values, "max_new_tokens": 20 - max_new_tokens}
            second = entry.generate(longer, **options, **DICT)
            assert torch.equal(second.sequences, whole) and second.speculation.rows_drafts[0]

    def test_continuation_of_ragged_rows(self, entry: Entry) -> None:
        """From plain decoding to drafts and back."""
        inputs = entry.inputs(4)
        whole, mask = entry.plain(inputs), torch.nn.functional.pad(inputs["attention_mask"], (0, 7), value=1)
        for begin, go_on in itertools.product((entry.plain, entry.generate), repeat=2):
            first = begin(inputs, max_new_tokens=7, **DICT)
            options = {"past_key_values": first.past_key_values, "max_new_tokens": NEW_TOKENS - 7}
            assert torch.equal(go_on({"input_ids": first.sequences, "attention_mask": mask}, **options), whole)

    def test_scores(self, entry: Entry) -> None:
        """Scores and logits of every token, in ragged rows that end apart."""
        inputs = entry.inputs(4)
        start = inputs["input_ids"].shape[1]
        options = dict(output_scores=True, output_logits=True, **DICT)
        for ends in (None, inside_a_draft(entry, inputs)):
            ours, theirs = (write(inputs, eos_token_id=ends, **options) for write in (entry.generate, entry.plain))
            assert torch.equal(ours.sequences, theirs.sequences)
            assert len(ours.scores) == len(ours.logits) == ours.sequences.shape[1] - start
            open_rows = torch.ones(4, dtype=torch.bool)
            for step, token in enumerate(ours.sequences[:, start:].unbind(1)):
                for name in ("scores", "logits"):
                    pair = (getattr(out, name)[step][open_rows] for out in (ours, theirs))
                    torch.testing.assert_close(*pair, atol=2e-4, rtol=1e-3)
                assert (ours.scores[step][~open_rows].softmax(-1)[:, 0] == 1).all()  # padding for certain
                open_rows &= token != (-1 if ends is None else ends)

    def test_hidden_states(self, entry: Entry) -> None:
        """Hidden states of every layer at every token."""
        inputs, options = entry.inputs(2), dict(output_hidden_states=True, **DICT)
        ours, theirs = entry.generate(inputs, **options), entry.plain(inputs, **options)
        assert len(ours.hidden_states) == len(theirs.hidden_states) == NEW_TOKENS
        real = inputs["attention_mask"].bool()
        for step, (own, other) in enumerate(zip(ours.hidden_states, theirs.hidden_states)):
            assert len(own) == len(other)
            for state, expected in zip(own, other):
                pair = (state, expected) if step else (state[real], expected[real])
                torch.testing.assert_close(*pair, atol=2e-4, rtol=1e-3)

    def test_several_sequences(self, entry: Entry) -> None:
        """`num_return_sequences` of every row of a ragged batch."""
        inputs = entry.inputs(2)
        certain = entry.generate(inputs, do_sample=True, top_k=1, num_return_sequences=3)
        assert torch.equal(certain, entry.text(2).repeat_interleave(3, 0))
        drawn = entry.generate(inputs, do_sample=True, top_k=0, temperature=1.5, num_return_sequences=3)
        assert len({tuple(row) for row in drawn[:3].tolist()}) > 1

    def test_adaptive(self, entry: Entry) -> None:
        """Drafts of the length that pays."""
        options = dict(max_new_tokens=24, num_assistant_tokens_schedule="adaptive")
        (entry.drafter or entry.model).schedules.clear()  # what other habits' calls have learned would be gone on with
        out = entry.generate(entry.inputs(2), **options, **DICT)
        assert torch.equal(out.sequences, entry.plain(entry.inputs(2), max_new_tokens=24))
        assert min(map(len, out.speculation.rows_drafts[0])) == 0 < max(map(len, out.speculation.rows_drafts[0]))

    def test_draft_length(self, entry: Entry) -> None:
        """`num_assistant_tokens`, from the shortest draft on, in a config of the call."""
        for number in (1, 2):
            config = GenerationConfig(num_assistant_tokens=number, max_new_tokens=NEW_TOKENS, do_sample=False)
            out = entry.generate(entry.inputs(3), generation_config=config, **DICT)
            assert torch.equal(out.sequences, entry.text())
            assert max(out.speculation.rows_accepted[0]) <= number

    def test_chunked_prefill(self, entry: Entry) -> None:
        """A prompt that is read in pieces."""
        inputs = entry.inputs(1)
        for size in (2, 5):
            assert torch.equal(entry.generate(inputs, prefill_chunk_size=size), entry.text(1))

    def test_in_pipeline(self, entry: Entry) -> None:
        """The text-generation pipeline."""
        assistant = {} if entry.drafter is None else {"assistant_model": entry.drafter}
        prompt = entry.tokenizer.decode(entry.inputs(1)["input_ids"][0].clamp(3, min(entry.vocabulary - 1, 25)))
        writer = pipeline("text-generation", model=entry.model, tokenizer=entry.tokenizer, **assistant)
        options = dict(do_sample=False, max_new_tokens=8, pad_token_id=0, return_full_text=False)
        ids = entry.tokenizer(prompt, return_tensors="pt")["input_ids"]
        expected = entry.plain({"input_ids": ids}, max_new_tokens=8)[0, ids.shape[1] :]
        assert writer(prompt, **options)[0]["generated_text"] == entry.tokenizer.decode(expected)
