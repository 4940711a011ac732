"""What exports promise, in the engine itself: greedy texts and drafts; see conftest.py for how to run it."""

import os
import subprocess

import pytest

GROUPS = ["hy_v3", "llama retrofit", "qwen2 retrofit", "heads as medusa", "heads through the proposer", "eagle"]
MOSTLY = 0.9
"""Share of drafts that must be ours: vLLM zeroes the first embedding, and another kernel may break a tie."""


@pytest.fixture(scope="module")
def answered(interpreter, benchmarks, tmp_path_factory):
    """Cases, and what vLLM answered: all engines in one separate process."""
    from serving import serve
    from serving_cases import Builder, cases

    folder = tmp_path_factory.mktemp("served")
    groups = cases(Builder(folder, steps=120))
    built = [case for name in GROUPS for case in groups[name]()]
    return built, serve(interpreter, built, folder)


def test_texts_are_plain_decodings_and_drafts_are_ours(answered):
    from serving import compare

    built, found = answered
    wrong = []
    for case in built:
        if "error" in found[case.name]:
            wrong.append((case.name, found[case.name]["error"]))
            continue
        seen, accepted = compare(case, found[case.name]), found[case.name]["counts"]["accepted_tokens"]
        texts_are_right = seen["alone"] == seen["together"] == len(case.prompts)
        drafts_are_ours = seen["places"] >= 30 and seen["equal"] >= MOSTLY * seen["places"]
        if not (texts_are_right and drafts_are_ours and accepted and seen["rejected"]):
            wrong.append((case.name, seen))
    assert not wrong


def test_the_library_is_imported_beside_vllm(interpreter, benchmarks):
    """Its pin of transformers is older than ours."""
    code = "import tokenahead, transformers; from tokenahead.model_cards.vllm import register; register()"
    environment = os.environ | {"PYTHONPATH": str(benchmarks), "HF_HUB_OFFLINE": "1"}
    subprocess.run([interpreter, "-c", code], env=environment, check=True, cwd=benchmarks)
