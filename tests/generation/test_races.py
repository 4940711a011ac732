"""Block verification as a race: when it is taken, and what it makes of targets that are no distribution.

That it draws from the distributions of block verification is tested with `verify` in `test_verification`.
"""

import torch

from tokenahead.generation.contract import DraftTree
from tokenahead.generation.verification import verifiers
from tokenahead.generation.verification.verifiers import SampledVerifier, race_block


def rows(batch: int, length: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts [B, m] and equal distributions q [B, m, v], p [B, m + 1, v]: every draft is kept."""
    p = torch.rand(batch, length + 1, size).softmax(-1)
    return torch.randint(size, (batch, length)), p[:, :-1].clone(), p


def test_a_race_keeps_nothing_after_a_target_that_is_no_distribution():
    draft, q, p = rows(50, 3, 6)
    p[:10, 0], p[10:20, 1] = torch.nan, torch.nan
    accepted, tokens, check = race_block(draft, q, p)
    assert check.isnan().tolist() == [True] * 10 + [False] * 40
    assert (accepted[:20] == 0).all() and (accepted[20:] == 3).all() and (tokens < 6).all()


def test_a_race_leaves_its_inputs_alone_and_uses_its_generator_only():
    draft, q, p = rows(64, 3, 6)
    q = q.roll(1, -1)
    before, state = [tensor.clone() for tensor in (draft, q, p)], torch.get_rng_state()
    runs = [race_block(draft, q, p, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip((draft, q, p), before))
    assert all(torch.equal(one, other) for one, other in zip(runs[0], runs[1]))
    assert not torch.equal(runs[0][1], runs[2][1])


def test_drawn_chains_are_raced_on_accelerators_alone(monkeypatch):
    draft, q, p = rows(4, 3, 6)
    there = [tensor.to("meta") for tensor in (draft, q)]
    races = []
    monkeypatch.setattr(verifiers, "race_block", lambda *args: races.append(args) or race_block(*args))
    here = SampledVerifier().verify(DraftTree.chain(draft, q), p.log())
    for verifier, tree in ((SampledVerifier("token"), there), (SampledVerifier(), there[:1])):
        verifier.verify(DraftTree.chain(*tree), p.log().to("meta"))
    assert not races
    raced = SampledVerifier().verify(DraftTree.chain(*there), p.log().to("meta"))
    assert len(races) == 1
    for name in ("num_accepted", "tokens"):
        one, other = getattr(raced, name), getattr(here, name)
        assert one.shape == other.shape and one.dtype == other.dtype
    assert raced.check.shape == here.check.shape
