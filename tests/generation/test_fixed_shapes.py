"""Cycles of fixed shapes: a replay does what the eager loop does, by the same calls at the same addresses."""

import gc
import warnings

import pytest
import torch
from transformers import CompileConfig

from tests.backbones import Reading, backbone, prompts, train_heads
from tests.fake_graphs import BlindGraph, FakeGraph
from tests.models import left_padded
from tokenahead import MTPHeads, NgramDrafter, free_buffers
from tokenahead.generation import graphs as graphs_module
from tokenahead.generation import loop as loop_module
from tokenahead.generation.backbone import static as buffers_module
from tokenahead.generation.backbone.static import Buffers
from tokenahead.generation.call.options import NumberCheck
from tokenahead.generation.results import Cycle
from tokenahead.generation.tensors.masks import cached_arange
from tokenahead.modeling.heads.attached import HeadSession

NEW = 24
COMMON = dict(max_new_tokens=NEW, pad_token_id=0, use_mtp=True, return_dict_in_generate=True)
SAMPLED = dict(do_sample=True, top_k=0)
PROCESSORS = dict(
    do_sample=True, temperature=0.8, top_k=30, top_p=0.95, min_p=0.01, typical_p=0.95, eta_cutoff=0.01,
    repetition_penalty=1.2,
)  # fmt: skip
WAYS = {
    "greedy": dict(do_sample=False, eos_token_id=None),
    "greedy, eos": dict(do_sample=False, eos_token_id=[7, 9], repetition_penalty=1.2),
    "sampled": SAMPLED | dict(eos_token_id=None),
    "processors": PROCESSORS | dict(eos_token_id=[7, 9]),
    "token rule": SAMPLED | dict(eos_token_id=7, verification="token"),
    "fixed tree": SAMPLED | dict(eos_token_id=7, draft_tree=[(0,), (1,), (0, 0)]),
    "drawn tree": SAMPLED | dict(eos_token_id=None, draft_tree={"depth": 1, "top_k": 2, "total_tokens": 5}),
    "grown tree": dict(do_sample=False, eos_token_id=7, draft_tree={"depth": 1, "top_k": 2, "total_tokens": 5}),
    "budget": dict(do_sample=False, eos_token_id=7, draft_tree={"depth": 1, "top_k": 6, "total_tokens": 6}),
}
KINDS = "ff", "cp", "hmm", "btree", "medusa", "hydra"


@pytest.fixture(scope="module")
def model():
    return backbone().double()


@pytest.fixture
def drafter(model):
    made = train_heads(model)
    yield made
    made.detach()


@pytest.fixture(autouse=True)
def fresh(model):
    yield
    free_buffers(model)
    vars(model).pop("_previous_max_cache_length", None)  # transformers keeps the room of the longest call


@pytest.fixture(params=[FakeGraph, BlindGraph])
def fake(monkeypatch, request):
    """Regions are recorded, and replayed by a fake that compares, or by one that only repeats calls."""
    monkeypatch.setitem(graphs_module.GRAPHS, "cpu", request.param)


def heads(model, kind):
    torch.manual_seed(1)
    rank = {"rank": 3} if kind in ("cp", "hmm", "btree") else {}
    return MTPHeads.from_backbone(model, window=4, head_type=kind, **rank).double().eval()


def batch_of(rows, seed=5):
    return left_padded(prompts(rows, seed=seed))


def generated(model, drafter, batch, seed=3, **options):
    torch.manual_seed(seed)
    return model.generate(**batch, **COMMON, **options, assistant_model=drafter)


def same(one, other):
    return torch.equal(one.sequences, other.sequences) and one.speculation == other.speculation


@pytest.mark.by_day("greedy, eos", "processors", "fixed tree", "grown tree")
@pytest.mark.parametrize("way", WAYS)
def test_texts_and_statistics_are_those_of_the_eager_loop(model, drafter, way):
    for rows in (1, 3):
        eager = generated(model, drafter, batch_of(rows), **WAYS[way])
        fixed = generated(model, drafter, batch_of(rows), **WAYS[way], cache_implementation="static")
        assert same(eager, fixed) and eager.speculation.graphs is None
        assert list(fixed.speculation.graphs.reasons) == ["cycle"]  # a processor has no graphs


@pytest.mark.by_day("FakeGraph-hydra")
@pytest.mark.parametrize("kind", KINDS)
def test_cycles_of_all_heads_repeat_themselves(model, kind, fake):
    drafter = heads(model, kind)
    for options in (WAYS["greedy"], WAYS["sampled"]):
        out = generated(model, drafter, batch_of(3), **options, cache_implementation="static")
        told = out.speculation.graphs
        assert told.recorded == 1 and told.replayed["cycle"] == out.speculation.backbone_calls - 3
        assert not told.reasons
    drafter.detach()


@pytest.mark.by_day(
    "FakeGraph-1-drawn tree", "BlindGraph-3-sampled", "FakeGraph-3-processors", "BlindGraph-1-grown tree"
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 3])
def test_cycles_repeat_themselves_whatever_is_asked(model, drafter, way, rows, fake):
    out = generated(model, drafter, batch_of(rows), **WAYS[way], cache_implementation="static")
    assert out.speculation.graphs.replayed["cycle"] and not out.speculation.graphs.reasons
    if "greedy" in way:
        assert same(out, generated(model, drafter, batch_of(rows), **WAYS[way]))


@pytest.mark.by_day("FakeGraph")
def test_a_compiled_call_does_not_replay_what_was_recorded_uncompiled(model, fake, monkeypatch):
    monkeypatch.setattr(type(model), "get_compiled_call", lambda model, how: model.forward)
    drafter, how = NgramDrafter(longest=1).attach(model), CompileConfig()
    how._compile_all_devices = True
    ways = dict(disable_compile=True), dict(compile_config=how), dict(disable_compile=True)
    options = WAYS["greedy"] | dict(cache_implementation="static")
    told = [generated(model, drafter, batch_of(3), **options, **way).speculation.graphs for way in ways]
    assert [each.recorded for each in told] == [1, 1, 0] and not any(each.reasons for each in told)


@pytest.mark.by_day("FakeGraph")
def test_later_calls_record_and_allocate_nothing(model, drafter, fake):
    options = WAYS["sampled"] | dict(cache_implementation="static")
    first = generated(model, drafter, batch_of(3), **options)
    again = generated(model, drafter, batch_of(3, seed=6), **options)
    gc.collect()
    held = {name: tensor.data_ptr() for name, tensor in buffers_module._KEPT[model].tensors.items()}
    third = generated(model, drafter, batch_of(3), seed=4, **options)
    gc.collect()
    assert held == {name: tensor.data_ptr() for name, tensor in buffers_module._KEPT[model].tensors.items()}
    for out in (again, third):
        told = out.speculation.graphs
        assert (told.recorded, told.buffers_made) == (0, 0)
        assert told.replayed["cycle"] == out.speculation.backbone_calls - 1  # the first cycle, too
    told = first.speculation.graphs
    assert told.recorded == 1 and told.buffers_made and told.buffer_bytes
    longer = {name: torch.nn.functional.pad(ids, (200, 0)) for name, ids in batch_of(4).items()}
    for batch in (batch_of(4), longer):
        larger = generated(model, drafter, batch, **options).speculation.graphs
        assert larger.recorded == 1 and larger.buffers_made
        gc.collect()
    assert free_buffers(model) == larger.buffer_bytes and free_buffers(model) == 0


@pytest.mark.by_day("FakeGraph")
def test_what_an_earlier_recording_fixed_is_recorded_anew(model, drafter, fake):
    options = SAMPLED | dict(eos_token_id=None, cache_implementation="static")
    made = []
    for change in (dict(), dict(temperature=0.5), dict(temperature=0.6), dict(num_assistant_tokens=2), dict()):
        gc.collect()
        made.append(generated(model, drafter, batch_of(2), **options, **change).speculation.graphs.recorded)
    assert made == [1, 1, 1, 1, 0]


def observed(monkeypatch):
    names = []

    def observer(name, function, *args, **kwargs):
        names.append(name)
        return function(*args, **kwargs)

    monkeypatch.setattr(loop_module, "REGION_OBSERVER", observer)
    return names


def nothing(ids, scores):
    """A processor of the user."""
    return scores


def stops_at(ids, scores, **kwargs):
    """A criterion of the user."""
    return (ids[:, -1] == 9) | (ids[:, -1] == 4)


@pytest.mark.by_day("FakeGraph")
def test_whom_the_host_calls_gets_two_regions(model, drafter, fake, monkeypatch):
    names = observed(monkeypatch)
    for asked in ({"logits_processor": [nothing]}, {"stopping_criteria": [stops_at]}):
        options = WAYS["greedy"] | asked
        eager = generated(model, drafter, batch_of(3), **options)
        for observer in (loop_module.REGION_OBSERVER, None):
            with monkeypatch.context() as patched:
                patched.setattr(loop_module, "REGION_OBSERVER", observer)
                names.clear()
                fixed = generated(model, drafter, batch_of(3), **options, cache_implementation="static")
            assert same(eager, fixed) and set(names) == ({"forward"} if observer else set())
        told = fixed.speculation.graphs
        assert asked.popitem()[1][0].__name__ in told.reasons["cycle"] and set(told.replayed) == {"forward"}


@pytest.mark.by_day("FakeGraph")
def test_records_are_those_of_the_eager_loop(model, drafter, fake):
    options = WAYS["greedy"] | dict(output_scores=True, output_logits=True, output_hidden_states=True)
    eager = generated(model, drafter, batch_of(3), **options)
    fixed = generated(model, drafter, batch_of(3), **options, cache_implementation="static")
    assert fixed.speculation.graphs.replayed["cycle"]
    torch.testing.assert_close(torch.stack(fixed.scores), torch.stack(eager.scores))
    torch.testing.assert_close(torch.stack(fixed.logits), torch.stack(eager.logits))
    for one, other in zip(fixed.hidden_states[1:], eager.hidden_states[1:], strict=True):
        torch.testing.assert_close(torch.stack(one), torch.stack(other))


@pytest.mark.by_day("FakeGraph")
def test_faults_leave_no_trace_in_a_replayed_cycle(model, drafter, fake, monkeypatch):
    propose = HeadSession.propose
    plain = generated(model, drafter, batch_of(3), **WAYS["greedy"])

    def damaged(session, tokens, length):
        session.options.numbers.note(torch.where(tokens.ends[:, None] > 26, torch.nan, 0.0))
        return propose(session, tokens, length)

    monkeypatch.setattr(HeadSession, "propose", damaged)
    fixed = generated(model, drafter, batch_of(3), **WAYS["greedy"], cache_implementation="static")
    assert torch.equal(fixed.sequences, plain.sequences)
    assert 0 < fixed.speculation.graphs.replayed["cycle"] < fixed.speculation.backbone_calls - 10


@pytest.mark.by_day("FakeGraph")
def test_a_forward_that_reads_from_the_device_is_launched_eagerly(fake):
    model = backbone().double()
    drafter = train_heads(model)
    plain = generated(model, drafter, batch_of(3), **WAYS["greedy"])
    layer = model.get_decoder().layers[0]
    layer.mlp = Reading(layer.mlp)
    fixed = generated(model, drafter, batch_of(3), **WAYS["greedy"], cache_implementation="static")
    told = fixed.speculation.graphs
    assert same(plain, fixed) and "_local_scalar_dense" in told.reasons["cycle"] and not told.replayed


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("what", ["deterministic", "autocast", "hooks", "devices", "offloading"])
def test_what_no_graph_can_repeat_is_refused_with_its_reason(model, drafter, fake, what):
    handle = None
    if what == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif what == "hooks":
        handle = model.get_decoder().layers[0].register_forward_hook(lambda *_: None)
    elif what in ("devices", "offloading"):
        model.hf_device_map = {"a": 0, "b": 1 if what == "devices" else "cpu"}
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
            fixed = generated(model, drafter, batch_of(3), **WAYS["greedy"], cache_implementation="static")
    finally:
        torch.use_deterministic_algorithms(False)
        vars(model).pop("hf_device_map", None)
        handle is None or handle.remove()
    told = fixed.speculation.graphs
    assert what in told.reasons["cycle"] and not told.replayed and not told.recorded


def test_a_wait_for_the_device_is_found_before_anything_is_recorded(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = graphs_module._noting_waits(lambda: warnings.warn("another matter", stacklevel=1))
        assert found == (None, None) and len(caught) == 1
        said = "called a synchronizing CUDA operation"
        _, wait = graphs_module._noting_waits(lambda: warnings.warn(said, stacklevel=1))
    assert wait.startswith("test_fixed_shapes.py:") and len(caught) == 1
    assert modes == ["default", "warn", "default", "warn", "default"]


@pytest.mark.by_day("FakeGraph-9-0")
@pytest.mark.parametrize("waiting, recorded", [(1, 1), (9, 0)])
def test_who_waits_at_first_is_tried_again(model, drafter, fake, monkeypatch, waiting, recorded):
    waits = iter(["modeling.py:7, where the host waits"] * waiting + [None] * 99)
    monkeypatch.setattr(graphs_module, "_beside", lambda run, device: (run(), next(waits)))
    told = generated(model, drafter, batch_of(3), **WAYS["greedy"], cache_implementation="static").speculation.graphs
    assert told.recorded == recorded and bool(told.replayed) == bool(recorded)
    assert told.reasons.get("cycle", "").startswith("modeling.py:7") == (not recorded)


def test_what_a_recording_reads_lives_as_long(model, drafter, monkeypatch):
    monkeypatch.setitem(graphs_module.GRAPHS, "cpu", BlindGraph)
    options = WAYS["fixed tree"] | dict(cache_implementation="static")
    first = generated(model, drafter, batch_of(3), **options)
    gc.collect()
    for size in range(2000, 2300):  # the newest sizes displace those of the recording
        cached_arange(size, model.device)
    again = generated(model, drafter, batch_of(3), **options)
    assert same(first, again) and not again.speculation.graphs.recorded


@pytest.mark.by_day("FakeGraph")
def test_nobody_records_while_another_call_runs(model, drafter, fake):
    options = WAYS["greedy"] | dict(cache_implementation="static")
    with graphs_module.running():
        told = generated(model, drafter, batch_of(3), **options).speculation.graphs
    assert not told.recorded and not told.replayed


@pytest.mark.by_day("FakeGraph")
def test_drafts_made_on_the_host_leave_the_rest_recorded(model, drafter, fake, monkeypatch):
    monkeypatch.setattr(HeadSession, "reads_host", True)
    monkeypatch.setattr(NumberCheck, "note", lambda *_: None)  # look-ups choose from no scores
    fixed = generated(model, drafter, batch_of(3), **WAYS["greedy"], cache_implementation="static")
    assert same(fixed, generated(model, drafter, batch_of(3), **WAYS["greedy"]))
    assert fixed.speculation.graphs.replayed["cycle"] == fixed.speculation.backbone_calls - 3


def test_the_host_reads_a_cycle_while_the_next_one_runs(model, drafter, monkeypatch):
    names, read = observed(monkeypatch), Cycle.read

    def noted(cycle, skipped):
        names.append("read")
        return read(cycle, skipped)

    monkeypatch.setattr(Cycle, "read", noted)
    ends = generated(model, drafter, batch_of(3), **WAYS["greedy"]).sequences[:, -12].tolist()
    for eos in (None, ends):
        options = WAYS["greedy"] | dict(eos_token_id=eos)
        eager = generated(model, drafter, batch_of(3), **options)
        names.clear()
        fixed = generated(model, drafter, batch_of(3), **options, cache_implementation="static")
        assert same(eager, fixed)
        cycles, reads = (names.count(name) for name in ("cycle", "read"))  # one read is that of the prompt
        assert names[:6] == ["read", "cycle", "cycle", "read", "cycle", "read"]
        assert cycles - reads + 1 == (eos is not None)  # who ends by its length leaves nothing unread


def test_a_buffer_that_is_replaced_takes_what_was_recorded_along():
    buffers, graph = Buffers(), object()
    buffers.hold("ids", torch.zeros(2))
    buffers.graphs["cycle"] = graph
    buffers.hold("ids", torch.ones(2))
    assert buffers.graphs == {"cycle": graph}
    buffers.hold("ids", torch.zeros(3))
    assert not buffers.graphs
