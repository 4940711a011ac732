"""A student in one command, which goes on where it was cut off."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TrainingArguments

from tests.internals import distil, main
from tests.internals import ptp_distil as command
from tests.ptp_models import VOCABULARY, backbone, ids
from tokenahead import PTPForCausalLM

PROMPTS = [ids(3, seed=n).tolist() for n in range(8)]
SIZES = {"max_new_tokens": 6, "batch_size": 4}


def arguments(**more) -> TrainingArguments:
    return TrainingArguments("unused", max_steps=4, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, **more)


def test_a_run_that_was_cut_off_ends_with_the_same_student(tmp_path, monkeypatch):
    student = {"num_slots": 2, "lora_rank": 2}

    def run(folder):
        torch.manual_seed(0)
        return distil(backbone(), PROMPTS, folder, student=student, arguments=arguments(), **SIZES)

    whole = run(tmp_path / "whole")
    train = command.PTPTrainer.training_step

    def fail(trainer, *args, **kwargs):
        if trainer.state.global_step == 3:
            raise KeyboardInterrupt
        return train(trainer, *args, **kwargs)

    monkeypatch.setattr(command.PTPTrainer, "training_step", fail)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut")
    monkeypatch.setattr(command.PTPTrainer, "training_step", train)
    again = run(tmp_path / "cut")
    for one, other in zip(whole.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.warns(UserWarning, match="4.*max_steps=.*4"):
        third = run(tmp_path / "cut")
    for one, other in zip(whole.parameters(), third.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    (tmp_path / "cut" / "checkpoints" / "checkpoint-4" / "trainer_state.json").unlink()
    with pytest.warns(UserWarning, match="checkpoint.*4"):
        run(tmp_path / "cut")
    loaded = PTPForCausalLM.from_pretrained(tmp_path / "cut" / "student")
    assert loaded.config.features == "arithmetic" and loaded.config.greedy


def test_the_command(tmp_path, capsys):
    words = {chr(97 + index): index for index in range(VOCABULARY)}
    plain = Tokenizer(models.WordLevel(words, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    backbone().save_pretrained(tmp_path / "backbone")
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "backbone")
    (tmp_path / "text").write_text("a b c d e f g h " * 3)
    where = [
        "--backbone",
        str(tmp_path / "backbone"),
        "--text",
        str(tmp_path / "text"),
        "--output",
        str(tmp_path / "out"),
    ]
    sizes = ["--slots", "2", "--prompt-tokens", "4", "--new-tokens", "5", "--max-steps", "1"]
    main([*where, *sizes])
    assert PTPForCausalLM.from_pretrained(tmp_path / "out" / "student").config.variant == "categorical"
    wrong = {
        ("--prompt-tokens", "1000"): "has 24 tokens, less than a prompt of 1000",
        ("--slots", "0"): "argument --slots: '0' must be a whole number of at least 1",
        ("--max-steps", "0"): "argument --max-steps: 0 must be at least 1",
        ("--text", str(tmp_path / "none")): "argument --text: ",
        ("--backbone", str(tmp_path / "none")): "argument --backbone: ",
    }
    for words, message in wrong.items():
        with pytest.raises(SystemExit):
            main([*where, *words])
        assert message in capsys.readouterr().err
