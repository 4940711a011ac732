"""The protocol of all measurements: methods by turns on the same prompts, a line for each, within a time limit.

A unit is a group of prompts and a way of decoding. In it every method decodes, in an order that rotates from unit to
unit: plain decoding, once more as a control, and the methods with drafts. All of them get plain decoding's answers as
the history of later turns. A unit counts as a whole or not at all, so that every method has seen the same prompts at
the same time wherever a run ends.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..utils import replace_text
from .decoding import MODES, DecodingMode, Method, Run, decode
from .drafts import DraftMeasures, text_of
from .near_ties import NearTies
from .prompts import Prompt, Writer, category_of, groups_of

PLAIN, CONTROL = "plain", "plain, again"
"""Names of decoding without drafts, and of the same a second time."""
LINES = "lines.jsonl"
"""Name of the file of what was measured, as it was measured."""
_WARM_UP = 8  # tokens of a first call that is not measured, because it also sets things up


@dataclass(frozen=True)
class Protocol:
    """How much is measured, and how.

    Attributes:
        modes: Ways of decoding.
        batch_sizes: Prompts per call.
        new_tokens: Tokens per answer, at most.
        forces_length: Let no answer end earlier. Forced texts loop.
        per_category: Prompts of each category; None: all.
        seconds: Time limit: no unit is begun that would end later, but one of every way of decoding and batch size.
            None: no limit.
        seed: Of the samples.
        expects: Whether calls are expected along the plain texts, too.
    """

    modes: Sequence[DecodingMode] = MODES
    batch_sizes: Sequence[int] = (1,)
    new_tokens: int = 128
    forces_length: bool = False
    per_category: int | None = None
    seconds: float | None = None
    seed: int = 0
    expects: bool = True


@dataclass(frozen=True)
class Line:
    """What a method did in one turn of a group of prompts.

    Attributes:
        prompts: Names of the prompts.
        category: Theirs.
        turn: From 0.
        mode: Name of the way of decoding.
        batch_size: Prompts per call as the protocol has it.
        method: Name of the method.
        run: Counts, times and texts.
        count: Lines of the unit.
    """

    prompts: tuple[str, ...]
    category: str
    turn: int
    mode: str
    batch_size: int
    method: str
    run: Run
    count: int = 0

    @property
    def unit(self) -> tuple[Any, ...]:
        """What the line belongs to."""
        return self.prompts, self.mode, self.batch_size

    def to_json(self) -> str:
        """Return a line of the file."""
        return json.dumps(vars(self) | {"run": self.run.as_dict()}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Line:
        """Return what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"prompts": tuple(fields["prompts"]), "run": Run(**fields["run"])})


class Bench:
    """Measures methods on prompts.

    Args:
        methods: The first decodes plainly.
        writer: Makes ids of prompts.
        protocol: How much is measured.
        folder: Where lines are written as they are measured, and read from where there are some; None: nowhere.
        control: Whether plain decoding is measured twice.

    Attributes:
        lines: All that was measured, of whole units.
        prompts: What was asked to be decoded, by name.
        refused: By method, way of decoding and batch size: why it is not measured.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        writer: Writer,
        protocol: Protocol,
        folder: Path | None = None,
        control: bool = True,
    ) -> None:
        again = [replace(methods[0], name=CONTROL)] if control else []
        self.methods = [methods[0], *again, *methods[1:]]
        self.writer, self.protocol = writer, protocol
        self.file = None if folder is None else folder / LINES
        self.ties = NearTies(methods[0])
        self.lines: list[Line] = []
        self.prompts: dict[str, Prompt] = {}
        self.refused: dict[tuple[str, str, int], str] = {}
        self.warm: set[tuple[str, int]] = set()

    def run(self, prompts: Sequence[Prompt], on_unit: Callable[[int, int], None] = lambda done, count: None) -> None:
        """Measure until all is done or the time is over; what earlier runs left in the directory is not repeated.

        Args:
            prompts: What to decode.
            on_unit: Called after every unit with the numbers of finished ones and of all.
        """
        self.prompts = {prompt.name: prompt for prompt in prompts}
        units, known = self._units(prompts), self._read()
        self.lines = [line for unit in units for line in known.get(self._key(*unit), [])]
        failed = [line for line in self.lines if line.run.error is not None]
        self.refused |= {(line.method, line.mode, line.batch_size): str(line.run.error) for line in failed}
        missing = [unit for unit in units if self._key(*unit) not in known]
        done, started, longest = len(units) - len(missing), time.monotonic(), 0.0
        on_unit(done, len(units))
        file = None if self.file is None else self.file.open("a", encoding="utf-8")
        settings = len(self.protocol.modes) * len(self.protocol.batch_sizes)
        for group, mode, batch_size in missing:
            spent = time.monotonic() - started
            if done >= settings and self.protocol.seconds is not None and spent + longest > self.protocol.seconds:
                break
            lines = self._measure(group, mode, batch_size, done)
            self.lines += lines
            if file is not None:
                file.write("".join(line.to_json() for line in lines))
                file.flush()
            longest, done = max(longest, time.monotonic() - started - spent), done + 1
            on_unit(done, len(units))
        if file is not None:
            file.close()

    def _units(self, prompts: Sequence[Prompt]) -> list[tuple[list[Prompt], DecodingMode, int]]:
        """Return the units in an order in which all settings advance alike."""
        found = []
        for batch_size in self.protocol.batch_sizes:
            groups = groups_of(prompts, batch_size, self.protocol.per_category)
            for index, group in enumerate(groups):
                found += [(index / len(groups), (group, mode, batch_size)) for mode in self.protocol.modes]
        return [unit for _, unit in sorted(found, key=lambda pair: pair[0])]

    def _key(self, group: Sequence[Prompt], mode: DecodingMode, batch_size: int) -> tuple[Any, ...]:
        return tuple(prompt.name for prompt in group), mode.name, batch_size

    def _read(self) -> dict[tuple[Any, ...], list[Line]]:
        """Return the lines of whole units, and leave only these in the file."""
        if self.file is None or not self.file.is_file():
            return {}
        units: dict[tuple[Any, ...], list[Line]] = {}
        *texts, _ = self.file.read_text(encoding="utf-8").split("\n")  # behind the last end a line was cut
        for line in map(Line.from_json, texts):
            units.setdefault(line.unit, []).append(line)
        whole = {key: lines for key, lines in units.items() if len(lines) == lines[0].count}
        replace_text(self.file, "".join(line.to_json() for lines in whole.values() for line in lines))
        return whole

    def _measure(self, group: Sequence[Prompt], mode: DecodingMode, batch_size: int, number: int) -> list[Line]:
        """Return the lines of a unit."""
        self._warm_up(group, mode, batch_size)
        forced = {"min_new_tokens": self.protocol.new_tokens} if self.protocol.forces_length else {}
        mode = replace(mode, options=mode.options | forced)
        answers: dict[str, list[str]] = {prompt.name: [] for prompt in group}
        lines: list[Line] = []
        for turn in range(max(len(prompt.turns) for prompt in group)):
            here = [prompt for prompt in group if len(prompt.turns) > turn]
            batch = self.writer.batch(here, [answers[prompt.name] for prompt in here], self.methods[0].model.device)
            # another one for each turn, for plain decoding would else answer a turn as it answered the one before
            seed = zlib.crc32(f"{self.protocol.seed} {turn} {[prompt.name for prompt in here]}".encode())
            runs = self._turn(batch, mode, batch_size, number + turn, seed)
            of_unit = tuple(prompt.name for prompt in group), category_of(group), turn, mode.name, batch_size
            lines += [Line(*of_unit, name, run) for name, run in runs.items()]
            plain = runs[self.methods[0].name]
            if plain.error is not None:
                break
            for prompt, ids in zip(here, plain.ids):
                answers[prompt.name].append(self.writer.answer(ids))
        return [replace(line, count=len(lines)) for line in lines]

    def _turn(
        self, batch: dict[str, torch.Tensor], mode: DecodingMode, batch_size: int, number: int, seed: int
    ) -> dict[str, Run]:
        """Return what the methods do, in their order, those that cannot do it once with the reason."""
        first, *_ = self.methods
        shift, runs = number % len(self.methods), {}
        for method in [*self.methods[shift:], *self.methods[:shift]]:
            asked = method.name, mode.name, batch_size
            if (first.name, mode.name, batch_size) in self.refused:  # then there is nothing to compare with
                runs[method.name] = Run(error=f"{first.name}: {self.refused[first.name, mode.name, batch_size]}")
            elif asked in self.refused:
                runs[method.name] = Run(error=self.refused[asked])
            else:
                limits = batch_size, self.protocol.new_tokens, seed
                runs[method.name] = self._tried(method, batch, mode, *limits)
        plain = runs[first.name]
        if plain.error is not None:
            return runs
        return {each.name: self._checked(each, runs[each.name], plain, batch, mode) for each in self.methods}

    def _tried(
        self,
        method: Method,
        batch: dict[str, torch.Tensor],
        mode: DecodingMode,
        batch_size: int,
        new_tokens: int,
        seed: int = 0,
    ) -> Run:
        """Return a run, or why there is none; the method is then left out of this setting."""
        try:
            return decode(method, batch, mode, new_tokens, seed)
        except Exception as error:  # whatever it is, of our code or of transformers', the other methods go on
            reason = f"no memory for a batch of {batch_size}" if _is_memory(error) else _one_line(error)
            self.refused[method.name, mode.name, batch_size] = reason
            return Run(error=reason)

    def _warm_up(self, group: Sequence[Prompt], mode: DecodingMode, batch_size: int) -> None:
        if (mode.name, batch_size) in self.warm:
            return
        self.warm.add((mode.name, batch_size))
        batch = self.writer.batch(group, [[] for _ in group], self.methods[0].model.device)
        for method in self.methods:
            self._tried(method, batch, mode, batch_size, min(_WARM_UP, self.protocol.new_tokens))

    def _checked(self, method: Method, run: Run, plain: Run, batch: dict[str, torch.Tensor], mode: DecodingMode) -> Run:
        """Return a run with what is different from plain decoding, and with the calls that are expected."""
        if method is self.methods[0] or run.error is not None:
            return run
        prompts = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
        differences: list[Any] = []
        if not mode.is_sampled:
            rows = zip(prompts, plain.ids, run.ids)
            differences = [self.ties.difference(*row, len(prompts)) for row in rows]
        expected = self._expected(method, prompts, plain, mode) if self.protocol.expects else None
        return replace(run, differences=differences, expected=expected)

    def _expected(
        self, method: Method, prompts: Sequence[torch.Tensor], plain: Run, mode: DecodingMode
    ) -> dict[str, Any] | None:
        """Return what drafts of the method's length are expected to take along the plain texts."""
        asked = method.expectation(mode)
        if asked is None:
            return None
        rule, length = asked
        measures = DraftMeasures(mode.temperature, length)
        for prompt, ids in zip(prompts, plain.ids):
            measures.add(method.drafter, text_of(prompt[None], prompt.new_tensor([ids])))
        return measures.calls[rule].as_lists() if rule in measures.calls else None


def _is_memory(error: Exception) -> bool:
    words = "not enough memory", "can't allocate memory"
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(each in str(error) for each in words)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
