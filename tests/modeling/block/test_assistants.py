"""Assistants of transformers: drafts are transformers' own, for batches too, and cost nobody their text."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LogitsProcessorList
from transformers.generation import candidate_generator

from tests.assisted import assisted_generate
from tests.backbones import backbone, check_greedy, code_prompts, plain_continuations, prompts
from tests.dflash_models import BLOCK, WINDOW, assistant, drafter_of, fill, random_pair, trained_pair
from tests.integration.test_enumeration import DRAFTS, WARPS, emitted, target_rows
from tests.integration.test_enumeration import WINDOW as LONGEST
from tests.models import left_padded, tiny_model
from tests.no_sync import NoSync
from tokenahead import AssistantDrafter, BlockDrafter, DrafterCascade, SuffixDrafter
from tokenahead.generation.backbone.backbones import target_of
from tokenahead.generation.call.options import CallOptions, DraftOptions, NumberCheck
from tokenahead.generation.call.processing import Processing
from tokenahead.generation.call.sequences import Sequences
from tokenahead.testing import continuation_distribution, continuation_p_value

NAMES = ["llama", "mistral", "glimmer", "spark"]


@pytest.fixture(params=NAMES)
def pair(request):
    model, small = trained_pair(request.param)
    drafter = drafter_of(small).attach(model)
    yield model, drafter, small
    drafter.detach()


@pytest.fixture
def plain_pair():
    model, small = trained_pair()
    drafter = drafter_of(small).attach(model)
    yield model, drafter
    drafter.detach()


@pytest.mark.by_day("llama")
def test_greedy_alone_and_in_ragged_batches(pair):
    model, drafter, _ = pair
    assert check_greedy(model, drafter, code_prompts(8), new=41) == set(range(BLOCK))


@pytest.mark.by_day("glimmer")
def test_drafts_are_those_of_transformers(pair, monkeypatch):
    """Cycle for cycle, as long as there is room for a whole block; texts are longer than windows."""
    model, drafter, small = pair
    theirs, made, seen = [], candidate_generator.DFlashTokenCandidateGenerator, set()
    get = made.get_candidates

    def recorded(self, input_ids, *args, **kwargs):
        ids, logits = get(self, input_ids, *args, **kwargs)
        theirs.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    monkeypatch.setattr(made, "get_candidates", recorded)
    for prompt in code_prompts(4):
        inputs = {"input_ids": prompt[None], "attention_mask": torch.ones_like(prompt)[None]}
        options = dict(max_new_tokens=40, do_sample=False)
        out = model.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True, **options)
        theirs.clear()
        own = type(model).generate(model, **inputs, assistant_model=small, speculation_type="dflash", **options)
        assert torch.equal(out.sequences, own)
        drafts = out.speculation.drafts
        whole = [draft for draft in drafts if len(draft) == BLOCK - 1]
        assert whole == theirs[1 : 1 + len(whole)] and len(whole) > 5
        seen |= set(out.speculation.accepted[: len(whole)])
    assert seen == set(range(BLOCK))


def first_draft(model, small, batch, do_sample):
    """The draft behind a batch, as the loop asks for it, without a wait for the device."""
    inputs, cache = left_padded(batch), DynamicCache(config=model.config)
    places = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    session_layers = [layer + 1 for layer in small.config.target_layer_ids]
    with torch.no_grad():
        outputs = model(**inputs, position_ids=places, past_key_values=cache, output_hidden_states=session_layers)
    prompt = inputs["input_ids"]
    target = target_of(model, cache, prompt[:, 0], inputs["attention_mask"])
    config, _ = model._prepare_generation_config(None, do_sample=do_sample, max_length=40)
    made = DraftOptions.of_call(
        CallOptions(num_assistant_tokens=BLOCK - 1, speculates=True), model, config, LogitsProcessorList(), prompt
    )
    session = drafter_of(small).attach(model).start(made)
    session.begin(outputs, target)
    tokens = Sequences(torch.cat([prompt, outputs.logits[:, -1:].argmax(-1)], dim=1))
    with torch.no_grad(), NoSync():
        return tokens, session.propose(tokens, BLOCK - 1)


def test_distributions_are_those_of_its_own_forward():
    """For rows of a ragged batch as for each row alone."""
    model, small = trained_pair()
    batch = code_prompts(5)
    tokens, tree = first_draft(model, small, batch, do_sample=True)
    assert tree.probs.shape == (5, BLOCK - 1, 48) and len(batch[-1]) > WINDOW
    for row, prompt in enumerate(batch):
        text = torch.cat([prompt, tokens.last()[row, None]])[None]
        expected = fill(small, model, text, len(prompt)).softmax(-1)
        torch.testing.assert_close(tree.probs[row], expected[0], atol=1e-5, rtol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("warp", WARPS)
def test_the_emitted_distribution_is_the_targets(warp):
    """Positions of a block are drawn one by one, from distributions that no drawn token changes."""
    processing = Processing(LogitsProcessorList(WARPS[warp]))
    options = SimpleNamespace(do_sample=True, threshold=0.0, processing=processing, numbers=NumberCheck())
    logits = 1.5 * torch.randn(LONGEST - 1, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q = torch.stack([DraftOptions.choose(options, step[None])[1][0] for step in logits])
    for rule in ("token", "block"):
        distribution, target = emitted(rule, q.expand(len(DRAFTS), -1, -1), target_rows(processing, 50))
        assert max(abs(distribution[text] - target[text]) for text in distribution) < 1e-12


WARPED = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.mark.by_day("block")
@pytest.mark.parametrize(
    ("name", "rule", "processors"),
    [("llama", "block", {}), ("llama", "token", WARPED), ("glimmer", "block", WARPED)],
    ids=["block", "token-warped", "glimmer-block-warped"],
)
def test_sampled_distribution_of_ragged_rows(name, rule, processors):
    """Two prompts of different lengths in one batch, in turn; each has its own distribution."""
    model, small = random_pair(name)
    drafter, options = drafter_of(small).attach(model), {"top_k": 0} | processors
    batch = [torch.tensor([1, 3, 2, 4, 3, 2, 2, 4, 5, 1, 2, 3]), torch.tensor([4, 1, 3])]
    assert len(batch[0]) > WINDOW
    out = model.generate(
        **left_padded(batch * 1_200), do_sample=True, max_new_tokens=6, assistant_model=drafter, verification=rule,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    drafter.detach()
    assert {count for row in out.speculation.rows_accepted for count in row} >= {0, 1, 2}
    for row, prompt in enumerate(batch):
        distribution = continuation_distribution(model, prompt[None], 2, **options)
        assert continuation_p_value(out.sequences[row::2, 12:14], distribution) > 0.001


@pytest.mark.by_day(
    "num_assistant_tokens", "assistant_confidence_threshold", "suppress_tokens", "num_assistant_tokens_schedule"
)
@pytest.mark.parametrize(
    "options",
    [{"num_assistant_tokens": 2}, {"assistant_confidence_threshold": 0.6}, {"suppress_tokens": [7, 9, 12]},
     {"num_assistant_tokens_schedule": "adaptive"}, {"do_sample": True, "top_k": 1}, {"speculation_type": "dflash"}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_of_calls(plain_pair, options):
    model, drafter = plain_pair
    common = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0} | options
    batch = left_padded(code_prompts(5))
    out = model.generate(**batch, assistant_model=drafter, return_dict_in_generate=True, **common)
    common |= {"speculation_type": None, "num_assistant_tokens_schedule": None}
    assert torch.equal(out.sequences, type(model).generate(model, **batch, **common))
    lengths = {len(draft) for row in out.speculation.rows_drafts for draft in row}
    assert max(lengths) == options.get("num_assistant_tokens", BLOCK - 1)


def test_cycles_without_drafts_are_made_up_for(plain_pair):
    """Where a look-up drafts, the states of several cycles are read before the next block; which is then as ever."""
    (model, drafter), small = plain_pair, trained_pair()[1]
    batch, new = prompts(8), 40
    cascade = DrafterCascade([SuffixDrafter(num_tokens=3), drafter], least=2.5).attach(model)
    out = model.generate(
        **left_padded(batch), max_new_tokens=new, do_sample=False, assistant_model=cascade, return_dict_in_generate=True
    )
    cascade.detach()
    assert torch.equal(out.sequences[:, -new:], torch.stack(plain_continuations(model, batch, new)))
    whole = []
    for row, prompt in enumerate(batch):
        text, place = torch.cat([prompt, out.sequences[row, -new:]])[None], len(prompt)
        for draft, accepted in zip(out.speculation.rows_drafts[row], out.speculation.rows_accepted[row]):
            whole.append(len(draft) == BLOCK - 1)
            if whole[-1]:
                assert draft == fill(small, model, text, place).argmax(-1)[0].tolist()
            place += accepted + 1
    assert 5 < sum(whole) < len(whole) - 5


def test_transformers_own_loop_takes_the_drafts(plain_pair):
    """Through `CandidateAdapter`, past our patch."""
    model, drafter = plain_pair
    batch = code_prompts(5)
    for prompt, text in zip(batch, plain_continuations(model, batch, 12)):
        mask = torch.ones_like(prompt)[None]
        out = assisted_generate(model, prompt[None], drafter, attention_mask=mask, max_new_tokens=12, do_sample=False)
        assert out[0, len(prompt) :].tolist() == text.tolist()


@pytest.mark.core
def test_copies_and_folders(plain_pair, tmp_path):
    model, drafter = plain_pair
    drafter.save_pretrained(tmp_path)
    loaded = BlockDrafter.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.num_drafts == BLOCK - 1 and loaded.config.vocab_size == 48
    batch, options = left_padded(code_prompts(4)), dict(max_new_tokens=12, do_sample=False)
    found = []
    for each in (drafter, copy.deepcopy(drafter), loaded):
        out = model.generate(**batch, assistant_model=each.attach(model), return_dict_in_generate=True, **options)
        found.append(out.speculation.rows_drafts)
        if each is not drafter:
            each.detach()
    assert found[0] == found[1] == found[2]


def test_backbones_that_it_was_not_made_for():
    for make, changes, message in (
        (backbone, {"target_layer_ids": [0, 1]}, r"feature_layers=\[1, 2\].*LlamaForCausalLM.*0..1"),
        (backbone, {"mask_token_id": 48, "target_layer_ids": [0]}, "mask_token_id=48.*0..47"),
        (backbone, {"hidden_size": 24}, "hidden_size.*24.*32"),
        (tiny_model, {"hidden_size": 64}, "hidden_size|EvaByteForMTPC"),
    ):
        model, drafter = make(), drafter_of(assistant(**changes))
        with pytest.raises(ValueError, match=message):
            drafter.attach(model)
        assert "generate" not in vars(model)


def test_drafters_with_a_cache_of_their_own_refuse_it(tmp_path):
    assistant().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BlockDrafter.from_pretrained"):
        AssistantDrafter(assistant())
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):  # transformers says so
        AssistantDrafter.from_pretrained(tmp_path)
