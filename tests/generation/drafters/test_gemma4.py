"""Gemma 4's assistants: drafts are those of transformers' own forward on verified rows, and cost nobody their text."""

import pytest
import torch
from transformers import DynamicCache, Gemma4Config, Gemma4ForConditionalGeneration, LogitsProcessorList

from tests.backbones import check_greedy, prompts
from tests.gemma4_models import WINDOW, assistant, read, trained_pair
from tests.models import left_padded
from tests.no_sync import NoSync
from tokenahead import AssistantDrafter
from tokenahead.generation.backbone.backbones import target_of
from tokenahead.generation.call.options import CallOptions, DraftOptions
from tokenahead.generation.call.sequences import Sequences

DRAFT = 3


@pytest.fixture(params=[dict(), dict(is_sharing=False), dict(has_clusters=True)], ids=["small", "large", "clusters"])
def pair(request):
    model, small = trained_pair(**request.param)
    drafter = AssistantDrafter(small, DRAFT).attach(model)
    yield model, drafter
    drafter.detach()


@pytest.mark.by_day("clusters")
def test_greedy_alone_and_in_ragged_batches(pair):
    model, drafter = pair
    assert check_greedy(model, drafter, prompts(8), new=14) == set(range(DRAFT + 1))


@pytest.mark.by_day("small")
def test_drafts_are_made_from_verified_rows_alone(pair):
    """Every draft of every row of a ragged batch is made again by transformers from that row's own finished text."""
    model, drafter = pair
    batch, new, seen = prompts(8), 30, set()
    out = model.generate(
        **left_padded(batch), max_new_tokens=new, do_sample=False, assistant_model=drafter.model,
        return_dict_in_generate=True,
    )  # fmt: skip
    for row, prompt in enumerate(batch):
        text, place = torch.cat([prompt, out.sequences[row, -new:]])[None], len(prompt)
        for draft, accepted in zip(out.speculation.rows_drafts[row], out.speculation.rows_accepted[row]):
            if draft:
                expected = read(drafter.model, model, text, place, len(draft)).argmax(-1)[0].tolist()
                assert draft == expected
            place, seen = place + accepted + 1, seen | {accepted}
    assert seen == set(range(DRAFT + 1)) and place > 2 * WINDOW


def first_draft(model, small, batch, do_sample):
    """The draft behind a batch, as the loop asks for it, without a wait for the device."""
    inputs, cache = left_padded(batch), DynamicCache(config=model.config)
    places = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        outputs = model(**inputs, position_ids=places, past_key_values=cache, output_hidden_states=-1)
    prompt = inputs["input_ids"]
    target = target_of(model, cache, prompt[:, 0], inputs["attention_mask"])
    config, _ = model._prepare_generation_config(None, do_sample=do_sample, max_length=40)
    options = CallOptions(num_assistant_tokens=DRAFT, speculates=True)
    made = DraftOptions.of_call(options, model, config, LogitsProcessorList(), prompt)
    chain = AssistantDrafter(small).start(made)
    chain.begin(outputs, target)
    tokens = Sequences(torch.cat([prompt, outputs.logits[:, -1:].argmax(-1)], dim=1))
    with torch.no_grad(), NoSync():
        return tokens, chain.propose(tokens, DRAFT)


def test_distributions_are_those_of_transformers_own_forward():
    """For rows of a ragged batch as for each row alone, though no step looks at the mask or waits for the device."""
    model, small = trained_pair()
    batch = prompts(5)
    tokens, tree = first_draft(model, small, batch, do_sample=True)
    assert tree.probs.shape == (5, DRAFT, 48) and len(batch[-1]) > WINDOW
    for row, prompt in enumerate(batch):
        text = torch.cat([prompt, tokens.last()[row, None], tree.tokens[row]])[None]
        expected = read(small, model, text, len(prompt), DRAFT, guided=True).softmax(-1)
        torch.testing.assert_close(tree.probs[row], expected[0], atol=1e-5, rtol=1e-4)


def test_backbones_that_see_and_hear():
    """Public Gemma 4 models are loaded as a whole; the text model within lends its states."""
    text, small = trained_pair()
    whole = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text.config)).eval()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    drafter, prompt = AssistantDrafter(small, DRAFT).attach(whole), prompts(4)[3][None]
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, eos_token_id=None)
    out = whole.generate(prompt, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, text.generate(prompt, **options)) and sum(out.speculation.accepted) > 0


def test_folders(tmp_path):
    for clusters in [False, True]:
        small = assistant(has_clusters=clusters)
        small.save_pretrained(tmp_path)
        drafter = AssistantDrafter.from_pretrained(tmp_path, num_tokens=2, dtype=torch.float64)
        assert drafter.num_tokens == 2 and drafter.model.dtype == torch.float64
        loaded = drafter.model.state_dict()
        assert all(
            torch.equal(value.to(loaded[name].dtype), loaded[name]) for name, value in small.state_dict().items()
        )
        drafter.model.float().save_pretrained(tmp_path / "again")
        first, second = ((folder / "config.json").read_text().splitlines() for folder in (tmp_path, tmp_path / "again"))
        assert all('"dtype"' in line for line in set(first) ^ set(second))
