"""`tokenahead restore-modules` from two directories to a third, and the figures that it prints."""

import json
import re
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import family_model
from tests.modeling.deepseek.test_float8 import put_in_float8
from tests.modeling.deepseek.test_model import GOLDENS, folder_tensors
from tokenahead import DeepSeekMTP, cli
from tokenahead.testing import letters
from tokenahead.training.commands.restore import distances

NEW = 16
CASES = {"dsv3_d2_trained": 128, "qwen3_next_d1_trained": 96}
"""Bases whose modules have learned, and their vocabularies."""


@pytest.fixture(params=CASES)
def pair(request, tmp_path):
    """Directories of a fine-tune and its base; every weight is 1 % larger, and the head 5 %."""
    base, tuned = GOLDENS / request.param, tmp_path / "tuned"
    plain = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight *= 1.05 if name == "lm_head.weight" else 1.01
    plain.generation_config.eos_token_id = None
    plain.save_pretrained(tuned, max_shard_size="200KB")
    tokenizer = letters(CASES[request.param])
    tokenizer.pad_token = tokenizer.eos_token = "a"
    tokenizer.save_pretrained(tuned)
    return tuned, base


def restored(*words, capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["restore-modules", *map(str, words)])
    captured = capsys.readouterr()
    assert (ended.value.code or 0) == 0, captured.err
    return captured.out


def figures(folder, texts) -> str:
    """Tokens per call, and the share of accepted drafts, of drafts of the usual length in calls one by one."""
    model, tokenizer, counts, tokens = DeepSeekMTP.from_pretrained(folder), letters(96), [], 0
    options = dict(max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, num_assistant_tokens=model.num_modules, **options)
        counts += out.speculation.rows_accepted[0]
        tokens += NEW - 1  # the prompt's own call adds the first one
    shares = (sum(count >= k for count in counts) / len(counts) for k in range(1, model.num_modules + 1))
    accepted = ", ".join(f"{share:.0%}" for share in shares)
    return f"{tokens / len(counts):.2f} tokens per call, drafts accepted: {accepted} ({len(texts)} answers)"


def test_the_command(pair, tmp_path, capsys):
    tuned, base = pair
    texts, folder = ["abcdef", "hello", "zyx", "mnopqr"], tmp_path / "restored"
    trained = folder / "trained"
    (tmp_path / "prompts.txt").write_text("\n".join(texts))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text * 5}) + "\n" for text in texts))
    words = [tuned, "--modules", base, "--output", folder, "--prompts", tmp_path / "prompts.txt", "--new-tokens", NEW]
    words += ["--device", "cpu", "--train", tmp_path / "data.jsonl", "--steps", 2]
    out = restored(*words, capsys=capsys)
    ours, theirs, whole = (folder_tensors(each) for each in (tuned, base, folder))
    moved = [float((ours[name] / theirs[name]).nanmean()) - 1 for name in ours if theirs[name].any()]
    mean = re.search(rf"of {len(moved)} shared tensors: mean (.*)%, largest 5.00% \(lm_head.weight\)", out)
    assert mean and float(mean[1]) / 100 == pytest.approx(fmean(moved), abs=1e-4)
    assert f"restored: {figures(folder, texts)}" in out and "restored: 1.00" not in out
    assert f"after 2 steps: {figures(folder / 'trained', texts)}" in out
    learned, of_modules = folder_tensors(trained), theirs.keys() - ours.keys()
    assert all(learned[name].equal(whole[name]) and whole[name].equal(ours[name]) for name in ours)
    assert any(not learned[name].equal(whole[name]) for name in of_modules)


def test_distances_of_float8_are_those_of_what_it_stands_for(tmp_path):
    family_model("deepseek_v3").save_pretrained(tmp_path)
    put_in_float8(tmp_path)
    DeepSeekMTP.from_pretrained(tmp_path).save_pretrained(tmp_path / "full")
    found = distances(str(tmp_path / "full"), str(tmp_path))
    whole = folder_tensors(tmp_path / "full")
    assert found == {name: 0 for name, tensor in whole.items() if tensor.any()}


def test_what_is_read_is_not_written_over(pair, capsys):
    with pytest.raises(SystemExit):
        cli.main(["restore-modules", str(pair[0]), "--modules", str(pair[1]), "--output", str(pair[0])])
    assert f"--output {pair[0]} would be written over" in capsys.readouterr().err
