"""Heads whose layers have a window: rows see positions less than `sliding_window` back, in drafts as in training."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch.nn.functional import pad
from transformers import DynamicCache

from tests.eagle_models import DATA, RecordedBackbone, tiny_backbone
from tests.modeling.eagle.test_fields import DEEPSPEC, PEAGLE, SLIDING, edited, made
from tests.modeling.eagle.test_loading import OFFICIAL, rewritten
from tests.models import left_padded
from tokenahead import EagleHead, EagleHeadConfig
from tokenahead.modeling.eagle.session import EagleSession

GOLDEN = DATA / "eagle3_windows"
KINDS = ["sliding_attention", "full_attention"]
WINDOWS = dict(layer_types=KINDS, num_hidden_layers=2, sliding_window=3)
TREE = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0)]


@pytest.fixture(scope="module")
def case():
    """A stand-in for a backbone, a head that speculators wrote, and the numbers of its classes."""
    base = RecordedBackbone("eagle3_llama")
    head = EagleHead.from_pretrained(GOLDEN, dtype=torch.float32).eval().attach(base)
    return base, head, load_file(GOLDEN / "golden.safetensors")


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * (1 + wanted.abs().max().item()))


@torch.no_grad()
def test_rows_and_chains_are_those_of_speculators(case):
    base, head, golden = case
    ids, mask, features = base.golden["input_ids"], base.golden["attention_mask"], head.fuse(base.hidden_states())
    hidden, logits = head.step(features[:, :-1], ids[:, 1:], attention_mask=mask[:, :-1])  # a ragged batch
    for row, real in enumerate(mask.bool()):
        close(hidden[row, real[:-1]], golden[f"hidden.{row}"])
        close(logits[row, real[:-1]][:, head.draft_ids], golden[f"logits.{row}"])
        cache, following = DynamicCache(config=head.config if row else None), ids[row, real][None, 1:]
        pairs = features[row, real][None, :-1]
        for k, law in enumerate(golden[f"chain_logits.{row}"]):
            positions = torch.arange(pairs.shape[1])[None] + (k and len(golden[f"hidden.{row}"]) + k - 1)
            pairs, found = head.step(pairs, following, positions, past_key_values=cache, logits_to_keep=1)
            close(found[0, 0, head.draft_ids], law)
            pairs, following = pairs[:, -1:], found.argmax(-1)
            assert following == golden[f"chain_ids.{row}"][k]


def test_a_saved_head_keeps_its_windows(tmp_path):
    for layout, options in (("speculators", {}), ("vllm", {}), ("sglang", SLIDING), ("tokenahead", {})):
        head = EagleHead.from_backbone(tiny_backbone(), **(options or WINDOWS))
        head.save_pretrained(tmp_path) if layout == "tokenahead" else head.export(tmp_path, layout)
        found = EagleHead.from_pretrained(tmp_path).config
        assert (found.layer_types, found.windows) == (head.config.layer_types, head.config.windows)
    for layout in ("official", "specforge"):
        with pytest.raises(ValueError, match="layer_types"):
            EagleHead.from_backbone(tiny_backbone(), **SLIDING).export(tmp_path, layout)


def test_windows_of_flat_layouts_are_read(tmp_path):
    for changes in (SLIDING, SLIDING | {"architectures": ["LlamaForCausalLMEagle3"]}):
        config = EagleHead.from_pretrained(rewritten(tmp_path, changes)).config
        assert config.windows == {"sliding_attention": 4}
        EagleHead.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
        assert EagleHead.from_pretrained(tmp_path / "again").config.windows == config.windows
    longer = {"layer_types": KINDS[::-1] + KINDS, "sliding_window": 4}  # the head's one layer has no window
    assert EagleHead.from_pretrained(rewritten(tmp_path, longer)).config.windows == {"full_attention": None}
    assert EagleHead.from_pretrained(OFFICIAL).config.windows == {"full_attention": None}


REFUSED = [
    SLIDING | {"sliding_window": None}, SLIDING | {"sliding_window": 0}, SLIDING | {"use_sliding_window": False},
    SLIDING | {"model_type": "qwen3"}, {"layer_types": ["chunked_attention"], "sliding_window": 4},
    {"sliding_window": 4, "use_sliding_window": True},
]  # fmt: skip


def test_windows_that_are_not_clear_are_refused_by_name(tmp_path):
    for changes in REFUSED:
        with pytest.raises(ValueError, match="layer_types=.*sliding_window="):
            EagleHead.from_pretrained(rewritten(tmp_path, changes))
    for fields, options in (
        (DEEPSPEC, {"aux_layers": [2, 3, 4, 6, 7], "qk_norm": True}),
        (PEAGLE, {"mask_token_id": 5}),
    ):
        made(tmp_path, fields | {"mask_token_id": options.get("mask_token_id")}, **options)
        with pytest.raises(ValueError, match="layer_types=.*sliding_window="):  # their code has none
            EagleHead.from_pretrained(edited(tmp_path, **SLIDING, use_sliding_window=True))
    for options in (
        {"layer_types": ["sliding_attention"]},
        {"sliding_window": 4},
        {"layer_types": ["chunked_attention"]},
    ):
        with pytest.raises(StrictDataclassError, match="layer_types=.*sliding_window="):
            EagleHeadConfig(hidden_size=32, num_attention_heads=4, vocab_size=64, **options)


def test_vllms_p_eagle_says_its_windows(tmp_path):
    head = EagleHead.from_backbone(tiny_backbone(), mask_token_id=5, **WINDOWS)
    head.export(tmp_path, "vllm")
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["layer_types"] == KINDS and fields["sliding_window"] == 3 and fields["ptd_token_id"] == 5
    assert EagleHead.from_pretrained(tmp_path).config.windows == head.config.windows


def drafted_rows(head, features, tokens, path):
    """Outputs [1, m, d] of rows that draft after pairs [1, n] and along `path`, each run over all rows before it."""
    if head.config.mask_token_id is not None:
        masked, ids = head.masked(1, len(path))
        return head.rows(torch.cat([features, masked], 1), torch.cat([tokens, ids], 1))[:, tokens.shape[1] - 1 :]
    found = []
    for token in [*path, None]:
        found.append(head.rows(features, tokens)[:, -1:])
        if token is not None:
            features, tokens = torch.cat([features, found[-1]], 1), torch.cat([tokens, token.view(1, 1)], 1)
    return torch.cat(found, 1)


def trained(seed=1, **options):
    """A small backbone, and a head with windows that was briefly trained on what it writes."""
    base = tiny_backbone(seed)
    text = base.generate(torch.randint(2, 64, (16, 3)), max_new_tokens=40, do_sample=False, pad_token_id=0)
    head = EagleHead.from_backbone(base, loss_options={"steps": 3}, **WINDOWS | options)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(25):
        head(text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head.eval(), [row[:length] for row, length in zip(text[::8], (3, 12))]


class Watched(EagleSession):
    """Makes every draft of every row again from that row's own text."""

    def propose(self, tokens, length):
        tree = super().propose(tokens, length)
        for row, (start, end) in enumerate(zip(self.starts, tokens.lengths)):
            if length < 1 or end % 7 or end == tokens.prompt_length + NEW:
                continue
            ids, drafts = tokens.ids[row : row + 1, start:end], tree.tokens[row]
            states = self.head.backbone(ids[:, :-1], output_hidden_states=True).hidden_states
            features, parents = self.head.fuse(states), (tree.parents[row] if tree.parents.dim() > 1 else tree.parents)
            paths, children = {-1: ()}, {}
            for node, parent in enumerate(parents.tolist()):
                paths[node] = (*paths[parent], node)
                children.setdefault(parent, set()).add(int(drafts[node]))
            for parent, below in children.items():
                path = drafts[list(paths[parent])]
                logits = self.head.draft_logits(drafted_rows(self.head, features, ids[:, 1:], path)[:, -1:])
                assert set(logits[0, 0].topk(len(below)).indices.tolist()) == below
                self.checked.append(len(path))
        return tree


NEW = 70  # more columns than a ring of 64 has


@pytest.mark.by_day("tree", "p_eagle-static")
@pytest.mark.parametrize(
    ("mask_token", "drafting"),
    [
        pytest.param(None, dict(num_assistant_tokens=5), id="chain"),
        pytest.param(None, dict(draft_tree=TREE), id="tree"),
        pytest.param(None, dict(draft_tree=TREE, cache_implementation="static"), id="tree-static"),
        pytest.param(5, dict(num_assistant_tokens=5, cache_implementation="static"), id="p_eagle-static"),
    ],
)
@torch.no_grad()
def test_drafts_see_what_their_windows_hold(mask_token, drafting, monkeypatch):
    with torch.enable_grad():
        torch.manual_seed(0)
        head, prompts = trained(mask_token_id=mask_token)
    batch, checked = left_padded(prompts), []

    def watched(options):
        session = Watched(head, options)
        session.starts, session.checked = (batch["attention_mask"] == 0).sum(1).tolist(), checked
        return session

    monkeypatch.setattr(head, "start", watched)
    call = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    out = head.backbone.generate(**batch, assistant_model=head, return_dict_in_generate=True, **call, **drafting)
    assert out.sequences.equal(head.backbone.generate(**batch, **call))
    assert max(map(max, out.speculation.rows_accepted)) > 1 and {3, 4} <= {*checked} | {4}


DOCUMENTS = [7, 5]


def batches(ids):
    """The documents of `ids` [2, 7] in a padded batch, joined in one row, and the first one alone."""
    lengths, size = DOCUMENTS, max(DOCUMENTS)
    padded = torch.stack([pad(ids[row, :length], (size - length, 0)) for row, length in enumerate(lengths)])
    mask = torch.stack([torch.arange(size) >= size - length for length in lengths]).long()
    joined = torch.cat([ids[row, :length] for row, length in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    labels = padded.masked_fill(mask == 0, -100)
    yield 2, dict(input_ids=padded, attention_mask=mask, labels=labels)
    yield 2, dict(input_ids=joined, position_ids=positions, labels=joined)
    yield 1, dict(input_ids=ids[:1], labels=ids[:1])


@pytest.mark.parametrize("mask_token", [None, 5])
def test_the_loss_is_that_of_the_drafts_at_every_place(mask_token):
    steps = 4
    base = tiny_backbone().double()
    options = WINDOWS | {"mask_token_id": mask_token, "loss_options": {"steps": steps, "divergence": "kl"}}
    head = EagleHead.from_backbone(base, **options).double().eval()
    ids = torch.randint(2, 64, (2, 7), generator=torch.Generator().manual_seed(2))
    for count, batch in batches(ids):
        sums, rows = torch.zeros(steps, dtype=torch.double), torch.zeros(steps)
        for text in (ids[row : row + 1, :length] for row, length in enumerate(DOCUMENTS[:count])):
            out = base(text, output_hidden_states=True)
            log_p, states = out.logits.detach().log_softmax(-1), [state.detach() for state in out.hidden_states]
            features = head.fuse(states)
            for row in range(text.shape[1] - 2):
                path = text[0, row + 2 : row + 1 + steps][: text.shape[1] - 3 - row]
                drafted = drafted_rows(head, features[:, : row + 1], text[:, 1 : row + 2], path)
                log_q = head.draft_logits(drafted)[0].log_softmax(-1)
                goal = log_p[0, row + 1 : row + 1 + len(log_q)]
                sums = sums + pad((goal.exp() * (goal - log_q)).sum(-1), (0, steps - len(log_q)))
                rows += torch.arange(steps) < len(log_q)
        loss = (sums / rows.clamp(min=1) * head.loss_options.resolved(3).decay ** torch.arange(steps)).sum()
        wanted = torch.autograd.grad(loss, parameters := [each for each in head.parameters() if each.requires_grad])
        found = head(**batch)
        close = dict(rtol=1e-4, atol=1e-5)  # norms and softmax are computed in float32
        torch.testing.assert_close(found.step_losses, (sums / rows.clamp(min=1)).detach(), **close)
        torch.testing.assert_close(torch.autograd.grad(found.loss, parameters), wanted, **close)
