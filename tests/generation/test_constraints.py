"""Drafts that know the constraint: what is drafted under them, what is asked, and what is refused."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as library

from tests import ptp_models
from tests.backbones import backbone, code, prompts, train_heads
from tests.no_sync import NoSync
from tokenahead import GrammarConstraint, LookaheadDrafter, NgramDrafter, RecyclingDrafter, SuffixDrafter
from tokenahead.extending import AutomatonProcessor, TableAutomaton
from tokenahead.generation.call.options import NumberCheck, chosen
from tokenahead.generation.call.processing import Processing
from tokenahead.generation.call.sequences import NewTokens, Sequences
from tokenahead.modeling.ptp.generation import ParallelAssistant

V = 48
TREE = {"draft_tree": {"top_k": 3, "total_tokens": 12}}
HEADS = {
    "ff": dict(unembedding="own"),
    "hmm": dict(head_type="hmm", rank=3, unembedding="own"),
    "hydra": dict(head_type="hydra", unembedding=None),
}
LOOK_UPS = {
    "ngram": lambda: NgramDrafter(num_tokens=4),
    "suffix": lambda: SuffixDrafter(num_tokens=4),
    "recycling": lambda: RecyclingDrafter(num_tokens=4),
    "lookahead": lambda: LookaheadDrafter(3, 3, 3),
}
BANNED = list(range(0, V, 3))
ALLOWED = [token for token in range(V) if token % 3]


class Cycle(AutomatonProcessor):
    """Tokens of another residue by 3 at every position, on the host."""

    start = 0

    def step(self, state, token):
        return (state + 1) % 3

    def allowed(self, state):
        return torch.arange(V) % 3 == state


def cycle_table():
    return TableAutomaton(
        ((torch.arange(3) + 1) % 3)[:, None].expand(3, V), torch.stack([Cycle().allowed(s) for s in range(3)])
    )


def only(mask):
    """An automaton of one state."""
    return TableAutomaton(torch.zeros(1, len(mask), dtype=torch.long), mask[None])


def drafter_of(name, model):
    if name in HEADS:
        return train_heads(model, steps=20, **HEADS[name])
    return LOOK_UPS[name]().attach(model)


@pytest.mark.by_day("ff-chain", "suffix-tree")
@pytest.mark.parametrize("options", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", [*HEADS, *LOOK_UPS])
def test_all_ways_to_say_one_distribution_draft_alike(name, options):
    """Seed by seed the same tokens, and as many of them per call."""
    if name not in HEADS and options:
        options = {} if name == "lookahead" else {"draft_tree": {"top_k": 3}}
    model, prompt, mask = backbone(), prompts(1)[0][None], torch.zeros(V, dtype=torch.bool)
    mask[ALLOWED] = True
    drafter, function = drafter_of(name, model), lambda row, ids: ALLOWED
    ways = [
        {"suppress_tokens": BANNED},
        {"prefix_allowed_tokens_fn": function},
        {"bad_words_ids": [[token] for token in BANNED]},
        {"logits_processor": [only(mask)]},
    ]
    for seed in range(3):
        outs = []
        for way in ways:
            torch.manual_seed(seed)
            if name in ("suffix", "recycling", "lookahead"):  # what it has read changes its drafts
                drafter.forget()
            common = dict(do_sample=True, temperature=0.9, max_new_tokens=30, return_dict_in_generate=True)
            common |= dict(attention_mask=torch.ones_like(prompt), assistant_model=drafter)
            outs.append(model.generate(prompt, **common, **way, **options))
        for out in outs[1:]:
            assert torch.equal(out.sequences, outs[0].sequences)
            assert out.speculation.rows_drafts == outs[0].speculation.rows_drafts
        drafted = [token for draft in outs[0].speculation.rows_drafts[0] for token in draft]
        firsts = [draft[0] for draft in outs[0].speculation.rows_drafts[0] if draft]
        if name != "lookahead":  # which has n-grams of the backbone's own, and may know none that is allowed
            assert set(drafted if name in HEADS else firsts) <= set(ALLOWED)


CONSTRAINTS = {
    "host": lambda: {"logits_processor": [Cycle()]},
    "table": lambda: {"logits_processor": [cycle_table()]},
    "beside others": lambda: {
        "logits_processor": [Cycle(), library.EncoderNoRepeatNGramLogitsProcessor(9, code(1)[None])]
    },
    "by row": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [(row + len(ids) + k) % V for k in range(0, V, 2)]},
    "length": lambda: {"min_new_tokens": 9, "begin_suppress_tokens": [3, 4], "no_repeat_ngram_size": 2},
    "words": lambda: {"bad_words_ids": [[5], [6, 7], [8, 9, 10]]},
}


@pytest.mark.by_day("hmm")
@pytest.mark.parametrize("name", ["ff", "hmm", "hydra"])
def test_a_draft_ends_where_nothing_of_its_vocabulary_is_allowed(name):
    model, ids = backbone(), prompts(1)[0][None]
    heads = train_heads(model, steps=5, draft_ids=list(range(3, V, 2)), **HEADS[name])
    for do_sample in (False, True):
        for options in ({}, TREE):
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), assistant_model=heads, max_new_tokens=8, do_sample=do_sample,
                prefix_allowed_tokens_fn=lambda row, prefix: [4, 6] if len(prefix) % 3 else [5, 6, 8], **options,
            )  # fmt: skip
            assert set(out[0, ids.shape[1] :].tolist()) <= {4, 5, 6, 8}


def test_everything_may_be_drafted_where_nothing_may():
    """Such drafts are rejected; a distribution without any token would be no numbers."""
    nothing = SimpleNamespace(allowed=lambda sequences: torch.zeros(len(sequences), V, dtype=torch.bool))
    processing = Processing(LogitsProcessorList([nothing]))
    masks = processing.constraints.masks(Sequences(torch.randint(V, (2, 5))), True)
    assert masks.allowed((2, V), torch.device("cpu")).all()


def test_tables_never_make_the_host_wait():
    processing = Processing(LogitsProcessorList([cycle_table()]), ends=frozenset([7]))
    options = SimpleNamespace(do_sample=True, threshold=0.0, processing=processing, numbers=NumberCheck())
    tokens = Sequences(torch.randint(V, (2, 5)))

    def draft():
        masks, found = processing.constraints.masks(tokens, True), []
        for _ in range(3):
            q = processing.warp(torch.full((2, V), 1 / V), masks.allowed((2, V), tokens.ids.device))
            found.append(chosen(q, options, masks))
        return torch.stack(found, 1)

    first = draft()
    tokens.write(first)
    tokens.keep(NewTokens([1, 3], tokens.ids.device))
    assert tokens.ends.tolist() == [6, 8]
    with NoSync():
        second = draft()
    assert ((first % 3) == torch.arange(3)).all()
    assert second[0].remainder(3).tolist() == [1, 2, 0] and second[1].remainder(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("do_sample", [False, True])
def test_prefix_functions_are_asked_by_row_and_never_after_an_end(do_sample):
    model = backbone()
    model.generation_config.eos_token_id = 7
    drafter, seen, ids = train_heads(model, steps=20, **HEADS["ff"]), set(), prompts(1)[0].expand(2, -1)

    def function(row, prefix):
        written = prefix[ids.shape[1] :].tolist()
        assert 7 not in written
        seen.add(row)
        return [5, 7] if len(written) % 2 else [6, 9]

    common = dict(attention_mask=torch.ones_like(ids), num_return_sequences=2, max_new_tokens=12, do_sample=True)
    common |= dict(do_sample=do_sample) if do_sample else dict(do_sample=False, num_return_sequences=1)
    plain = set()
    model.generate(
        ids, prefix_allowed_tokens_fn=lambda row, _: plain.add(row) or [5, 7], **common | {"max_new_tokens": 1}
    )
    for options in ({}, TREE):
        seen.clear()
        model.generate(ids, assistant_model=drafter, prefix_allowed_tokens_fn=function, **common, **options)
        assert seen == plain  # transformers 5.24 numbers prompts, older versions rows


NONE = torch.zeros(V, dtype=torch.bool)
SOME = NONE.index_fill(0, torch.tensor(ALLOWED), True)
DEAD_END = {
    "function": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: ALLOWED if len(ids) < 12 else []},
    "table": lambda: {
        "logits_processor": [
            TableAutomaton((torch.arange(5) + 1).clamp(max=4)[:, None].expand(5, V), torch.stack([*[SOME] * 4, NONE]))
        ]
    },
}


def test_a_state_that_allows_nothing_is_named_once_the_text_reaches_it():
    for do_sample, way in itertools.product([False, True], DEAD_END):
        model, ids = backbone(), torch.arange(4, 12)[None]
        heads = train_heads(model, steps=20, **HEADS["ff"])
        common = dict(attention_mask=torch.ones_like(ids), assistant_model=heads, do_sample=do_sample)
        model.generate(ids, max_new_tokens=4, **common, **DEAD_END[way]())
        with pytest.raises(ValueError, match="prefix_allowed_tokens_fn|PrefixConstrained|TableAutomaton"):
            model.generate(ids, max_new_tokens=9, **common, **DEAD_END[way]())


class Liar(LogitsProcessor):
    """Offers what it excludes."""

    def allowed(self, sequences):
        return ~SOME.expand(len(sequences), -1)

    def __call__(self, input_ids, scores):
        return scores.masked_fill(~SOME, -torch.inf)


class Honest(Liar):
    def allowed(self, sequences):
        return SOME.expand(len(sequences), -1)


def test_where_a_processor_masks_otherwise_the_text_stays_the_targets():
    model, ids = backbone(), prompts(1)[0][None]
    heads = train_heads(model, steps=20, **HEADS["ff"])
    common = dict(attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    want = model.generate(ids, **common, suppress_tokens=BANNED)
    accepted = {}
    for processor in (Honest(), Liar()):
        out = model.generate(
            ids, assistant_model=heads, logits_processor=[processor], return_dict_in_generate=True, **common
        )
        assert torch.equal(out.sequences, want)
        accepted[type(processor).__name__] = sum(out.speculation.rows_accepted[0])
    assert accepted["Honest"] > accepted["Liar"] == 0


BOX = "model_cards/box"


def test_grammars_are_kept_to_with_drafts_that_know_them():
    for drafts in [{}, {"drafter": True}]:
        pytest.importorskip("llguidance")
        tokenizer = AutoTokenizer.from_pretrained(BOX)
        model = AutoModelForCausalLM.from_pretrained(BOX, dtype="float32").eval()
        constraint, calls = GrammarConstraint(tokenizer, regex=r"[0-9]{3}-[a-z]{3}(, [0-9]-[a-z]){2}"), []
        inputs = tokenizer("x = ", return_tensors="pt")
        common = dict(max_new_tokens=40, logits_processor=[constraint], return_dict_in_generate=True)
        if drafts:
            drafts = {"assistant_model": NgramDrafter().attach(model)}
        plain = model.generate(**inputs, do_sample=False, use_mtp=False, **common).sequences
        for do_sample in (False, True):
            torch.manual_seed(1)
            out = model.generate(**inputs, do_sample=do_sample, **common, **drafts)
            text = tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            assert re.fullmatch(r"[0-9]{3}-[a-z]{3}(, [0-9]-[a-z]){2}", text)
            assert do_sample or torch.equal(out.sequences, plain)
            calls.append(out.speculation.backbone_calls)
        assert drafts or calls[0] < 14


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("variant", ["one_hot", "categorical"])
@pytest.mark.parametrize("is_apart", [False, True])
def test_parallel_drafts_hold_what_is_allowed(is_apart, variant, do_sample):
    model = ptp_models.student(variant)
    allowed = {0: [1, 4, 7, 9], 1: [2, 3, 5, 10]}  # by the parity of the length
    prompt = ptp_models.ids(2, 6)
    options = dict(
        attention_mask=torch.ones_like(prompt), max_new_tokens=14, do_sample=do_sample, eos_token_id=None,
        prefix_allowed_tokens_fn=lambda row, prefix: allowed[len(prefix) % 2], return_dict_in_generate=True,
    )  # fmt: skip
    target = ptp_models.backbone() if is_apart else model
    own = {"assistant_model": ParallelAssistant(model).attach(target)} if is_apart else {}
    torch.manual_seed(4)
    out = target.generate(prompt, **options, **own)
    drafts = [draft for row in out.speculation.rows_drafts for draft in row if draft]
    assert any(any(draft) for draft in drafts)
    for row, calls in enumerate(out.speculation.rows_drafts):
        place = 7  # the call behind the prompt adds the first token
        for draft, kept in zip(calls, out.speculation.rows_accepted[row]):
            # where a row has no slot it holds 0, for certain
            assert all(token in (0, *allowed[(place + step) % 2]) for step, token in enumerate(draft))
            place += 1 + kept
    if not do_sample:
        assert torch.equal(out.sequences, target.generate(prompt, **options, use_mtp=False).sequences)
