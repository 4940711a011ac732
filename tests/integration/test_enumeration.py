"""The distribution of what is emitted, enumerated: every head family, both rules, plain and warped drafts and
targets."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.ptp_models import backbone, student
from tokenahead.generation.call.options import DraftOptions
from tokenahead.generation.call.processing import Processing
from tokenahead.generation.verification.rules import block_acceptance, token_acceptance
from tokenahead.modeling.heads.circuit_head import circuit_from_logits

V, WINDOW, RANK = 3, 4, 2
WARPS = {
    "plain": [],
    "temperature": [TemperatureLogitsWarper(0.5)],
    "top_p": [TopPLogitsWarper(0.9)],
    "top_k": [TopKLogitsWarper(2)],
}
DRAFTS = torch.tensor(list(itertools.product(range(V), repeat=WINDOW - 1)))


def distribution_of(kind, seed):
    """A random distribution of the next tokens after a kept one, as a batch over all drafts."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "mask":
        return mask_distribution(generator)
    normal = lambda *shape: 1.5 * torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    rank = 1 if kind == "ff" else RANK
    parameters = {"leaf_logits": normal(WINDOW, rank, V)}
    parameters |= {} if kind == "ff" else {"root_logits": normal(rank)}
    parameters |= {"trans_logits": normal(WINDOW - 1, rank, rank)} if kind == "hmm" else {}
    parameters |= {"node_logits": normal(WINDOW - 2, rank, rank)} if kind == "btree" else {}
    parameters = {key: value.expand(len(DRAFTS), *value.shape) for key, value in parameters.items()}
    return circuit_from_logits(kind, **parameters).condition(torch.full((len(DRAFTS),), 1))


@torch.no_grad()
def mask_distribution(generator):
    """The distribution of a group of three masks behind a kept token, by a random sampler head."""
    config = LlamaConfig(vocab_size=V, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                         bos_token_id=None, eos_token_id=None, pad_token_id=None)  # fmt: skip
    model = student("mask", backbone(config).double(), num_slots=WINDOW - 1).requires_grad_(False)
    for parameter in (*model.sampler.parameters(), model.get_output_embeddings().weight):
        parameter.normal_(generator=generator)
    states = torch.randn(WINDOW - 1, 8, generator=generator, dtype=torch.float64)
    return model.slot_distribution(states.expand(len(DRAFTS), -1, -1), torch.full((len(DRAFTS),), 1))


def target_rows(processing, seed):
    """Processed next-token distributions of a random order-2 target along every draft, [N, m + 1, V]."""
    logits = 1.5 * torch.randn(V, V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    text = torch.cat([torch.tensor([[0, 1]]).expand(len(DRAFTS), 2), DRAFTS], dim=1)
    return processing.warp(torch.stack([logits[text[:, i], text[:, i + 1]] for i in range(WINDOW)], 1).softmax(-1))


def drafted(distribution, processing):
    """q along every draft [N, m, V], through the drafter's own path with the choice dictated."""
    position = itertools.count()

    def dictate(probs):
        q = processing.warp(probs)
        step = next(position)
        return (DRAFTS[:, step], q) if probs.dim() == 2 else (DRAFTS, q)

    return distribution.draft(dictate)[1]


def ends_of(rule, drafts, q, p):
    """How likely 0, .., m drafts are kept, [N, m + 1], and the distributions of the token added then."""
    accept, residual = {"token": token_acceptance, "block": block_acceptance}[rule](drafts, q, p)
    one = torch.ones_like(accept[:, :1])
    if rule == "token":
        return torch.cat([one, accept.cumprod(1)], 1) * torch.cat([1 - accept, one], 1), residual
    later = (1 - accept).flip(1).cumprod(1).flip(1)
    return torch.cat([one, accept], 1) * torch.cat([later, one], 1), residual


def shares_of_lengths(q, other, threshold):
    """How often each draft ends after 1, .., m tokens, [N, m], while another row of the batch drafts, too."""
    options, shares = SimpleNamespace(threshold=threshold), torch.zeros(len(DRAFTS), WINDOW - 1, dtype=q.dtype)
    chances = other.gather(-1, DRAFTS[..., None])[..., 0].prod(1)
    for one, two in itertools.product(range(len(DRAFTS)), repeat=2):
        length = DraftOptions.sure_length(options, DRAFTS[[one, two]], torch.stack([q[one], other[two]]))
        shares[one, length - 1] += chances[two]
    return shares


def emitted(rule, q, p, shares=None):
    """Distribution of the next m + 1 tokens: accepted drafts, the added token, then the target.

    `shares` [N, m] says how often a draft ends after 1, .., m tokens; None: it never ends before m.
    """
    rows = {tuple(draft): row for draft, row in zip(DRAFTS.tolist(), p)}
    first = {prefix[:i]: row[i] for prefix, row in rows.items() for i in range(WINDOW)}
    distribution = dict.fromkeys(itertools.product(range(V), repeat=WINDOW), 0.0)
    for length in range(1, WINDOW) if shares is not None else [WINDOW - 1]:
        stopped, residual = ends_of(rule, DRAFTS[:, :length], q[:, :length], p[:, : length + 1])
        for n, draft in enumerate(map(tuple, DRAFTS.tolist())):
            drawn = float(q[n].gather(-1, DRAFTS[n][:, None]).prod())
            drawn *= 1 if shares is None else float(shares[n, length - 1])
            for count, added in itertools.product(range(length + 1), range(V)) if drawn else []:
                mass = drawn * float(stopped[n, count]) * float(residual[n, count, added])
                head = (*draft[:count], added)
                for tail in itertools.product(range(V), repeat=WINDOW - len(head)):
                    text, value = head + tail, mass
                    for i in range(len(head), WINDOW):
                        value *= float(first[text[:i]][text[i]])
                    distribution[text] += value
    target = {}
    for text in distribution:
        target[text] = 1.0
        for i in range(WINDOW):
            target[text] *= float(first[text[:i]][text[i]])
    return distribution, target


def test_the_emitted_distribution_is_the_targets():
    for warp, rule, kind in itertools.product(WARPS, ["token", "block"], ["ff", "cp", "hmm", "btree", "mask"]):
        processing = Processing(LogitsProcessorList(WARPS[warp]))
        for seed in range(2):
            q = drafted(distribution_of(kind, seed), processing)
            p = target_rows(processing, seed + 50)
            distribution, target = emitted(rule, q, p)
            assert abs(sum(distribution.values()) - 1) < 1e-12
            assert max(abs(distribution[text] - target[text]) for text in distribution) < 1e-12


def test_drafts_that_end_where_no_row_is_sure_emit_the_targets_distribution():
    """Both rows' drafts say where the drafts of the batch end (`assistant_confidence_threshold`)."""
    for warp, rule, kind in itertools.product(["plain", "top_p"], ["token", "block"], ["ff", "hmm", "btree"]):
        processing = Processing(LogitsProcessorList(WARPS[warp]))
        q, other = (drafted(distribution_of(kind, seed), processing) for seed in (0, 7))
        p, shares = target_rows(processing, 50), shares_of_lengths(q, other, 0.4)
        assert (shares > 0).any(0).sum() > 1, "lengths must differ, or the test shows nothing"
        distribution, target = emitted(rule, q, p, shares)
        assert max(abs(distribution[text] - target[text]) for text in distribution) < 1e-12


@pytest.mark.core
def test_enumeration_notices_drafts_that_end_by_what_comes_behind():
    """A draft whose last token decides whether its first one is verified at all."""
    processing = Processing(LogitsProcessorList())
    q, p = drafted(distribution_of("hmm", 0), processing), target_rows(processing, 50)
    shares = torch.nn.functional.one_hot(torch.where(DRAFTS[:, -1] == 0, 0, 2), WINDOW - 1).double()
    distribution, target = emitted("block", q, p, shares)
    assert max(abs(distribution[text] - target[text]) for text in distribution) > 1e-4
