"""The protocol of all measurements: methods by turns on the same prompts, a line for each, within a time limit.

A unit is a group of prompts and a way of decoding. In it every method decodes, in an order that rotates from unit to
unit: plain decoding, once more as a control, and the methods with drafts. All of them get plain decoding's answers as
the history of later turns. Drafters that remember text begin every unit with what they remembered at first: they must
not have read the answer in another one. A unit counts as a whole or not at all, so that every method has seen the same
prompts at the same time wherever a run ends.

Greedy outputs that differ from plain decoding's are near-ties, where rounding decides, or real differences. A block and
a single token are rounded differently, so that two tokens of nearly equal logits may swap their order. A difference is
a near-tie if the gap of their logits in float32 is at most twice the largest error between logits of a block and of
single tokens, which is measured on the same model, dtype and batch size.
"""

from __future__ import annotations

import copy
import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...configuration.cache_names import CACHE, cache_of
from ...generation.drafter import BaseDrafter
from ...generation.tensors.tensor_files import Fields
from ..utils import one_line, replace_file
from .decoding import GREEDY, MODES, DecodingMode, Method, Run, decode
from .drafts import DraftMeasures, text_of
from .prompts import Prompt, PromptEncoder, category_of, groups_of

PLAIN, CONTROL = "plain", "plain, again"
"""Names of decoding without drafts, and of the same a second time."""
LINES = "lines.jsonl"
"""Name of the file of what was measured, as it was measured."""
_WARM_UP = 8  # tokens of a first call that is not measured, because it also sets things up
_WIDTH, _BLOCKS = 6, 4  # tokens of a block, and blocks of an output, along which the error of logits is measured
_TOP = 10  # likeliest tokens whose logits are compared
_OUTPUTS = 4  # along which the error is measured
_Batch = dict[str, torch.Tensor]
_Unit = tuple[tuple[str, ...], str, int]


@dataclass(frozen=True)
class Protocol:
    """How much is measured, and how.

    Attributes:
        modes: Ways of decoding.
        batch_sizes: Prompts per call.
        new_tokens: Tokens per answer, at most.
        forces_length: Let no answer end earlier. Forced outputs loop.
        per_category: Prompts of each category; None: all.
        seconds: Time limit: no unit is begun that would end later, but one of every way of decoding and batch size.
            None: no limit.
        seed: Of the samples.
        expects: Whether calls are expected along the plain outputs, too.
        scores: Whether answers are scored by the prompts' references.
    """

    modes: Sequence[DecodingMode] = MODES
    batch_sizes: Sequence[int] = (1,)
    new_tokens: int = 128
    forces_length: bool = False
    per_category: int | None = None
    seconds: float | None = None
    seed: int = 0
    expects: bool = True
    scores: bool = False


@dataclass(frozen=True)
class Line:
    """What a method did in one turn, from 0, of a group of prompts; `count` is the number of lines of the unit."""

    prompts: tuple[str, ...]
    category: str
    turn: int
    mode: str
    batch_size: int
    method: str
    run: Run
    count: int = 0

    @property
    def unit(self) -> _Unit:
        """The unit that the line belongs to."""
        return self.prompts, self.mode, self.batch_size

    def to_json(self) -> str:
        """Return a line of the file."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, line: str) -> Line:
        """Return what `to_json` wrote."""
        fields = json.loads(line)
        return cls(**fields | {"prompts": tuple(fields["prompts"]), "run": Run(**fields["run"])})


class Bench:
    """Measures methods on prompts.

    Args:
        methods: The first decodes plainly.
        writer: Makes ids of prompts.
        protocol: How much is measured.
        directory: Where lines are written as they are measured, and read from where there are some; None: nowhere.
        control: Whether plain decoding is measured twice.

    Attributes:
        lines: All that was measured, of whole units.
        prompts: The prompts, by name.
        refused: By method, way of decoding and batch size: why it is not measured.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        writer: PromptEncoder,
        protocol: Protocol,
        directory: Path | None = None,
        control: bool = True,
    ) -> None:
        again = [replace(methods[0], name=CONTROL)] if control else []
        self.methods = [methods[0], *again, *methods[1:]]
        self.writer, self.protocol = writer, protocol
        self.file = None if directory is None else directory / LINES
        self.ties = NearTies(methods[0])
        self.lines: list[Line] = []
        self.prompts: dict[str, Prompt] = {}
        self.refused: dict[tuple[str, str, int], str] = {}
        self.warm: set[tuple[str, int]] = set()
        drafters = [method.drafter for method in methods if isinstance(method.drafter, BaseDrafter)]
        self.restore_points = [drafter.restore_point() for drafter in drafters]

    @property
    def not_measured(self) -> dict[str, str | int | float]:
        """What failed, and why."""
        return {f"{method}, {mode}, batch {size}": reason for (method, mode, size), reason in self.refused.items()}

    def run(self, prompts: Sequence[Prompt], on_unit: Callable[[int, int], None] = lambda done, count: None) -> None:
        """Measure until all is done or the time is over; what earlier runs left in the directory is not repeated.

        Args:
            prompts: What to decode.
            on_unit: Called after every unit with the numbers of finished ones and of all.
        """
        self.writer.check(prompts)
        self.prompts = {prompt.name: prompt for prompt in prompts}
        units, known = self._units(prompts), self._read()
        self.lines = [line for unit in units for line in known.get(_key(*unit), [])]
        failed = [line for line in self.lines if line.run.error is not None]
        self.refused |= {(line.method, line.mode, line.batch_size): str(line.run.error) for line in failed}
        missing = [unit for unit in units if _key(*unit) not in known]
        done, started, longest = len(units) - len(missing), time.monotonic(), 0.0
        on_unit(done, len(units))
        settings = len(self.protocol.modes) * len(self.protocol.batch_sizes)
        for group, mode, batch_size in missing:
            spent = time.monotonic() - started
            if done >= settings and self.protocol.seconds is not None and spent + longest > self.protocol.seconds:
                break
            lines = self._measure(group, mode, batch_size, done)
            self.lines += lines
            if self.file is not None:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write("".join(line.to_json() for line in lines))
            longest, done = max(longest, time.monotonic() - started - spent), done + 1
            on_unit(done, len(units))

    def _units(self, prompts: Sequence[Prompt]) -> list[tuple[list[Prompt], DecodingMode, int]]:
        """Return the units in an order in which all settings advance alike."""
        units = []
        for batch_size in self.protocol.batch_sizes:
            groups = groups_of(prompts, batch_size, self.protocol.per_category)
            for index, group in enumerate(groups):
                units += [(index / len(groups), (group, mode, batch_size)) for mode in self.protocol.modes]
        return [unit for _, unit in sorted(units, key=lambda pair: pair[0])]

    def _read(self) -> dict[_Unit, list[Line]]:
        """Return the lines of whole units, and leave only these in the file."""
        if self.file is None or not self.file.is_file():
            return {}
        units: dict[_Unit, list[Line]] = {}
        *whole_lines, _ = self.file.read_text(encoding="utf-8").split("\n")  # the last line may have been cut off
        for line in map(Line.from_json, whole_lines):
            units.setdefault(line.unit, []).append(line)
        whole = {key: lines for key, lines in units.items() if len(lines) == lines[0].count}
        replace_file(self.file, "".join(line.to_json() for lines in whole.values() for line in lines))
        return whole

    def _measure(self, group: Sequence[Prompt], mode: DecodingMode, batch_size: int, number: int) -> list[Line]:
        self._warm_up(group, mode, batch_size)
        for restore in self.restore_points:
            restore()
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
            facts = tuple(prompt.name for prompt in group), category_of(group), turn, mode.name, batch_size
            lines += [Line(*facts, name, run) for name, run in runs.items()]
            plain = runs[self.methods[0].name]
            if plain.error is not None:
                break
            for prompt, ids in zip(here, plain.ids):
                answers[prompt.name].append(self.writer.answer(ids))
        return [replace(line, count=len(lines)) for line in lines]

    def _turn(self, batch: _Batch, mode: DecodingMode, batch_size: int, number: int, seed: int) -> dict[str, Run]:
        """Return what the methods do, in their order, or why they cannot."""
        first, *_ = self.methods
        shift, runs = number % len(self.methods), {}
        for method in [*self.methods[shift:], *self.methods[:shift]]:
            reason = self.refused.get((first.name, mode.name, batch_size))  # then there is nothing to compare with
            reason = f"{first.name}: {reason}" if reason else self.refused.get((method.name, mode.name, batch_size))
            limits = batch_size, self.protocol.new_tokens, seed
            runs[method.name] = Run(error=reason) if reason else self._tried(method, batch, mode, *limits)
        plain = runs[first.name]
        if plain.error is not None:
            return runs
        return {each.name: self._checked(each, runs[each.name], plain, batch, mode) for each in self.methods}

    def _tried(
        self, method: Method, batch: _Batch, mode: DecodingMode, batch_size: int, new_tokens: int, seed: int = 0
    ) -> Run:
        """Return a run, or why there is none; the method is then left out of this setting."""
        try:
            return decode(method, batch, mode, new_tokens, seed)
        except Exception as error:  # whatever it is, of our code or of transformers', the other methods go on
            reason = f"no memory for a batch of {batch_size}" if _is_memory(error) else one_line(error)
            self.refused[method.name, mode.name, batch_size] = reason
            return Run(error=reason)

    def _warm_up(self, group: Sequence[Prompt], mode: DecodingMode, batch_size: int) -> None:
        if (mode.name, batch_size) in self.warm:
            return
        self.warm.add((mode.name, batch_size))
        batch = self.writer.batch(group, [[] for _ in group], self.methods[0].model.device)
        for method in self.methods:
            self._tried(method, batch, mode, batch_size, min(_WARM_UP, self.protocol.new_tokens))

    def _checked(self, method: Method, run: Run, plain: Run, batch: _Batch, mode: DecodingMode) -> Run:
        """Return a run with its differences from plain decoding, and with the expected calls."""
        if method is self.methods[0] or run.error is not None:
            return run
        prompts = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
        outputs = () if mode.is_sampled else zip(prompts, plain.ids, run.ids)
        differences = [self.ties.difference(*output, len(prompts)) for output in outputs]
        expected = self._expected(method, prompts, plain, mode) if self.protocol.expects else None
        return replace(run, differences=differences, expected=expected)

    def _expected(
        self, method: Method, prompts: Sequence[torch.Tensor], plain: Run, mode: DecodingMode
    ) -> dict[str, list] | None:
        """Return the expected calls of the method's drafts along the plain outputs."""
        expectation = method.expectation(mode)
        if expectation is None:
            return None
        rule, length = expectation
        measures = DraftMeasures(mode.temperature, length)
        for prompt, ids in zip(prompts, plain.ids):
            measures.add(method.drafter, text_of(prompt[None], prompt.new_tensor([ids])))
        return measures.calls[rule].as_lists() if rule in measures.calls else None


def _key(group: Sequence[Prompt], mode: DecodingMode, batch_size: int) -> _Unit:
    return tuple(prompt.name for prompt in group), mode.name, batch_size


def _is_memory(error: Exception) -> bool:
    words = "not enough memory", "can't allocate memory"
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(each in str(error) for each in words)


class NearTies:
    """Compares greedy outputs with those of plain decoding."""

    def __init__(self, plain: Method) -> None:
        self.plain = plain
        self.errors: dict[int, list[float]] = {}

    @cached_property
    def exact(self) -> Method:
        """Plain decoding in float32; a copy of the model in other dtypes."""
        model = self.plain.model
        model = model if model.dtype == torch.float32 else copy.deepcopy(model).float()
        return Method("float32", model, self.plain.options)

    def difference(
        self, prompt: torch.Tensor, expected: Sequence[int], got: Sequence[int], batch_size: int
    ) -> Fields | None:
        """Return where two outputs differ after a prompt [L]; None if they are equal.

        Returns:
            `index`, `expected` and `got` (tokens; None where an output has ended), `gap` of their logits in float32,
            and the `error` between block and single logits; an output that ended early has no gap.
        """
        if list(expected) == list(got):
            return None
        pairs = enumerate(zip(expected, got))
        index = next((i for i, (one, other) in pairs if one != other), min(len(expected), len(got)))
        result: Fields = {"index": index, "expected": None, "got": None, "gap": None}
        if index < min(len(expected), len(got)):
            one, other = expected[index], got[index]
            ids = torch.cat([prompt, prompt.new_tensor(expected[:index])])[None]
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "output_scores": True}
            scores = self.exact.generate(input_ids=ids, **options, **GREEDY.options).scores[0][0]
            result |= {"expected": one, "got": other, "gap": abs(float(scores[one] - scores[other]))}
        return result | {"error": self._error(prompt, expected, batch_size)}

    def _error(self, prompt: torch.Tensor, output: Sequence[int], batch_size: int) -> float:
        errors = self.errors.setdefault(batch_size, [])
        if len(errors) < _OUTPUTS:
            errors.append(block_error(self.plain.model, prompt, prompt.new_tensor(output), batch_size))
        return max(errors)


@torch.no_grad()
def block_error(model: PreTrainedModel, prompt: torch.Tensor, output: torch.Tensor, batch_size: int = 1) -> float:
    """Return the largest difference between logits of a block and of single tokens, among each position's likeliest.

    The output [T] after a prompt [L] is passed as blocks and token by token, in `batch_size` equal sequences.
    """
    prompt, output = (ids.expand(batch_size, -1) for ids in (prompt, output[: _WIDTH * _BLOCKS]))
    logits = []
    for width in (_WIDTH, 1):
        cache, parts = cache_of(model(prompt, use_cache=True)), []
        for part in output.split(width, 1):
            parts.append(model(part, **{CACHE: cache}, use_cache=True).logits.float())
        logits.append(torch.cat(parts, 1))
    blocks, singles = logits
    likeliest = singles.topk(min(_TOP, singles.shape[-1])).indices
    return float((blocks - singles).gather(-1, likeliest).abs().max())


def is_near_tie(difference: Fields, error: float) -> bool:
    """Return whether rounding of that error explains a difference."""
    return difference["gap"] is not None and difference["gap"] <= 2 * error
