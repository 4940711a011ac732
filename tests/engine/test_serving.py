"""What exports promise, in the engine itself: run where TOKENAHEAD_VLLM_PYTHON names the interpreter of a vLLM.

bash benchmarks/serving_environment.sh vllm-env
TOKENAHEAD_VLLM_PYTHON=vllm-env/bin/python pytest -n 0 tests/engine
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERPRETER = os.environ.get("TOKENAHEAD_VLLM_PYTHON")
GROUPS = ["hy_v3", "llama retrofit", "qwen2 retrofit", "heads as medusa", "heads through the proposer", "eagle"]
MOSTLY = 0.9
"""Share of drafts that must be ours: vLLM zeroes the first embedding, and another kernel may break a tie."""

pytestmark = pytest.mark.skipif(not INTERPRETER, reason="TOKENAHEAD_VLLM_PYTHON names no interpreter with vLLM")


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Cases, and what vLLM answered: all engines in one process of its own."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from serving import serve
    from serving_cases import Builder, cases

    folder = tmp_path_factory.mktemp("served")
    groups = cases(Builder(folder, steps=120))
    built = [case for name in GROUPS for case in groups[name]()]
    return built, serve(os.path.abspath(INTERPRETER), built, folder)  # noqa: PTH100 - a link must stay one


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
        if not texts_are_right or seen["equal"] < MOSTLY * seen["places"] or seen["places"] < 30 or not accepted:
            wrong.append((case.name, seen))
    assert not wrong


def test_the_library_is_imported_beside_vllm():
    """Its pin of transformers is older than ours."""
    code = "import tokenahead, transformers; from tokenahead.generation.vllm_proposer import register; register()"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run([INTERPRETER, "-c", code], env=environment, check=True, cwd=ROOT)
