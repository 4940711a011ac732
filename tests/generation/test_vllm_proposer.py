"""The proposer for vLLM, without vLLM: a runner that calls it as vLLM's does, on a backbone of transformers.

Real engines are run by tests/engine and benchmarks/serving.py. Here: which row of which request the distribution is
made from, ragged requests, distributions of sampled drafts, what is refused.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.modeling.heads.backbones import backbone, shaken
from tokenahead import MTPHeads
from tokenahead.model_cards.vllm import HeadProposer, listen, register

KINDS = {
    "ff": {},
    "ff full": {"unembedding": "own"},
    "cp": {"head_type": "cp", "rank": 3},
    "hmm": {"head_type": "hmm", "rank": 3},
    "btree": {"head_type": "btree", "rank": 3, "unembedding": "own"},
    "medusa": {"head_type": "medusa"},
}
WINDOW, DRAFTS, NEW = 4, 3, 14
VOCABULARY = 5  # so few tokens that heads with random weights guess right now and then
PROMPTS = [
    torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
    for length in (9, 3, 17, 5, 12)
]


class Runner:
    """The method of vLLM's model runner that asks for drafts, and what it reads of itself."""

    def __init__(self, drafter, requests):
        self.drafter, self.input_batch = drafter, SimpleNamespace(req_ids=[str(i) for i in range(requests)])
        self._draft_probs = self._draft_prob_req_ids = None

    def propose_draft_token_ids(
        self, scheduler_output, sampled_token_ids, sampling_metadata, hidden_states, sample_hidden_states,
        aux_hidden_states, spec_decode_metadata, common_attn_metadata, slot_mappings,
    ):  # fmt: skip
        self._draft_probs = self._draft_prob_req_ids = None
        return self.drafter.propose(sampled_token_ids, self.lengths, None, slot_mappings=slot_mappings)


@pytest.fixture
def runner_class(monkeypatch):
    kind = type("GPUModelRunner", (Runner,), dict(vars(Runner)))
    module = ModuleType("vllm.v1.worker.gpu_model_runner")
    module.GPUModelRunner = kind
    sampler = ModuleType("vllm.v1.sample.rejection_sampler")
    sampler.expand_batch_to_tokens = lambda values, ends, size: values.repeat_interleave(
        ends.diff(prepend=ends.new_zeros(1)), output_size=size
    )
    sampler.apply_top_k_top_p = lambda logits, k, p: logits[:, : k.max()]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.sample"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, sampler.__name__, sampler)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return kind


def configuration(base, folder, count=DRAFTS, method="greedy", max_model_len=100):
    """The part of vLLM's configuration that is read."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=count, draft_sample_method=method),
        model_config=SimpleNamespace(max_model_len=max_model_len, hf_text_config=base.config, dtype=torch.float32),
        additional_config={"tokenahead_heads": str(folder)},
    )


def served(base):
    """A backbone as vLLM's: `compute_logits` of flat states."""
    base.compute_logits = lambda states: base.lm_head(states)
    return base


def saved(kind, folder):
    base = backbone(vocab_size=VOCABULARY, initializer_range=0.4)  # texts that do not repeat one token
    heads = shaken(MTPHeads.from_backbone(base, window=WINDOW, **KINDS[kind])).eval()
    heads.save_pretrained(folder)
    return base, heads


@torch.no_grad()
def decode(base, runner, temperature=None):
    """Greedy decoding of all prompts at once, as vLLM's loop does it; the drafts of every request, and its text."""
    texts, drafts = [prompt.tolist() for prompt in PROMPTS], [[] for _ in PROMPTS]
    made = [[] for _ in PROMPTS]
    sampling = SimpleNamespace(all_greedy=temperature is None, temperature=temperature)
    while min(len(text) - len(prompt) for text, prompt in zip(texts, PROMPTS)) < NEW:
        states, sampled = [], []
        for text, draft in zip(texts, drafts):
            out = base(torch.tensor([text + draft]), output_hidden_states=True)
            rows = slice(len(text) - 1, None)
            states.append(out.hidden_states[-1][0, rows])
            picks = out.logits[0, rows].argmax(-1).tolist()
            kept = next((i for i, token in enumerate(draft) if token != picks[i]), len(draft))
            sampled.append(picks[: kept + 1])
        counts = [len(draft) for draft in drafts]
        metadata = SimpleNamespace(num_draft_tokens=counts) if any(counts) else None
        for text, tokens in zip(texts, sampled):
            text += tokens
        runner.lengths = [len(text) for text in texts]
        drafts = runner.propose_draft_token_ids(
            None, sampled, sampling, None, torch.cat(states), None, metadata, None, slot_mappings=None
        )
        for row, text, draft in zip(made, texts, drafts):
            row.append((len(text), draft))
    return texts, made


@pytest.mark.by_day("btree", "medusa")
@pytest.mark.core_cases("ff")
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_ragged_requests_are_those_of_generate(kind, runner_class, tmp_path):
    base, heads = saved(kind, tmp_path)
    proposer = HeadProposer(configuration(base, tmp_path))
    proposer.load_model(served(base))
    texts, made = decode(base, runner_class(proposer, len(PROMPTS)))
    kept = {after - before for row in made for (before, _), (after, _) in zip(row, row[1:])}
    assert len(kept) > 1  # so that the rows of a step do not all begin at multiples of the same number
    for prompt, text, row in zip(PROMPTS, texts, made):
        options = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": heads, "pad_token_id": 0}
        mask = torch.ones_like(prompt)[None]
        out = base.generate(prompt[None], attention_mask=mask, return_dict_in_generate=True, **options)
        assert text[: len(prompt) + NEW] == out.sequences[0].tolist()
        length, theirs, places = len(prompt) + 1, dict(row), 0
        for accepted, draft in zip(out.speculation.accepted, out.speculation.drafts):
            if len(draft) == DRAFTS:
                assert theirs[length] == draft
                places += 1
            length += accepted + 1
        assert places > 2


@pytest.mark.core
def test_requests_without_a_token_and_at_their_end_get_no_drafts(runner_class, tmp_path):
    base, _ = saved("cp", tmp_path)
    proposer = HeadProposer(configuration(base, tmp_path, max_model_len=21))
    proposer.load_model(served(base))
    sampling = SimpleNamespace(all_greedy=True, temperature=None)
    proposer.take(torch.randn(3, 32), None, sampling)
    drafts = proposer.propose([[4], [], [2]], [20, 9, 21], None)
    assert [len(draft) for draft in drafts] == [1, 0, 0]
    proposer.take(torch.randn(3, 32), None, sampling)
    assert proposer.propose([[], [], []], [1, 1, 1], None) == [[], [], []]
    with pytest.raises(RuntimeError, match="model runner"):
        proposer.propose([[4]], [3], None)


@pytest.mark.parametrize("kind", ["ff", "hmm"])
def test_sampled_drafts_come_with_the_distributions_they_were_drawn_from(kind, runner_class, tmp_path):
    base, heads = saved(kind, tmp_path)
    proposer = HeadProposer(configuration(base, tmp_path, method="probabilistic"))
    proposer.load_model(served(base))
    runner = runner_class(proposer, 3)
    temperature, states = torch.tensor([0.7, 0.0, 2.0]), torch.randn(3, 32)
    runner.lengths = [5, 5, 5]
    sampling, sampled = SimpleNamespace(all_greedy=False, temperature=temperature), [[4], [3], [1]]
    drafts = runner.propose_draft_token_ids(None, sampled, sampling, None, states, None, None, None, None)
    assert runner._draft_prob_req_ids == ["0", "1", "2"] and runner._draft_probs.shape == (3, DRAFTS, VOCABULARY)
    distribution = heads.distribution_of_features(states).condition(torch.tensor([4, 3, 1]))
    exact = distribution.conditional_log_probs(torch.tensor(drafts))
    for row, heat in ((0, 0.7), (2, 2.0)):
        torch.testing.assert_close(runner._draft_probs[row], (exact[row] / heat).softmax(-1), atol=1e-5, rtol=0)
    assert drafts[1] == distribution.greedy(DRAFTS)[1].tolist()
    assert torch.equal(runner._draft_probs[1].argmax(-1), torch.tensor(drafts[1]))
    sampling.all_greedy = True
    runner.propose_draft_token_ids(None, sampled, sampling, None, states, None, None, None, None)
    assert runner._draft_probs is None


def test_a_sampler_that_loses_temperatures_is_mended(runner_class, tmp_path, caplog):
    """As on CPUs in 0.32, whose kernel writes into a copy; a sampler that is right is left as it is."""
    base, _ = saved("cp", tmp_path)
    sampler = sys.modules["vllm.v1.sample.rejection_sampler"]
    right = sampler.expand_batch_to_tokens
    HeadProposer(configuration(base, tmp_path)).load_model(served(base))
    assert sampler.expand_batch_to_tokens is right and not caplog.text
    sampler.expand_batch_to_tokens = lambda values, ends, size: values.new_empty(size)
    HeadProposer(configuration(base, tmp_path)).load_model(served(base))
    assert "expand_batch_to_tokens loses temperatures on cpu; replaced" in caplog.text
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    heat = sampler.expand_batch_to_tokens(torch.tensor([0.5, 0.7, 0, 2]), ends, 6, replace_from=0, replace_to=1)
    assert heat.tolist() == [0.5, 0.5, 1, 1, 1, 2]
    top_k = sampler.expand_batch_to_tokens(torch.tensor([3, 4, 5, 6], dtype=torch.int32), ends, 6)
    assert top_k.tolist() == [3, 3, 5, 5, 5, 6] and top_k.dtype == torch.int32
    none = torch.zeros(0, 8)  # logits of drafts, where no request has any
    assert sampler.apply_top_k_top_p(none, torch.zeros(0, dtype=torch.int32), None).shape == (0, 8)
    assert sampler.apply_top_k_top_p(torch.zeros(1, 8), torch.tensor([2]), None).shape == (1, 2)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_register_repairs_the_sampler_for_every_drafter_on_cpus(is_cpu, runner_class, monkeypatch):
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: is_cpu)
    monkeypatch.setitem(sys.modules, platforms.__name__, platforms)
    sampler = sys.modules["vllm.v1.sample.rejection_sampler"]
    sampler.expand_batch_to_tokens = lambda values, ends, size: values.new_full((size,), -1)
    register()
    heat = sampler.expand_batch_to_tokens(torch.tensor([0.5, 2.0]), torch.tensor([1, 3]), 3)
    assert (heat.tolist() == [0.5, 2, 2]) == is_cpu


def test_other_drafters_are_left_alone_and_other_versions_refused(runner_class):
    for _ in range(2):
        listen()
    other = SimpleNamespace(propose=lambda sampled, lengths, ids, slot_mappings: [[1] for _ in sampled])
    runner = runner_class(other, 2)
    runner.lengths = [1, 1]
    assert runner.propose_draft_token_ids(None, [[1], [2]], None, None, None, None, None, None, None) == [[1], [1]]
    runner_class.propose_draft_token_ids = lambda self, scheduler_output, sampled_token_ids: None
    with pytest.raises(RuntimeError, match="sample_hidden_states.*spec_decode_metadata.*sampling_metadata"):
        listen()


def test_heads_that_do_not_fit(runner_class, tmp_path):
    base, _ = saved("ff full", tmp_path)
    with pytest.raises(ValueError, match="vocab_size.*5.*80"):
        HeadProposer(configuration(backbone(vocab_size=80), tmp_path))
    layered = MTPHeads.from_backbone(base, window=3, head_type="layer")
    layered.save_pretrained(tmp_path / "layer")
    with pytest.raises(ValueError, match="head_type=.*'layer'"):
        HeadProposer(configuration(base, tmp_path / "layer", count=2))
    proposer = HeadProposer(configuration(base, tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="weight"):
        proposer.load_model(served(base))


def test_a_shard_of_the_unembedding_is_gathered_or_refused(runner_class, tmp_path):
    """vLLM's own method gathers; where it gives a rank nothing, shared leaves are refused and full ones work."""
    for kind, works in (("cp", False), ("ff full", True)):
        base, _ = saved(kind, tmp_path / kind)
        proposer = HeadProposer(configuration(base, tmp_path / kind))
        served(base).compute_logits = lambda states: None
        proposer.load_model(base)
        proposer.take(torch.randn(1, 32), None, SimpleNamespace(all_greedy=True, temperature=None))
        if works:
            assert len(proposer.propose([[4]], [5], None)[0]) == DRAFTS
        else:
            with pytest.raises(RuntimeError, match="one rank"):
                proposer.propose([[4]], [5], None)
