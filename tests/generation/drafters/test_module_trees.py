"""Trees of sequential modules: every node has the distribution of its chain, and the text is the backbone's."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, LogitsProcessorList

from tests.families import family_model
from tests.models import left_padded
from tokenahead import DeepSeekMTP
from tokenahead.generation.call.options import NumberCheck
from tokenahead.generation.call.processing import Processing
from tokenahead.generation.call.sequences import Sequences
from tokenahead.generation.trees import growth
from tokenahead.modeling.deepseek import session as modules
from tokenahead.modeling.deepseek.session import ModuleGrowth

CHECKPOINT = Path(__file__).parents[2] / "data" / "deepseek_mtp" / "dsv3_d2_trained"
NEW_TOKENS = 24
TREE = dict(draft_tree=dict(depth=3, top_k=3, total_tokens=14))


@pytest.fixture(scope="module")
def model():
    model = DeepSeekMTP.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(count):
    """Noise of 1 to 40 tokens: the shortest are shorter than D."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 3, *torch.randint(1, 41, (count - 3,), generator=generator).tolist()]
    return [torch.randint(1, 128, (length,), generator=generator) for length in lengths]


def greedy(model, batch, **options):
    inputs = left_padded(batch)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True} | options
    return model.generate(**inputs, **options)


class _Told(ModuleGrowth):
    """Grows along a tree that is given, and keeps what followed each node."""

    def __init__(self, drafter, tokens) -> None:
        super().__init__(drafter, tokens)
        self.found = []

    def first(self):
        self.found.append(super().first()[:, None])
        return self.found[0][:, 0]

    def after(self, tokens, parents):
        self.found.append(super().after(tokens, parents))
        return self.found[-1]


def _options(draft_tree, num_tokens):
    return SimpleNamespace(
        num_tokens=num_tokens, max_length=30, do_sample=False, threshold=0.0, extra={}, draft_tree=draft_tree,
        processing=Processing(LogitsProcessorList([])), is_unsure=lambda token, distribution: False,
        masks=lambda tokens: None, numbers=NumberCheck(),
    )  # fmt: skip


@pytest.mark.by_day(each=1)
@torch.no_grad()
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "mistral"])
def test_every_node_is_followed_by_what_a_chain_through_it_says(family, count):
    """Levels 1 to 4 of a tree against the chain drafter told to go along each path; D = 1, 2 and 3."""
    model = family_model(family, num_nextn_predict_layers=count).eval()
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(count))
    real = torch.ones(2, 10, dtype=torch.bool)
    real[1, :3] = False
    outputs = model(
        ids[:, :-1], attention_mask=real.long(), position_ids=(real.cumsum(1) - 1).clamp(min=0), use_cache=False,
        output_hidden_states=-1, output_mtp_logits=False,
    )  # fmt: skip
    view = SimpleNamespace(mask=real, counts=real.sum(1), is_padded=True, is_fixed=False, fixed_layout=lambda *_: None)
    rows = Sequences(ids)

    def drafter(draft_tree):
        made = modules.ModuleSession(model, _options(draft_tree, 5))
        made.begin(outputs, view)
        return made

    tree = _Told(drafter({}), rows)
    tree.first()
    generator, levels = torch.Generator().manual_seed(8), []
    for level in range(4):
        tokens = torch.randint(3, 90, (2, 3), generator=generator)
        parents = torch.randint(3, (2, 3), generator=generator) if level else torch.full((2, 3), -1)
        levels.append((tokens, parents))
        tree.after(tokens, parents)
    for level, node in itertools.product(range(4), range(3)):
        paths = []
        for row in range(2):
            place, path = node, []
            for tokens, parents in reversed(levels[: level + 1]):
                path.insert(0, int(tokens[row, place]))
                place = int(parents[row, place])
            paths.append(path)
        told, seen = iter(torch.tensor(paths).t()), []

        def choose(logits, *columns, told=told, seen=seen):
            seen.append(logits)
            return next(told, seen[-1].argmax(-1)), None

        chain = drafter(None)
        chain.options.choose = choose
        chain.propose(rows, level + 2)
        torch.testing.assert_close(tree.found[0][:, 0], seen[0], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(tree.found[level + 1][:, node], seen[level + 1], atol=1e-5, rtol=1e-4)


def test_between_cycles_it_knows_verified_tokens_only(model, monkeypatch):
    """Distributions of a cycle's first token in a ragged batch are those of a fresh drafter on the row alone."""
    batch, seen = prompts(8)[4:], []
    grow = growth.grow

    def watched(grown, options, length, masks):
        first = grown.first

        def noted():
            logits = first()
            for row, end in enumerate(grown.tokens.lengths):
                if end < grown.tokens.prompt_length + 24:
                    start = grown.tokens.prompt_length - len(batch[row])
                    text = grown.tokens.ids[row : row + 1, start:end]
                    chain = model(text, use_cache=False, output_mtp_logits=True).mtp_logits[0]
                    seen.append(float((chain[0, end - start - 2] - logits[row]).abs().max()))
            return logits

        grown.first = noted
        return grow(grown, options, length, masks)

    monkeypatch.setattr(modules, "grow", watched)
    greedy(model, batch, **TREE)
    assert len(seen) > 8 and max(seen) < 1e-3


def test_a_smaller_draft_vocabulary_and_fixed_shapes(model):
    batch = prompts(8)[4:]
    want = greedy(model, batch, use_mtp=False).sequences
    vocabulary = list(range(2, 128, 2))
    choices = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    for tree in (TREE["draft_tree"], choices, "auto"):
        out = greedy(model, batch, draft_tree=tree, draft_vocabulary=vocabulary)
        assert torch.equal(out.sequences, want)
        assert all(token in vocabulary for row in out.speculation.rows_drafts for draft in row for token in draft[:4])
    inputs = left_padded(batch)
    model.generate(
        **inputs, do_sample=True, draft_tree=TREE["draft_tree"], draft_vocabulary=vocabulary, max_new_tokens=9
    )


def test_fresh_weights_draft_with_their_own_modules():
    config = AutoConfig.from_pretrained(CHECKPOINT)  # knows the path of another model's modules
    model, prompt, options = DeepSeekMTP(config).eval(), prompts(10)[9], {"eos_token_id": None, "pad_token_id": 0}
    drafts = greedy(model, [prompt], **options).speculation.drafts
    with torch.no_grad():
        for parameter in model.mtp.parameters():
            parameter.mul_(-1)
    assert greedy(model, [prompt], **options).speculation.drafts != drafts
