"""Every Python block of the README runs, in order, in a fresh directory."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)


def test_blocks_run_in_order(tmp_path):
    assert len(blocks()) >= 6
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    (tmp_path / "readme.py").write_text("\n".join(blocks()), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "readme.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "heads" / "config.json").exists() and (tmp_path / "student" / "config.json").exists()


def test_blocks_are_formatted():
    text = "\n".join(blocks())
    assert all(len(line) <= 120 for line in text.splitlines())
