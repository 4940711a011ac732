"""Servers of vLLM that are forked from a process which has imported it, for `benchmarks/serving.py`.

What runs is the command `vllm serve` with its own arguments, its API server, its engine and its worker, each a process;
that they are forked, and do not import vllm for themselves, saves a minute on two busy cores, and takes along what
`serving_engine.py` replaces. `tests/engine/test_server.py` starts the command itself.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serving_server import Process, Server

FORKS = multiprocessing.get_context("fork")
_PARENT_ENDS = 1  # PR_SET_PDEATHSIG of prctl(2)


def prepare() -> None:
    """Imports what a server needs, and lets vLLM fork its processes."""
    from vllm.utils import system_utils

    system_utils.get_mp_context = lambda: FORKS  # on CPUs it ignores the environment, and spawns
    import vllm.entrypoints.cli.main  # noqa: F401
    import vllm.entrypoints.openai.api_server  # noqa: F401
    import vllm.v1.executor.multiproc_executor  # noqa: F401
    import vllm.v1.worker.cpu_worker  # noqa: F401


class Fork:
    """A forked process, as `subprocess.Popen` has it.

    Args:
        run: What it does.
        log: Where its output goes.
    """

    def __init__(self, run: Callable[[], None], log: Path) -> None:
        def child() -> None:
            os.setsid()
            ctypes.CDLL(None).prctl(_PARENT_ENDS, signal.SIGTERM)  # no server outlives this run
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            run()

        self.process = FORKS.Process(target=child)
        self.process.start()
        self.pid = self.process.pid or 0

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self.process.exitcode

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.terminate()

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code when it has ended."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("vllm serve", timeout or 0.0)
        return self.process.exitcode


class ForkedServer(Server):
    """`vllm serve` in a fork of this process."""

    def start(self) -> Process:
        """Start the command."""
        return Fork(self._run, self.log)

    def _run(self) -> None:
        from vllm.entrypoints.cli.main import main

        sys.argv = self.command
        main()


def ask_server(case: dict[str, Any]) -> dict[str, Any]:
    """Serve a case, and return what it writes after every prompt, one by one and all at once."""
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 8}
    words = options(settings | {"enforce_eager": True} | case["engine"])
    command = shlex.join(["vllm", "serve", case["engine"]["model"], *words])

    def ask(prompt: list[int]) -> list[int]:
        return server.tokens(prompt, case["new_tokens"])

    with ForkedServer(command, sys.executable, Path("server.log"), options=(), patience=300) as server:
        alone = [ask(prompt) for prompt in case["prompts"]]
        accepted = server.accepted()
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(ask, case["prompts"]))
    return {"alone": alone, "together": together, "accepted": accepted}


def options(engine: dict[str, Any]) -> list[str]:
    """Return arguments of vLLM's `LLM`, but for the model, as words of its command line."""
    words = []
    for name, value in engine.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif name != "model":
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
