"""The conformance kit: planted faults of decoding loops are found, and right loops raise no alarm."""

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.test_cli import run
from tokenahead.testing import ALARM, DECODERS, chi_square, disturbed, verify, verify_greedy
from tokenahead.training.conformance.decoders import plain, small_model
from tokenahead.training.conformance.kit import BROKEN, KEPT, REFUSED

DRAFTS = 2
FAULTS = [
    "q of another temperature", "residual not renormalised", "bonus token dropped", "argmax drafts called samples",
]  # fmt: skip


def loop(fault: str | None = None):
    """A speculative loop over a batch, for calls without processors; right, or with a fault of sampled decoding."""

    @torch.no_grad()
    def decode(
        model, input_ids, attention_mask=None, max_new_tokens=3, do_sample=False, temperature=1.0, top_k=0, **rest
    ):
        rest = {name: value for name, value in rest.items() if name not in ("pad_token_id", "top_p")}
        if rest or not bool(attention_mask.all()):
            raise NotImplementedError(f"{sorted(rest) or 'padding'}")

        def probs_of(source, ids, heat=temperature):
            logits = source(ids).logits / heat if do_sample else source(ids).logits * 1e4
            if top_k and do_sample:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
            return logits.softmax(-1)

        small, count, start = disturbed(model), len(input_ids), input_ids.shape[1]
        every, last = torch.arange(count), start + max_new_tokens * (2 if fault == "bonus token dropped" else 1)
        ids = torch.nn.functional.pad(input_ids, (0, last - start + 2 * DRAFTS + 1))
        is_text = torch.ones_like(ids, dtype=torch.bool)
        ends = torch.full((count,), start)
        while bool((ends < last).any()):
            drafts, q = ids.clone(), []
            for step in range(DRAFTS):
                q.append(probs_of(small, drafts)[every, ends + step - 1])
                drawn_from = q[-1]
                if fault == "q of another temperature":
                    drawn_from = probs_of(small, drafts, 2 * temperature)[every, ends + step - 1]
                token = drawn_from.multinomial(1)[:, 0]
                if fault == "argmax drafts called samples":
                    token = drawn_from.argmax(-1)
                drafts[every, ends + step] = token
            p = probs_of(model, drafts)
            going = torch.ones(count, dtype=torch.bool)
            for step in range(DRAFTS + 1):
                target = p[every, ends - 1].clone()
                if step < DRAFTS:
                    token = drafts[every, ends]
                    ratio = target[every, token] / q[step][every, token]
                    kept = going & (torch.rand(count, dtype=p.dtype) < ratio)
                    rest_of = (target - q[step]).clamp(min=0)
                    if fault == "residual not renormalised":
                        rest_of = target
                    rest_of = torch.where(rest_of.sum(-1, keepdim=True) > 0, rest_of, target)
                    added = torch.where(kept, token, rest_of.multinomial(1)[:, 0])
                    is_written = going
                else:
                    kept, added, is_written = going, target.multinomial(1)[:, 0], going
                    if fault == "bonus token dropped":  # it is read on from, and returned to nobody
                        is_text[every, ends] = ~going
                ids[every, ends] = torch.where(is_written, added, ids[every, ends])
                ends = (ends + is_written).clamp(max=last + DRAFTS)
                going = kept
        return torch.stack([row[shown][: start + max_new_tokens] for row, shown in zip(ids, is_text)])

    return decode


def results(found, *names):
    return {each.check: each.result for each in found if not names or each.check in names}


def test_a_right_loop():
    """What it does not support is refused, and named; the rest is kept."""
    found = results(verify(loop(), samples=1000))
    assert found["greedy"] == found["sampled"] == found["sampled, warped"] == KEPT
    assert found["ragged batch"] == found["stop strings"] == found["sampled, processors"] == REFUSED


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault):
    found = {each.check: each for each in verify(loop(fault), samples=1200)}
    assert found["sampled"].result == BROKEN and found["sampled"].p_value < ALARM


BROKEN_THERE = {"transformers: prompt lookup": ["stop strings"]}
"""What other loops break (docs/upstream.md)."""


@pytest.mark.parametrize("name", [name for name in DECODERS if "vLLM" not in name])
def test_right_loops_raise_no_alarm(name):
    """What loops of others do not support is refused; ours keep everything."""
    is_foreign = ":" in name
    found = results(verify(DECODERS[name], samples=120 if is_foreign else 1000))
    assert [check for check, result in found.items() if result == BROKEN] == BROKEN_THERE.get(name, [])
    assert is_foreign or set(found.values()) == {KEPT}
    assert found["greedy"] == KEPT or "dflash" in name and find_spec("dflash") is None


class StandIn:
    """vLLM's `LLM` and `SamplingParams`, as far as the kit asks for them, over transformers."""

    is_dead, seen = False, {}

    def __init__(self, model, dtype, max_model_len, enforce_eager, speculative_config, gpu_memory_utilization):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self.tokenizer = AutoTokenizer.from_pretrained(model)

    def generate(self, prompts, params, use_tqdm):
        if params.get("top_k"):  # where 0.32 ends on CPUs: docs/upstream.md
            self.model = None
        return [self.completed(torch.tensor([prompt["prompt_token_ids"]]), **params) for prompt in prompts]

    def completed(self, ids, max_tokens, stop_token_ids, stop=None, temperature=1.0, **rest):
        assert all(end < self.model.config.vocab_size for end in stop_token_ids)
        assert rest.pop("ignore_eos") and rest.pop("include_stop_str_in_output")
        options = {"eos_token_id": stop_token_ids or None, "do_sample": temperature > 0} | rest
        options |= {"temperature": temperature} if temperature else {}
        options |= {"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}
        out = self.model.generate(ids, max_new_tokens=max_tokens, pad_token_id=0, **options)
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=out[0, ids.shape[1] :].tolist())])


def test_vllms_engine(monkeypatch):
    """It is refused by name where it is missing; options become vLLM's, and rows come back as one tensor.

    A check that ends the engine leaves the next ones a new one.
    """
    assert all("pip install vllm" in each.words for each in verify(DECODERS["vLLM: ngram"], samples=4))
    stand_in = ModuleType("vllm")
    stand_in.LLM, stand_in.SamplingParams = StandIn, dict
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    found = results(verify(DECODERS["vLLM: ngram"], samples=40))
    refused = [check for check, result in found.items() if result == REFUSED]
    odd = ["processors", "user's processor", "allowed tokens"]
    odd = [each for check in odd for each in (check, f"{check}, ragged batch")]
    assert refused == [*odd, "sampled, warped"] and found["sampled, processors"] == KEPT
    assert BROKEN not in found.values()


def test_a_loop_that_forgets_what_is_asked():
    """Options that are ignored are seen, each by its check."""

    def forgetful(model, input_ids, **options):
        left = {name: value for name, value in options.items() if name not in ("eos_token_id", "stop_strings")}
        return DECODERS["transformers: plain"](model, input_ids, **left)

    found = results(verify(forgetful, samples=500))
    asked = ["eos", "stop strings", "processors"]
    broken = [check for check, result in found.items() if result == BROKEN]
    assert broken == [each for check in asked for each in (check, f"{check}, ragged batch")]


def test_a_model_that_has_learned_is_compared_with_its_own_texts():
    model = small_model(1, 8)
    for _ in range(2):
        assert {each.result for each in verify_greedy(plain, model)} == {KEPT}
        with torch.no_grad():
            model.get_output_embeddings().weight.copy_(model.get_output_embeddings().weight.roll(1, 0))


def test_the_chi_square_test_agrees_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    draws = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    cells = torch.multinomial(probs, 500, replacement=True, generator=draws)
    for distribution in (probs, torch.tensor([0.3, 0.4, 0.2, 0.1], dtype=torch.float64)):
        want = stats.chisquare(torch.bincount(cells, minlength=4).numpy(), (distribution * 500).numpy()).pvalue
        assert chi_square(cells, distribution) == pytest.approx(want, rel=1e-9)
    assert chi_square(cells, torch.tensor([0.5, 0.5, 0.0, 0.0])) == 0.0


def test_the_command_shows_a_table_and_its_exit_status(capsys):
    assert run("verify", "--decoders", "ngram", "--samples", "500") == 0
    shown = capsys.readouterr().out
    assert "ngram" in shown and "stop strings" in shown and max(map(len, shown.splitlines())) <= 80


def test_the_exit_status_is_of_what_is_ours(capsys):
    """Transformers' loop does not end at a stop string, which docs/upstream.md says."""
    assert run("verify", "--decoders", "transformers: prompt lookup", "--samples", "500") == 0
    assert "transformers: prompt lookup: stop strings BROKEN (not ours, known)" in capsys.readouterr().out


def test_the_command_verifies_strangers_functions(tmp_path, monkeypatch, capsys):
    """Of a module in the working directory; what raises is refused, and what is no function an error of one line."""
    (tmp_path / "strange.py").write_text(
        "class Loops:\n    broken = lambda model, ids, **options: ids\nraises = lambda *_, **__: {}[0]\nnothing = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    assert run("verify", "--function", "strange:Loops.broken", "--samples", "500") == 1
    assert "0 of 1 keep all" in (shown := capsys.readouterr().out) and "strange:Loops.broken: " in shown
    assert run("verify", "--function", "strange:raises", "--samples", "500") == 0
    assert len((shown := capsys.readouterr().out).splitlines()) < 5 and "strange:raises: refused: KeyError" in shown
    for name in ("strange:nothing", "strange:gone", "gone:gone"):
        assert run("verify", "--function", name) == 1 and f"--function {name}" in capsys.readouterr().err
