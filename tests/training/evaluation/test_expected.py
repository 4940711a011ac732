"""Expected calls along a text are those of decoding, by enumeration: text by text, and on average."""

from functools import cache
from itertools import product

import pytest
import torch

from tests.backbones import backbone, train_eagle, train_heads
from tests.models import GOLDENS, trained_model
from tokenahead import DeepSeekMTP, EagleHead, MTPHeads
from tokenahead.generation.verification.rules import block_acceptance, token_acceptance
from tokenahead.training.evaluation.drafts import DraftMeasures, text_of
from tokenahead.training.evaluation.expected import ExpectedCalls, acceptance_along, ratio_of_sums

V, M, T = 4, 3, 5


class Source:
    """A Markov chain p [V, V], and a drafter whose j-th draft follows q[j] [V, V], given the token before it."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.p = torch.rand(V, V, generator=source, dtype=torch.float64).square()
        self.q = torch.rand(M, V, V, generator=source, dtype=torch.float64) + self.p
        self.p, self.q = (rows / rows.sum(-1, keepdim=True) for rows in (self.p, self.q))

    def cycles(self, rule: str) -> dict[tuple[int, ...], float]:
        """The probability of everything that one cycle may write after its first token, which stands before it."""
        drafts = torch.tensor(list(product(range(V), repeat=M)))
        found: dict[tuple[int, ...], float] = {}
        for first in range(V):
            before = torch.cat([torch.full_like(drafts[:, :1], first), drafts], 1)
            q, p = self.q[torch.arange(M), before[:, :-1]], self.p[before]
            if rule == "greedy":
                self._greedy_cycle(first, found)
                continue
            accept, residual = {"token": token_acceptance, "block": block_acceptance}[rule](drafts, q, p)
            for k in range(M + 1):
                ends = q.gather(-1, drafts[..., None])[..., 0].prod(1) * self._accepts_just(accept, k, rule)
                for draft, end, row in zip(drafts.tolist(), ends.tolist(), residual[:, k].tolist()):
                    for added, chance in enumerate(row):
                        written = (first, *draft[:k], added)
                        found[written] = found.get(written, 0.0) + end * chance
        return found

    @staticmethod
    def _accepts_just(accept: torch.Tensor, k: int, rule: str) -> torch.Tensor:
        refused = 1 - accept
        if rule == "token":
            return accept[:, :k].prod(1) * (refused[:, k] if k < M else 1)
        return (accept[:, k - 1] if k else 1) * refused[:, k:].prod(1)

    def _greedy_cycle(self, first: int, found: dict[tuple[int, ...], float]) -> None:
        written = (first,)
        for j in range(M):
            written += (int(self.p[written[-1]].argmax()),)
            if self.q[j, written[-2]].argmax() != written[-1]:
                break
        else:
            written += (int(self.p[written[-1]].argmax()),)
        found[written] = 1.0

    def along(self, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of texts [N, T + 1]: log q and log p [N, T, M, V] of the drafts after each token, and those tokens."""
        padded = torch.nn.functional.pad(texts, (0, M))
        windows = padded.unfold(1, M + 1, 1)[:, :T]
        return self.q[torch.arange(M), windows[..., :-1]].log(), self.p[windows[..., :-1]].log(), windows[..., 1:]


def ways_to_write(cycles: dict[tuple[int, ...], float]):
    """From a text to the probability that decoding writes it after its first token, and that times its cycles."""
    beginnings: dict[tuple[int, ...], float] = {}
    for written, chance in cycles.items():
        for count in range(2, len(written) + 1):
            beginnings[written[:count]] = beginnings.get(written[:count], 0.0) + chance

    @cache
    def write(text: tuple[int, ...]) -> tuple[float, float]:
        if len(text) == 1:
            return 1.0, 0.0
        mass = calls = 0.0
        for count in range(2, len(text) + 1):
            chance = (beginnings if count == len(text) else cycles).get(text[:count], 0.0)
            rest, more = write(text[count - 1 :])
            mass, calls = mass + chance * rest, calls + chance * (rest + more)
        return mass, calls

    return write


@pytest.mark.core_cases("0-token")
@pytest.mark.by_day("0-block", "0-token", "0-greedy")
@pytest.mark.parametrize("rule", ["block", "token", "greedy"])
@pytest.mark.parametrize("seed", range(3))
def test_calls_along_a_text_are_those_of_all_the_ways_to_write_it(rule, seed):
    source = Source(seed)
    write = ways_to_write(source.cycles(rule))
    texts = torch.tensor(list(product(range(V), repeat=T + 1)))
    chances = source.p[texts[:, :-1], texts[:, 1:]].prod(1)
    if rule == "greedy":
        texts = texts[(source.p.argmax(-1)[texts[:, :-1]] == texts[:, 1:]).all(1)]
        chances = torch.ones(len(texts), dtype=torch.float64)
    accepted = acceptance_along(*source.along(texts), float(rule != "greedy"), rule)
    found = ExpectedCalls.along(accepted, torch.ones(texts.shape[0], T, dtype=torch.bool))
    mass, calls = torch.tensor([write(tuple(text)) for text in texts.tolist()], dtype=torch.float64).T
    torch.testing.assert_close(mass, chances, atol=1e-12, rtol=0)  # the decoding is lossless
    torch.testing.assert_close(found.calls, calls / mass, atol=1e-12, rtol=1e-12)
    assert found.tokens.tolist() == [T] * len(texts) and found.accepted.shape[-1] == M
    assert 1 + sum(found.by_position) == pytest.approx(found.tokens_per_call)


def test_each_run_of_places_is_a_text_of_its_own():
    accepted = torch.rand(1, 9, 2, dtype=torch.float64).sort(-1, descending=True).values
    places = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0, 0]]).bool()
    both = ExpectedCalls.along(accepted, places)
    parts = [ExpectedCalls.along(accepted[:, a:b], places[:, a:b]) for a, b in ((1, 4), (5, 7))]
    assert float(both.calls) == pytest.approx(sum(float(part.calls) for part in parts))
    assert both.tokens.tolist() == [5]
    assert not len(ExpectedCalls.along(accepted, torch.zeros_like(places)).calls)


def test_the_standard_error_is_that_of_a_ratio_of_sums():
    tokens, calls = torch.tensor([10.0, 10.0, 10.0]), torch.tensor([4.0, 5.0, 6.0])
    ratio, error = ratio_of_sums(tokens, calls)
    assert ratio == pytest.approx(2.0) and error == pytest.approx((3 / 2 * 8) ** 0.5 / 15)


DRAFTERS = {
    "ff": lambda: train_heads(backbone(), steps=20),
    "btree": lambda: train_heads(backbone(), steps=20, head_type="btree", rank=2),
    "hydra": lambda: train_heads(backbone(), steps=20, head_type="hydra", unembedding=None),
    "eagle1": lambda: train_eagle(backbone(), 1, steps=20),
    "evabyte": trained_model,
    "modules": lambda: DeepSeekMTP.from_pretrained(GOLDENS.parent / "deepseek_mtp" / "dsv3_d2_trained").float().eval(),
}


@pytest.mark.by_day("btree", "eagle1")
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_decoding_takes_the_calls_that_are_expected(name):
    drafter = DRAFTERS[name]()
    is_attached = isinstance(drafter, (MTPHeads, EagleHead))
    model = drafter.backbone if is_attached else drafter
    prompts = torch.randint(70, 100, (4, 9), generator=torch.Generator().manual_seed(0)) % model.config.vocab_size
    length = 2 if name == "modules" else 3
    counts, measures = [], DraftMeasures(0.0, length)
    for prompt in prompts[:, None]:
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=30, eos_token_id=None,
            num_assistant_tokens=length, pad_token_id=0, return_dict_in_generate=True,
            **({"assistant_model": drafter} if is_attached else {}),
        )  # fmt: skip
        counts.append(len(out.speculation.rows_accepted[0]))
        measures.add(drafter, text_of(prompt, out.sequences[:, prompt.shape[1] :]))
    assert measures.calls["greedy"].calls.tolist() == pytest.approx(counts)
    assert min(counts) < 29  # some drafts were accepted
