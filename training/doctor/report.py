"""Why a drafter accepts little: what its files say, what it drafts along known texts, and what else would fit.

`diagnose_source` and `diagnose` return a `Diagnosis`: a finding per check, the accepted drafts by depth, a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from dataclasses import field as attribute
from math import gcd, log2
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...configuration.fields import field
from ...generation.attach import MTPGenerationMixin
from ...generation.backbone.wrapped_models import fingerprint, same_backbone
from ...generation.call.sequences import acceptance_by_position
from ...generation.drafter import BaseDrafter
from ...generation.tensors.tensor_files import Fields, optional_file, read_tensors, tensor_names, weight_files
from ...modeling import EagleHead
from ...modeling.common.draft_vocabulary import DraftVocabulary
from ...modeling.common.learning import DraftModel
from ...modeling.common.loading import drafter_class, read_drafter
from ...modeling.eagle.conversion import SHOWN_BY, own_name
from ...modeling.heads.losses import IGNORE
from ..evaluation.decoding import GREEDY, Method, Row, decode, drafting_method, named_method
from ..evaluation.drafts import Batch, has_probs, usual_drafts
from ..evaluation.prompts import Prompt, PromptEncoder, groups_of
from ..utils import one_line
from .trials import Drafted, Trial, along, answered, brings_back, is_easier, is_surer, reach, remembered, trials_of

OK, NOTE, FAULT = "ok", "note", "fault"
"""States of a check."""
Source = str | PathLike[str]
_COVERED = 0.85  # least share of a text's tokens that a draft vocabulary holds; every other token ends a draft
_LITTLE = 0.08  # share of first drafts below which nothing is gained, and something must be wrong
_SMALLEST, _ROWS = 16, 512  # rows and columns of a matrix that is told from noise: the least, and the most looked at
_DEVIATION, _DEVIATES = 0.02, 4.0  # usual deviation of new weights, and standard errors by which theirs may differ
_BITS = 16  # binary digits that are 0 by chance once in 65,536 vocabularies
_LOOPING = 0.5  # texts that repeat themselves more are left out where forms of prompts are compared
_CLOSE, _ENDS = 0.03, 3  # shares that differ by less are one, for near-ties; verifications that a text's end cuts short
_SURE, _LIKELY = 3.0, 2.0  # standard errors by which a convention is better; where the backbone's config says it
_LEAST, _LEAST_OF_THEIRS = 0.15, 0.05  # shares of the lost calls that a cause brings back; the same
_READ_OFF, _SURER = 0.9, 0.15  # first drafts right where the answer is read off; and surer than right, at most
_BATCH = 8  # prompts that are answered at once


@dataclass(frozen=True)
class Finding:
    """One check: its name, its state, and what it saw."""

    check: str
    state: str
    words: str

    @classmethod
    def of(cls, check: str, is_fault: bool, words: str) -> Finding:
        """Return what is at fault, or is not."""
        return cls(check, FAULT if is_fault else OK, words)


@dataclass(frozen=True)
class Accepted:
    """Shares of verifications that accept at least 1, 2, ... drafts: in calls of `generate`, as expected along the same
    texts, and of first drafts made from the backbone's own states; tokens per call, and the number of verifications."""

    decoded: list[float] = attribute(default_factory=list)
    expected: list[float] = attribute(default_factory=list)
    fresh: list[float] = attribute(default_factory=list)
    tokens_per_call: float | None = None
    verifications: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, in the order of the checks, and the accepted drafts by depth."""

    findings: Sequence[Finding]
    accepted: Accepted = attribute(default_factory=Accepted)

    @property
    def faults(self) -> list[Finding]:
        """What lets fewer drafts be accepted."""
        return [finding for finding in self.findings if finding.state == FAULT]

    @property
    def is_well(self) -> bool:
        """Whether nothing is at fault."""
        return not self.faults

    @property
    def verdict(self) -> str:
        """Everything at fault, in one sentence."""
        if self.is_well:
            per_call = self.accepted.tokens_per_call
            return "nothing is at fault" + (f": {per_call:.2f} tokens per call" if per_call else "")
        return "at fault: " + "; ".join(f"{finding.check} ({finding.words})" for finding in self.faults)

    def as_dict(self) -> Fields:
        """Return values for a JSON object."""
        return asdict(self) | {"verdict": self.verdict, "is_well": self.is_well}


def diagnose_source(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: str,
    prompts: Sequence[Prompt],
    chats: bool = True,
    new_tokens: int = 64,
) -> Diagnosis:
    """Return what is wrong with a drafter that is stored, as `tokenahead bench` names it: `KIND[:SOURCE]`.

    One that cannot be loaded is diagnosed by its files. Further arguments are those of `diagnose`.
    """
    source = spec.partition(":")[2].partition("?")[0] or None
    try:
        method = named_method(spec, model)
        getattr(method.drafter, "draft_vocabulary", None)
    except ValueError as error:
        if source is None or drafter_class(source) is None:
            raise
        for each in [*getattr(model.generate, "drafters", ())]:
            each.detach()
        return Diagnosis([*_of_files(source), Finding("loading", FAULT, one_line(error))])
    options = {key: value for key, value in method.options.items() if key not in ("assistant_model", "use_mtp")}
    return diagnose(model, tokenizer, method.drafter, prompts, chats, new_tokens, source, **options)


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
    """Return what is wrong with a drafter that is attached to a backbone, or with a model that drafts for itself.

    The backbone answers the prompts greedily, with the tokenizer's chat template if it `chats`, in so many new tokens.
    `source` is the directory or repository of the drafter, and `options` are those of `generate`.
    """
    method = drafting_method("drafter", model, None if drafter is model else drafter, **options)
    texts, runs = answers(method, PromptEncoder(tokenizer, chats), prompts, new_tokens)
    accepted = _accepted(runs)
    findings = [*_of_files(source), _of_backbone(drafter, model), *_of_tokenizers(source, tokenizer, model)]
    findings.append(_untrained(drafter, model))
    if (part := getattr(drafter, "draft_vocabulary", None)) is not None:
        findings.append(_of_vocabulary(part, texts))
    if not has_probs(drafter):
        findings.append(Finding("conventions", NOTE, f"a {type(drafter).__name__} has no distributions to compare"))
        return Diagnosis(_settled(findings), accepted)
    length = len(accepted.decoded) or usual_drafts(drafter)
    with remembered(model):
        base = along(drafter, texts, length)
        accepted = replace(accepted, expected=base.calls.by_position, fresh=reach(drafter, texts, length))
        findings += [] if options else [_of_decoding(accepted)]
        findings += [_of_dtype(drafter, texts, base, source), *_of_trials(drafter, texts, base)]
    if tokenizer.chat_template is not None and (chats or not isinstance(drafter, MTPGenerationMixin)):
        texts, runs = answers(method, PromptEncoder(tokenizer, not chats), prompts, new_tokens)
        if sum(run.repeated_share for run in runs) <= _LOOPING * len(runs):
            other, forms = along(drafter, texts, base.length), ("with", "without") if chats else ("without", "with")
            rates = (f"{each.calls.tokens_per_call:.2f} {form}" for each, form in zip((base, other), forms))
            words = f"tokens per call with and without the chat template: {', '.join(rates)} it"
            findings.append(Finding.of("form of prompts", is_easier(other, base), words))
    return Diagnosis(_settled([*findings, _of_acceptance(base, findings)]), accepted)


def answers(
    method: Method, writer: PromptEncoder, prompts: Sequence[Prompt], new_tokens: int
) -> tuple[list[Batch], list[Row]]:
    """Return the greedy answers to all prompts in batches, each with what it took."""
    texts, runs = list[Batch](), list[Row]()
    for group in groups_of(prompts, _BATCH):
        batch = writer.batch(group, [[]] * len(group), method.model.device)
        runs.append(decode(method, batch, GREEDY, new_tokens))
        texts.append(answered(batch, runs[-1].ids))
    return texts, runs


def _accepted(rows: Sequence[Row]) -> Accepted:
    """Return what calls accepted, by depth and in the mean."""
    if not (counts := [count for row in rows for each in row.accepted for count in each]):
        return Accepted()
    longest = max((count for row in rows for each in row.drafted for count in each), default=0)
    return Accepted(acceptance_by_position(counts, longest), [], [], 1 + sum(counts) / len(counts), len(counts))


def _of_files(source: Source | None) -> Iterator[Finding]:
    """Yield whether an EAGLE head's config denies or invents norms and biases of its tensors, and `d2t` is rounded."""
    kind = None if source is None else drafter_class(source)
    if source is None or kind is None or not issubclass(kind, DraftModel):
        return
    names = {*map(own_name, tensor_names(source))}
    if kind is EagleHead:
        raw = PreTrainedConfig.get_config_dict(source)[0]
        raw = raw | (raw.get("eagle_config") or {}) | (raw.get("transformer_layer_config") or {})
        for name, tensor in SHOWN_BY.items():
            if name in raw and bool(raw[name]) != (tensor in names):
                have = "have" if tensor in names else "lack"
                words = f"the config says {name}={raw[name]}, and the tensors {have} {tensor}"
                yield Finding("norms" if "norm" in name else "biases", FAULT, words)
    if "d2t" in names:
        tensors = read_tensors(weight_files(source, pickles=True)).items()
        offsets = next(each for name, each in tensors if own_name(name) == "d2t")
        if how := rounded(offsets.cpu().long()):
            yield Finding("d2t", FAULT, f"its {len(offsets)} offsets are rounded: {how}")


def rounded(offsets: Tensor) -> str | None:
    """Return how offsets [Vd] of draft ids are rounded, where chance would hardly make them so; None: they are not."""
    if len(offsets.diff().unique()) <= 1:  # ids that are spaced evenly
        return None
    distinct = offsets.unique()
    unit = max(gcd(*distinct.tolist()), 1)
    zeros = {f"multiples of {unit}": (len(distinct) - 1) * log2(unit)}
    for dtype, digits in ((torch.bfloat16, 8), (torch.float16, 11)):
        if distinct.to(dtype).long().equal(distinct):
            beyond = (max(int(each).bit_length() - digits, 0) for each in distinct)
            zeros[f"to numbers that {dtype} holds"] = sum(beyond)
    return next((words for words, count in zeros.items() if count > _BITS), None)


def _of_backbone(drafter: Any, backbone: PreTrainedModel) -> Finding:
    """Return whether a drafter learned on this backbone, by the fingerprint of its config."""
    config = getattr(drafter, "config", None)
    recorded, actual = field(config, "backbone_fingerprint"), fingerprint(backbone)
    state, words = NOTE, "it is that of unembedding and last norm alone; no layers are recorded or read"
    if recorded is None or actual is None:
        made_for = field(config, "base_model_name_or_path")
        words = f"none is recorded, or these weights cannot be read; made for {made_for}"
    elif not same_backbone(recorded, actual):
        state, words = FAULT, f"learned on {recorded!r}, and this backbone has {actual!r}"
    elif "/" in recorded and "/" in actual:
        state, words = OK, "the drafter learned on this backbone"
    return Finding("fingerprint", state, words)


def _of_tokenizers(
    source: Source | None, tokenizer: PreTrainedTokenizerBase, backbone: PreTrainedModel
) -> Iterator[Finding]:
    """Yield whether the backbone and the drafter know the tokenizer's ids, and whether both have one chat template."""
    size, own = backbone.config.get_text_config().vocab_size, None
    if len(tokenizer) > size:
        yield Finding("tokenizer", FAULT, f"it has {len(tokenizer)} tokens, and the backbone {size}")
    with suppress(OSError, ValueError):
        if source is not None and optional_file(source, "tokenizer_config.json", {}):
            own = AutoTokenizer.from_pretrained(source)
    if own is None:
        return
    theirs, ours = own.get_vocab(), tokenizer.get_vocab()
    odd = sorted(token for token in {*theirs, *ours} if ours.get(token) != theirs.get(token))
    yield Finding.of("tokenizer", bool(odd), f"{len(odd)} tokens have other ids in the drafter's, or none ({odd[:3]})")
    if own.chat_template is not None:
        is_other = own.chat_template != tokenizer.chat_template
        yield Finding.of("chat template", is_other, f"the drafter brings {'another' if is_other else 'the same'} one")


def _untrained(drafter: BaseDrafter, backbone: PreTrainedModel) -> Finding:
    """Return whether matrices of a drafter, but copies of the backbone's tables, are as they were made."""
    parts = backbone.get_input_embeddings(), backbone.get_output_embeddings()
    tables = [each for part in parts if isinstance(each := getattr(part, "weight", None), Tensor) and not each.is_meta]
    matrices = dict[str, Tensor]()
    for name, each in (pair for part in drafter.parts().values() for pair in part.named_parameters()):
        is_learned = each.requires_grad and not each.is_meta and each.dim() > 1
        if is_learned and not any(each.shape == table.shape and each.equal(table.to(each)) for table in tables):
            matrices[name] = each.detach()
    deviation = getattr(getattr(drafter, "config", None), "initializer_range", None)
    found = [name for name, each in matrices.items() if is_new(each, deviation or _DEVIATION)]
    words = f"as newly made: {len(found)} of {len(matrices)} matrices {', '.join(found[:3])}"
    return Finding.of("untrained tensors", bool(found), words)


@torch.no_grad()
def is_new(weight: Tensor, deviation: float = _DEVIATION) -> bool:
    """Return whether a weight [.., m, n] is constant, or independent noise as it is made (`initializer_range`).

    The largest singular value of noise is s (sqrt m + sqrt n); a trained matrix may keep that, and so its numbers must
    also be normal of a usual deviation, or uniform as in `torch.nn.Linear`, within four standard errors.
    """
    matrix = weight.flatten(0, -2).float()  # [m, n]
    if bool((matrix == matrix[0, 0]).all()):
        return True
    if min(matrix.shape) < _SMALLEST or not bool(matrix.isfinite().all()):
        return False
    count, found = matrix.numel(), float(matrix.square().mean().sqrt())
    bound = matrix.shape[1] ** -0.5  # of the uniform numbers of `torch.nn.Linear`
    fills = 1 - 20 / count < float(matrix.abs().max()) / bound < 1 + 2**-8  # bfloat16 rounds up
    usual = [deviation, _DEVIATION, 1.0, *[bound / 3**0.5] * fills]
    if not any(abs(found / each - 1) * (2 * count) ** 0.5 < _DEVIATES for each in usual):
        return False
    part = matrix[:_ROWS, :_ROWS]  # a part of noise is noise
    rows, columns = part.shape
    edge = float(part.std()) * (rows**0.5 + columns**0.5)
    return float(torch.linalg.matrix_norm(part, 2)) < edge * (1 + min(rows, columns) ** (-2 / 3))


def _of_vocabulary(part: DraftVocabulary, texts: Sequence[Batch]) -> Finding:
    """Return whether a draft vocabulary holds the tokens of the texts."""
    new = torch.cat([batch["input_ids"][batch["labels"] != IGNORE] for batch in texts])  # [N]
    share = float(torch.isin(new, part.ids.to(new.device)).double().mean())
    error = (share * (1 - share) / len(new)) ** 0.5
    words = f"{share:.1%} of the texts' tokens are among the {len(part)} that can be drafted"
    return Finding.of("vocabulary", share + _LIKELY * error < _COVERED, words)


def _of_decoding(accepted: Accepted) -> Finding:
    """Return whether calls accept what the drafts along the same texts say."""
    worst = max((expected - decoded for decoded, expected in zip(accepted.decoded, accepted.expected)), default=0.0)
    is_less = worst > _CLOSE + _ENDS / max(accepted.verifications, 1)
    words = f"calls accept up to {max(worst, 0.0):.0%} less than the drafts along the same texts do"
    return Finding.of("decoding", is_less, words)


def _of_dtype(drafter: Any, texts: Sequence[Batch], base: Drafted, source: Source | None) -> Finding:
    """Return whether the drafter would accept more in float32, or has numbers that its dtype does not hold."""
    dtype, name, kind = drafter.dtype, str(drafter.dtype).removeprefix("torch."), type(drafter)
    if dtype == torch.float32 or not issubclass(kind, torch.nn.Module) or issubclass(kind, MTPGenerationMixin):
        return Finding("dtype", OK, name)
    held = {key: value.clone() for key, value in drafter.state_dict().items()}
    options = getattr(drafter, "read_with", {})
    wide = held if source is None else read_drafter(source, torch.float32, drafter.backbone, **options).state_dict()
    floats, most = {key: each for key, each in wide.items() if each.is_floating_point()}, torch.finfo(dtype).max
    odd = [key for key, each in floats.items() if not bool((each.abs() <= most).all())]
    try:
        drafter.float().load_state_dict(wide)
        found = along(drafter, texts, base.length)
    finally:
        drafter.to(dtype).load_state_dict(held)
    words = f"{name}: {base.calls.tokens_per_call:.2f} tokens per call, in float32 {found.calls.tokens_per_call:.2f}"
    words += f"; {name} cannot hold {', '.join(odd[:3])}" if odd else ""
    return Finding.of("dtype", bool(odd) or _mends(Trial("dtype", name), found, base), words)


def _of_trials(drafter: Any, texts: Sequence[Batch], base: Drafted) -> Iterator[Finding]:
    """Yield a finding for each kind of convention: that it fits, or that another one fits better than all others."""
    tried = list[tuple[Trial, Drafted]]()
    for trial in trials_of(drafter):
        with trial.holds():
            tried.append((trial, along(drafter, texts, base.length, trial.shift)))
    rated = [each for each in tried if _is_rated(*each)]
    best = max((each for each in rated if _mends(*each, base)), key=_fit, default=None)
    others = [found for trial, found in rated if best is not None and trial.cause != best[0].cause]
    # the best of wrong answers, which brings back little, or which others come near, is no cause but the nearest
    is_cause = best is not None and all(is_surer(best[1], found, _LIKELY) for found in others)
    for check in dict.fromkeys(trial.check for trial, _ in tried):
        is_best = best is not None and best[0].check == check
        trial, found = best if best and is_best else max((each for each in tried if each[0].check == check), key=_fit)
        per_call = f"{found.calls.tokens_per_call:.2f} tokens per call, not {base.calls.tokens_per_call:.2f}"
        if is_cause and is_best:
            yield Finding(check, FAULT, f"what fits better than all else: {trial.words}, {per_call}; {trial.advice}")
        else:
            state = NOTE if trial.is_theirs or is_best else OK
            note = ", which the backbone's config says" * trial.is_theirs
            yield Finding(check, state, f"nothing else is the cause; nearest: {trial.words}, {per_call}{note}")
    if best is not None and not is_cause and brings_back(best[1], base) > _LEAST:
        words = f"something else fits better, and what is not clear; nearest: {best[0].words}"
        yield Finding("acceptance", FAULT, words)


def _is_rated(trial: Trial, found: Drafted) -> bool:
    """Return whether a trial may be the cause: an answer is read off, and nothing is surer than right."""
    if trial.shows_answer and found.calls.by_position[0] < _READ_OFF:
        return False
    return trial.is_theirs or float(found.surer.sum() / found.calls.tokens.sum()) < _SURER


def _mends(trial: Trial, found: Drafted, base: Drafted) -> bool:
    """Return whether a trial brings back calls that are lost, and not by chance."""
    errors, least = (_LIKELY, _LEAST_OF_THEIRS) if trial.is_theirs else (_SURE, _LEAST)
    return is_surer(found, base, errors) and brings_back(found, base) > least


def _fit(tried: tuple[Trial, Drafted]) -> float:
    return float(tried[1].drawn.sum())


def _of_acceptance(base: Drafted, others: Sequence[Finding]) -> Finding:
    """Return whether first drafts are hardly ever right, which no check says why, but one of the vocabulary."""
    share = base.calls.by_position[0] if base.calls.by_position else 0.0
    words = f"{share:.0%} of the first drafts are right"
    if share < _LITTLE and not any(each.state == FAULT and each.check != "vocabulary" for each in others):
        return Finding("acceptance", FAULT, f"{words}: another backbone, or weights that are damaged or hardly trained")
    return Finding("acceptance", NOTE if share < _LITTLE else OK, words)


def _settled(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings without what follows from others: wrong ids of drafts lack tokens, and are tried in vain."""
    if (d2t := next((each for each in findings if (each.check, each.state) == ("d2t", FAULT)), None)) is None:
        return [*findings]
    kept = [each for each in findings if each is d2t or each.check != "d2t"]
    return [replace(each, state=NOTE) if each.check == "vocabulary" else each for each in kept]
