"""`vllm serve` by a printed command, on a free port of the loopback, asked as an OpenAI client would.

with Server(export(model, "served").command, "vllm-env/bin/python", Path("server.log")) as server:
    print(server.complete([1, 2, 3], max_tokens=8, temperature=0))
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8")
"""Added to the command: the arithmetic that texts are compared in, and what shortens the start."""


def write_plugin(folder: Path) -> Path:
    """Write a package into `folder`, on whose path vLLM repairs its sampler in every process, and return `folder`."""
    facts = folder / "repair-0.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: repair\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nrepair = tokenahead.model_cards.vllm:register\n")
    return folder


class Server:
    """A server, from its start to its end.

    Args:
        command: As `export` prints it, beginning with `vllm serve`.
        interpreter: Python of the environment that has vLLM.
        log: Where its output goes.
        options: Added to the command.
        patience: Seconds that its start may take.
    """

    def __init__(
        self, command: str, interpreter: str, log: Path, options: tuple[str, ...] = OPTIONS, patience: float = 600
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        program, *words = shlex.split(command)
        program = str(Path(interpreter).with_name(program))
        self.command = [program, *words, *options, "--host", "127.0.0.1", "--port", port]
        self.url, self.log, self.patience = f"http://127.0.0.1:{port}", log, patience
        self.process: subprocess.Popen | None = None

    def start(self) -> subprocess.Popen:
        """Start the command in a new session: its engine's processes are ended with it."""
        plugin = write_plugin(self.log.absolute().parent)
        environment = os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(plugin)])}
        with self.log.open("w") as log:
            return subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def __enter__(self) -> Server:
        self.process = self.start()
        try:
            self._wait(self.process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self, process: subprocess.Popen) -> None:
        end = time.monotonic() + self.patience
        while time.monotonic() < end:
            if process.poll() is not None:
                raise RuntimeError(f"vllm serve ended with {process.returncode}:\n{self.log.read_text()[-3000:]}")
            try:
                self.get("/health")
                return
            except (URLError, ConnectionError):
                time.sleep(1)
        raise TimeoutError(f"vllm serve was not ready after {self.patience} seconds; see {self.log}")

    def __exit__(self, *_: object) -> None:
        process = self.process
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        with suppress(ProcessLookupError):  # what is left of it, and of its engine's processes
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def get(self, path: str) -> str:
        """Return what a path answers."""
        with urlopen(self.url + path, timeout=60) as answer:
            return answer.read().decode()

    def post(self, path: str, **body: Any) -> str:
        """Return the answer to a request."""
        request = Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=120) as answer:
            return answer.read().decode()

    def complete(self, prompt: str | list[int], **options: Any) -> str:
        """Return the text that follows a prompt."""
        answer = self.post("/v1/completions", model=self.model, prompt=prompt, **options)
        return json.loads(answer)["choices"][0]["text"]

    def stream(self, prompt: str | list[int], **options: Any) -> list[str]:
        """Return the pieces of text that follow a prompt, as they come."""
        answer = self.post("/v1/completions", model=self.model, prompt=prompt, stream=True, **options)
        data = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
        return [json.loads(line)["choices"][0]["text"] for line in data]

    def chat(self, content: str, **options: Any) -> str:
        """Return the answer to a message."""
        messages = [{"role": "user", "content": content}]
        answer = self.post("/v1/chat/completions", model=self.model, messages=messages, **options)
        return json.loads(answer)["choices"][0]["message"]["content"]

    @property
    def model(self) -> str:
        """The name under which the model is served."""
        return json.loads(self.get("/v1/models"))["data"][0]["id"]

    def accepted(self) -> int:
        """Return the number of drafted tokens that were accepted so far."""
        name = "vllm:spec_decode_num_accepted_tokens_total"
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name)]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))
