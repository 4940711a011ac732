"""On a GPU: texts of recorded and compiled cycles are those of plain decoding, and a second call records nothing.

pytest -m gpu -n 0 tests/generation/test_on_gpu.py
"""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.backbones import Reading, backbone, prompts, train_eagle, train_heads
from tests.models import left_padded, tiny_model
from tokenahead import MTPHeads, NgramDrafter, SuffixDrafter, free_buffers
from tokenahead.testing import chi_square

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NEW = 40
GREEDY = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
MODES = {
    "eager": {},
    "recorded": {"cache_implementation": "static", "disable_compile": True},
    "compiled": {"cache_implementation": "static"},
}
RANKED = "cp", "hmm", "btree"


def heads(kind):
    def make(model):
        rank = {"rank": 3} if kind in RANKED else {}
        return MTPHeads.from_backbone(model, window=4, head_type=kind, **rank)

    return make


DRAFTERS = {kind: heads(kind) for kind in ("ff", *RANKED, "medusa", "hydra", "layer")} | {
    "trained heads": train_heads,
    "EAGLE-1": lambda model: train_eagle(model, 1),
    "EAGLE-3": lambda model: train_eagle(model, 3),
    "n-grams": lambda model: NgramDrafter(longest=1).attach(model),
    "suffixes": lambda model: SuffixDrafter().attach(model),
}


@pytest.fixture(autouse=True)
def exact():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    yield
    torch.set_float32_matmul_precision(before)


def prepared(name, dtype):
    model = backbone()
    drafter = DRAFTERS[name](model)
    if isinstance(drafter, torch.nn.Module):
        drafter.to("cuda", dtype)
    return model.to("cuda", dtype), drafter


def batch_of(rows, seed=5):
    return {name: tensor.cuda() for name, tensor in left_padded(prompts(rows, seed=seed)).items()}


def decoded(model, drafter, batch, **options):
    return model.generate(
        **batch, **GREEDY | options, assistant_model=drafter, use_mtp=True, return_dict_in_generate=True
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_texts_are_those_of_plain_decoding(name, mode, dtype):
    model, drafter = prepared(name, dtype)
    for rows in (1, 5):
        plain = model.generate(**batch_of(rows), **GREEDY, use_mtp=False)
        for call in range(2):
            out = decoded(model, drafter, batch_of(rows), **MODES[mode])
            gc.collect()
            assert torch.equal(out.sequences, plain)
            if call and (told := out.speculation.graphs) is not None:
                assert not told.recorded and not told.buffers_made


@pytest.mark.parametrize("mode", ["recorded", "compiled"])
def test_whole_cycles_of_heads_are_replayed(mode):
    model, drafter = prepared("hmm", torch.float32)
    told = [decoded(model, drafter, batch_of(3, seed), **MODES[mode]).speculation for seed in (5, 6)]
    assert [each.graphs.recorded for each in told] == [1, 0] and not told[0].graphs.reasons
    assert told[1].graphs.replayed["cycle"] == told[1].backbone_calls - 1
    assert free_buffers(model)


@pytest.mark.parametrize("kind", ["ff", *RANKED])
def test_cycles_of_evabyte_are_replayed_across_windows(kind):
    rank = {"rank": 2} if kind in RANKED else {}
    model = tiny_model(mtp_head=dict(head_type=kind, window=4, **rank), num_pred_heads=4).to("cuda", torch.float64)
    plain = model.generate(**batch_of(3), **GREEDY, use_mtp=False)
    for recorded in (1, 0):
        options = dict(use_mtp=True, return_dict_in_generate=True, cache_implementation="static")
        out = model.generate(**batch_of(3), **GREEDY, **options)
        told = out.speculation.graphs
        assert torch.equal(out.sequences, plain) and (told.recorded, told.reasons) == (recorded, {})
    assert told.replayed["cycle"] == out.speculation.backbone_calls - 1


@pytest.mark.parametrize("mode", MODES)
def test_sampled_texts_have_the_distribution_of_the_model(mode):
    model, drafter = prepared("trained heads", torch.float32)
    rows, prompt = 16384, torch.tensor([[5, 6, 7]], device="cuda")
    ids, options = prompt.expand(rows, -1), dict(do_sample=True, top_k=0, max_new_tokens=5)
    torch.manual_seed(0)
    drawn = decoded(model, drafter, {"input_ids": ids}, **options, **MODES[mode]).sequences[:, 3:5]  # [N, 2]
    with torch.no_grad():
        first = model(prompt).logits[0, -1].double().softmax(-1)  # [V]
        vocabulary = torch.arange(len(first), device="cuda")[:, None]
        second = model(torch.cat([prompt.expand(len(first), -1), vocabulary], 1)).logits[:, -1].double().softmax(-1)
    cells = drawn[:, 0] * len(first) + drawn[:, 1]  # [N]
    assert chi_square(cells.cpu(), (first[:, None] * second).flatten().cpu()) > 1e-4


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 8}], ids=["greedy", "sampled"])
def test_a_forward_that_reads_from_the_device_is_not_recorded(options):
    model, drafter = prepared("hmm", torch.float32)
    layer = model.get_decoder().layers[0]
    layer.mlp = Reading(layer.mlp)
    told = decoded(model, drafter, batch_of(3), **options, **MODES["recorded"]).speculation.graphs
    assert "test_on_gpu.py" in told.reasons["cycle"] and not told.recorded
    torch.rand(4, device="cuda")  # nothing is left of a recording
    other, heads = prepared("hmm", torch.float32)
    assert decoded(other, heads, batch_of(3), **options, **MODES["recorded"]).speculation.graphs.replayed["cycle"]


def test_calls_of_two_threads_are_right():
    model, drafter = prepared("hmm", torch.float64)
    batches = [batch_of(4, seed) for seed in (5, 6)]
    plain = [model.generate(**batch, **GREEDY, use_mtp=False) for batch in batches]
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(decoded, model, drafter, batch, **MODES["recorded"]) for batch in batches * 3]
        texts = [run.result().sequences for run in runs]
    assert all(map(torch.equal, texts, plain * 3))


def test_a_processor_of_the_user_leaves_draft_and_forward_recorded():
    model, drafter = prepared("hmm", torch.float64)
    options = dict(logits_processor=[lambda ids, scores: scores]) | MODES["recorded"]
    out = decoded(model, drafter, batch_of(3), **options)
    assert torch.equal(out.sequences, model.generate(**batch_of(3), **GREEDY, use_mtp=False))
    assert set(out.speculation.graphs.replayed) == {"forward"}
