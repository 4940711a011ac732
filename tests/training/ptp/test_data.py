"""Texts that a teacher writes before training: their prompts, resumption, and their distribution."""

import pytest
import torch

from tests.internals import write_texts
from tests.ptp_models import backbone, ids, student

PROMPTS = [ids(n, seed=n).tolist() for n in (3, 1, 4, 2, 5)]
SIZES = {"max_new_tokens": 6, "per_prompt": 2, "batch_size": 2}


def test_texts_continue_their_prompts(tmp_path):
    teacher = backbone()
    teacher.generation_config.eos_token_id = 4
    texts = write_texts(teacher, PROMPTS, tmp_path, **SIZES)
    assert len(texts) == 10
    for index in range(len(texts)):
        row = {name: column.tolist() for name, column in texts[index].items()}
        prompt = PROMPTS[index // 2]
        assert row["input_ids"][: len(prompt)] == prompt and row["labels"][: len(prompt)] == [-100] * len(prompt)
        written = row["input_ids"][len(prompt) :]
        assert row["labels"][len(prompt) :] == written and 1 <= len(written) <= 6
        assert 4 not in written[:-1] and (len(written) == 6 or written[-1] == 4)


def test_a_run_that_was_cut_off_ends_with_the_same_texts(tmp_path):
    teacher = backbone()
    whole = write_texts(teacher, PROMPTS, tmp_path / "whole", **SIZES).rows
    write_texts(teacher, PROMPTS, tmp_path / "cut", **SIZES)
    text = tmp_path / "cut" / "text.jsonl"
    text.write_text(text.read_text()[:150])
    torch.manual_seed(99)  # what happened in between does not matter
    assert write_texts(teacher, PROMPTS, tmp_path / "cut", **SIZES).rows == whole


def test_texts_follow_the_verified_distribution(tmp_path):
    model = student(sampling={"top_k": 1})  # taken from the student's own configuration
    texts = write_texts(model, PROMPTS, tmp_path, max_new_tokens=4)
    for prompt, row in zip(PROMPTS, texts):
        greedy = torch.tensor([prompt])
        for _ in range(4):
            greedy = torch.cat([greedy, model(greedy).logits[:, -1:].argmax(-1)], dim=1)
        assert row["input_ids"].tolist() == greedy[0].tolist()


def test_a_folder_keeps_its_settings(tmp_path):
    write_texts(backbone(), PROMPTS, tmp_path, **SIZES)
    with pytest.raises(ValueError, match="seed=0.*1"):
        write_texts(backbone(), PROMPTS, tmp_path, seed=1, **SIZES)
    with pytest.raises(ValueError, match="rows=10.*8"):
        write_texts(backbone(), PROMPTS[:4], tmp_path, **SIZES)
    others = [[token ^ 1 for token in prompt] for prompt in PROMPTS]  # as many, and as long
    with pytest.raises(ValueError, match="other prompts"):
        write_texts(backbone(), others, tmp_path, **SIZES)
    taught = backbone()
    torch.nn.init.normal_(taught.get_output_embeddings().weight)
    with pytest.raises(ValueError, match="another backbone"):
        write_texts(taught, PROMPTS, tmp_path, **SIZES)
    student_of = student(base=backbone())  # its adapters write nothing
    write_texts(student_of, PROMPTS, tmp_path / "student", **SIZES)
    for name, parameter in student_of.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    write_texts(student_of, PROMPTS, tmp_path / "student", **SIZES)


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="prompt.*1"):
        write_texts(backbone(), [[1], []], tmp_path)
