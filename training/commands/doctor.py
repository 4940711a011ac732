"""`tokenahead doctor`: why a drafter accepts little, as a table of checks, one of accepted drafts, and a verdict."""

from __future__ import annotations

import json
from itertools import zip_longest

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging

from ...generation.attach import MTPGenerationMixin
from ..demo import requests
from ..doctor.report import FAULT, NOTE, OK, Diagnosis, diagnose_source
from ..evaluation.prompts import PromptEncoder, groups_of, read_prompts
from ..loading import load_model
from ..requests import DoctorRequest
from ..utils import escaped

_STYLES = {OK: "green", NOTE: "yellow", FAULT: "bold red"}


def main(request: DoctorRequest) -> int:
    """Look a drafter over, and show what was seen; return 0 where nothing is at fault, else 1."""
    console = Console(highlight=False, emoji=False)
    logging.disable_progress_bar()
    prompts = requests(further=True)
    if request.prompts:
        prompts = read_prompts(request.prompts, ignore_columns=request.ignore_columns)[0]
    prompts = [prompt for group in groups_of(prompts, 1, request.per_category) for prompt in group]
    model, tokenizer = load_model(request.model, request.dtype, request.device)
    PromptEncoder(tokenizer, not request.raw).check(prompts)
    spec = request.method() or ("own" if isinstance(model, MTPGenerationMixin) else None)
    if spec is None:
        raise ValueError(f"--drafter: {request.model} does not draft for itself; name one, such as eagle:SOURCE")
    diagnosis = diagnose_source(model, tokenizer, spec, prompts, not request.raw, request.new_tokens)
    if request.json:
        console.print(json.dumps(diagnosis.as_dict()), markup=False, soft_wrap=True)
    else:
        _show(console, diagnosis)
    return 0 if diagnosis.is_well else 1


def _show(console: Console, diagnosis: Diagnosis) -> None:
    options = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    checks = Table("check", "", "what was seen", **options)
    for finding in diagnosis.findings:
        checks.add_row(finding.check, Text(finding.state, _STYLES[finding.state]), Text(escaped(finding.words)))
    depths = Table("draft", "accepted", "along the texts", "from true features", **options)
    accepted = diagnosis.accepted
    for depth, shares in enumerate(zip_longest(accepted.decoded, accepted.expected, accepted.fresh), 1):
        depths.add_row(str(depth), *("" if share is None else f"{share:.0%}" for share in shares))
    for table in (checks, depths):
        console.print(table)
    console.print(Text(escaped(diagnosis.verdict), "green" if diagnosis.is_well else "bold red"))
