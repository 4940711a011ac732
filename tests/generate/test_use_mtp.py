"""Cases in which transformers' own `use_mtp` raises, is silently wrong or drafts nothing: they work, or say why not.

Training, float8 and labels are tested in tests/modeling and tests/training; shorter prompts than D, earlier caches and
ragged batches in test_lossless_modules.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoConfig, StaticCache, StoppingCriteria, StoppingCriteriaList

from tests.models import left_padded
from tokenahead import DeepSeekMTP

CHECKPOINT = Path(__file__).parents[1] / "data" / "deepseek_mtp" / "dsv3_d2_trained"
PROMPT = torch.arange(20, 34)[None]


def load(**options):
    model = DeepSeekMTP.from_pretrained(CHECKPOINT, dtype=torch.float32, **options).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.fixture(scope="module")
def model():
    return load()


def greedy(model, prompt=PROMPT, **options):
    defaults = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(prompt, **(defaults | options))


@pytest.fixture(scope="module")
def plain(model):
    return greedy(model, use_mtp=False).sequences


def test_several_sequences_per_prompt(model):
    torch.manual_seed(0)
    out = greedy(model, do_sample=True, num_return_sequences=3)
    assert out.sequences.shape == (3, 30) and len(out.speculation.rows_accepted) == 3
    assert len(set(map(tuple, out.sequences.tolist()))) == 3


class StopAt(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.by_day("15", "18", "21")
@pytest.mark.parametrize("length", range(15, 24))
def test_custom_criteria_cut_at_the_first_hit(model, plain, length):
    out = greedy(model, stopping_criteria=StoppingCriteriaList([StopAt(length)]), num_assistant_tokens=4)
    assert torch.equal(out.sequences, plain[:, :length])


@pytest.mark.parametrize("options", [{"use_cache": False}, {"num_beams": 2}], ids=lambda o: next(iter(o)))
def test_what_cannot_speculate_decodes_plainly_or_says_why_not(model, options):
    want = greedy(model, use_mtp=False, **options).sequences
    assert torch.equal(greedy(model, **options).sequences, want)
    with pytest.raises(ValueError, match=next(iter(options))):
        greedy(model, use_mtp=True, **options)


def test_given_static_caches_decode_plainly(model, plain):
    cache = StaticCache(config=model.config, max_cache_len=64)
    assert torch.equal(greedy(model, past_key_values=cache).sequences, plain)
    with pytest.raises(ValueError, match="StaticCache"):
        greedy(model, past_key_values=StaticCache(config=model.config, max_cache_len=64), use_mtp=True)


def test_embeddings_instead_of_ids_decode_plainly(model, plain):
    embeds = model.get_input_embeddings()(PROMPT)
    out = model.generate(inputs_embeds=embeds, max_new_tokens=16, do_sample=False)
    assert torch.equal(out, plain[:, PROMPT.shape[1] :])


def test_hidden_states_and_logits_come_one_per_token(model, plain):
    wanted = {"output_hidden_states": True, "output_logits": True, "output_scores": True}
    ours, theirs = greedy(model, **wanted), greedy(model, use_mtp=False, **wanted)
    assert sum(ours.speculation.accepted) > 0 and torch.equal(ours.sequences, plain)
    for name in ("logits", "scores", "hidden_states"):
        assert len(getattr(ours, name)) == len(getattr(theirs, name))
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), atol=3e-4, rtol=0)
    for one, other in zip(ours.hidden_states, theirs.hidden_states):
        torch.testing.assert_close(torch.stack(one), torch.stack(other), atol=3e-4, rtol=0)


def test_attentions_may_be_asked_for(plain):
    model = load(attn_implementation="eager")
    assert torch.equal(greedy(model, output_attentions=True).sequences, plain)


def test_left_padding_changes_no_draft(model):
    alone = greedy(model).speculation
    inputs = left_padded([PROMPT[0], torch.arange(1, 40)])
    padded = greedy(model, inputs["input_ids"][:1], attention_mask=inputs["attention_mask"][:1])
    assert padded.speculation.drafts == alone.drafts and padded.speculation.accepted == alone.accepted


def test_speculation_goes_on_after_saving(model, plain, tmp_path):
    model.save_pretrained(tmp_path)
    for again in (model, DeepSeekMTP.from_pretrained(tmp_path).eval()):
        again.generation_config.eos_token_id = None
        out = greedy(again, pad_token_id=0)
        assert torch.equal(out.sequences, plain) and sum(out.speculation.accepted) > 0


def test_fresh_weights_draft_with_their_own_modules():
    config = AutoConfig.from_pretrained(CHECKPOINT)  # knows the path of another model's modules
    torch.manual_seed(0)
    model = DeepSeekMTP(config).eval()
    drafts = greedy(model, eos_token_id=None, pad_token_id=0).speculation.drafts
    with torch.no_grad():
        for parameter in model.mtp.parameters():
            parameter.mul_(-1)
    assert greedy(model, eos_token_id=None, pad_token_id=0).speculation.drafts != drafts


@pytest.mark.parametrize("targets", [["o_proj"], ["lm_head"]])
def test_adapters_on_the_main_model(targets):
    model = load()
    config = LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
    torch.manual_seed(0)
    inject_adapter_in_model(config, model.main)
    out = greedy(model)
    assert torch.equal(out.sequences, greedy(model, use_mtp=False).sequences) and out.speculation.drafts
