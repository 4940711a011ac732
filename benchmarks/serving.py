"""Exported directories in vLLM: is the text plain decoding's, are drafts those of this library, how many are accepted?

    bash benchmarks/serving_environment.sh vllm-env                # once: 3.4 GB, a separate environment
    python benchmarks/serving.py --vllm vllm-env/bin/python        # 25 minutes on two cores, no GPU
    python benchmarks/serving.py --vllm vllm-env/bin/python --only hy_v3 "heads through the proposer"
    python benchmarks/serving.py --vllm vllm-env/bin/python --keep run --json benchmarks/serving.json
    python benchmarks/serving.py --table                           # the table of docs/serving.md, of that file

Tiny models are trained, exported by this library, and served by vLLM in its own interpreter (`serving_engine.py`): 6
prompts of 2 to 64 tokens, 48 new tokens, greedy, float32. Every prompt is asked alone and all as one batch. `drafts`
counts whole drafts that equal ours at the positions of the text where both drafted, and how many of them the backbone
rejects, at least in part (drafters are unsettled on purpose); `accepted` is what vLLM reports of the prompts alone.
A run that was interrupted goes on in its directory (`--keep`). Exits with 1 where a text differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import markdown
from serving_cases import Builder, Case, cases

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "serving.json"
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
COLUMNS = (
    "equal outputs, alone and as a batch", "of a server, one by one and at once", "drafts as here, rejected",
    "accepted by position, of drafts",
)  # fmt: skip
"""The second is of rows that a further run asked of servers."""


def serve(interpreter: str, built: Sequence[Case], folder: Path) -> dict[str, dict[str, Any]]:
    """Lets vLLM serve the cases, in its own process; the library is found from the directory of this file.

    Args:
        interpreter: Python of the environment that has vLLM.
        built: The cases.
        folder: Of files; what an earlier run has asked in this folder is not asked again.
    """
    asked, answered, log = folder / "cases.json", folder / "results.json", folder / "engine.log"
    asked.write_text(json.dumps([case.to_dict() for case in built]))
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(HERE.parent)}
    command = [interpreter, str(HERE / "serving_engine.py"), str(asked), str(answered)]
    with log.open("w") as errors:
        code = subprocess.run(command, env=environment, cwd=folder, stderr=errors).returncode
    if code or not answered.exists():
        raise RuntimeError(f"the engine ended with {code}:\n{log.read_text()[-3000:]}")
    return json.loads(answered.read_text())


def build(names: Iterable[str], folder: Path, steps: int) -> list[Case]:
    """Return the cases of groups; those that an earlier run has built in this folder are read from there."""
    groups, written, built = cases(Builder(folder, steps)), folder / "built.json", {}
    if unknown := set(names) - set(groups):
        raise SystemExit(f"--only {', '.join(unknown)}: there are {', '.join(groups)}")
    if written.exists():
        built = {name: [Case(**case) for case in group] for name, group in json.loads(written.read_text()).items()}
    names = list(names) or list(groups)
    for name in names:
        if name not in built:
            print(f"{time.strftime('%H:%M:%S')} built: {name}", flush=True)
            built[name] = groups[name]()
            written.write_text(json.dumps({key: [case.to_dict() for case in group] for key, group in built.items()}))
    return [case for name in names for case in built[name]]


def compare(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """What of a case came out as here.

    Returns:
        `alone`, `together`: texts that are equal; `equal`, `places`: drafts that are equal, and positions where both
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
    name = case.name + (", native operators" if "compilation_config" in case.engine else "")
    name += f", {case.engine['dtype']}" if "dtype" in case.engine else ""
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
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next(line.split(":")[1].strip() for line in lines if "model name" in line)
    return {"vllm": version, "cpu": name, "dtype": "float32"}


def write(path: Path, machine: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write rows to a file of results; rows and values that it already has stay."""
    before = json.loads(path.read_text())["rows"] if path.is_file() else []
    merged = {row["name"]: row for row in before}
    for row in rows:
        merged[row["name"]] = {**merged.get(row["name"], {}), **row}
    lines = ",\n  ".join(json.dumps(row) for row in merged.values())
    path.write_text(f'{{\n "machine": {json.dumps(machine)},\n "rows": [\n  {lines}\n ]\n}}\n')


def table_of(results: dict[str, Any]) -> str:
    """Return the table, headed by what it was run on."""
    machine = results["machine"]
    head = f"directory, in vLLM {machine['vllm']} on a CPU ({machine['cpu']}), {machine['dtype']}"
    return markdown((head, *COLUMNS), map(_cells, results["rows"]))


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["name"], "-", "-", "-", f"does not start: {row['error'][:100]}"]
    total = row["prompts"]
    server = " and ".join(f"{equal}/{total}" for equal in row["server"]) if "server" in row else "-"
    texts = f"{row['alone']}/{total} and {row['together']}/{total}"
    drafts = f"{row['equal']}/{row['places']}, {row['rejected']}"
    return [row["name"], texts, server, drafts, f"{row['accepted']} of {row['drafts']}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=os.environ.get("TOKENAHEAD_VLLM_PYTHON"), help="vLLM's interpreter")
    parser.add_argument("--only", nargs="*", help="groups of cases")
    parser.add_argument("--steps", type=int, default=120, help="of training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="a file to write the rows to; its other rows stay")
    parser.add_argument("--keep", type=Path, help="a directory to leave everything in, and to go on in")
    parser.add_argument("--table", action="store_true", help="print the table of --json, or of benchmarks/serving.json")
    arguments = parser.parse_args()
    if arguments.table:
        print(table_of(json.loads((arguments.json or RESULTS).read_text())), end="")
        return
    if not arguments.vllm:
        parser.error("--vllm, or TOKENAHEAD_VLLM_PYTHON: the interpreter of an environment with vLLM")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        built = build(arguments.only or (), folder, arguments.steps)
        found = serve(arguments.vllm, built, folder)
    facts, rows = machine(arguments.vllm), [row(case, found[case.name]) for case in built]
    if arguments.json:
        write(arguments.json, facts, rows)
    print(table_of({"machine": facts, "rows": rows}), end="")
    sys.exit(any("error" in each or not each["alone"] == each["together"] == each["prompts"] for each in rows))


if __name__ == "__main__":
    main()
