"""The conformance kit: planted faults of decoding loops are found, and right loops raise no alarm."""

import json
import sys

import pytest
import torch

from tests.benchmark_modules import other_loops
from tests.speculative_loops import Loop, Tilted
from tests.test_cli import run
from tokenahead.testing import ALARM, DECODERS, chi_square, verify, verify_greedy, verify_sampled
from tokenahead.training.commands import verify as command
from tokenahead.training.conformance.kit import BROKEN, KEPT, REFUSED, Verified, plain, small_model
from tokenahead.training.conformance.sampled import CoarseTests

PLACES = [(drafts, place) for drafts in range(1, 7) for place in range(drafts)]


def drawn(decode, check="sampled", samples=1000, seed=0):
    """What one check of sampled texts finds."""
    found = verify_sampled(decode, samples, seed, longest_draft=6, checks=[check])
    return found[0]


def results(found, *names):
    return {each.check: each.result for each in found if not names or each.check in names}


def test_a_right_loop():
    """What it does not support is refused, and named; the rest is kept."""
    found = results(verify(Loop(), samples=60))
    refused = {check for check, result in found.items() if result == REFUSED}
    assert BROKEN not in found.values() and all("stop strings" in each or "allowed" in each for each in refused)
    assert len(refused) == 4 and len(found) == 26


EXACT = [(fault, *each) for fault in ("accepts", "residual is p") for each in PLACES]
"""Drafts are the model's own before the place, so that it is reached in every cycle."""


@pytest.mark.by_day("accepts-3-1", "residual is p-2-1")
@pytest.mark.parametrize(("fault", "drafts", "place"), EXACT)
def test_a_fault_at_any_place_of_a_block_is_found(fault, drafts, place):
    found = drawn(Loop(fault, drafts, place, by=0.6, exact=True), "sampled, places", samples=100)
    assert found.result == BROKEN and found.p_value < ALARM


@pytest.mark.slow
@pytest.mark.parametrize("by", [0.2, 0.3, 0.6])
@pytest.mark.parametrize(("fault", "drafts", "place"), EXACT)
def test_a_fault_behind_drafts_of_a_copy_is_found(fault, drafts, place, by):
    """Where the drafts before the place are often rejected."""
    assert drawn(Loop(fault, drafts, place, by=by), "sampled, places", samples=4000).result == BROKEN


FAULTS = [(fault, drafts, 0.2, "sampled, places", 200) for drafts in (1, 2, 3)
          for fault in ("bonus of q", "bonus is the likeliest")]  # fmt: skip
FAULTS += [("acceptance 5 % too high", drafts, 0.3, "sampled, places", 1000) for drafts in (1, 3, 6)]
FAULTS += [("accepts all late", 2, 0.6, "sampled, ragged batch", 2000), ("residual is p late", 2, 0.6, "sampled", 2000)]
FAULTS += [("float16", 3, 0.3, "sampled, precision", 40), ("rounded", 3, 0.3, "sampled, precision", 40)]
IGNORED = {
    "top_p": ["top_p"], "top_k": ["warped"], "temperature": ["warped"], "min_p": ["other warpers"],
    "typical_p": ["other warpers"], "epsilon_cutoff": ["other warpers"], "eta_cutoff": ["other warpers"],
    "repetition_penalty": ["processors"], "min_new_tokens": ["processors"], "eos_token_id": ["eos"],
    "logits_processor": ["user's processor", "constraint"],
}  # fmt: skip
FAULTS += [(f"{name} ignored", 3, 0.3, f"sampled, {check}", 1000) for name in IGNORED for check in IGNORED[name]]
FAULTS += [("processors see the prefix", 3, 0.3, f"sampled, {check}", 1000)
           for check in ("processors", "user's processor", "constraint")]  # fmt: skip


@pytest.mark.by_day(
    "bonus of q-2", "accepts all late-2", "float16-3", "top_p ignored-3", "eos_token_id ignored-3",
    "processors see the prefix-3-constraint",
)  # fmt: skip
@pytest.mark.parametrize(
    ("fault", "drafts", "by", "check", "samples"),
    FAULTS,
    ids=[f"{fault}-{n}" + f"-{check[9:]}" * ("processor" in fault) for fault, n, _, check, _ in FAULTS],
)
def test_a_fault_is_found_by_its_check(fault, drafts, by, check, samples):
    found = drawn(Loop(fault, drafts, by=by), check, samples)
    assert found.result == BROKEN
    assert check != "sampled, precision" or found.words == "drafts are accepted by numbers of 16 bits"


@pytest.mark.slow
def test_acceptance_in_float16_shows_in_rare_tokens(monkeypatch):
    """Also of engines whose operations nobody sees: of every 2,000 rare drafts one is kept."""
    monkeypatch.setattr(
        CoarseTests, "__torch_dispatch__", lambda self, func, types, args, kwargs: func(*args, **kwargs)
    )
    found = drawn(Loop("float16", 3), "sampled, precision", samples=4000)
    assert found.result == BROKEN and found.p_value < ALARM


@pytest.mark.by_day("2", "4")
@pytest.mark.parametrize("seed", range(20))
def test_right_loops_with_drafts_of_any_length_raise_no_alarm(seed):
    decode = Loop(drafts=1 + seed % 6, by=0.15 + 0.1 * (seed % 5), place=seed % 3, exact=seed % 2 == 0)
    checks = ["sampled", "sampled, ragged batch", "sampled, eos", "sampled, constraint", "sampled, precision"]
    samples = 60 if seed % 3 else 500
    for check in ("sampled, places", checks[seed % 5]):
        assert drawn(decode, check, samples=samples, seed=seed).result == KEPT


def test_nineteen_of_twenty_errors_of_the_size_that_is_documented_are_found():
    """3.5 % by 4,000 texts are 9.9 % by 500."""
    found = [drawn(Tilted(0.035 * 8**0.5), samples=500, seed=seed).result for seed in range(4)]
    assert found.count(BROKEN) >= 3  # 3.8 in the mean; 2 or fewer come once in 70
    assert drawn(Tilted(0.0)).result == KEPT


@pytest.mark.parametrize(("error", "result"), [(KeyError, BROKEN), (ImportError, BROKEN), (ValueError, REFUSED)])
def test_errors_are_faults_unless_they_refuse(error, result):
    def decode(model, ids, **options):
        raise error("temperature")

    found = drawn(decode)
    assert found.result == result and error.__name__ in found.words


BROKEN_THERE = {"transformers: prompt lookup": ["stop strings"]}
"""What other loops break (docs/upstream.md)."""


@pytest.mark.by_day("heads")
@pytest.mark.parametrize("name", DECODERS)
def test_right_loops_raise_no_alarm(name):
    """What loops of others do not support is refused; ours keep everything."""
    is_foreign = ":" in name
    found = results(verify(DECODERS[name], samples=120 if is_foreign else 200))
    assert [check for check, result in found.items() if result == BROKEN] == BROKEN_THERE.get(name, [])
    assert is_foreign or set(found.values()) == {KEPT}
    assert found["greedy"] == KEPT


def test_a_loop_whose_package_is_missing_is_refused_by_name():
    assert all(
        each.result == REFUSED and "pip install vllm" in each.words for each in verify(other_loops.vllm, samples=4)
    )


def test_a_loop_that_forgets_what_is_asked():
    """Options that are ignored are seen, each by its check."""

    def forgetful(model, input_ids, **options):
        left = {name: value for name, value in options.items() if name not in ("eos_token_id", "stop_strings")}
        return DECODERS["transformers: plain"](model, input_ids, **left)

    found = results(verify(forgetful, samples=500))
    asked = ["eos", "stop strings", "processors"]
    broken = [check for check, result in found.items() if result == BROKEN]
    asked = [each for check in asked for each in (check, f"{check}, ragged batch")]
    assert broken == [*asked, "sampled, processors", "sampled, eos"]


def test_a_model_that_has_learned_is_compared_with_its_own_texts():
    model = small_model(1, 8)
    for _ in range(2):
        assert {each.result for each in verify_greedy(plain, model)} == {KEPT}
        with torch.no_grad():
            model.get_output_embeddings().weight.copy_(model.get_output_embeddings().weight.roll(1, 0))


@pytest.mark.parametrize(("by", "result", "counts"), [(3, KEPT, "near-ties {}, different 0"),
                                                      (1, BROKEN, "near-ties 0, different {}")])  # fmt: skip
def test_a_token_of_equal_logits_is_told_from_a_wrong_one(by, result, counts):
    """Tokens 2, 3 and 4 have the logits of 5, 6 and 7, and plain decoding takes the first of two."""
    model = small_model(1, 8)
    unembedding = model.get_output_embeddings().weight
    with torch.no_grad():
        unembedding[5:] = unembedding[2:5]

    def swaps(model, input_ids, **options):
        ids, width = plain(model, input_ids, **options), input_ids.shape[1]
        for row in ids:
            place = next((at for at in range(width, len(row)) if 2 <= row[at] < 5), None)
            if place is not None:
                row[place] += by
        return ids

    found = {each.check: each for each in verify_greedy(swaps, model)}
    for check, texts in (("greedy", 4), ("ragged batch", 4), ("padded prompt", 1)):
        assert found[check].result == result
        assert f"equal 0, {counts.format(texts)}; differs from new token " in found[check].words


def test_the_chi_square_test_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    draws = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    cells = torch.multinomial(probs, 500, replacement=True, generator=draws)
    for distribution in (probs, torch.tensor([0.3, 0.4, 0.2, 0.1], dtype=torch.float64)):
        want = stats.chisquare(torch.bincount(cells, minlength=4).numpy(), (distribution * 500).numpy()).pvalue
        assert chi_square(cells, distribution) == pytest.approx(want, rel=1e-9)
    assert chi_square(cells, torch.tensor([0.5, 0.5, 0.0, 0.0])) == 0.0


@pytest.mark.parametrize(
    ("name", "result", "status", "shown"),
    [
        ("ngram", KEPT, 0, "1 of 1 keep all"),
        ("ngram", BROKEN, 1, "ngram: stop strings BROKEN\n"),
        ("transformers: prompt lookup", BROKEN, 0, ": stop strings BROKEN (not ours, known)"),
    ],
)
def test_the_exit_status_is_of_what_is_ours(name, result, status, shown, monkeypatch, capsys):
    found = [Verified("greedy", KEPT), Verified("stop strings", result, "differs from new token 3 on")]
    monkeypatch.setattr(command, "verify", lambda decode, samples: found)
    assert run("verify", "--decoders", name, "--samples", "500") == status
    out = capsys.readouterr().out
    assert shown in out and "greedy" in out and max(map(len, out.splitlines())) <= 80
    assert run("verify", "--decoders", name, "--json") == status
    assert json.loads(capsys.readouterr().out)[name][1]["result"] == result
    assert run("verify", "--decoders", name, "--markdown") == status
    assert f"| {name} | {1 + (result == KEPT)} of 2 |" in capsys.readouterr().out


def test_the_command_verifies_strangers_functions(tmp_path, monkeypatch, capsys):
    """Of a module in the working directory."""
    (tmp_path / "strange.py").write_text(
        "class Loops:\n    broken = lambda model, ids, **options: ids\nraises = lambda *_, **__: {}[0]\n"
        "def refuses(*_, **__):\n    raise ValueError('no batch')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    assert run("verify", "--function", "strange:Loops.broken", "--samples", "500") == 1
    assert "0 of 1 keep all" in (shown := capsys.readouterr().out) and "strange:Loops.broken: " in shown
    assert run("verify", "--function", "strange:raises", "--samples", "500") == 1
    assert "KeyError" in (shown := capsys.readouterr().out) and "0 of 1 keep all" in shown
    assert run("verify", "--function", "strange:refuses", "--samples", "500") == 0
    shown = capsys.readouterr().out
    assert "ValueError: no batch" in shown and "1 of 1 keep all" in shown
    for name in ("strange:gone", "gone:gone"):
        assert run("verify", "--function", name) == 1 and f"--function {name}" in capsys.readouterr().err
