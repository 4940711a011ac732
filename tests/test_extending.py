"""A drafter of a third party, written with the names of `tokenahead.extending` alone."""

import pytest
import torch

import tokenahead.extending
from tests.backbones import backbone
from tokenahead.extending import AttachableDrafter, DraftOptions, DraftSession, DraftTree, Sequences, grow
from tokenahead.testing import continuation_distribution, continuation_p_value

BATCH = torch.tensor([[5, 6, 7, 8, 5, 6], [9, 10, 11, 9, 10, 11], [3, 3, 4, 3, 3, 4]])
TREE = {"depth": 2, "top_k": 2, "total_tokens": 6}


class BigramDrafter(AttachableDrafter):
    """Drafts by a table [V, V] of logits of the token after each token."""

    drafts_trees = True

    def __init__(self, table: torch.Tensor, num_tokens: int = 4) -> None:
        self.table, self.window = table, num_tokens + 1  # a call yields the drafts, and one token more

    def check_backbone(self, backbone) -> None:
        if backbone.config.vocab_size != len(self.table):
            raise ValueError(f"vocab_size={backbone.config.vocab_size}, but the table has {len(self.table)} rows")

    def start(self, options: DraftOptions) -> DraftSession:
        return BigramSession(self.table, options)


class BigramSession(DraftSession):
    """The drafts of one call: chains, or trees where `draft_tree` asks for them."""

    supports_confidence_threshold = True

    def __init__(self, table: torch.Tensor, options: DraftOptions) -> None:
        self.table, self.options, self.num_tokens = table, options, options.num_tokens

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        if self.options.draft_tree is not None:
            return grow(BigramGrowth(self.table, tokens.last()), self.options, length)
        token, drafts, probs = tokens.last(), [], []
        for _ in range(length):
            token, distribution = self.options.choose(self.table[token])
            drafts.append(token)
            probs.append(distribution)
            if self.options.is_unsure(token, distribution):
                break
        q = torch.stack(probs, 1) if self.options.do_sample else None  # what the tokens were really drawn from
        return DraftTree.chain(torch.stack(drafts, 1), q)


class BigramGrowth:
    """What the table says of the next tokens, level by level of a tree."""

    draft_ids, vocab_size = None, 0  # a column of logits for every token

    def __init__(self, table: torch.Tensor, last: torch.Tensor) -> None:
        self.table, self.last = table, last

    def first(self) -> torch.Tensor:
        return self.table[self.last]

    def after(self, tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


def table_of(model) -> torch.Tensor:
    """Logits of the backbone after every single token: no good drafts, but better than chance."""
    with torch.no_grad():
        return model(torch.arange(model.config.vocab_size)[:, None]).logits[:, -1]


@pytest.mark.parametrize("options", [{}, {"draft_tree": TREE}, {"assistant_confidence_threshold": 0.05}], ids=str)
def test_greedy_output_is_the_backbones_own(options):
    model = backbone()
    drafter = BigramDrafter(table_of(model)).attach(model)
    common = dict(attention_mask=torch.ones_like(BATCH), max_new_tokens=24, do_sample=False)
    want = model.generate(BATCH, **common)
    out = model.generate(BATCH, assistant_model=drafter, return_dict_in_generate=True, **common, **options)
    assert torch.equal(out.sequences, want)
    assert all(any(draft) for draft in out.speculation.rows_drafts) and sum(map(sum, out.speculation.rows_accepted))


@pytest.mark.core_cases("{}")
@pytest.mark.parametrize("options", [{}, {"draft_tree": TREE}, {"verification": "token"}], ids=str)
def test_sampled_output_has_the_backbones_distribution(options):
    model, prompt = backbone(vocabulary=5, seed=2), torch.tensor([[1, 3, 2, 4, 3]])
    drafter = BigramDrafter(table_of(model)).attach(model)
    sampling = dict(temperature=0.8, top_k=4, repetition_penalty=1.2)
    torch.manual_seed(0)
    out = model.generate(
        prompt.expand(800, -1), assistant_model=drafter, do_sample=True, max_new_tokens=4, **sampling, **options
    )
    assert continuation_p_value(out[:, 5:7], continuation_distribution(model, prompt, 2, **sampling)) > 0.001


def test_a_backbone_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="vocab_size=5"):
        BigramDrafter(torch.zeros(7, 7)).attach(backbone(vocabulary=5))


@pytest.mark.core
def test_every_public_name_is_there():
    names = {name for name in vars(tokenahead.extending) if not name.startswith("_")}
    assert len(names) == 37 and {"AttachableDrafter", "DraftTree", "grow", "register_head_family"} <= names
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tokenahead.extending.nothing  # noqa: B018
