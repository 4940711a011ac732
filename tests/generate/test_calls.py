"""What users do with `generate`: options, stopping, outputs, caches, and what is refused at the door."""

import pytest
import torch
from transformers import GPT2LMHeadModel

from tests.models import left_padded, tiny_model
from tests.ptp_models import CONFIGS, VOCABULARY, backbone
from tokenahead import GenerateSpeculativeOutput, NgramDrafter

PROMPT = torch.arange(100, 112)[None]
GREEDY = dict(do_sample=False, max_new_tokens=30)
DICT = dict(return_dict_in_generate=True)


def texts(count):
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(64, 320, (n,), generator=generator) for n in (3, 40, 17, 66)[:count]]


def plain(model, prompt=PROMPT, **options):
    return model.generate(prompt, use_mtp=False, **(GREEDY | options))


def test_speculates_by_default_and_says_what_it_did(trained):
    out = trained.generate(PROMPT, **GREEDY, **DICT)
    assert isinstance(out, GenerateSpeculativeOutput)
    assert torch.equal(out.sequences, plain(trained))
    stats = out.speculation
    assert stats.backbone_calls == 1 + len(stats.accepted) == 1 + len(stats.drafts) < 30
    assert stats.new_tokens == 30 == 1 + sum(stats.accepted) + len(stats.accepted)
    assert stats.tokens_per_call == 30 / stats.backbone_calls
    assert 0 < stats.accepted_by_position[0] <= 1 and len(stats.accepted_by_position) == 7
    assert stats.draft_seconds > 0 and stats.verify_seconds > 0
    text = out.sequences[0, PROMPT.shape[1] :].tolist()
    at = 1
    for count, draft in zip(stats.accepted, stats.drafts):
        assert draft[:count] == text[at : at + count]
        at += count + 1


@pytest.mark.by_day("1", "31", "33")
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65])
def test_prompts_of_any_length(trained, length):
    prompt = torch.arange(64, 64 + length)[None]
    assert torch.equal(trained.generate(prompt, **GREEDY), plain(trained, prompt))


@pytest.mark.by_day("False")
@pytest.mark.parametrize("use_mtp", [True, False])
def test_a_cache_of_plain_decoding_in_which_rows_ended_early_is_continued(trained, use_mtp):
    """Plain decoding feeds padding to rows that have ended; the mask says so when the texts go on."""
    prompts = texts(4)
    alone = [plain(trained, p[None])[0, len(p) :].tolist() for p in prompts]
    eos, batch = alone[1][10], left_padded(prompts)
    first = trained.generate(**batch, eos_token_id=eos, pad_token_id=0, use_mtp=False, **GREEDY, **DICT)
    ended = [row.index(eos) + 1 if eos in row else len(row) for row in alone]
    assert len(set(ended)) > 1
    new, more = first.sequences.shape[1] - batch["input_ids"].shape[1], torch.full((4, 1), 200)
    own = (torch.arange(new) < torch.tensor(ended)[:, None]).long()
    mask = torch.cat([batch["attention_mask"], own, torch.ones(4, 1).long()], dim=1)
    ids = torch.cat([first.sequences, more], dim=1)
    options = GREEDY | {"past_key_values": first.past_key_values, "use_mtp": use_mtp}
    second = trained.generate(ids, attention_mask=mask, **options)
    for row, (prompt, text, end) in enumerate(zip(prompts, alone, ended)):
        history = torch.cat([prompt, torch.tensor(text[:end]), more[0]])
        assert torch.equal(second[row, -30:], plain(trained, history[None])[0, -30:])


def test_nothing_of_the_decision_is_written_to_disk(tmp_path):
    model = tiny_model()
    model.generate(PROMPT, **GREEDY)
    model.save_pretrained(tmp_path)
    saved = (tmp_path / "generation_config.json").read_text()
    assert "use_mtp" not in saved and "verification" not in saved


class _Passing(GPT2LMHeadModel):
    """Hands on what it does not name: transformers gives it no `position_ids`, and it counts columns, padded or not."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_positions_of_a_class_that_counts_columns_go_on_behind_its_prompt():
    model, options = backbone(CONFIGS["gpt2"]()).double(), GREEDY | DICT | dict(pad_token_id=0, output_logits=True)
    model.__class__ = _Passing
    batch = left_padded([text % VOCABULARY for text in texts(3)[::2]])
    want, drafter = model.generate(**batch, **options), NgramDrafter(longest=1).attach(model)
    out = model.generate(**batch, **options, assistant_model=drafter)
    assert torch.equal(out.sequences, want.sequences) and sum(map(sum, out.speculation.rows_accepted)) > 20
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(want.logits))
