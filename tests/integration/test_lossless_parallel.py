"""Parallel token prediction writes the text of sequential inverse-CDF decoding, with any draft of the student."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.models import left_padded
from tokenahead import PTPForCausalLM
from tokenahead.experimental import best_of
from tokenahead.testing import continuation_distribution, continuation_p_value

RUNS = Path(__file__).parents[1] / "data" / "ptp" / "runs"
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 8, "top_p": 0.95}
NEW_TOKENS = 16


def official(noise=0.0, seed=0, slots=6):
    """The public code's tiny student in float64, its adapters disturbed."""
    model = PTPForCausalLM.from_official(RUNS / "interpolation", RUNS / "backbone").double().eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.config.num_slots, model.config.sampling = slots, {"temperature": 0.7, "top_k": 8, "top_p": 0.95}
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter += noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def prompts(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 32, (int(n),), generator=generator)
        for n in torch.randint(1, 20, (count,), generator=generator)
    ]


def decode(model, batch, **options):
    defaults = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
    return model.generate(**left_padded(batch), **(defaults | options))


@pytest.mark.by_day("interpolation")
@pytest.mark.parametrize("name", ["binary", "interpolation"])
def test_text_of_the_public_code(name):
    model = PTPForCausalLM.from_official(RUNS / name, RUNS / "backbone").float().eval()
    model.generation_config.eos_token_id = None
    runs = np.load(RUNS / name / "expected.npz")
    for number in range(int(runs["generate_count"])):
        prompt, wanted = torch.from_numpy(runs[f"prompt_{number}"]), runs[f"output_{number}"].tolist()
        uniforms = torch.from_numpy(runs[f"z_{number}"])[None, : len(wanted)]
        for use_mtp in (False, True):
            out = decode(model, [prompt], uniforms=uniforms, use_mtp=use_mtp, max_new_tokens=len(wanted), **SAMPLING)
            assert out.sequences[0, -len(wanted) :].tolist() == wanted


STUDENTS = [(0.0, 6), (0.003, 5), (0.01, 4), (0.03, 3), (0.3, 2)]  # noise of the adapters, and slots


@pytest.mark.by_day("1", "4")
@pytest.mark.parametrize("seed", range(len(STUDENTS)))
def test_any_student_writes_the_sequential_text(seed):
    """Coupled sampling from the same uniforms, and greedy; alone and in ragged batches.

    Of every draft it accepts what the sequential text begins with at this place, and nothing else.
    """
    model, batch = official(STUDENTS[seed][0], seed, STUDENTS[seed][1]), prompts(12, seed)
    uniforms = torch.rand(len(batch), NEW_TOKENS, generator=torch.Generator().manual_seed(seed))
    counts = set()
    for how, given in ((SAMPLING, {"uniforms": uniforms}), ({"do_sample": False}, {})):
        want = decode(model, batch, use_mtp=False, **how, **given).sequences[:, -NEW_TOKENS:]
        for size in (1, 4):
            for start in range(0, len(batch), size):
                chosen = slice(start, start + size)
                out = decode(model, batch[chosen], **how, **{name: u[chosen] for name, u in given.items()})
                assert torch.equal(out.sequences[:, -NEW_TOKENS:], want[chosen])
                stats = out.speculation
                for text, drafts, accepted in zip(want[chosen].tolist(), stats.rows_drafts, stats.rows_accepted):
                    place = 1  # behind the token of the prefill
                    for draft, count in zip(drafts, accepted, strict=True):
                        agrees = [token == other for token, other in zip(draft, text[place:])]
                        assert min(count, len(agrees)) == [*agrees, False].index(False)
                        place += count + 1
                    counts |= {*accepted}
    assert {0, 1} <= counts


def tiny(variant, **options):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=7, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.5, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = PTPForCausalLM.from_backbone(LlamaForCausalLM(config), variant, num_slots=4, lora_rank=2, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model.eval()


def follows_the_target(model, rows, new, **options):
    """Assert that the first tokens of many texts have the model's distribution; return how many drafts were kept."""
    prompt, warp = torch.tensor([[1, 2, 3]]), {"temperature": 3.0, "top_k": options.pop("top_k")}
    inputs = {"input_ids": prompt.expand(rows, -1), "attention_mask": torch.ones(rows, 3, dtype=torch.long)}
    out = model.generate(**inputs, max_new_tokens=new, do_sample=True, return_dict_in_generate=True, **warp, **options)
    assert continuation_p_value(out.sequences[:, 3:7], continuation_distribution(model, prompt, 4, **warp)) > 0.001
    return set().union(*out.speculation.rows_accepted)


@pytest.mark.by_day("categorical-coupled-3")
@pytest.mark.parametrize(
    ("variant", "rule", "many"),
    [("one_hot", "token", 1), ("categorical", "block", 1), ("one_hot", "coupled", 4), ("categorical", "coupled", 3)],
)
def test_drafts_follow_the_target(variant, rule, many):
    """Speculative rules, and the coupled one with the best of several drafts."""
    model = tiny(variant)
    assert {1, 2} <= follows_the_target(
        model if many == 1 else best_of(model, many), 4000, 5, top_k=3, verification=rule
    )


@pytest.mark.parametrize("budget", [2, "linear"])
def test_sequences_without_slots_follow_the_target_beside_others_that_have_drafts(budget):
    """After some numbers of accepted drafts there are no slots: token 0 stands where no draft exists, as certain."""
    options = {"top_k": 2, "verification": "token", "slot_budget": budget}
    assert {0, 1, 2} <= follows_the_target(tiny("categorical"), 2500, 7, **options)


def test_the_best_of_many_is_repeated_by_its_seed_in_ragged_batches_with_processors_that_read_ids():
    model, batch = best_of(official(), 3), prompts(4)
    options = {"repetition_penalty": 1.3, "output_scores": True, "output_hidden_states": True, **SAMPLING}
    first, again = (decode(model, batch, seed=5, **options) for _ in range(2))
    assert torch.equal(first.sequences, again.sequences) and not first.speculation.backbone_calls >= NEW_TOKENS
    inputs = left_padded(batch)
    mask = torch.cat([inputs["attention_mask"], torch.ones(4, NEW_TOKENS, dtype=torch.long)], dim=1)
    with torch.no_grad():
        behind = model(first.sequences[:, -1:], attention_mask=mask, past_key_values=first.past_key_values).logits
    for row, text in enumerate(first.sequences):  # what was kept in the cache and in the outputs is the chosen branch
        with torch.no_grad():
            want = model(text[mask[row].bool()][None], output_hidden_states=True)
        torch.testing.assert_close(behind[row, -1], want.logits[0, -1])
        states = torch.stack([states[-1][row, -1] for states in first.hidden_states])
        torch.testing.assert_close(states, want.hidden_states[-1][0, -NEW_TOKENS - 1 : -1])
        assert (torch.stack(first.scores)[torch.arange(NEW_TOKENS), row, text[-NEW_TOKENS:]] > -torch.inf).all()
