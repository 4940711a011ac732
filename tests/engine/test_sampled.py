"""Sampled text in the engine: it has the backbone's distribution, whoever drafts, and whether drafts come with theirs
or not.

A vocabulary of eight tokens and random weights: all distributions are known exactly, and many drafts are right and many
wrong.
"""

import json
import shlex
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from tokenahead import DeepSeekMTP, EagleHead, MTPHeads
from tokenahead.model_cards.export import export
from tokenahead.testing import continuation_distribution, continuation_p_value

VOCABULARY, WINDOW, TEXTS, NEW = 8, 4, 2000, 5
PROMPT = [1, 5, 2, 7]
ASKED = {"hot": {"temperature": 1.3, "top_k": 0}, "top_k": {"temperature": 0.8, "top_k": 4}}
GREEDY = 8  # requests among the sampled ones
DRAWN, CERTAIN = "probabilistic", "greedy"
METHODS = dict.fromkeys(("btree", "module", "eagle3"), (DRAWN, CERTAIN)) | {"medusa": (CERTAIN,)}
"""Kinds of drafters, and how they draft; vLLM's Medusa takes the argmax alone."""
CASES = [(kind, method) for kind, methods in METHODS.items() for method in methods]
SHAKEN = {"btree": 0.5, "medusa": 0.5, "module": 0.1, "eagle3": 0.1}
"""The spread of the noise on each."""
PARTS = {"--speculative-config": "speculative_config", "--hf-overrides": "hf_overrides"} | {
    "--additional-config": "additional_config"
}
"""Options of the printed command, and of vLLM's class."""


@pytest.fixture(scope="module")
def base(benchmarks, tmp_path_factory):
    from serving_models import config

    torch.manual_seed(1)
    sizes = dict(vocab_size=VOCABULARY, initializer_range=0.15, num_hidden_layers=4)
    folder = tmp_path_factory.mktemp("backbone")
    AutoModelForCausalLM.from_config(config("llama", **sizes)).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)


def engine_of(kind, base, folder):
    """Arguments of vLLM's engine, as the printed command has them, for a drafter that is often wrong."""
    if kind == "module":
        model = DeepSeekMTP.from_backbone(base)
        drafter = model.mtp
    elif kind == "eagle3":
        model = drafter = EagleHead.from_backbone(base, version=3, aux_layers=[1, 2, 3])
    else:
        options = {"head_type": "medusa"} if kind == "medusa" else {"head_type": "btree", "rank": 3}
        model = drafter = MTPHeads.from_backbone(base, window=WINDOW, **options)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += SHAKEN[kind] * torch.randn_like(parameter)
    words = shlex.split(export(model, folder / kind).command)
    engine = {PARTS[name]: json.loads(value) for name, value in zip(words, words[1:]) if name in PARTS}
    engine["speculative_config"] |= {"num_speculative_tokens": WINDOW - 1}
    return engine | {"model": words[2], "max_num_seqs": 64, "seed": 1}


@pytest.fixture(scope="module")
def answered(interpreter, base, tmp_path_factory):
    """Of every kind of drafter and of drafts: all requests in one batch, the greedy ones last."""
    from serving import serve
    from serving_cases import Case

    folder = tmp_path_factory.mktemp("sampled")
    sampling = [options for options in ASKED.values() for _ in range(TEXTS)] + [{"temperature": 0}] * GREEDY
    engines = {kind: engine_of(kind, base, folder) for kind in METHODS}
    cases = []
    for kind, method in CASES:
        engine = engines[kind]
        drawn = {"draft_sample_method": DRAWN} if method == DRAWN else {}
        engine = engine | {"speculative_config": engine["speculative_config"] | drawn}
        prompts = [PROMPT] * len(sampling)
        cases.append(Case(f"{kind} {method}", engine, [], [], prompts, NEW, sampling, is_alone=False))
    return serve(interpreter, cases, folder)


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_sampled_text_has_the_backbones_distribution(answered, base, kind, method):
    found = answered[f"{kind} {method}"]
    assert "error" not in found, found
    counts = found["counts"]
    assert 0 < counts["accepted_tokens"] < counts["draft_tokens"]
    for index, options in enumerate(ASKED.values()):
        texts = torch.tensor(found["together"][index * TEXTS : (index + 1) * TEXTS])
        drafted: Counter[tuple[int, ...]] = Counter()  # the positions behind the first
        for text, probability in continuation_distribution(base, torch.tensor([PROMPT]), 4, **options).items():
            drafted[text[1:]] += probability
        value = continuation_p_value(texts[:, 1:4], drafted)
        print(f"{kind} {method} {options}: p = {value:.3f}")
        assert value > 1e-3, options


def test_greedy_requests_among_sampled_ones_are_plain_decodings(answered, base):
    out = base.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    for found in answered.values():
        assert found["together"][-GREEDY:] == [out[0, len(PROMPT) :].tolist()] * GREEDY


def test_drafts_with_their_distributions_are_accepted_more_often(answered):
    """Than certain ones: on such flat distributions."""
    for kind, methods in METHODS.items():
        counts = [answered[f"{kind} {method}"]["counts"] for method in methods]
        shares = [found["accepted_tokens"] / found["draft_tokens"] for found in counts]
        print(kind, shares)
        assert shares == sorted(shares, reverse=True)
