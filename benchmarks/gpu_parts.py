"""What a GPU that is lent for minutes is asked, in the order of worth: every part is a process with a time of its own.

    python benchmarks/gpu.py --all-parts --seconds 600 --json $OUT/gpu.json    # --smoke: small sizes, on any machine

The file has how every part ended, and beside it lie the figures of each, written row by row: what is ended loses none.
Wanted are torch 2.11 and transformers 5.21, and pytest for the first part, as wheels where there is no network.

Left out: acceptance of the released heads, for SmolLM2 has 270 MB in bfloat16 and 80 in four bits, of which 64 travel;
and blocks' laws trained for long, for which one needs its text (`smollm2.py train block`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CELLS = "gpu.py --shapes 1B 8B --batches 1 8"
DRAFTS = "n-grams HMM EAGLE-3 EAGLE-3-tree block"
PARTS = {
    "exact": (110, f"-m pytest -m gpu -n 0 -p no:cacheprovider {HERE.parent}/tests/generation/test_on_gpu.py"),
    "evabyte": (80, "gpu.py --evabyte --windows 8 16 --ranks 32 --batches 1 --new-tokens 64"),
    "plain": (90, f"{CELLS} --drafts none --modes compiled --calls 2"),
    "recorded": (110, f"{CELLS} --drafts {DRAFTS} --modes recorded"),
    "compiled": (140, f"{CELLS} --drafts EAGLE-3 HMM block --modes compiled --calls 2"),
    "training": (40, "training.py --device cuda --shape 1B --only EAGLE-3 --length 512 --rounds 2"),
    "joined": (20, "training.py --device cuda --shape 1B --only EAGLE-3 --length 512 --rounds 1 --joined"),
}
"""Seconds of ten minutes, and the words of every part; the first cycles of calls are a column of the cells."""
SMOKE = {
    "evabyte": "gpu.py --evabyte --smoke --batches 1",
    "plain": "gpu.py --smoke --drafts none --modes compiled",
    "recorded": f"gpu.py --smoke --drafts {DRAFTS} --modes recorded",
    "compiled": "gpu.py --smoke --drafts EAGLE-3 HMM block --modes compiled",
    "training": "training.py --shape tiny --length 8 --steps 1 --rounds 1 --only EAGLE-3",
    "joined": "training.py --shape tiny --length 40 --steps 1 --rounds 1 --only EAGLE-3 --joined",
}


def run(arguments: Any) -> dict[str, dict[str, Any]]:
    """Run part after part; the time that one leaves is the next one's."""
    begun, due, ends = time.perf_counter(), 0.0, dict[str, dict[str, Any]]()
    file = arguments.json or Path("gpu.json")
    for name, (share, words) in PARTS.items():
        due += share * arguments.seconds / sum(seconds for seconds, _ in PARTS.values())
        limit, started = due - (time.perf_counter() - begun), time.perf_counter()
        words = SMOKE.get(name, words) if arguments.smoke else words
        command = [sys.executable, *words.split()]
        if words.startswith("gpu.py"):  # it leaves out what would not end
            command += ["--seconds", f"{0.9 * limit:.0f}"]
        if name != "exact":
            command = [
                command[0],
                str(HERE / command[1]),
                *command[2:],
                "--json",
                str(file.with_suffix(f".{name}.json")),
            ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(limit, 1))
            code, said = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            code, said = None, (error.stdout or b"").decode(errors="replace")
        ends[name] = {"seconds": time.perf_counter() - started, "code": code, "end": said[-4000:]}
        file.write_text(json.dumps(ends))
        print(
            f"{name}: {ends[name]['seconds']:.0f} s, {'ran out of time' if code is None else f'exit code {code}'}",
            flush=True,
        )
    return ends
