"""Do the tests find faults? Plants the mutants of `*.toml` one by one, and runs the tests that run their functions.

    python tests/mutants/run.py [check | cover | table] [--only PATTERN] [--jobs N] [--results FILE] [--limit SECONDS]

`cover` runs all tests once, and notes which functions each runs (mutants.json, for all later runs).

A mutant names file, function (`Class.method`; "": the whole file), an old text that stands there once, the new one, and
the kind of fault. It is killed where a test fails that passes without it, or where they take too long. The tree is
copied as a run begins, and is never touched itself; a run goes on from the lines of its results. Tests run in forks of
a process that has imported the libraries, but nothing of the tree.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[2]
_LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".venv", "site", "build", "dist")
_PYTEST = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
_LIBRARIES = "pytest", "hypothesis", "torch", "transformers", "datasets", "peft", "trl", "safetensors.torch"
_SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
_OUTCOMES = "killed", "timed out", "survived", "broken", "equivalent", "not run"


@dataclass(frozen=True)
class Mutant:
    """A fault: `new` in place of `old` in a function of a file. One that says `why` changes nothing, and never runs."""

    file: str
    function: str
    old: str
    new: str
    kind: str
    why: str = ""

    @property
    def name(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file} {self.function}: {old} -> {new}"

    def applied(self, source: str) -> str:
        """Return the source with the fault; a ValueError or a SyntaxError says why it cannot be planted."""
        lines = source.splitlines(keepends=True)
        first, last = _places_of(source)[self.function]
        own = "".join(lines[first:last])
        if (times := own.count(self.old)) != 1:
            raise ValueError(f"the old text is there {times} times")
        new = own.replace(self.old, self.new)
        block = "if 1:\n" * own.startswith(" ")  # around a method
        if ast.dump(ast.parse(block + new)) == ast.dump(ast.parse(block + own)):
            raise ValueError("the code stays as it is")
        return "".join([*lines[:first], new, *lines[last:]])


@cache
def _places_of(source: str) -> dict[str, tuple[int, int]]:
    """Return where functions and classes begin and end; decorators belong to them."""
    places, waiting = {"": (0, source.count("\n"))}, [("", ast.parse(source).body)]
    for outer, body in waiting:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}{node.name}"  # of overloads, and of properties, the last one
                places[name] = min(each.lineno for each in (node, *node.decorator_list)) - 1, node.end_lineno or 0
                waiting.append((f"{name}.", node.body))
    return places


def read_mutants() -> list[Mutant]:
    """Return the mutants, by room and file."""
    files = [ROOT / f"tests/mutants/{room}.toml" for room in ("generation", "modeling", "training")]
    rooms = [tomllib.loads(file.read_text()) for file in files]
    return [Mutant(file, **entry) for room in rooms for file, entries in room.items() for entry in entries]


def check(mutants: list[Mutant], root: Path = ROOT) -> None:
    """Plant every mutant in memory, and raise a ValueError with the names of those that cannot be planted."""
    faults = [f"{each} stands here twice" for each, times in Counter(m.name for m in mutants).items() if times > 1]
    for mutant in mutants:
        try:
            mutant.applied((root / mutant.file).read_text())
        except (OSError, LookupError, ValueError, SyntaxError) as error:
            faults.append(f"{mutant.name}: {error!r}")
    if faults:
        raise ValueError("\n".join(faults))


def cover(jobs: int, covered: Path, words: list[str]) -> None:
    """Run the tests, and write which of them run the functions of the mutants (`Covered`)."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        plugin = ["-p", "tests.mutants.covered", "-p", "no:cacheprovider", "-n", str(jobs), "--dist", "worksteal"]
        environment = os.environ | _SETTINGS | {"MUTANTS_FOLDER": folder, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", "pytest", *plugin, *words], cwd=ROOT, env=environment, check=False)
        seconds = dict[str, float]()
        for file in Path(folder).glob("seconds-*.json"):
            seconds |= json.loads(file.read_text())
        found = defaultdict[str, set[str]](set)
        keys = {(each.file, each.function) for each in read_mutants()}
        for file in Path(folder).glob("lines.*"):
            (data := CoverageData(str(file))).read()
            for name, function in keys:
                first, last = _places_of((ROOT / name).read_text())[function]
                lines = data.contexts_by_lineno(str(ROOT / name))
                for line in range(first + 1, last + 1):
                    found[f"{name} {function}"] |= set(lines.get(line, ()))
    tests = {
        key: [test for test in seconds if test in own or f"{test.partition('::')[0]}::" in own]
        for key, own in found.items()
    }
    covered.write_text(json.dumps({"seconds": seconds, "tests": tests}))


class Covered:
    """Which tests run a function, as `cover` wrote it."""

    def __init__(self, file: Path) -> None:
        found = json.loads(file.read_text())
        self.seconds, self.tests = found["seconds"], found["tests"]

    def of(self, mutant: Mutant) -> list[str]:
        """Return the tests of a mutant's function: those of its folder or name first, and of these quick ones."""
        path, near = Path(mutant.file), f"tests/{Path(mutant.file).parent}/"
        tests = self.tests.get(f"{mutant.file} {mutant.function}", [])
        return sorted(tests, key=lambda test: (near not in test and path.stem not in test, self.seconds[test]))


class Tree:
    """A copy of the tree, in which mutants are planted in turn; `limit` is in seconds of processor time."""

    def __init__(self, folder: Path, limit: int, covered: Covered) -> None:
        self.root, self.scratch, self.limit, self.covered = folder / "tree", folder / "scratch", limit, covered
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=_LEFT_OUT)
        self.passing, self.failing = set[str](), set[str]()  # without any mutant
        self.seconds = count(1)

    def result_of(self, mutant: Mutant) -> tuple[str, str]:
        """Return what becomes of a mutant, and the test that says so."""
        path = self.root / mutant.file
        source = path.read_text()
        while True:
            if not (tests := self.covered.of(mutant)):
                return "survived", "no test runs it"
            self._write(path, mutant.applied(source))
            outcome, test = self._run(tests)
            self._write(path, source)
            if outcome != "killed" or test in self.passing:
                return outcome, test
            if test in self.failing:  # a file that cannot be collected is not deselected
                return "broken", test
            (self.passing if self._run([test])[0] == "survived" else self.failing).add(test)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        os.utime(path, (0, next(self.seconds)))  # a .pyc knows its source by size and second

    def _run(self, tests: list[str]) -> tuple[str, str]:
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        words = [*_PYTEST, *(f"--deselect={test}" for test in sorted(self.failing)), *tests]
        if not (child := os.fork()):
            self._test(words)
        # time, for what only waits; the child counts its processor time, for a busy machine does not
        end, done = time.monotonic() + 8 * self.limit, 0
        while not done:
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.1)
            done, status = os.waitpid(child, os.WNOHANG)
        text = (self.scratch / "output").read_text(errors="replace")
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return "survived", ""
        if failed := re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE):
            return "killed", failed[1]
        return ("timed out", "") if code < 0 or "Timeout" in text else ("broken", text[-500:])

    def _test(self, words: list[str]) -> NoReturn:
        """Run pytest on the tree in this process, a child of its own group, and end it."""
        os.setsid()
        output = os.open(self.scratch / "output", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (self.limit, self.limit + 5))
        os.chdir(self.root)
        os.environ.update(PYTHONPATH=str(self.root), TMPDIR=str(self.scratch))
        tempfile.tempdir, sys.path[0] = str(self.scratch), str(self.root)
        code = 70
        try:
            code = int(import_module("pytest").main(words))
        finally:
            sys.stdout.flush()
            os._exit(code)


def _run_all(mutants: list[Mutant], limit: int, covered: Path, passing: set[str], results: Path) -> None:
    """Run mutants one after the other, and add a line for each to the results."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(Path(folder), limit, Covered(covered))
        tree.passing |= passing
        for mutant in mutants:
            outcome, test = tree.result_of(mutant)
            with results.open("a") as file:
                file.write(json.dumps({"mutant": mutant.name, "outcome": outcome, "by": test}) + "\n")
            print(f"{outcome:10} {mutant.name}  {test}", flush=True)


def _prepare() -> None:
    """Import what the tests import in any case."""
    os.environ.update(_SETTINGS)
    for name in _LIBRARIES:
        import_module(name)


def _outcomes_of(results: Path) -> dict[str, tuple[str, str]]:
    """Return outcome and killing test by mutant."""
    lines = map(json.loads, results.open()) if results.exists() else ()
    return {each["mutant"]: (each["outcome"], each["by"]) for each in lines}


def table(outcomes: dict[str, str], mutants: list[Mutant]) -> str:
    """Return how many mutants of each room have which outcome, and the names of those that survived."""
    counts = Counter[tuple[str, str]]()
    for mutant in mutants:
        for room in ("/".join(Path(mutant.file).parent.parts[:2]), "all"):
            counts[room, outcomes.get(mutant.name, "equivalent" if mutant.why else "not run")] += 1
    lines = ["".join(f"{outcome:>12}" for outcome in _OUTCOMES) + "  room"]
    for room in dict.fromkeys([*sorted(room for room, _ in counts if room != "all"), "all"]):
        lines.append("".join(f"{counts[room, outcome]:>12}" for outcome in _OUTCOMES) + f"  {room}")
    return "\n".join([*lines, *(f"survived: {m.name}" for m in mutants if outcomes.get(m.name) == "survived")])


def main() -> None:
    """Check the mutants, or run those that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=["run", "check", "cover", "table"], default="run")
    parser.add_argument("--only", default="", help="a regular expression; the mutants whose names have it")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--covered", type=Path, default=Path("mutants.json"), help="what `cover` writes, and runs read")
    parser.add_argument("--limit", type=int, default=1800, help="seconds of processor time for the tests of a mutant")
    options, words = parser.parse_known_args()  # others are pytest's, for `cover`
    mutants = [mutant for mutant in read_mutants() if re.search(options.only, mutant.name)]
    check(mutants)
    if options.mode == "cover" or (options.mode == "run" and not options.covered.exists()):
        cover(options.jobs, options.covered.resolve(), words)
    known = _outcomes_of(options.results)
    left = [mutant for mutant in mutants if mutant.name not in known and not mutant.why]
    random.Random(0).shuffle(left)  # so that a run which is cut short has seen all rooms
    if options.mode == "run" and left:
        passing = {test for outcome, test in known.values() if outcome == "killed"}
        shared = options.limit, options.covered.resolve(), passing, options.results.resolve()
        with ProcessPoolExecutor(options.jobs, get_context("spawn"), _prepare) as pool:
            runs = [pool.submit(_run_all, left[job :: options.jobs], *shared) for job in range(options.jobs)]
            for run in runs:
                run.result()
    if options.mode in ("run", "table"):
        print(table({name: outcome for name, (outcome, _) in _outcomes_of(options.results).items()}, mutants))


if __name__ == "__main__":
    main()
