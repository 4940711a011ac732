"""Heads attached to plain backbones: greedy output is the backbone's own, sampled output has its distribution."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from tests.backbones import (
    ATTENTION_WINDOW,
    backbone,
    check_greedy,
    plain_continuations,
    prompts,
    train_heads,
    word_tokenizer,
)
from tests.distributions import continuation_distribution, continuation_p_value
from tests.models import left_padded

NAMES = ["llama", "gemma3", "gpt2"]
GROUP = prompts(4, seed=8)[:4]


@pytest.fixture(scope="module", params=NAMES)
def pair(request):
    model = backbone(request.param)
    return model, train_heads(model)


def test_greedy_alone_and_in_ragged_batches(pair):
    model, heads = pair
    assert check_greedy(model, heads, prompts(68), new=20) == {0, 1, 2, 3}


@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("name", NAMES)
def test_sampled_distribution(name, rule):
    model = backbone(name, vocabulary=5, seed=2)
    heads, prompt = train_heads(model, steps=30), torch.tensor([[1, 3, 2, 4, 3, 2, 2, 4]])
    assert prompt.shape[1] > ATTENTION_WINDOW
    options = dict(temperature=0.8, top_k=4, repetition_penalty=1.2)
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_new_tokens=5, num_return_sequences=5_000,
        assistant_model=heads, verification=rule, return_dict_in_generate=True, **options,
    )  # fmt: skip
    assert {count for row in out.speculation.rows_accepted for count in row} == {0, 1, 2, 3}
    distribution = continuation_distribution(model, prompt, 3, **options)
    assert continuation_p_value(out.sequences[:, 8:11], distribution) > 0.001


def generate_group(model, heads, **options):
    """The ragged batch, with and without the heads; the accepted counts of the first."""
    common = dict(max_new_tokens=20, do_sample=False, return_dict_in_generate=True) | left_padded(GROUP) | options
    plain = model.generate(**common)
    out = model.generate(**common, assistant_model=heads)
    return plain.sequences, out


class RowBias(LogitsProcessor):
    """A bias and a temperature for every row of the batch."""

    def __init__(self, rows: int, vocabulary: int) -> None:
        self.bias = 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(4))
        self.temperature = torch.linspace(0.5, 2, rows)[:, None]

    def __call__(self, input_ids, scores):
        return (scores + self.bias) / self.temperature


class RowLimit(StoppingCriteria):
    """A length for every row of the batch."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= torch.arange(24, 24 + 2 * len(input_ids), 2)


class Surprise(StoppingCriteria):
    """Stops a row at the second token that nearly was another one, as it reads from the recorded scores."""

    def __call__(self, input_ids, scores, **kwargs):
        best = torch.stack(scores).topk(2).values
        return (best[..., 0] - best[..., 1] < 0.15).sum(0) > 1


def test_processors_that_know_rows(pair):
    plain, out = generate_group(*pair, logits_processor=LogitsProcessorList([RowBias(4, 48)]))
    assert torch.equal(out.sequences, plain) and not torch.equal(plain, generate_group(*pair)[0])
    assert len({len(row) for row in out.speculation.rows_accepted}) > 1


@pytest.mark.parametrize(
    "options", [{"criterion": RowLimit()}, {"criterion": Surprise(), "output_scores": True}], ids=["rows", "scores"]
)
def test_criteria_that_know_rows_or_read_scores(pair, options):
    options = dict(options)
    criteria = StoppingCriteriaList([options.pop("criterion")])
    # without an end-of-sequence id plain decoding goes on in rows that ended, until the last has ended
    plain, out = generate_group(*pair, stopping_criteria=criteria, eos_token_id=47, **options)
    assert torch.equal(out.sequences, plain) and len(set((plain == 0).sum(1).tolist())) > 1
    assert (plain[:, -1] == 0).any()


def test_stop_strings(pair):
    (model, heads), words = pair, word_tokenizer()
    batch = prompts(20, seed=6)
    stopped = 0
    for prompt, text in zip(batch, plain_continuations(model, batch, 20)):
        for start in (2, 5):
            stop = words.decode(text[start : start + 3])
            options = dict(stop_strings=[stop], tokenizer=words, max_new_tokens=20, do_sample=False)
            options["attention_mask"] = torch.ones_like(prompt)[None]
            plain = model.generate(prompt[None], **options)
            assert torch.equal(model.generate(prompt[None], assistant_model=heads, **options), plain)
            stopped += plain.shape[1] < len(prompt) + 20
    assert stopped == 40


def test_a_given_cache_is_continued(pair):
    model, heads = pair
    plain, _ = generate_group(model, heads)
    inputs = left_padded(GROUP)
    for first, second in [(None, heads), (heads, None), (heads, heads)]:
        options = dict(do_sample=False, return_dict_in_generate=True)
        begun = model.generate(**inputs, **options, max_new_tokens=9, assistant_model=first)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 9), value=1)
        out = model.generate(
            begun.sequences, attention_mask=mask, past_key_values=begun.past_key_values, max_new_tokens=11,
            assistant_model=second, **options,
        )  # fmt: skip
        assert torch.equal(out.sequences, plain)


def test_guidance_decodes_plainly_and_refuses_to_be_forced(pair):
    model, heads = pair
    plain, out = generate_group(model, heads, guidance_scale=1.7)
    assert torch.equal(out.sequences, plain) and not hasattr(out, "speculation")
    with pytest.raises(ValueError, match="use_mtp=.*guidance_scale=.*1.7"):
        model.generate(GROUP[0][None], assistant_model=heads, guidance_scale=1.7, use_mtp=True)
