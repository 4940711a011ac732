"""Why a drafter accepts little: all checks of one drafter, on texts that its backbone writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...generation.attach import MTPGenerationMixin
from ...generation.tensors.wrapped_models import untyped
from ...modeling import EagleHead
from ...modeling.common.stored_drafters import drafter_class, read_drafter
from ...modeling.heads.losses import IGNORE
from ..evaluation.decoding import GREEDY, Run, acceptance_by_position, decode
from ..evaluation.drafts import Batch, has_probs, usual_drafts
from ..evaluation.methods import drafting_method, named_method
from ..evaluation.prompts import Prompt, PromptEncoder, groups_of
from ..utils import one_line
from .files import Source, contradictions, of_backbone, of_layers, of_tokenizers, stored_tokenizer, too_large, untrained
from .findings import FAULT, NOTE, OK, SKIPPED, Accepted, Diagnosis, Finding
from .texts import Drafted, along, answered, is_better, is_easier, reach, remembered
from .trials import trials_of

COVERED = 0.85
"""Least share of a text's tokens that a draft vocabulary holds; every other token ends a draft."""
LITTLE = 0.08
"""Share of first drafts below which nothing is gained, and something must be wrong."""
_VOCABULARY = "vocabulary"
_ERRORS = 2.0
"""Standard errors that a share of tokens may be off."""
_LOOPING = 0.5
"""Texts that repeat themselves more are left out where forms of prompts are compared."""
_CLOSE = 0.03
"""Shares of accepted drafts that differ by less are one: near-ties round differently in blocks."""
_ENDS = 3
"""And so many verifications, for those at the end of a text are cut short."""
_READ_OFF = 0.9
"""Share of first drafts that are right where the answer is read off."""
_BATCH = 8
"""Prompts that are answered at once."""


def diagnose_source(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: str,
    prompts: Sequence[Prompt],
    chats: bool = True,
    new_tokens: int = 64,
) -> Diagnosis:
    """Return what is wrong with a drafter that is stored; one that cannot be loaded is diagnosed by its files.

    Args:
        model: The backbone.
        tokenizer: Its tokenizer.
        spec: The drafter, as `tokenahead bench` names it: `KIND[:SOURCE]`.
        prompts: What the backbone answers.
        chats: Whether prompts get the tokenizer's chat template, if it has one.
        new_tokens: Of every answer, at most.

    Raises:
        ValueError: No kind of drafter.
        FileNotFoundError: No such directory.
        OSError: What the Hub cannot give.
    """
    source = spec.partition(":")[2].partition("?")[0] or None
    try:
        method = named_method(spec, model)
    except ValueError as error:
        if source is None or drafter_class(source) is None:
            raise
        return Diagnosis([*_by_files(source), Finding("loading", FAULT, one_line(error))])
    options = {key: value for key, value in method.options.items() if key not in ("assistant_model", "use_mtp")}
    rest = diagnose(model, tokenizer, method.drafter, prompts, chats, new_tokens, source, **options)
    return Diagnosis([*_by_files(source), *rest.findings], rest.accepted)


def _by_files(source: str | None) -> list[Finding]:
    return [*contradictions(source)] if source is not None and drafter_class(source) is EagleHead else []


def diagnose(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Any,
    prompts: Sequence[Prompt],
    chats: bool = True,
    new_tokens: int = 64,
    source: Source | None = None,
    **options: Any,
) -> Diagnosis:
    """Return what is wrong with an attached drafter; see `diagnose_source`.

    Args:
        model: The backbone.
        tokenizer: Its tokenizer.
        drafter: Attached to `model`, or `model` itself where it drafts.
        prompts: What the backbone answers, greedily.
        chats: Whether prompts get the tokenizer's chat template, if it has one.
        new_tokens: Of every answer, at most.
        source: The directory or repository of the drafter, where it has one.
        **options: Of `generate`.
    """
    own = stored_tokenizer(source)
    findings = [of_backbone(drafter, model), *of_tokenizers(own, tokenizer, model)]
    examination = _Examination(model, tokenizer, drafter, prompts, new_tokens, options)
    texts, runs = examination.answers(chats)
    findings += [layers] if (layers := of_layers(getattr(drafter, "config", None))) is not None else []
    findings += [untrained(drafter, model), _of_vocabulary(drafter, texts)]
    accepted = _accepted(runs)
    if not has_probs(drafter):
        findings.append(Finding("conventions", SKIPPED, f"a {type(drafter).__name__} has no distributions to compare"))
        return Diagnosis(findings, accepted)
    length = len(accepted.decoded) or usual_drafts(drafter)
    with remembered(model):
        base = along(drafter, texts, length)
        accepted = replace(accepted, expected=base.by_position, fresh=reach(drafter, texts, length))
        findings += [_of_decoding(accepted, options), _of_dtype(drafter, texts, base, source)]
        findings += _of_trials(drafter, texts, base)
    findings += examination.of_template(chats, base)
    return Diagnosis([*findings, _of_acceptance(base, findings)], accepted)


class _Examination:
    """A drafter, and the prompts that its backbone answers."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Any,
        prompts: Sequence[Prompt],
        new_tokens: int,
        options: dict[str, Any],
    ) -> None:
        self.model, self.tokenizer, self.prompts, self.new_tokens = model, tokenizer, prompts, new_tokens
        drafts = None if drafter is model else drafter
        self.drafter, self.method = drafter, drafting_method("drafter", model, drafts, **options)

    def answers(self, chats: bool) -> tuple[list[Batch], list[Run]]:
        """Return the greedy answers to all prompts in batches, each with what it took."""
        writer, texts, runs = PromptEncoder(self.tokenizer, chats), list[Batch](), list[Run]()
        for group in groups_of(self.prompts, _BATCH):
            batch = writer.batch(group, [[]] * len(group), self.model.device)
            runs.append(decode(self.method, batch, GREEDY, self.new_tokens))
            texts.append(answered(batch, runs[-1].ids))
        return texts, runs

    def of_template(self, chats: bool, base: Drafted) -> Iterator[Finding]:
        """Yield whether the drafter fits the prompts better in their other form, with or without the template."""
        if self.tokenizer.chat_template is None or isinstance(self.drafter, MTPGenerationMixin) and not chats:
            return
        texts, runs = self.answers(not chats)
        if sum(run.repeated_share for run in runs) > _LOOPING * len(runs):
            return
        found = along(self.drafter, texts, len(base.by_position))
        words = f"{found.tokens_per_call:.2f} tokens per call {'without' if chats else 'with'} it, "
        words += f"{base.tokens_per_call:.2f} {'with' if chats else 'without'} it"
        words += "" if (is_at_fault := is_easier(found, base)) else ", of which texts differ as much"
        yield Finding("form of prompts", FAULT if is_at_fault else OK, f"chat template: {words}")


def _accepted(runs: Sequence[Run]) -> Accepted:
    """Return what calls accepted, by depth and in the mean."""
    counts = [count for run in runs for row in run.accepted for count in row]
    longest = max((count for run in runs for row in run.drafted for count in row), default=0)
    if not counts:
        return Accepted()
    mean = 1 + sum(counts) / len(counts)
    return Accepted(acceptance_by_position(counts, longest), tokens_per_call=mean, verifications=len(counts))


def _of_vocabulary(drafter: Any, texts: Sequence[Batch]) -> Finding:
    """Return whether a draft vocabulary holds the tokens of the texts."""
    part = getattr(drafter, "draft_vocabulary", None)
    if part is None:
        return Finding(_VOCABULARY, SKIPPED, "every token can be drafted")
    new = torch.cat([batch["input_ids"][batch["labels"] != IGNORE] for batch in texts])  # [N]
    share = float(torch.isin(new, part.ids.to(new.device)).double().mean())
    error = (share * (1 - share) / len(new)) ** 0.5
    words = f"{share:.1%} of the texts' tokens are among the {len(part)} that can be drafted"
    return Finding(_VOCABULARY, FAULT if share + _ERRORS * error < COVERED else OK, words)


def _of_acceptance(base: Drafted, others: Sequence[Finding]) -> Finding:
    """Return whether first drafts are hardly ever right where no other check says why; a vocabulary that lacks tokens
    is no reason for that."""
    share = base.by_position[0] if base.by_position else 0.0
    words = f"{share:.0%} of the first drafts are right"
    if share >= LITTLE:
        return Finding("acceptance", OK, words)
    if any(each.state == FAULT and each.check != _VOCABULARY for each in others):
        return Finding("acceptance", NOTE, words)
    return Finding("acceptance", FAULT, f"{words}: another backbone, or weights that are damaged or hardly trained")


def _of_decoding(accepted: Accepted, options: dict[str, Any]) -> Finding:
    """Return whether calls accept what the drafter's distributions along the same texts say."""
    pairs = [*zip(accepted.decoded, accepted.expected)]
    worst = max((expected - decoded for decoded, expected in pairs), default=0.0)
    if options:
        return Finding("decoding", SKIPPED, "with further options of generate")
    if worst <= _CLOSE + _ENDS / max(accepted.verifications, 1):
        return Finding("decoding", OK, "calls accept what they can")
    return Finding("decoding", FAULT, f"calls accept up to {worst:.0%} less than the drafts along the same texts do")


def _of_dtype(drafter: Any, texts: Sequence[Batch], base: Drafted, source: Source | None) -> Finding:
    """Return whether the drafter would accept more in float32."""
    dtype, name = drafter.dtype, str(drafter.dtype).removeprefix("torch.")
    if dtype == torch.float32 or not isinstance(drafter, torch.nn.Module) or isinstance(drafter, MTPGenerationMixin):
        return Finding("dtype", OK, name)
    held = {key: value.clone() for key, value in drafter.state_dict().items()}
    options, backbone = getattr(drafter, "read_with", {}), untyped(drafter).backbone
    wide = held if source is None else read_drafter(source, torch.float32, backbone, **options).state_dict()
    odd = too_large([*wide.items()], dtype)
    try:
        untyped(drafter).float().load_state_dict(wide)
        found = along(drafter, texts, len(base.by_position))
    finally:
        untyped(drafter).to(dtype).load_state_dict(held)
    words = f"{name}: {base.tokens_per_call:.2f} tokens per call, in float32 {found.tokens_per_call:.2f}"
    words += f"; {name} cannot hold {', '.join(odd[:3])}" if odd else ""
    return Finding("dtype", FAULT if odd or is_better(found, base) else OK, words)


def _of_trials(drafter: Any, texts: Sequence[Batch], base: Drafted) -> Iterator[Finding]:
    """Yield a finding for each kind of convention: that it fits, or, of all trials, the one that fits better."""
    length = len(base.by_position)
    tried = [("token shift", f"drafts of {by:+d} places", along(drafter, texts, length, by)) for by in (-1, 1)]
    better = [each for each in tried if is_better(each[2], base)]
    for trial in trials_of(drafter):
        with trial.holds():
            found = along(drafter, texts, length)
        shows = " (which show any head the answer)" if trial.shows_answer else ""
        tried.append((trial.check, trial.words + shows, found))
        if is_better(found, base) and not (trial.shows_answer and found.by_position[0] < _READ_OFF):
            better.append(tried[-1])
    best = max(better, key=lambda each: each[2].tokens_per_call, default=None)
    for check in dict.fromkeys(check for check, *_ in tried):
        of_check = [each for each in tried if each[0] == check]
        is_best = best in of_check
        _, words, found = best if is_best else max(of_check, key=lambda each: each[2].tokens_per_call)
        figures = f"{found.tokens_per_call:.2f} tokens per call, not {base.tokens_per_call:.2f}"
        nearest = f"nothing fits better by more than chance; nearest: {words}, {figures}"
        yield Finding(check, *(FAULT, f"{words} fits better: {figures}") if is_best else (OK, nearest))
