"""EvaByte's tokenizer against golden cases of the official one, and what transformers and trainers ask of it."""

import json
from pathlib import Path

import jinja2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TextStreamer

from tokenahead import EvaByteTokenizer
from tokenahead.modeling.evabyte.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "evabyte_tokenizer.json").read_text(encoding="utf-8"))
INFO = GOLDEN["info"]
TOKENIZER = EvaByteTokenizer()
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "où?"},
    {"role": "assistant", "content": "là ☃"},
    {"role": "user", "content": "ok"},
    {"role": "assistant", "content": ""},
]
SHORT_CHAT = CHAT[1:3]
LITERALS = st.sampled_from(SPECIAL_TOKENS)
PLAIN_TEXT = st.text().filter(lambda text: not any(literal in text for literal in SPECIAL_TOKENS))


def assistant_text(ids, mask) -> str:
    return TOKENIZER.decode([int(index) for index, marked in zip(ids, mask, strict=True) if marked])


def test_golden_encode():
    for case in GOLDEN["encode"]:
        text = case["text"]
        assert TOKENIZER(text)["input_ids"] == case["ids"]
        assert TOKENIZER(text, add_special_tokens=False)["input_ids"] == case["ids_no_bos"]
        assert TOKENIZER(text, split_special_tokens=True)["input_ids"] == case["ids_split_special"]
        assert TOKENIZER.decode(case["ids"]) == case["decoded"]
        assert TOKENIZER.decode(case["ids"], skip_special_tokens=True) == case["decoded_skip_special"]


def test_golden_decode():
    for case in GOLDEN["decode"]:
        assert TOKENIZER.decode(case["ids"]) == case["text"]
        assert TOKENIZER.decode(case["ids"], skip_special_tokens=True) == case["text_skip_special"]
        assert TOKENIZER.decode(torch.tensor([case["ids"]], dtype=torch.long)) == [case["text"]]


@pytest.mark.parametrize("prompt, suffix", [(False, ""), (True, "_gen")])
def test_golden_chat(prompt, suffix):
    for case in GOLDEN["chat"]:
        options = {"conversation": case["messages"], "add_generation_prompt": prompt}
        assert TOKENIZER.apply_chat_template(**options, tokenize=False) == case["text" + suffix]
        assert TOKENIZER.apply_chat_template(**options, return_dict=False) == case["ids" + suffix]
        masked = TOKENIZER.apply_chat_template(**options, return_assistant_tokens_mask=True)
        assert masked["input_ids"] == case["ids" + suffix]


def test_golden_pair():
    (case,) = GOLDEN["pair"]
    encoded = TOKENIZER(case["a"], case["b"], return_special_tokens_mask=True)
    assert encoded["input_ids"] == case["ids"]
    assert encoded["special_tokens_mask"] == [1, 0, 0, 1, 0, 0]


def test_golden_info():
    assert list(SPECIAL_TOKENS) == INFO["special_tokens"]
    assert (TOKENIZER.vocab_size, len(TOKENIZER)) == (INFO["vocab_size_property"], INFO["len"])
    for name in ("bos", "eos", "pad", "unk", "sep"):
        assert getattr(TOKENIZER, f"{name}_token_id") == INFO[name]
    assert sorted(TOKENIZER.all_special_ids) == list(range(INFO["offset"]))
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(INFO["len"]))


@pytest.mark.parametrize("mask", [False, True])
def test_golden_error_case_other_roles_are_refused(mask):
    assert len(GOLDEN["error_cases"]) == 1  # this one
    for role in ("tool", "system", "User"):
        with pytest.raises(jinja2.TemplateError, match="roles"):
            TOKENIZER.apply_chat_template([*CHAT, {"role": role, "content": "x"}], return_assistant_tokens_mask=mask)


@given(st.lists(PLAIN_TEXT | LITERALS, max_size=8).map("".join))
def test_any_text_comes_back_and_split_special_tokens_makes_bytes_of_literals(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text
    split = TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert bytes(index - 64 for index in split) == text.encode()


@given(st.lists(st.integers(0, 319)))
def test_decoding_drops_invalid_bytes_and_with_skip_all_ids_below_64(ids):
    whole = b"".join(bytes([index - 64]) if index >= 64 else SPECIAL_TOKENS[index].encode() for index in ids)
    assert TOKENIZER.decode(ids) == whole.decode(errors="ignore")
    kept = bytes(index - 64 for index in ids if index >= 64)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == kept.decode(errors="ignore")


def test_padding_is_on_the_left_and_there_are_no_token_type_ids():
    batch = TOKENIZER(["abc", "é<eos>", ""], padding=True, return_tensors="pt")
    assert list(batch) == ["input_ids", "attention_mask"]
    assert batch["input_ids"].tolist() == [[1, 161, 162, 163], [1, 259, 233, 2], [0, 0, 0, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]
    assert EvaByteTokenizer(padding_side="right")(["ab", ""], padding=True)["input_ids"][1] == [1, 0, 0]


def test_text_streamer_prints_the_text_byte_by_byte(capsys):
    for text in ("né ☃ 😀 日本語\nñ\n\n😀", "e\u0301 👨\u200d👩\u200d👧 fin", "don't , stop ."):
        streamer = TextStreamer(TOKENIZER, skip_prompt=True, skip_special_tokens=True)
        streamer.put(torch.tensor([TOKENIZER("prompt")["input_ids"]]))
        for index in [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]:
            streamer.put(torch.tensor([index]))
        streamer.end()
        assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("options", [{}, {"split_special_tokens": True}])
def test_assistant_mask_covers_contents_and_their_ends(options):
    encoded = TOKENIZER.apply_chat_template(
        CHAT, add_generation_prompt=True, return_assistant_tokens_mask=True, tokenizer_kwargs=options
    )
    plain = TOKENIZER.apply_chat_template(CHAT, add_generation_prompt=True, tokenizer_kwargs=options)
    assert {name: encoded[name] for name in plain} == dict(plain)
    assert assistant_text(encoded["input_ids"], encoded["assistant_masks"]) == "là ☃<|eot_id|><|eot_id|>"


@pytest.mark.parametrize(("side", "pad_token"), [("left", "<pad>"), ("right", "<bos>")])
def test_assistant_mask_is_padded_as_the_ids_are(side, pad_token):
    tokenizer = EvaByteTokenizer(padding_side=side, pad_token=pad_token)
    batch = tokenizer.apply_chat_template(
        [CHAT, SHORT_CHAT], padding=True, return_tensors="pt", return_assistant_tokens_mask=True
    )
    assert batch["assistant_masks"].shape == batch["input_ids"].shape
    assert not (batch["assistant_masks"] & (1 - batch["attention_mask"])).any()
    texts = [assistant_text(ids, mask) for ids, mask in zip(batch["input_ids"], batch["assistant_masks"])]
    assert texts == ["là ☃<|eot_id|><|eot_id|>", "là ☃<|eot_id|>"]


def official_config() -> dict:
    """A tokenizer_config.json as the official directories have it: mixed flags, the official template, code
    references."""
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {str(i): {"content": literal, "special": i < 5, **flags} for i, literal in enumerate(SPECIAL_TOKENS)}
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL_TOKENS[5:]),
        "auto_map": {"AutoTokenizer": ["tokenization_evabyte.EvaByteTokenizer", None]},
        "bos_token": "<bos>",
        "chat_template": INFO["chat_template"],
        "eos_token": "<|eot_id|>",
        "model_max_length": 32768,
        "pad_token": "<pad>",
        "sep_token": "<sep>",
        "tokenizer_class": "EvaByteTokenizer",
        "unk_token": "<unk>",
    }


def load(folder: Path, config: dict) -> EvaByteTokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return EvaByteTokenizer.from_pretrained(folder)


def test_an_official_folder_loads_with_64_specials_and_a_marked_template(tmp_path):
    tokenizer = load(tmp_path, official_config())
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.model_max_length) == (320, 11, 32768)
    assert tokenizer.decode([*range(64), 161], skip_special_tokens=True) == "a"
    assert all(token.special for token in tokenizer.added_tokens_decoder.values())
    assert sorted(tokenizer.all_special_ids) == list(range(64))
    assert tokenizer.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("by_assignment", [False, True])
def test_the_sft_eos_survives_a_round_trip(tmp_path, by_assignment):
    tokenizer = EvaByteTokenizer() if by_assignment else EvaByteTokenizer(eos_token="<|eot_id|>")
    tokenizer.eos_token = "<|eot_id|>"
    assert (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<eos>")) == (11, 2)
    tokenizer.save_pretrained(tmp_path)
    again = EvaByteTokenizer.from_pretrained(tmp_path)
    assert (again.eos_token, again.eos_token_id, len(again)) == ("<|eot_id|>", 11, 320)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.decode([2, 161, 11, 3], skip_special_tokens=True) == "a"
    assert again.apply_chat_template(CHAT)["input_ids"] == tokenizer.apply_chat_template(CHAT)["input_ids"]


@pytest.mark.core
def test_a_saved_folder_names_no_code_files_of_the_folder_read(tmp_path):
    for remote_code, folder in (("auto", "plain"), ("bundle", "saved")):
        load(tmp_path, official_config()).save_pretrained(tmp_path / folder, remote_code=remote_code)
        saved = json.loads((tmp_path / folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert saved["tokenizer_class"] == "EvaByteTokenizer"
        for named, _ in saved.get("auto_map", {}).values():
            assert (tmp_path / folder / f"{named.partition('.')[0]}.py").is_file()
        assert ("auto_map" in saved) == (remote_code == "bundle")


def test_tokens_that_the_user_adds_follow_the_vocabulary_and_survive(tmp_path):
    tokenizer = EvaByteTokenizer()
    tokenizer.add_tokens(["<tool>", "a"])  # "a" is a byte already
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, EvaByteTokenizer.from_pretrained(tmp_path)):
        assert each("<tool>ab")["input_ids"] == [1, 320, 161, 162]
        assert each.decode([320, 161]) == "<tool>a"
        assert len(each) == 321


def test_a_named_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="eos_token=.*'</s>'"):
        EvaByteTokenizer(eos_token="</s>")
