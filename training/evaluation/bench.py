"""The protocol of all measurements: methods by turns on the same prompts, a row for each, within a time limit.

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
from .decoding import GREEDY, MODES, DecodingMode, Method, Row, decode
from .drafts import DraftMeasures, text_of
from .prompts import Prompt, PromptEncoder, groups_of

PLAIN, CONTROL = "plain", "plain, again"
"""Names of decoding without drafts, and of the same a second time."""
LINES = "lines.jsonl"
"""Name of the file of what was measured, as it was measured: a list of rows for each unit."""
_WARM_UP = 8  # tokens of a first call that is not measured, because it also sets things up
_WIDTH, _BLOCKS = 6, 4  # tokens of a block, and blocks of an output, along which the error of logits is measured
_TOP = 10  # likeliest tokens whose logits are compared
_OUTPUTS = 4  # along which the error is measured
_Batch = dict[str, torch.Tensor]
_Unit = tuple[list[Prompt], DecodingMode, int]
_Key = tuple[tuple[str, ...], str, int]


@dataclass(frozen=True)
class Protocol:
    """How much is measured, and how."""

    modes: Sequence[DecodingMode] = MODES  # ways of decoding
    batch_sizes: Sequence[int] = (1,)  # prompts per call
    new_tokens: int = 128  # per answer, at most
    forces_length: bool = False  # let no answer end earlier; forced outputs loop
    per_category: int | None = None  # prompts of each category; None: all
    seconds: float | None = None  # no unit is begun that would end later, but one of every mode and batch size
    seed: int = 0  # of the samples
    expects: bool = True  # whether calls are expected along the plain outputs, too
    scores: bool = False  # whether answers are scored by the prompts' references


class Bench:
    """Measures methods on prompts.

    Args:
        methods: The first decodes plainly.
        writer: Makes ids of prompts.
        protocol: How much is measured.
        directory: Where rows are written as they are measured, and read from where there are some; None: nowhere.
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
        self.lines: list[Row] = []
        self.prompts: dict[str, Prompt] = {}
        self.refused: dict[tuple[str, str, int], str] = {}
        self.errors: dict[int, list[float]] = {}
        self.warm: set[tuple[str, int]] = set()
        drafters = [method.drafter for method in methods if isinstance(method.drafter, BaseDrafter)]
        self.restore_points = [drafter.restore_point() for drafter in drafters]

    @property
    def not_measured(self) -> dict[str, str | int | float]:
        """What failed, and why."""
        return {f"{method}, {mode}, batch {size}": reason for (method, mode, size), reason in self.refused.items()}

    def run(self, prompts: Sequence[Prompt], on_unit: Callable[[int, int], None] = lambda done, count: None) -> None:
        """Measure until all is done or the time is over; what earlier runs left in the directory is not repeated.

        `on_unit` is called after every unit with the numbers of finished ones and of all.
        """
        self.writer.check(prompts)
        self.prompts = {prompt.name: prompt for prompt in prompts}
        units, known = self._units(prompts), self._read()
        self.lines = [row for unit in units for row in known.get(_key(unit), [])]
        self.refused |= {(row.method, row.mode, row.batch_size): row.error for row in self.lines if row.error}
        missing = [unit for unit in units if _key(unit) not in known]
        done, started, longest = len(units) - len(missing), time.monotonic(), 0.0
        on_unit(done, len(units))
        settings = len(self.protocol.modes) * len(self.protocol.batch_sizes)
        for unit in missing:
            spent = time.monotonic() - started
            if done >= settings and self.protocol.seconds is not None and spent + longest > self.protocol.seconds:
                break
            rows = self._measure(*unit, done)
            self.lines += rows
            if self.file is not None:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(list(map(asdict, rows))) + "\n")
            longest, done = max(longest, time.monotonic() - started - spent), done + 1
            on_unit(done, len(units))

    def _units(self, prompts: Sequence[Prompt]) -> list[_Unit]:
        """Return the units in an order in which all settings advance alike."""
        units = []
        for batch_size in self.protocol.batch_sizes:
            groups = groups_of(prompts, batch_size, self.protocol.per_category)
            for index, group in enumerate(groups):
                units += [(index / len(groups), (group, mode, batch_size)) for mode in self.protocol.modes]
        return [unit for _, unit in sorted(units, key=lambda pair: pair[0])]

    def _read(self) -> dict[_Key, list[Row]]:
        """Return the rows of whole units, and leave only these in the file."""
        if self.file is None or not self.file.is_file():
            return {}
        *whole, _ = self.file.read_text(encoding="utf-8").split("\n")  # the last line may have been cut off
        replace_file(self.file, "".join(f"{line}\n" for line in whole))
        units = [[Row(**row) for row in json.loads(line)] for line in whole]
        return {(tuple(rows[0].prompts), rows[0].mode, rows[0].batch_size): rows for rows in units}

    def _measure(self, group: Sequence[Prompt], mode: DecodingMode, batch_size: int, number: int) -> list[Row]:
        device = self.methods[0].model.device
        if (mode.name, batch_size) not in self.warm:
            self.warm.add((mode.name, batch_size))
            batch = self.writer.batch(group, [[] for _ in group], device)
            for method in self.methods:
                self._tried(method, batch, mode, batch_size, min(_WARM_UP, self.protocol.new_tokens))
        for restore in self.restore_points:
            restore()
        forced = {"min_new_tokens": self.protocol.new_tokens} if self.protocol.forces_length else {}
        mode = replace(mode, options=mode.options | forced)
        names, categories = [prompt.name for prompt in group], {prompt.category for prompt in group}
        answers: dict[str, list[str]] = {name: [] for name in names}
        rows: list[Row] = []
        for turn in range(max(len(prompt.turns) for prompt in group)):
            here = [prompt for prompt in group if len(prompt.turns) > turn]
            batch = self.writer.batch(here, [answers[prompt.name] for prompt in here], device)
            # another one for each turn, for plain decoding would else answer a turn as it answered the one before
            seed = zlib.crc32(f"{self.protocol.seed} {turn} {[prompt.name for prompt in here]}".encode())
            found = self._turn(batch, mode, batch_size, number + turn, seed)
            for row in found:
                row.prompts, row.turn, row.mode, row.batch_size = names, turn, mode.name, batch_size
                row.category = "mixed" if len(categories) > 1 else group[0].category
            rows += found
            if found[0].error is not None:
                break
            for prompt, ids in zip(here, found[0].ids):
                answers[prompt.name].append(self.writer.answer(ids))
        return rows

    def _turn(self, batch: _Batch, mode: DecodingMode, batch_size: int, number: int, seed: int) -> list[Row]:
        """Return what the methods do, in their order, with differences from plain decoding, and expected calls."""
        shift, found = number % len(self.methods), dict[str, Row]()
        for method in [*self.methods[shift:], *self.methods[:shift]]:
            found[method.name] = self._tried(method, batch, mode, batch_size, self.protocol.new_tokens, seed)
        rows = [found[method.name] for method in self.methods]
        plain, prompts = rows[0], [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
        for method, row in zip(self.methods, rows):
            row.method = method.name
            if row is plain or plain.error is not None or row.error is not None:
                continue
            outputs = () if mode.is_sampled else zip(prompts, plain.ids, row.ids)
            row.differences = [self._difference(*output, len(prompts)) for output in outputs]
            expectation = method.expectation(mode) if self.protocol.expects else None
            if expectation is not None:
                measures = DraftMeasures(mode.temperature, expectation[1])
                for prompt, ids in zip(prompts, plain.ids):
                    measures.add(method.drafter, text_of(prompt[None], prompt.new_tensor([ids])))
                row.expected = {rule: calls.as_lists() for rule, calls in measures.calls.items()}.get(expectation[0])
        return rows

    def _tried(
        self, method: Method, batch: _Batch, mode: DecodingMode, batch_size: int, new_tokens: int, seed: int = 0
    ) -> Row:
        """Return a row, or why there is none; the method is then left out of this setting."""
        first = self.methods[0].name
        if reason := self.refused.get((first, mode.name, batch_size)):  # then there is nothing to compare with
            return Row(error=f"{first}: {reason}")
        if reason := self.refused.get((method.name, mode.name, batch_size)):
            return Row(error=reason)
        try:
            return decode(method, batch, mode, new_tokens, seed)
        except Exception as error:  # whatever it is, of our code or of transformers', the other methods go on
            words = "not enough memory", "can't allocate memory"
            is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or any(map(str(error).count, words))
            reason = f"no memory for a batch of {batch_size}" if is_memory else one_line(error)
            self.refused[method.name, mode.name, batch_size] = reason
            return Row(error=reason)

    @cached_property
    def _exact(self) -> Method:
        """Plain decoding in float32; a copy of the model in other dtypes."""
        plain = self.methods[0]
        return plain if plain.model.dtype == torch.float32 else replace(plain, model=copy.deepcopy(plain.model).float())

    def _difference(
        self, prompt: torch.Tensor, expected: Sequence[int], got: Sequence[int], batch_size: int
    ) -> Fields | None:
        """Return where two outputs differ after a prompt [L]: `index`, the `gap` of the two tokens' logits in float32
        (None where one output has ended), and the `error` between block and single logits; None if they are equal."""
        if list(expected) == list(got):
            return None
        shorter = min(len(expected), len(got))
        index, gap = next((i for i in range(shorter) if expected[i] != got[i]), shorter), None
        if index < shorter:
            ids = torch.cat([prompt, prompt.new_tensor(expected[:index])])[None]
            options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "output_scores": True}
            scores = self._exact.generate(input_ids=ids, **options, **GREEDY.options).scores[0][0]
            gap = abs(float(scores[expected[index]] - scores[got[index]]))
        errors = self.errors.setdefault(batch_size, [])
        if len(errors) < _OUTPUTS:
            errors.append(block_error(self.methods[0].model, prompt, prompt.new_tensor(expected), batch_size))
        return {"index": index, "gap": gap, "error": max(errors)}


def _key(unit: _Unit) -> _Key:
    group, mode, batch_size = unit
    return tuple(prompt.name for prompt in group), mode.name, batch_size


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
