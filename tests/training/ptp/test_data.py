"""Texts that the backbone of a student writes before training."""

import torch

from tests.ptp_models import backbone, ids, student
from tokenahead.training import regenerate

PROMPTS = [ids(n, seed=n).tolist() for n in (3, 1, 4, 2, 5)]


def test_texts_follow_the_verified_distribution(tmp_path):
    model = student(sampling={"top_k": 1})
    texts = regenerate(model, PROMPTS, tmp_path, max_new_tokens=4, do_sample=True, top_k=1)
    for prompt, row in zip(PROMPTS, texts):
        greedy = torch.tensor([prompt])
        for _ in range(4):
            greedy = torch.cat([greedy, model(greedy).logits[:, -1:].argmax(-1)], dim=1)
        assert row["input_ids"].tolist() == greedy[0].tolist()


def test_texts_are_those_of_the_backbone_whatever_its_adapters(tmp_path):
    model = student(base=backbone())
    written = regenerate(model, PROMPTS, tmp_path, max_new_tokens=4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    assert regenerate(model, PROMPTS, tmp_path, max_new_tokens=4).rows == written.rows
