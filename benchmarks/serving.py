"""Exported directories in vLLM: is the text plain decoding's, are drafts those of this library, how many are accepted?

    bash benchmarks/serving_environment.sh vllm-env                # once: 3.4 GB, an environment of its own
    python benchmarks/serving.py --vllm vllm-env/bin/python        # about fifteen minutes on two cores, no GPU
    python benchmarks/serving.py --vllm vllm-env/bin/python --only hy_v3 "heads through the proposer"
    python benchmarks/serving.py --vllm vllm-env/bin/python --json benchmarks/serving.json
    python benchmarks/serving_table.py                             # the table of docs/serving.md, of that file

Tiny models are trained, exported by this library, and served by an unmodified vLLM in its own interpreter: 6 prompts of
2 to 64 tokens, 48 new tokens, each prompt alone and all as one batch, greedy, float32. `drafts` counts whole drafts
that equal ours at the places in the text where both drafted, and how many of them the backbone rejects, at least in
part (drafters are unsettled on purpose); `accepted` is what vLLM reports of the prompts alone.
Exits with 1 where a text differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from serving_cases import Builder, Case, cases
from serving_table import cells, write

HERE = Path(__file__).resolve().parent
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def serve(interpreter: str, built: Sequence[Case], folder: Path) -> dict[str, dict[str, Any]]:
    """Lets vLLM serve the cases, in its own process; the library is found beside this file."""
    asked, answered = folder / "cases.json", folder / "results.json"
    asked.write_text(json.dumps([case.to_dict() for case in built]))
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(HERE.parent)}
    command = [interpreter, str(HERE / "serving_engine.py"), str(asked), str(answered)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    (folder / "engine.log").write_text(done.stdout + done.stderr)
    if done.returncode or not answered.exists():
        raise RuntimeError(f"the engine ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(answered.read_text())


def compare(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """What of a case came out as here.

    Returns:
        `alone`, `together`: texts that are equal; `equal`, `places`: drafts that are equal, and places where both
        drafted as many tokens; `rejected`: of the equal ones, those that the text does not follow to their end;
        `counts`: vLLM's own.
    """
    equal = places = rejected = 0
    for prompt, text, ours, theirs in zip(case.prompts, case.texts, case.drafts, found["drafts"]):
        theirs, whole = dict(theirs), prompt + text
        for length, draft in ours:
            if draft and len(theirs.get(length, ())) == len(draft):
                places += 1
                equal += theirs[length] == draft
                rejected += theirs[length] == draft != whole[length : length + len(draft)]
    texts = {name: sum(a == b for a, b in zip(found[name], case.texts)) for name in ("alone", "together")}
    return texts | {"equal": equal, "places": places, "rejected": rejected, "counts": found["counts"]}


def row(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a case."""
    name = case.name
    if "compilation_config" in case.engine:
        name += ", native operators"
    if "dtype" in case.engine:
        name += f", {case.engine['dtype']}"
    if "error" in found:
        return {"name": name, "error": found["error"]}
    seen = compare(case, found)
    counts = seen.pop("counts")
    accepted = counts.get("accepted_tokens_per_pos") or counts["accepted_tokens"]
    return {"name": name, "prompts": len(case.prompts)} | seen | {"accepted": accepted, "drafts": counts["drafts"]}


def machine(interpreter: str) -> dict[str, str]:
    """Return what the cases run on."""
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    version = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {"vllm": version, "cpu": names[0], "dtype": "float32"}


def is_right(case: Case, found: dict[str, Any]) -> bool:
    """Whether every text is plain decoding's."""
    return "error" not in found and all(found[name] == case.texts for name in ("alone", "together"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=os.environ.get("TOKENAHEAD_VLLM_PYTHON"), help="vLLM's interpreter")
    parser.add_argument("--only", nargs="*", help="groups of cases")
    parser.add_argument("--steps", type=int, default=120, help="of training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file to write the rows to; its other rows stay")
    parser.add_argument("--keep", type=Path, help="a directory to leave the exported directories in")
    arguments = parser.parse_args()
    if not arguments.vllm:
        parser.error("--vllm, or TOKENAHEAD_VLLM_PYTHON: the interpreter of an environment with vLLM")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        groups = cases(Builder(folder, arguments.steps))
        if unknown := set(arguments.only or ()) - set(groups):
            parser.error(f"--only {', '.join(unknown)}: there are {', '.join(groups)}")
        built = [case for name in arguments.only or groups for case in groups[name]()]
        found = serve(arguments.vllm, built, folder)
    table = Table(title="in vLLM, on CPUs")
    for name in ("folder", "texts alone and as a batch", "drafts as here, rejected", "accepted by vLLM"):
        table.add_column(name)
    rows = [row(case, found[case.name]) for case in built]
    for kept in rows:
        table.add_row(*cells(kept))
    Console(width=140).print(table)
    if arguments.json:
        write(arguments.json, machine(arguments.vllm), rows)
    sys.exit(not all(is_right(case, found[case.name]) for case in built))


if __name__ == "__main__":
    main()
