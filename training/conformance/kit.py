"""Whether a decoding function keeps the text of its model: greedy texts are equal, and sampled ones drawn alike.

All models are small and in float64, so that nothing but a fault tells two greedy texts apart. Sampled texts are
compared with the probabilities of every token of theirs (`sampled`). `DECODERS` are those that are known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationMixin,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ...generation.assistant.drafter import AssistantDrafter
from ...generation.attach import AttachableDrafter
from ...generation.backbone.wrapped_models import untyped
from ...generation.lookups.lookahead import LookaheadDrafter
from ...generation.lookups.ngram import NgramDrafter
from ...generation.lookups.recycling import RecyclingDrafter
from ...generation.lookups.suffix import SuffixDrafter
from ...modeling import BlockDrafter, EagleHead, MTPHeads
from ..evaluation.decoding import PLAIN, Method
from ..evaluation.lossless import Comparison, counts_of, in_words
from ..utils import one_line
from .sampled import ALARM, LAST, SUSPECT, VOCABULARY, CoarseTests, Damping, Follows, Law, plain_probabilities

KEPT, BROKEN, REFUSED = "kept", "BROKEN", "refused"
"""Results of a check; a refused one raised an error."""
_Options = Mapping[str, Any]
_Call = tuple[Tensor, _Options, Tensor]
"""A greedy call: prompts, options of `generate`, and the text of plain decoding."""
_NEW = 16
_PROMPTS = torch.tensor(
    [[1, 2, 1, 1, 2, 1, LAST], [0, 0, 0, 0, 1, 1, LAST], [2, 1, 1, 2, 1, 1, LAST], [0, 1, 2, 1, 1, 1, LAST]]
)
"""Of sampled texts, padded on the left; two of the tokens are in none of them, so that penalties find them new."""
PLACES = "sampled, places"
_SHARES = {"sampled": 1.0, PLACES: 4.0, "sampled, precision": 1.0, "sampled, processors": 1.0}
"""Texts of a check, as a share of those that are asked for; a quarter of other checks, whose faults are larger."""
_BATCH, _FEWER = 1000, 16  # texts of a call; texts that are drawn one by one are fewer by this factor


class Decoder(Protocol):
    """A decoding function: what it is given is what `generate` of a plain model would be given."""

    def __call__(self, model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
        """Return the prompts [B, L], padded on the left with 0, and what was written after them, [B, L + T] int64.

        `options` are those of `generate`: `attention_mask`, `max_new_tokens`, `do_sample`, `temperature`, `top_k`,
        `eos_token_id`, `stop_strings` with `tokenizer`, `repetition_penalty`, `logits_processor`, ...
        """
        ...


def small_model(seed: int = 0, vocab_size: int = 6, width: int = 16) -> PreTrainedModel:
    """Return a random Llama in float64 whose distributions are neither flat nor sharp."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=128, initializer_range=2 * width**-0.5, **sizes, **ids
    )
    return untyped(LlamaForCausalLM(config)).double().eval()


def letters(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token i is the i-th letter."""
    known = {chr(97 + index if index < 26 else 0x100 + index): index for index in range(size)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@torch.no_grad()
def disturbed(model: PreTrainedModel, by: float = 0.15) -> PreTrainedModel:
    """Return a copy whose weights are a little off, to draft for the model: some of its drafts are right."""
    twin, draws = copy.deepcopy(model), torch.Generator().manual_seed(1)
    for each in twin.parameters():
        each.add_(torch.randn(each.shape, generator=draws, dtype=each.dtype) * by)
    return twin


_assistant = cache(disturbed)


def plain(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    """Decode one token at a time, in transformers' own loop."""
    return untyped(GenerationMixin).generate(model, input_ids, **options)


def _assisted(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
    return plain(model, input_ids, assistant_model=_assistant(model), **options)


def drafted_by(made: Callable[[PreTrainedModel], AttachableDrafter], **own: Any) -> Decoder:
    """Return decoding with a drafter of this library; `own` are further options of `generate`."""

    def decode(model: PreTrainedModel, input_ids: Tensor, /, **options: Any) -> Tensor:
        drafter = made(model).attach(model)
        try:
            return untyped(model).generate(input_ids, assistant_model=drafter, **own, **options)
        finally:
            drafter.detach()

    return decode


block_drafter = partial(
    BlockDrafter.from_backbone, law="independent", sample_from_anchor=False, layers=1, block_size=4, feature_layers=[1],
    mask_token_id=1,
)  # fmt: skip
"""Makes a DFlash drafter of a model."""
_heads = partial(MTPHeads.from_backbone, unembedding="own")
_eagle = partial(EagleHead.from_backbone, aux_layers=[0, 1, 2])
DECODERS: dict[str, Decoder] = {
    "transformers: plain": plain,
    "transformers: assistant": _assisted,
    "transformers: prompt lookup": partial(plain, prompt_lookup_num_tokens=3),
    "ngram": drafted_by(lambda model: NgramDrafter(num_tokens=6)),
    "suffix": drafted_by(lambda model: SuffixDrafter(num_tokens=6)),
    "recycling": drafted_by(lambda model: RecyclingDrafter()),
    "lookahead": drafted_by(lambda model: LookaheadDrafter(5, 4, 4)),
    "assistant": drafted_by(lambda model: AssistantDrafter(_assistant(model))),
    "assistant, by token": drafted_by(lambda model: AssistantDrafter(_assistant(model)), verification="token"),
    "heads": drafted_by(_heads),
    "hmm heads": drafted_by(partial(_heads, head_type="hmm", rank=2)),
    "EAGLE": drafted_by(_eagle),
    "dflash": drafted_by(block_drafter),
    "EAGLE, as a tree": drafted_by(_eagle, draft_tree={"depth": 3, "top_k": 2, "total_tokens": 6}),
}
"""What `tokenahead verify` looks at, by name."""


@dataclass(frozen=True)
class Verified:
    """What a check found: its result, `"kept"`, `"BROKEN"` or `"refused"`, what differs, or why it was refused, and the
    p-value of sampled texts, corrected for the number of tests."""

    check: str
    result: str
    words: str = ""
    p_value: float | None = None


class _FaultError(Exception):
    """What a text shows by itself."""


class Favouring(LogitsProcessor):
    """A user's processor, which knows rows and lengths."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Favour one token in three."""
        rows = torch.arange(len(input_ids), device=scores.device)[:, None]
        liked = (input_ids[:, -1:] + rows + input_ids.shape[1]) % 3
        return scores + (torch.arange(scores.shape[1], device=scores.device) % 3 == liked) * 1.5


def verify(decode: Decoder, samples: int = 4000, seed: int = 0, longest_draft: int = 6) -> list[Verified]:
    """Return what a decoding function keeps; its `NotImplementedError` or `ValueError` refuse, other errors are faults.

    Args:
        decode: See `Decoder`.
        samples: Texts that are drawn for `"sampled"`, four times as many for `"sampled, places"`, and mostly a quarter
            for other checks; more where they are suspect, a sixteenth of them where batches are refused.
        seed: Of the samples.
        longest_draft: Of the function, in tokens; sampled texts are longer by three, so that a whole draft is kept, and
            others follow it.

    Example:
        >>> from tokenahead.testing import verify
        >>> all(found.result == "kept" for found in verify(my_decoding_function))
    """
    model = _made(getattr(decode, "small_model", small_model), 1, 8)
    return [*_compared(decode, model, _known_checks(model)), *verify_sampled(decode, samples, seed, longest_draft)]


def verify_greedy(
    decode: Decoder,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reference: Decoder = plain,
) -> list[Verified]:
    """Return what a decoding function keeps of the greedy texts of a model in whose dtype rounding decides no token.

    `tokenizer` is that of stop strings, `letters` by default, and `reference` writes the model's plain texts.
    """
    return _compared(decode, model, _greedy_checks(model, tokenizer, reference))


def verify_sampled(
    decode: Decoder, samples: int = 4000, seed: int = 0, longest_draft: int = 6, checks: Sequence[str] | None = None
) -> list[Verified]:
    """Return what a decoding function keeps of sampled texts; arguments as for `verify`, and the names of checks."""
    model = _made(getattr(decode, "small_model", small_model), 14, VOCABULARY)
    found = list[Verified]()
    for check, calls in _sampled_checks().items():
        if checks is None or check in checks:
            torch.manual_seed(seed)
            source, count = _steady(model) if check == PLACES else model, int(samples * _SHARES.get(check, 0.25))
            found.append(_checked(check, _deviating, decode, source, calls, count, longest_draft + 3))
    return found


def _compared(decode: Decoder, model: PreTrainedModel, checks: Mapping[str, list[_Call]]) -> list[Verified]:
    """Return what a decoding function keeps of known greedy texts."""
    return [_checked(check, _differing, decode, model, calls) for check, calls in checks.items()]


def _checked(check: str, look: Callable[..., tuple[str, str, float | None]], *given: Any) -> Verified:
    """Return what a look finds: result, words, p-value; or what the error of a stranger's function says."""
    try:
        return Verified(check, *look(*given))
    except (NotImplementedError, ValueError) as error:
        return Verified(check, REFUSED, f"{type(error).__name__}: {one_line(error)}")
    except _FaultError as error:
        return Verified(check, BROKEN, str(error), 0.0)
    except Exception as error:
        return Verified(check, BROKEN, f"{type(error).__name__}: {one_line(error)}")


@cache
def _made(make_model: Callable[[int, int], PreTrainedModel], seed: int, vocab_size: int) -> PreTrainedModel:
    return make_model(seed, vocab_size)


@cache
@torch.no_grad()
def _steady(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose probabilities, and those of a drafter that resembles it, hardly depend on the text."""
    # what a fault at a place of the block adds to a token's probability then has one sign in all texts, and adds up
    copied, draws = copy.deepcopy(model), torch.Generator().manual_seed(3)
    embeddings: Any = copied.get_input_embeddings().weight
    unembedding = untyped(copied).lm_head.weight
    common = torch.randn(embeddings.shape[1], generator=draws).sign().to(embeddings)
    embeddings.mul_(20 / embeddings.std()).add_(100 * common)
    unembedding.mul_(0.3)
    return copied


def _greedy_checks(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, reference: Decoder = plain
) -> dict[str, list[_Call]]:
    """Return the calls of every check, with their plain texts: of one prompt, and of a ragged batch."""
    size = model.config.get_text_config().vocab_size
    tokenizer, draws = tokenizer or letters(size), [(n, torch.Generator().manual_seed(n)) for n in (7, 3, 12, 5)]
    rows = [torch.randint(1, size, (1, length), generator=draw) for length, draw in draws]
    batch = pad_sequence([row[0] for row in rows], batch_first=True, padding_side="left")

    def call(ids: Tensor, own: _Options) -> _Call:
        options = {"max_new_tokens": _NEW, "do_sample": False, "pad_token_id": 0, **own}
        return ids, options, reference(model, ids, attention_mask=(ids > 0).long(), **options)

    def allowed(row: int, ids: Tensor) -> list[int]:
        return [1 + row, 2 + (int(ids[-1]) + row) % (size - 2)]

    checks = {
        "greedy": [call(row, {}) for row in rows], "padded prompt": [call(batch[1:2], {})],
        "ragged batch": [call(batch, {})],
    }  # fmt: skip
    first, second = (want[0, -_NEW:].tolist() for _, _, want in checks["greedy"][:2])
    stops = [first[3:5], second[-8:-4], first[9:11], second[-8:-3], first[5:8], second[-8:-2]]  # within drafts
    asked: dict[str, list[dict[str, Any]]] = {  # of the first and the second prompt by turns
        "few tokens": [{"max_new_tokens": count} for count in (1, 2, 3)],
        "eos": [{"eos_token_id": each} for each in (first[5], [second[2], second[6]], first[9], second[9])],
        "stop strings": [
            {"stop_strings": [tokenizer.decode(stop)], "tokenizer": tokenizer, "eos_token_id": size} for stop in stops
        ],  # transformers pads rows that have ended only where there is an eos: here one that never comes
        "processors": [
            {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}, {"min_new_tokens": 9, "eos_token_id": second[3]}
        ],
        "user's processor": [{"logits_processor": [Favouring()]}],
        "allowed tokens": [{"prefix_allowed_tokens_fn": allowed}],
    }  # fmt: skip
    for check, options in asked.items():
        checks[check] = [call(rows[at % 2], own) for at, own in enumerate(options)]
        checks[f"{check}, ragged batch"] = [call(batch, own) for own in options[:2]]
    return checks


_known_checks = cache(_greedy_checks)


def _differing(decode: Decoder, model: PreTrainedModel, calls: Sequence[_Call]) -> tuple[str, str, None]:
    """Return how many greedy texts are plain ones, and from where on others differ."""
    comparison, found = Comparison(Method(PLAIN, model, is_foreign=True)), []
    for ids, options, want in calls:
        got, width = _decoded(decode, model, ids, options), ids.shape[1]
        try:
            for prompt, plain, text in zip(ids, want[:, width:].tolist(), got[:, width:].tolist()):
                found.append(comparison.difference(prompt[prompt > 0], plain, text, len(ids), **options))
        except Exception as error:  # of a model whose cache nobody knows: no refusal of the function
            raise _FaultError(f"differs, by what rounding nobody knows: {one_line(error)}") from error
    texts, differing, near_ties = counts_of(found)
    first = 1 + min((each["index"] for each in found if each is not None), default=0)
    words = in_words(texts, differing, near_ties) + f"; differs from new token {first} on" * (differing > 0)
    return BROKEN if differing > near_ties else KEPT, words, None


def _sampled_checks() -> dict[str, list[tuple[Tensor, _Options]]]:
    """Return prompts and options of the calls of every check of sampled texts, among which texts are divided."""
    one, options = _PROMPTS[:1], {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    asked: dict[str, list[dict[str, Any]]] = {
        "sampled": [{}],
        "sampled, warped": [{"temperature": 0.6, "top_k": 3}],
        "sampled, top_p": [{"top_p": 0.7}],
        "sampled, other warpers": [{"min_p": 0.3}, {"typical_p": 0.7}, {"epsilon_cutoff": 0.15}, {"eta_cutoff": 0.3}],
        "sampled, processors": [{"repetition_penalty": 1.5}, {"min_new_tokens": 6, "eos_token_id": 3}],
        "sampled, user's processor": [{"logits_processor": [Favouring()]}],
        "sampled, constraint": [{"logits_processor": [Follows()]}],
        "sampled, precision": [{"logits_processor": [Damping()]}],
    }
    return {check: [(one, options | own) for own in each] for check, each in asked.items()} | {
        PLACES: [(_PROMPTS[:1, -2:], options | {"temperature": each}) for each in (2.5, 5.0)],
        "sampled, ragged batch": [(_PROMPTS, options | {"max_new_tokens": 24})],  # of many cycles
        "sampled, eos": [(_PROMPTS, options | {"eos_token_id": end}) for end in (3, [0, 3])],
    }


def _deviating(
    decode: Decoder, model: PreTrainedModel, calls: Sequence[tuple[Tensor, _Options]], samples: int, length: int
) -> tuple[str, str, float]:
    """Return how likely drawn texts are: in batches, or one by one, and fewer, where batches are refused."""
    law = Law(VOCABULARY)

    def draw(count: int) -> None:
        for prompts, own in calls:
            options = {"max_new_tokens": length, **own}
            rows = prompts.repeat(-(-count // len(calls) // len(prompts)), 1)  # [B, L]
            try:
                for part in rows.split(_BATCH):
                    _add_texts(law, decode, model, part, options)
            except (ValueError, NotImplementedError):
                for row in rows[: -(-len(rows) // _FEWER)]:
                    _add_texts(law, decode, model, row[None, int((row == 0).sum()) :], options)

    draw(samples)
    for level, further in SUSPECT:
        if ALARM <= law.p_value() < level:
            draw(further * samples)
    p_value = law.p_value()
    return KEPT if p_value >= ALARM else BROKEN, f"p = {p_value:.1g}, {law.num_texts} texts", p_value


def _add_texts(law: Law, decode: Decoder, model: PreTrainedModel, ids: Tensor, options: _Options) -> None:
    """Add the texts of a call; refuse other lengths than were asked for, and what goes on behind its end."""
    with CoarseTests() if "logits_processor" in options else nullcontext() as tests:
        found, width, length = _decoded(decode, model, ids, options), ids.shape[1], options["max_new_tokens"]
    if tests is not None and tests.found:
        raise _FaultError("drafts are accepted by numbers of 16 bits")
    ends = torch.tensor(options.get("eos_token_id", [])).flatten().long()  # [E]
    is_end = torch.isin(found[:, width:], ends)  # [B, T]
    counted = is_end.cumsum(1) - is_end.long() == 0  # up to the end, itself included
    if found.shape[1] > width + length or not (found.shape[1] == width + length or is_end.any(1).all()):
        raise _FaultError(f"texts have {found.shape[1] - width} new tokens, not {length}")
    if bool((found[:, width:][~counted] != options["pad_token_id"]).any()):
        raise _FaultError("texts go on behind their end")
    law.add(found, width, counted, plain_probabilities(model, found, width, options))


def _decoded(decode: Decoder, model: PreTrainedModel, ids: Tensor, options: _Options) -> Tensor:
    """Return the prompts and texts that a function writes."""
    found = decode(model, ids, attention_mask=(ids > 0).long(), **options)
    found = getattr(found, "sequences", found)
    if not isinstance(found, Tensor) or found.dim() != 2 or not found[:, : ids.shape[1]].equal(ids):
        raise TypeError("it must return the prompts and what follows them, ids [B, L + T]")
    return found
