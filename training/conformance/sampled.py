"""Whether sampled texts follow the law of their model, token by token.

Every drawn token is compared with the probabilities that plain decoding gives it after the text before it. Over many
texts a token of a group of places (one place, the places behind one token, ...) then comes as often as the sum of its
probabilities, and the sum of their variances says how far it may be off, whatever was drawn before: the differences are
a martingale. So nothing is enumerated, and texts may be longer than any draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from ...generation.call.automata import AutomatonProcessor

VOCABULARY, LAST = 4, 2
"""Tokens of the models of sampled texts, and the last one of every prompt."""
ALARM = 1e-6
"""p-values below it are faults: a right loop meets one in a million."""
SUSPECT = ((0.05, 3), (0.001, 12))
"""Below such a p-value so many times as many texts are drawn further; the verdict is that of all of them."""
_LEAST = 20.0  # variance of a count that is compared with a normal distribution
_RARE = 1e-3  # tokens of smaller probability are counted together, by the tail of a Poisson distribution


class Follows(AutomatonProcessor):
    """A constraint whose state is the last token: one token is excluded behind each, and another one guessed."""

    start = LAST

    def step(self, state: int, token: int) -> int:
        """Return the token."""
        return token

    def allowed(self, state: int, /) -> Tensor:
        """Return all tokens but one."""
        return torch.arange(VOCABULARY) != (state + 1) % VOCABULARY

    def likely(self, state: int) -> int | None:
        """Return a guess behind even tokens."""
        return None if state % 2 else (state + 3) % VOCABULARY

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Exclude a token; the ids alone tell which, so that loops may call it in any order."""
        allowed = torch.stack([self.allowed(state) for state in range(VOCABULARY)])  # [V, V]
        return scores.masked_fill(~allowed.to(scores.device)[input_ids[:, -1]], -torch.inf)


class Damping(LogitsProcessor):
    """A user's processor that makes tokens rare whose probability is below a bound, which varies.

    What is drafted often is then often rare for the model: acceptance tests of few bits let too much of it pass.
    """

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Divide small probabilities by a million."""
        bound = 0.1 + 0.06 * ((input_ids[:, -1:] + input_ids.shape[1]) % 5)
        return scores - 14.0 * (scores.softmax(-1) < bound)


class CoarseTests(TorchDispatchMode):
    """Sees whether random numbers are compared in 16 bits (`found`): counts show no error of one in 2,000."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self._random = False, WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and follow what was drawn through it."""
        result = func(*args, **(kwargs or {}))
        read = [each for each in tree_leaves(args) if isinstance(each, Tensor) and each.is_floating_point()]
        is_random = torch.Tag.nondeterministic_seeded in func.tags or any(each in self._random for each in read)
        if is_random and isinstance(result, Tensor):
            if result.is_floating_point():
                self._random[result] = True
            self.found |= result.dtype == torch.bool and any(each.itemsize < 4 for each in read)
        return result


def _processors(model: Any, prompts: Tensor, options: Mapping[str, Any]) -> LogitsProcessorList:
    """Return what transformers' own loop does to logits after prompts [B, L]."""
    fields = {name: value for name, value in options.items() if name != "logits_processor"}
    config, _ = model._prepare_generation_config(None, **fields)
    model._prepare_special_tokens(config, device=prompts.device)
    own = LogitsProcessorList(options.get("logits_processor", []))
    return model._get_logits_processor(config, prompts.shape[1], prompts, None, own, device=prompts.device)


@torch.no_grad()
def plain_probabilities(model: PreTrainedModel, ids: Tensor, width: int, options: Mapping[str, Any]) -> Tensor:
    """Return the probabilities [B, T, V] of plain decoding for the new tokens of a call's ids [B, width + T]."""
    mask = torch.nn.functional.pad(ids[:, :width] > 0, (0, ids.shape[1] - width), value=True).long()
    places = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, width - 1 : -1]
    processors = _processors(model, ids[:, :width], options)
    scores = logits.float().unbind(1)  # as transformers' own loop casts them
    seen = [processors(ids[:, : width + at], each.clone()) for at, each in enumerate(scores)]
    return torch.stack(seen, 1).double().softmax(-1)


class Law:
    """Drawn tokens of a vocabulary of V, their probabilities, and how far the first are from the second."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self.num_texts = vocabulary, 0
        self._calls = list[tuple[Tensor, ...]]()

    def add(self, ids: Tensor, width: int, counted: Tensor, probs: Tensor) -> None:
        """Add the texts of a call: ids [B, width + T], of whose new tokens `counted` [B, T] bool were drawn."""
        previous = ids[:, width - 1 : -1] + self.vocabulary * ids[:, width - 2 : -2]  # [B, T], the last two tokens
        places = torch.arange(counted.shape[1]).expand_as(counted)
        self._calls.append(tuple(each[counted] for each in (ids[:, width:], probs, previous, places)))
        self.num_texts += len(ids)

    def p_value(self) -> float:
        """Return how likely tokens are so far off, corrected for the number of tests."""
        drawn, probs, before, places = map(torch.cat, zip(*self._calls))  # [M], [M, V], [M], [M]
        of_drawn = probs.gather(1, drawn[:, None])[:, 0]
        if bool((of_drawn == 0).any()):
            return 0.0
        seen, expected = (of_drawn < _RARE).sum(), probs.where(probs < _RARE, 0).sum()
        rare = float(torch.special.gammainc(seen.double(), expected)) if seen else 1.0
        tests = [p_value for each in self._tests(drawn, probs, before, places) for p_value in each]
        return min(1.0, 2 * rare, 2 * len(tests) * min(tests))

    def _tests(self, drawn: Tensor, probs: Tensor, before: Tensor, places: Tensor) -> Iterator[list[float]]:
        size = self.vocabulary
        last, width, all_tokens = before % size, int(places.max()) + 1, torch.zeros_like(places)
        off = torch.nn.functional.one_hot(drawn, size) - probs  # [M, V]
        spread = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]  # [M, V, V]
        # a fault of one place of the first block stays at one place of the texts: each is a test of its own
        yield _chi_squares(off, spread, places, width, width)
        yield _chi_squares(off, spread, places * size + last, width * size, width)
        yield _chi_squares(off, spread, all_tokens, 1)
        yield _chi_squares(off, spread, last, size)
        yield _chi_squares(off, spread, before, size * size)
        # too flat or too sharp, at a place and anywhere
        logs = probs.clamp(min=1e-300).log()  # [M, V]
        mean = (probs * logs).sum(1)
        off = (logs.gather(1, drawn[:, None])[:, 0] - mean)[:, None]
        spread = ((probs * logs.square()).sum(1) - mean.square())[:, None, None]
        yield _chi_squares(off, spread, places, width, width)
        yield _chi_squares(off, spread, all_tokens, 1)


def _chi_squares(off: Tensor, spread: Tensor, groups: Tensor, count: int, tests: int = 1) -> list[float]:
    """Return p-values of sums by group of differences [M, F], whose covariances [M, F, F] are known.

    Each of the tests is of count / tests groups that follow each other.
    """
    sums = off.new_zeros(count, off.shape[1]).index_add_(0, groups, off)  # [G, F]
    variances, axes = torch.linalg.eigh(spread.new_zeros(count, *spread.shape[1:]).index_add_(0, groups, spread))
    along = (axes.transpose(1, 2) @ sums[..., None])[..., 0]  # [G, F], along the axes of each covariance
    kept = variances >= _LEAST
    squares = (along.square() / variances).where(kept, 0)
    return list(map(_tail, squares.view(tests, -1).sum(1).tolist(), kept.view(tests, -1).sum(1).tolist()))


def _tail(statistic: Tensor | float, freedom: int) -> float:
    """Return the probability that a chi-square of so many degrees of freedom is larger."""
    half = torch.tensor([freedom, float(statistic)], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(half[0], half[1])) if freedom else 1.0


Distribution = dict[tuple[int, ...], float]
"""Texts and their probabilities."""


def chi_square(cells: Tensor, distribution: Tensor) -> float:
    """Return the p-value of drawn cell numbers [N] under `distribution` [C]; rare cells are counted as one.

    A cell that the distribution excludes and that was drawn gives 0.
    """
    seen = torch.bincount(cells, minlength=len(distribution)).double()
    if bool(seen[distribution == 0].any()):
        return 0.0
    expected = distribution.double() * len(cells)
    rare = expected < 5
    seen, expected = (torch.cat([counts[~rare], counts[rare].sum()[None]]) for counts in (seen, expected))
    if expected[-1] < 5:  # too few even together: they join the last frequent cell
        seen, expected = (torch.cat([counts[:-2], counts[-2:].sum()[None]]) for counts in (seen, expected))
    expected = expected * seen.sum() / expected.sum()
    return _tail(((seen - expected).square() / expected).sum(), len(seen) - 1)


@torch.no_grad()
def continuation_distribution(model: Any, prompt: Tensor, length: int, **options: Any) -> Distribution:
    """Return the probabilities of all continuations of a prompt [1, L] by `length` tokens; options of `generate`."""
    processors = _processors(model, prompt, {"do_sample": True, **options})
    distribution: Distribution = {(): 1.0}
    for _ in range(length):
        texts = torch.tensor(list(distribution)).long().view(len(distribution), -1)
        ids = torch.cat([prompt.expand(len(distribution), -1), texts], dim=1)
        rows = processors(ids, model(ids, use_cache=False).logits[:, -1].double()).softmax(-1).tolist()
        pairs = zip(distribution.items(), rows)
        distribution = {(*text, x): p * q for (text, p), row in pairs for x, q in enumerate(row) if q > 0}
    return distribution


def continuation_p_value(samples: Tensor, distribution: Distribution) -> float:
    """Return the chi-square p-value of drawn continuations [N, length]; see `chi_square`."""
    number = {text: cell for cell, text in enumerate(distribution)}
    texts = list(map(tuple, samples.tolist()))
    if not number.keys() >= {*texts}:  # one continues what the distribution excludes
        return 0.0
    return chi_square(torch.tensor([*map(number.get, texts)]), torch.tensor([*distribution.values()]).double())
