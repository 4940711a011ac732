"""Measured results and configs that the tests of this directory share."""

import pytest

from tokenahead import EvaByteConfig
from tokenahead.model_cards import DecodingResult, MeasuredResults


@pytest.fixture
def row():
    counts = {"backbone_calls": 50, "new_tokens": 200, "seconds": 2.0, "plain_seconds": 5.0}
    return DecodingResult(name="greedy", do_sample=False, identical=True, **counts)


@pytest.fixture
def results(row):
    counts = {"backbone_calls": 80, "new_tokens": 200, "seconds": 4.0, "plain_seconds": 5.0, "plain_new_tokens": 100}
    sampled = DecodingResult(name="sampled, a | b", do_sample=True, **counts)
    return MeasuredResults(
        results=[row, sampled],
        dataset_name="held-out code",
        dataset_description="8 files, 25 bytes each.",
        hardware="two cores of a made-up machine",
        dtype="float32",
        command="tokenahead demo --seed 3",
        library_version="0.0.1",
        accepted_by_position=[0.75, 0.5],
        bits_per_byte=2.125,
        extra={"torch": "2.13.0", "prompts": 8},
    )


@pytest.fixture
def config():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return EvaByteConfig(**sizes, window_size=16, chunk_size=4, num_pred_heads=4, max_position_embeddings=256)
