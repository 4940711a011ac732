"""Block drafters against numbers of the official code, from checkpoints in the official layouts."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from tokenahead import BlockDrafter

DATA = Path(__file__).parents[2] / "data" / "block"
CASES = {
    "zlab_llama": "llama",
    "zlab_dflash2": "qwen3",
    "speculators_dflash": "qwen3",
    "speculators_dspark": "llama",
    "deepspec_dspark_gated": "llama",
}
SMALL = (
    *("modelopt_dspark", "modelopt_swa", "zlab_dspark_fill_in", "zlab_dflash_interleaved"),
    *("specforge_domino", "domino_fill_in"),
)  # of one backbone
GEMMA = dict.fromkeys(("deepspec_gemma4", "deepspec_gemma4_values"), "gemma4_small")
TOLERANCE = 1e-5


@cache
def golden(name):
    return load_file(DATA / name / "golden.safetensors"), json.loads((DATA / name / "meta.json").read_text())


def pair(name):
    """A backbone, and the drafter of a golden."""
    base = AutoModelForCausalLM.from_pretrained(
        DATA / (CASES | GEMMA).get(name, "qwen3_small"), dtype=torch.float32
    ).eval()
    base.generation_config.eos_token_id = None
    return base, BlockDrafter.from_pretrained(DATA / name, dtype=torch.float32).eval().attach(base)


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)


@pytest.fixture(params=CASES)
def case(request):
    """Backbone, drafter, numbers and facts of a golden."""
    return *pair(request.param), *golden(request.param)


@torch.no_grad()
def contexts(base, drafter, text):
    return drafter.fuse(base(text[None], output_hidden_states=True).hidden_states)


@pytest.mark.parametrize("name", [*CASES, *SMALL, *GEMMA])
@torch.no_grad()
def test_rows_logits_laws_and_confidences_are_official(name):
    (base, drafter), (gold, meta) = pair(name), golden(name)
    assert drafter.feature_layers == meta["feature_hidden_states"]
    assert (drafter.block_size, drafter.num_drafts) == (meta["block_size"], meta["drafts_per_block"])
    for b in (0, 1):
        text, context = gold[f"text.{b}"], contexts(base, drafter, gold[f"text.{b}"])
        close(context[0], gold.get(f"context.{b}", context[0]))
        base_logits = gold.get(f"base_logits.{b}", gold[f"logits.{b}"])
        for i, hidden in enumerate(gold[f"hidden.{b}"]):
            start, drafts = int(gold[f"starts.{b}"][i]), gold[f"drafts.{b}"][i]
            block = drafter.block(context[:, :start], text[start][None])
            close(block.hidden[0], hidden)
            close(block.logits[0], base_logits[i])
            assert block.distribution.greedy()[0].equal(drafts)
            law = gold[f"logits.{b}"][i]
            if f"scores.{b}" in gold:
                law = torch.full_like(law, -torch.inf).scatter(-1, gold[f"candidates.{b}"][i], gold[f"scores.{b}"][i])
            close(block.distribution.conditional_log_probs(drafts[None])[0], law.log_softmax(-1))
            if f"confidence.{b}" in gold:
                close(drafter.confidence(block, drafts[None])[0], gold[f"confidence.{b}"][i])


@pytest.mark.by_day("zlab_dflash2", "speculators_dspark")
@torch.no_grad()
def test_a_ragged_batch_computes_what_single_sequences_do(case):
    base, drafter, gold, _ = case
    whole = [contexts(base, drafter, gold[f"text.{b}"])[:, : int(gold[f"starts.{b}"][2 - b])] for b in (0, 1)]
    last = torch.stack([gold[f"text.{b}"][each.shape[1]] for b, each in enumerate(whole)])
    width = max(each.shape[1] for each in whole)
    mask = torch.stack([torch.arange(width) >= width - each.shape[1] for each in whole]).long()
    padded = [torch.nn.functional.pad(each, (0, 0, width - each.shape[1], 0), value=7.0) for each in whole]
    together = drafter.block(torch.cat(padded), last, attention_mask=mask).hidden
    for row, (context, token) in enumerate(zip(whole, last)):
        close(together[row], drafter.block(context, token[None]).hidden[0])


@pytest.mark.by_day("zlab_dflash2", "speculators_dspark")
@torch.no_grad()
def test_a_cache_gets_new_columns_of_the_context_alone(case):
    base, drafter, gold, _ = case
    text, context = gold["text.0"], contexts(base, drafter, gold["text.0"])
    cache, read = DynamicCache(), 0
    for start, hidden in zip(gold["starts.0"].tolist(), gold["hidden.0"]):
        block = drafter.block(context[:, read:start], text[start][None], past_key_values=cache)
        close(block.hidden[0], hidden)
        assert cache.get_seq_length() == start
        read = start


def test_drafts_and_accepted_counts_are_official(case):
    base, drafter, gold, meta = case
    drafter.confidence_threshold = meta.get("confidence_threshold") or None
    options = dict(max_new_tokens=meta["new_tokens"], do_sample=False, pad_token_id=0, assistant_model=drafter)
    for b in (0, 1):
        prompt = gold["input_ids"][b : b + 1, gold["attention_mask"][b] == 1]
        out = base.generate(prompt, attention_mask=torch.ones_like(prompt), return_dict_in_generate=True, **options)
        assert out.sequences[0].equal(gold[f"text.{b}"][: out.sequences.shape[1]])
        settled = len(gold[f"accepted.{b}"]) - 1
        drafts = gold[f"drafts.{b}"][:settled].tolist()
        if f"proposed.{b}" in gold:
            drafts = [draft[:count] for draft, count in zip(drafts, gold[f"proposed.{b}"].tolist())]
        wanted = [pair for pair in zip(drafts, gold[f"accepted.{b}"].tolist()) if pair[0]]
        found = [
            (list(draft), int(n)) for draft, n in zip(out.speculation.drafts, out.speculation.accepted) if len(draft)
        ]
        assert found[: len(wanted)] == wanted


@pytest.mark.by_day(
    "zlab_llama-tree1",
    "zlab_dflash2-tree2",
    "speculators_dflash-None",
    "speculators_dspark-tree1",
    "deepspec_dspark_gated-None",
)
@pytest.mark.parametrize("tree", [None, {"depth": 2, "top_k": 3, "total_tokens": 12}, [(0,), (1,), (0, 0), (0, 1)]])
def test_ragged_batches_write_the_backbones_text(case, tree):
    base, drafter, gold, _ = case
    prompt = dict(input_ids=gold["input_ids"], attention_mask=gold["attention_mask"])
    options = dict(max_new_tokens=24, do_sample=False, pad_token_id=0)
    drafted = base.generate(**prompt, **options, assistant_model=drafter, draft_tree=tree)
    assert drafted.equal(base.generate(**prompt, **options))


RECIPES = {"loss": {}, "loss_dflash": {"gamma": 7.0}, "loss_dpace": {"weights": "dpace"}}


def test_losses_and_gradient_norms_are_official(case):
    base, drafter, gold, meta = case
    base.requires_grad_(False)
    for name in sorted(RECIPES.keys() & gold.keys()):
        drafter.zero_grad()
        terms = meta.get("loss_weights") or meta.get("loss_fn")
        options = {"layout": meta["layout"], "method": meta["method"], "terms": terms, "weights": "decay", "gamma": 4.0}
        drafter.loss_options.update(**options | RECIPES[name])
        chosen = {"anchors": gold["train_anchors"], "keep": gold["train_keep"].bool()}
        loss = drafter(gold["train_input_ids"], loss_mask=gold["train_loss_mask"], **chosen).loss
        check_loss(drafter, loss, gold, name)


def check_loss(drafter, loss, gold, name="loss"):
    torch.testing.assert_close(loss[None], gold[name], atol=0, rtol=1e-4)
    loss.backward()
    prefix = name.replace("loss", "grad") + "."
    wanted = sorted(float(value) for key, value in gold.items() if key.startswith(prefix))
    found = sorted(float(each.grad.norm()) for each in drafter.parameters() if each.grad is not None)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=0, rtol=1e-3)


@pytest.mark.parametrize("name", ["specforge_domino", "domino_fill_in"])
def test_dominos_loss_of_both_logits_is_official(name):
    (base, drafter), (gold, _) = pair(name), golden(name)
    base.requires_grad_(False)
    drafter.loss_options.update(layout="z-lab", gamma=4.0, terms={"ce": 0.75, "base": 0.25})
    chosen = {"anchors": gold["train_anchors"], "keep": gold["train_keep"].bool()}
    check_loss(drafter, drafter(gold["train_input_ids"], loss_mask=gold["train_loss_mask"], **chosen).loss, gold)
