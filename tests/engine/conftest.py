"""vLLM in a separate interpreter, where TOKENAHEAD_VLLM_PYTHON names one.

bash benchmarks/serving_environment.sh vllm-env
TOKENAHEAD_VLLM_PYTHON=vllm-env/bin/python pytest tests/engine
"""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def interpreter():
    """The path of vLLM's interpreter; a link must stay one."""
    named = os.environ.get("TOKENAHEAD_VLLM_PYTHON")
    if not named:
        pytest.skip("TOKENAHEAD_VLLM_PYTHON names no interpreter with vLLM")
    return os.path.abspath(named)  # noqa: PTH100


@pytest.fixture(scope="session")
def benchmarks():
    """Makes the modules of benchmarks/ importable."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield ROOT
    sys.path.remove(str(ROOT / "benchmarks"))
