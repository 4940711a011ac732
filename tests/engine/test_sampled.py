"""Sampled text in the engine: it has the backbone's distribution, whether the proposer's drafts come with theirs or
not.

A vocabulary of eight tokens and random weights: all distributions are known exactly, and many drafts are right and many
wrong.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributions import chi_square, continuation_distribution
from tokenahead import MTPHeads

VOCABULARY, WINDOW, TEXTS, NEW = 8, 4, 2000, 5
PROMPT = [1, 5, 2, 7]
ASKED = {"hot": {"temperature": 1.3, "top_k": 0}, "top_k": {"temperature": 0.8, "top_k": 4}}
GREEDY = 8  # requests among the sampled ones
HEADS = {"btree": {"head_type": "btree", "rank": 3}, "ff": {"leaf": "full"}}
METHODS = ("probabilistic", "greedy")


@pytest.fixture(scope="module")
def base(benchmarks):
    from serving_models import config

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config("llama", vocab_size=VOCABULARY, initializer_range=0.15)).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def answered(interpreter, base, tmp_path_factory):
    """Of every kind of heads and of drafts: all requests in one batch, the greedy ones last."""
    from serving import serve
    from serving_cases import PROPOSER, Case

    folder = tmp_path_factory.mktemp("sampled")
    base.save_pretrained(folder / "backbone")
    sampling = [options for options in ASKED.values() for _ in range(TEXTS)] + [{"temperature": 0}] * GREEDY
    cases = []
    for kind, options in HEADS.items():
        heads = MTPHeads.from_backbone(base, window=WINDOW, **options)
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter += 0.5 * torch.randn_like(parameter)
        heads.save_pretrained(folder / kind)
        for method in METHODS:
            speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": WINDOW - 1}
            engine = {
                "model": str(folder / "backbone"),
                "speculative_config": speculative | {"draft_sample_method": method},
                "additional_config": {"tokenahead_heads": str(folder / kind)},
                "max_num_seqs": 64,
            }
            prompts = [PROMPT] * len(sampling)
            cases.append(Case(f"{kind} {method}", engine, [], [], prompts, NEW, sampling, is_alone=False))
    return serve(interpreter, cases, folder)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("method", METHODS)
def test_sampled_text_has_the_backbones_distribution(answered, base, kind, method):
    found = answered[f"{kind} {method}"]
    assert "error" not in found, found
    counts = found["counts"]
    assert 0 < counts["accepted_tokens"] < counts["draft_tokens"]
    for index, options in enumerate(ASKED.values()):
        texts = torch.tensor(found["together"][index * TEXTS : (index + 1) * TEXTS])
        whole = continuation_distribution(base, torch.tensor([PROMPT]), 4, **options)
        distribution = torch.tensor(list(whole.values()), dtype=torch.double).view([VOCABULARY] * 4).sum(0).flatten()
        cells = (texts[:, 1:4] * torch.tensor([VOCABULARY**2, VOCABULARY, 1])).sum(1)  # the drafted places
        assert chi_square(cells, distribution) > 1e-3, options


def test_greedy_requests_among_sampled_ones_are_plain_decodings(answered, base):
    out = base.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    for found in answered.values():
        assert found["together"][-GREEDY:] == [out[0, len(PROMPT) :].tolist()] * GREEDY


def test_drafts_with_their_distributions_are_accepted_more_often(answered):
    """Than certain ones: on such flat distributions."""
    for kind in HEADS:
        drawn, certain = (answered[f"{kind} {method}"]["counts"] for method in METHODS)
        assert drawn["accepted_tokens"] / drawn["draft_tokens"] > certain["accepted_tokens"] / certain["draft_tokens"]
