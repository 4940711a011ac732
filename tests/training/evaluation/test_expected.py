"""Expected acceptance along a text equals, by enumeration, what verification accepts of drafts from the head."""

from itertools import product

import pytest
import torch

from tests.internals import GREEDY, TeacherForced, block_acceptance, sampled, token_acceptance
from tests.training.conftest import small_model

V, M, QUARTERS = 3, 3, 4


class Tables:
    """Distributions of M tokens given those before them, with p in quarters, so that 4^M equally likely texts are all
    of p."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        prefixes = [prefix for length in range(M) for prefix in product(range(V), repeat=length)]
        self.p = {prefix: torch.randint(V, (QUARTERS,), generator=source) for prefix in prefixes}
        self.q = {prefix: torch.rand(V, generator=source, dtype=torch.float64) for prefix in prefixes}
        self.q = {prefix: distribution / distribution.sum() for prefix, distribution in self.q.items()}

    def texts(self) -> torch.Tensor:
        """[4^M, M]."""
        rows = []
        for quarters in product(range(QUARTERS), repeat=M):
            text: tuple[int, ...] = ()
            for quarter in quarters:
                text += (int(self.p[text][quarter]),)
            rows.append(text)
        return torch.tensor(rows)

    def along(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Distributions p and q of every token of [N, M]: [N, M, V] each."""
        prefixes = [[tuple(row[:i]) for i in range(M)] for row in tokens.tolist()]
        p = [[torch.bincount(self.p[x], minlength=V).double() / QUARTERS for x in row] for row in prefixes]
        q = [[self.q[x] for x in row] for row in prefixes]
        return torch.stack([torch.stack(row) for row in p]), torch.stack([torch.stack(row) for row in q])

    def window_distribution(self, hidden: torch.Tensor) -> "Tables":
        return self

    def conditional_log_probs(self, windows: torch.Tensor) -> torch.Tensor:
        """Of windows [N, 1 + M], whose first token is known and has no distribution here."""
        return torch.nn.functional.pad(self.along(windows[:, 1:])[1].log(), (0, 0, 1, 0))


def accepted_of_drafts(tables: Tables, rule: str) -> torch.Tensor:
    """P(accepted >= k), summed over every draft from q: [M]."""
    drafts = torch.tensor(list(product(range(V), repeat=M)))
    p, q = tables.along(drafts)
    p = torch.cat([p, torch.full_like(p[:, :1], 1 / V)], 1)
    weight = q.gather(-1, drafts[..., None])[..., 0].prod(1)
    if rule == "token":
        kept = token_acceptance(drafts, q, p)[0].cumprod(1)
    else:
        accept = block_acceptance(drafts, q, p)[0]
        kept = 1 - (1 - accept).flip(1).cumprod(1).flip(1)
    return (weight[:, None] * kept).sum(0)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("seed", range(5))
def test_the_sum_over_texts_is_the_sum_over_drafts(rule, seed):
    tables = Tables(seed)
    texts = tables.texts()
    p, _ = tables.along(texts)
    windows = torch.nn.functional.pad(texts, (1, 0))[:, None]
    places = TeacherForced(torch.zeros(len(texts), 1, 1), windows, p.log()[:, None])
    found = places.acceptance(tables, sampled(1.0), rule)
    expected = accepted_of_drafts(tables, rule)
    assert found.by_position == pytest.approx(expected.tolist(), abs=1e-12)
    assert found.tokens_per_call == pytest.approx(1 + float(expected.sum())) and found.places == QUARTERS**M


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="'blocks'"):
        TeacherForced(torch.zeros(1, 1, 1), torch.zeros(1, 1, 2), torch.zeros(1, 1, 1, V)).acceptance(
            None, GREEDY, "blocks"
        )


@pytest.fixture
def model():
    return small_model().eval()


@pytest.mark.parametrize("mode", [GREEDY, sampled(0.7)], ids=["greedy", "sampled"])
def test_states_distributions_and_tokens_of_continuations_belong_together(model, mode):
    """What was kept on the way equals one pass over the prefix and what was written behind it."""
    prefixes = torch.randint(64, 320, (3, 10))
    places = TeacherForced.on_continuations(model, prefixes, model.window, mode, places=5)
    texts = torch.cat([prefixes, places.windows[:, 0], places.windows[:, 1:, -1]], 1)
    again = TeacherForced.on_text(model, torch.cat([texts, texts[:, :1]], 1), model.window, first=9, every=1)
    torch.testing.assert_close(again.hidden[:, :5], places.hidden, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(again.logits[:, :5], places.logits, atol=1e-5, rtol=1e-4)
    assert torch.equal(again.windows[:, :5], places.windows)


def test_greedy_expectation_is_what_greedy_decoding_accepts(model):
    prefix = torch.randint(64, 320, (1, 10))
    options = dict(do_sample=False, max_new_tokens=9, eos_token_id=None, return_dict_in_generate=True)
    speculation = model.generate(prefix, **options).speculation
    places = TeacherForced.on_continuations(model, prefix, model.window, GREEDY, places=1)
    assert places.acceptance(model, GREEDY).tokens_per_call == 1 + speculation.accepted[0]


def test_a_head_that_is_the_target_is_always_accepted(model):
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.draft_heads.weight.zero_()
    places = TeacherForced.on_text(model, torch.randint(64, 320, (2, 40)), model.window, first=8)
    for mode in (GREEDY, sampled(0.7), sampled(1.0)):
        assert places.acceptance(model, mode).by_position == pytest.approx([1.0] * (model.window - 1))


def test_texts_without_a_place_are_refused(model):
    with pytest.raises(ValueError, match="12.*window"):
        TeacherForced.on_text(model, torch.randint(64, 320, (2, 12)), model.window, first=10)
