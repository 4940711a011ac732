"""Programs that tests start: one that hangs is ended, and what it printed is said."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_GRACE = 10
"""Seconds."""


class Program:
    """A Python program that runs in the checkout.

    What it prints goes to a file: processes that a killed launcher leaves behind would hold a pipe open.

    Args:
        words: What follows `python`.
        variables: Beyond the environment of the tests.
    """

    def __init__(self, *words: str | Path, **variables: str) -> None:
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as this object
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=ROOT, env=os.environ | environment | variables,
            stdout=self.printed, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def ended(self, seconds: float = 300, code: int = 0) -> str:
        """Wait for its end with an exit code, and return what it printed.

        Raises:
            AssertionError: For another code, or if it takes longer: then it is killed.
        """
        try:
            found: int | str = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # so that a launcher ends what it has started
            time.sleep(_GRACE)
            os.killpg(self.process.pid, signal.SIGKILL)
            found = f"still running after {seconds} s"
        self.printed.seek(0)
        text = self.printed.read()
        assert found == code, f"{self.process.args}: {found}\n{text[-4000:]}"
        return text
