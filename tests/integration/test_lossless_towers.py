"""Models with a tower for images and modules: drafts behind images, training, saved directories."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.models import left_padded
from tests.towers import TOWERS, image_batch, tower_model
from tokenahead import DeepSeekMTP

VOCABULARY, NEW_TOKENS, DRAFTS = 4, 24, 2  # so few tokens that modules with random weights guess right now and then
IMAGE = VOCABULARY - 1
OPTIONS = {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": None, "pad_token_id": 0}
NAMES = list(TOWERS)
SEEDS = {"inkling_mm_model": 9, "minimax_m3_vl": 1}


@pytest.mark.by_day("qwen3_5")
@pytest.mark.parametrize("name", NAMES)
def test_greedy_behind_images_equals_the_main_model_s(name):
    model = tower_model(name, VOCABULARY, SEEDS.get(name, 0))
    batch, options = image_batch(name, 3, 2, VOCABULARY), OPTIONS | {"max_new_tokens": NEW_TOKENS}
    plain = model.main.generate(**batch, **options).sequences
    blind = model.main.generate(**batch | {"pixel_values": batch["pixel_values"].flip(0)}, **options).sequences
    assert not torch.equal(plain, blind), "or the case shows nothing"
    out = model.generate(**batch, num_assistant_tokens=DRAFTS, **options)
    assert torch.equal(out.sequences, plain)
    assert set().union(*out.speculation.rows_accepted) == set(range(DRAFTS + 1))
    alone = image_batch(name, 1, 1, VOCABULARY)
    want = model.generate(**alone, use_mtp=False, **options).sequences
    assert torch.equal(model.generate(**alone, num_assistant_tokens=DRAFTS, **options).sequences, want)


@pytest.mark.by_day("qwen3_5")
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_drafts_behind_images_are_those_of_whole_texts(name):
    """Modules see features of images and their positions: what they draft is what a forward of the whole text says."""
    model, batch = tower_model(name, vocab_size=VOCABULARY), image_batch(name, 3, 2, VOCABULARY)
    options = OPTIONS | {"max_new_tokens": 8, "num_assistant_tokens": model.num_modules, "suppress_tokens": [IMAGE]}
    out, width = model.generate(**batch, **options), batch["input_ids"].shape[1]
    whole = {"attention_mask": 1, "mm_token_type_ids": 0}
    more = {key: torch.nn.functional.pad(batch[key], (0, 8), value=new) for key, new in whole.items() if key in batch}
    whole = model(**batch | more | {"input_ids": out.sequences}, output_mtp_logits=True)
    says = [logits[..., :IMAGE].argmax(-1) for logits in whole.mtp_logits]  # drafts, too, leave out what is suppressed
    for row, (drafts, accepted) in enumerate(zip(out.speculation.rows_drafts, out.speculation.rows_accepted)):
        last = width  # of the text so far
        for draft, count in zip(drafts, accepted):
            for token, at_depth in zip(draft[: count + 1], says):  # the tokens before it are those of the text
                assert token == at_depth[row, last - 1]
            last += count + 1


def test_blocks_of_columns_behind_padding_are_decoded_plainly_and_said_to_be(caplog):
    """What transformers makes of tokens that see nothing but padding depends on how many columns there are."""
    model = tower_model("minimax_m3_vl", VOCABULARY)
    batch = left_padded([torch.tensor([1, 2, 0, 1, 2]), torch.tensor([2])])
    options = OPTIONS | {"max_new_tokens": NEW_TOKENS}
    plain = model.main.generate(**batch, **options).sequences
    with caplog.at_level("WARNING"):
        assert torch.equal(model.generate(**batch, **options).sequences, plain)
    assert "attention_mask" in caplog.text
    with pytest.raises(ValueError, match="draft_tree"):
        model.generate(batch["input_ids"][:1], draft_tree=[(0,), (0, 0)], **options)


@pytest.mark.by_day("qwen3_5")
@pytest.mark.parametrize("name", NAMES)
def test_training_moves_modules_alone_and_directories_hold_the_tower(name, tmp_path):
    model, batch = tower_model(name), image_batch(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.train_only("drafter")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    model.train()(**batch, labels=labels).loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved and all(key.startswith("mtp.") for key in moved)
    assert any(key.startswith("mtp.0.eh_proj.") for key in moved)
    model.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        want = model(**batch, labels=labels, output_mtp_logits=True)
        again = DeepSeekMTP.from_pretrained(tmp_path)
        found = again(**batch, labels=labels, output_mtp_logits=True)
        for a, b in zip((want.loss, want.logits, *want.mtp_logits), (found.loss, found.logits, *found.mtp_logits)):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
        plain, report = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
        assert type(plain) is type(again.main) and not report["missing_keys"] and not report["mismatched_keys"]
        torch.testing.assert_close(plain(**batch).logits, want.logits, atol=1e-5, rtol=0)
        main = DeepSeekMTP.from_pretrained(tmp_path, inference_only=True)
        torch.testing.assert_close(main(**batch).logits, want.logits, atol=1e-5, rtol=0)
