"""The doctor: every planted fault of a small trained head is found by its name, and right heads raise no alarm."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.backbones import backbone, code, coder, taught
from tests.matrix.models import BLOCK, DEEPSEEK
from tests.modeling.test_stored_drafters import written
from tests.ptp_models import backbone as slots_backbone
from tests.ptp_models import student
from tokenahead import BlockDrafter, DeepSeekMTP, EagleHead, MTPHeads
from tokenahead.modeling.common.draft_vocabulary import DraftVocabulary
from tokenahead.testing import letters
from tokenahead.training.doctor import diagnose, diagnose_source, report
from tokenahead.training.doctor.report import is_new, rounded
from tokenahead.training.doctor.trials import Drafted, brings_back, is_easier, replaced, shifted_rows, trials_of
from tokenahead.training.evaluation.drafts import ExpectedCalls
from tokenahead.training.evaluation.prompts import Prompt

RELEASED = Path(__file__).parents[2] / "model_cards" / "smollm2"

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def tokenizer_of(template: str | None = None, by: int = 0):
    """One character per id, or the ids of another tokenizer."""
    tokenizer = letters(48)
    if by:
        names = {token: (index + by) % 48 for token, index in tokenizer.get_vocab().items()}
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["model"]["vocab"] = names
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    tokenizer.chat_template, tokenizer.pad_token = template, "a"
    return tokenizer


@cache
def texts() -> tuple[torch.Tensor, list[Prompt]]:
    """Text that the backbone writes, and the prompts of the doctor."""
    starts = torch.stack([code()[start : start + 20] for start in range(0, 480, 20)])
    written = coder("llama").generate(
        starts[::2], attention_mask=torch.ones_like(starts[::2]), max_new_tokens=40, do_sample=False
    )
    decode = letters(48).decode
    return written, [Prompt(str(index), (decode(ids),)) for index, ids in enumerate(starts.tolist())]


@pytest.fixture(scope="session")
def learned(tmp_path_factory):
    """The directory of a head that learned by a convention of rows (`shifted_rows`), made once."""

    @cache
    def made(kind: str = "", **options):
        torch.manual_seed(0)
        model = coder("llama")
        options = {"aux_layers": [0, 1, 2]} | {name: eval(value) for name, value in options.items()}
        head = EagleHead.from_backbone(model, loss_options={"steps": 3}, **options)
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
        with replaced(shifted_rows(head, **{kind: 1 if kind == "positions" else -1}) if kind else []):
            for _ in range(60):
                optimizer.zero_grad()
                head(texts()[0], labels=texts()[0]).loss.backward()
                optimizer.step()
        folder = tmp_path_factory.mktemp("head")
        head.save_pretrained(folder)
        head.detach()
        return folder

    return made


def changed(source, folder, fields=None, tensors=None):
    """A drafter with other fields in its config, and other tensors."""
    config, weights = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | (fields or {})))
    made = {name: each.contiguous().clone() for name, each in (tensors or dict)(weights).items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def copied(learned, tmp_path):
    """A changed copy of the right head."""
    return lambda fields=None, tensors=None, kind="": changed(learned(kind), tmp_path, fields, tensors)


def seen(folder, model=None, tokenizer=None, count: int = 8, new_tokens: int = 24, kind: str = "eagle"):
    """The diagnosis of a drafter in a directory."""
    model, prompts = model or coder("llama"), texts()[1][:count]
    try:
        return diagnose_source(model, tokenizer or tokenizer_of(), f"{kind}:{folder}", prompts, new_tokens=new_tokens)
    finally:
        for drafter in list(getattr(model.generate, "drafters", [])):
            drafter.detach()


def heads(family, dtype=torch.float32, **options):
    """Heads that learned text of a random backbone for a moment."""
    options = {"window": 4} | options
    return lambda: taught(MTPHeads.from_backbone(backbone(family).to(dtype), **options), 20)


def eagle(family, dtype=torch.float32, version=3, **options):
    """An EAGLE head that did."""
    options = ({"aux_layers": [0, 1, 2], "loss_options": {"steps": 2}} if version == 3 else {}) | options
    return lambda: taught(EagleHead.from_backbone(backbone(family).to(dtype), version=version, **options), 12)


def block(target, name):
    """A golden block drafter."""

    def made():
        model = AutoModelForCausalLM.from_pretrained(BLOCK / target, dtype=torch.float32).eval()
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        return BlockDrafter.from_pretrained(BLOCK / name, dtype=torch.float32).eval().attach(model)

    return made


def modules():
    model = DeepSeekMTP.from_pretrained(DEEPSEEK, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


RIGHT = {
    "ff": heads("llama", unembedding="own"),
    "ff, bfloat16": heads("gemma3", torch.bfloat16, unembedding="own"),
    "cp": heads("gemma3", head_type="cp", rank=2),
    "hmm": heads("llama", head_type="hmm", rank=2),
    "btree": heads("qwen3", head_type="btree", rank=2),
    "medusa": heads("llama", head_type="medusa"),
    "hydra": heads("qwen3", head_type="hydra"),
    "eagle-1, gemma": eagle("gemma3", version=1),
    "eagle-3, bfloat16": eagle("qwen3", torch.bfloat16),
    "draft vocabulary": eagle("llama", draft_ids=torch.arange(2, 48)),
    "biases": eagle("qwen3", fc_bias=True, attention_bias=True),
    "normed output": eagle("llama", norm_output=True, qk_norm=True),
    "p-eagle": eagle("llama", mask_token_id=1),
    "dflash 2": block("qwen3", "zlab_dflash2"),
    "dspark": block("llama", "deepspec_dspark_gated"),
    "modules": modules,
    "slots": lambda: student("one_hot", slots_backbone(seed=2)).eval(),
}


def faults(diagnosis) -> list[str]:
    return [finding.check for finding in diagnosis.faults]


def test_a_right_head(learned):
    found = seen(learned())
    assert found.is_well and "nothing is at fault" in found.verdict
    assert found.accepted.decoded == pytest.approx(found.accepted.expected, abs=0.15)
    assert found.accepted.decoded[0] > 0.6 and len(found.accepted.fresh) == len(found.accepted.decoded)


@pytest.mark.by_day("draft vocabulary", "dflash 2", "slots")
@pytest.mark.parametrize("name", RIGHT)
def test_right_drafters_raise_no_alarm(name):
    """They learned a little, in every convention that a config can state."""
    drafter = RIGHT[name]()
    model = getattr(drafter, "backbone", None) if isinstance(drafter, (MTPHeads, EagleHead, BlockDrafter)) else drafter
    tokenizer = letters(model.config.get_text_config().vocab_size)
    tokenizer.pad_token = "a"
    starts = torch.randint(2, 26, (8, 3), generator=torch.Generator().manual_seed(3))
    prompts = [Prompt(str(row), (tokenizer.decode(ids),)) for row, ids in enumerate(starts)]
    found = diagnose(model, tokenizer, drafter, prompts, new_tokens=24)
    assert found.is_well, found.verdict
    assert found.accepted.decoded[0] > 0.1


def test_other_layers_of_the_backbone(learned):
    """Noise in one matrix of one layer, which the unembedding and the last norm do not show."""
    twin = backbone("llama")
    twin.load_state_dict(coder("llama").state_dict())
    with torch.no_grad():
        weight = twin.model.layers[1].mlp.down_proj.weight
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1 * weight.std())
    assert faults(seen(learned(), twin))[0] == "fingerprint"


def test_a_fingerprint_without_layers_says_what_it_shows(copied):
    ends = json.loads((copied() / "config.json").read_text())["backbone_fingerprint"].partition("/")[0]
    found = seen(copied({"backbone_fingerprint": ends}))
    (of_backbone,) = (each for each in found.findings if each.check == "fingerprint")
    assert found.is_well and of_backbone.state == "note" and "no layers" in of_backbone.words


@pytest.mark.parametrize(
    ("theirs", "ours", "check"),
    [(tokenizer_of(by=1), None, "tokenizer"), (tokenizer_of("<" + TEMPLATE), tokenizer_of(TEMPLATE), "chat template")],
)
def test_another_tokenizer_or_template(copied, theirs, ours, check):
    theirs.save_pretrained(folder := copied())
    found = faults(seen(folder, tokenizer=ours))
    assert found[0] == check and (ours or found == [check])


def rope(theta, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | more}


def exchanged(*names):
    """Exchange the halves of the columns of matrices, as a conversion does that puts the feature first."""

    def change(state):
        return state | {
            name: torch.cat(weight.chunk(2, 1)[::-1], 1) for name, weight in state.items() if name.endswith(names)
        }

    return change


def turned(*names):
    """Change the order of rows of matrices."""
    return lambda state: {
        name: weight.flip(0).contiguous() if name.endswith(names) else weight for name, weight in state.items()
    }


def scaled(by: float):
    """Change scales that cancel where the last norm is applied to what the unembedding reads, and nowhere else."""
    factors = {"norm.weight": by, "lm_head.weight": 1 / by}
    return lambda state: state | {name: state[name] * factor for name, factor in factors.items()}


def fused_in(order):
    """Exchange blocks of the fusing matrix."""
    columns = torch.cat([torch.arange(32) + 32 * block for block in order])
    return lambda state: state | {"fc.weight": state["fc.weight"][:, columns].clone()}


def neighbours(state):
    """Rows of queries and keys as for a rope that turns neighbours, in heads of eight."""
    halves, maps = [0, 4, 1, 5, 2, 6, 3, 7], ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
    return {
        name: weight.unflatten(0, (-1, 8))[:, halves].flatten(0, 1) if name.endswith(maps) else weight
        for name, weight in state.items()
    }


SIXTEEN = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
CAUSES = {
    "theta": ({"fields": rope(1.5)}, "rope", "'rope_theta': 10000.0"),
    "scaling": ({"fields": rope(10_000.0, rope_type="linear", factor=16.0)}, "rope", "'rope_type': 'default'"),
    "pairs": ({"tensors": neighbours}, "rope", "rope_is_neox_style=False"),
    "epsilon": ({"fields": {"rms_norm_eps": 1.0}}, "norms", "rms_norm_eps=1e-06"),
    "activation": ({"fields": {"hidden_act": "relu2"}}, "activation", "hidden_act=silu"),
    "head_dim": ({"fields": SIXTEEN}, "head_dim", "head_dim=8"),
    "inputs": ({"tensors": exchanged("q_proj.weight", "k_proj.weight", "v_proj.weight")}, "first layer", "halves"),
    "output": ({"fields": {"norm_output": True}, "tensors": scaled(4.0)}, "norms", "norm_output=False"),
    "residual": ({"fields": {"norm_before_residual": True}}, "norms", "norm_before_residual=False"),
    "layers": ({"fields": {"aux_layers": [2, 1, 0]}}, "layer ids", "aux_layers=[0, 1, 2]"),
    "blocks": ({"tensors": fused_in((1, 2, 0))}, "layer ids, or fc", "aux_layers=[1, 2, 0]"),
    "features": ({"kind": "features"}, "feature shift", "features of the place before"),
    "tokens": ({"kind": "tokens"}, "token shift", "tokens of the place before"),
    "positions": ({"kind": "positions"}, "positions", "positions of drafted rows one more"),
    "nothing": (  # rows of the output in another order, which no fingerprint tells
        {"fields": {"backbone_fingerprint": None}, "tensors": turned("lm_head.weight")}, "acceptance", "are right"
    ),
}  # fmt: skip


@pytest.mark.by_day("theta", "head_dim", "features", "output")
@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named_and_no_other(copied, name):
    planted, check, words = CAUSES[name]
    found = seen(copied(**planted), count=24, new_tokens=40)
    assert faults(found) == [check] and words in found.verdict


def permuted(name, order):
    return lambda state: state | {name: torch.cat([state[name].chunk(len(order))[index] for index in order])}


def of_heads(**options):
    return lambda: MTPHeads.from_backbone(coder("llama"), window=4, **options)


OWN = {"unembedding": "own"}
ORDERED = {"head.weight": OWN, "head.maps": {}, "head.leaf.weight": OWN | {"head_type": "hmm", "rank": 2}}
HURT = {
    "fc": (lambda: EagleHead.from_backbone(coder("llama"), version=1), {"tensors": exchanged("fc.weight")}, "fc"),
} | {
    f"{name}, {order}": (of_heads(**options), {"tensors": permuted(name, order)}, "depth")
    for name, options in ORDERED.items() for order in ([0, 2, 1, 3], [3, 2, 1, 0], [1, 2, 3, 0])
}  # fmt: skip


@pytest.mark.by_day("True-fc", "True-head.maps, [0, 2, 1, 3]")
@pytest.mark.parametrize("name", HURT)
@pytest.mark.parametrize("is_hurt", [False, True])
def test_what_is_hurt_is_named(name, is_hurt, tmp_path):
    make, fault, check = HURT[name]
    drafter = make()
    taught(drafter, 60).save_pretrained(tmp_path)
    drafter.detach()
    folder = changed(tmp_path, tmp_path, **fault) if is_hurt else tmp_path
    kind = "eagle" if isinstance(drafter, EagleHead) else "heads"
    assert faults(seen(folder, count=24, new_tokens=40, kind=kind)) == [check] * is_hurt


def in_place_of(*names):
    """Exchange two tensors."""
    return lambda state: state | dict(zip(names, [state[name] for name in names[::-1]]))


def turned_by(name, by):
    """Read the last columns of a matrix first."""
    return lambda state: state | {name: state[name].roll(by, 1)}


WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 6}
BLOCKS = {
    "selector": {"law": "selector", "sample_from_anchor": False, "block_size": 5, "feature_layers": [1]},
    "markov": {"block_size": 4, "feature_layers": [0, 1], "law_options": {"rank": 8, "kind": "gated"}} | WINDOW,
}
CODEBOOKS = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"
TABLES, GATE = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"), "markov_head.gate_proj.weight"
FILL_IN = {"sample_from_anchor": False}
MISREAD = {
    "selector, anchor first": ({"fields": {"sample_from_anchor": True}}, "row", "sample_from_anchor=False"),
    "selector, layers": ({"fields": {"feature_layers": [0]}}, "layer ids", "feature_layers=[1]"),
    "selector, pairs": ({"tensors": neighbours}, "rope", "rope_is_neox_style=False"),
    "selector, window": ({"fields": WINDOW | {"sliding_window": 2}}, "window of rows", "full_attention"),
    "selector, codebooks": ({"tensors": in_place_of(*CODEBOOKS)}, "law", "exchanged"),
    "markov, fill-in": ({"fields": FILL_IN}, "row", "sample_from_anchor=True"),
    "markov, fill-in of a row more": ({"fields": FILL_IN | {"block_size": 5}}, "row", "sample_from_anchor=True"),
    "markov, window": ({"fields": {"sliding_window": 3}}, "window of rows", "sliding_window=4"),
    "markov, causal": ({"fields": {"sliding_causal": True}}, "row", "sliding_causal=False"),
    "markov, tables": ({"tensors": in_place_of(*TABLES)}, "law", "exchanged"),
    "markov, gate": ({"tensors": turned_by(GATE, 8)}, "law", "gate_proj"),
} | {kind: ({}, None, "nothing is at fault") for kind in BLOCKS}  # fmt: skip


@pytest.mark.by_day("selector", "selector, anchor first", "selector, codebooks")
@pytest.mark.parametrize("name", MISREAD)
def test_what_is_misread_of_a_block_drafter_is_named(name, tmp_path):
    planted, check, words = MISREAD[name]
    torch.manual_seed(0)
    drafter = BlockDrafter.from_backbone(coder("llama"), layers=1, **BLOCKS[name.partition(",")[0]])
    taught(drafter, 60).save_pretrained(tmp_path)
    drafter.detach()
    found = seen(changed(tmp_path, tmp_path, **planted), count=24, new_tokens=40, kind="block")
    assert faults(found) == [check] * bool(check) and words in found.verdict


def test_ids_of_drafts_that_are_one_off(learned, tmp_path):
    source = learned("", draft_ids="texts()[0].unique()")
    found = seen(changed(source, tmp_path, tensors=lambda state: state | {"d2t": state["d2t"] - 1}), count=24)
    assert faults(found) == ["d2t"] and "draft ids one more" in found.verdict

    def unsorted(state):
        first, second, *rest = state["d2t"].tolist()
        return state | {"d2t": torch.tensor([second + 1, first - 1, *rest])}

    found = seen(changed(source, tmp_path, tensors=unsorted))
    assert faults(found) == ["loading"] and "d2t" in found.verdict


@pytest.mark.parametrize(
    ("change", "is_told"),
    [
        (lambda offsets: offsets, False),
        (lambda offsets: offsets.bfloat16().long(), True),
        (lambda offsets: offsets.half().long(), True),
        (lambda offsets: offsets // 10 * 10, True),
        (lambda offsets: 2 * torch.arange(len(offsets)), False),
        (torch.zeros_like, False),
    ],
)
def test_rounded_ids_of_drafts(change, is_told):
    """A vocabulary that is spaced evenly is none that was rounded."""
    ids = torch.randperm(20_000, generator=torch.Generator().manual_seed(0))[:1000].sort().values
    assert (rounded(change(ids - torch.arange(1000))) is not None) is is_told


@pytest.mark.nightly
def test_the_best_of_wrong_answers_is_no_cause(copied):
    """Rows of a matrix in another order, which no trial undoes."""
    for name in ("down_proj.weight", "o_proj.weight"):
        found = seen(copied(tensors=turned(name)), count=24)
        assert not {*faults(found)} - {"acceptance"}, found.verdict


def test_trials_leave_a_drafter_as_it_was():
    model = coder("llama")
    head = EagleHead.from_backbone(model, aux_layers=[0, 1, 2], draft_ids=torch.arange(3, 40)).eval()
    block = BlockDrafter.from_backbone(model, layers=1, block_size=4, feature_layers=[0, 1], law_options={"rank": 4})
    heads = MTPHeads.from_backbone(model, window=4, head_type="hydra", arch="prefix-mlp")
    named = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    for drafter in (head, block, heads):
        held, fields = [{**vars(module)} for module in drafter.modules()], drafter.config.to_dict()
        for trial in trials_of(drafter):
            assert f"| {trial.check} |" in named or f"{trial.check}," in named or f", {trial.check}" in named
            with trial.holds():
                pass
        assert [vars(module).keys() for module in drafter.modules()] == [each.keys() for each in held]
        assert all(vars(module) == each for module, each in zip(drafter.modules(), held))
        assert drafter.config.to_dict() == fields
        drafter.detach()


@pytest.mark.parametrize(("count", "is_told"), [(32, False), (1024, True)])
def test_chance_tells_no_want_of_vocabulary(count, is_told):
    labels = (torch.arange(count) % 32)[None]
    part = DraftVocabulary(torch.arange(25), 48)
    found = report._of_vocabulary(part, [{"input_ids": labels, "labels": labels}])
    assert (found.state == "fault") is is_told and "78.1%" in found.words


@pytest.mark.parametrize(
    ("fields", "lost", "check"),
    [({"qk_norm": True}, {}, "norms"), ({"fc_bias": True}, {}, "biases"), ({}, {"fc.bias": torch.zeros(32)}, "biases")],
)
def test_what_the_config_invents_or_denies(copied, fields, lost, check):
    """The head cannot be loaded, and the doctor says which field is wrong."""
    found = seen(copied(fields, lambda state: state | lost))
    assert faults(found) == [check, "loading"] and f"{next(iter(fields), 'fc_bias')}={not lost}" in found.verdict


def test_a_draft_vocabulary_without_the_texts_tokens(learned):
    assert faults(seen(learned("", draft_ids="torch.arange(6)"))) == ["vocabulary"]


def test_a_dtype_that_cannot_hold_the_weights(copied):
    """Scales that cancel in float32, and overflow in float16."""

    folder = copied(tensors=scaled(2.0**20))
    assert seen(folder).is_well
    half = backbone("llama")
    half.load_state_dict(coder("llama").state_dict())
    found = seen(folder, half.half())
    assert faults(found)[-1] == "dtype" and "norm.weight" in found.verdict


def drafted(tokens: int, calls: float, length: int = 2) -> Drafted:
    """What a drafter does along one text of so many tokens and calls."""
    along = ExpectedCalls(torch.tensor([tokens]), torch.tensor([calls]), torch.zeros(1, length))
    return Drafted(along, *torch.ones(2, 1))


@pytest.mark.parametrize(("tokens", "is_told"), [(32, False), (512, True)])
def test_chance_tells_no_form_of_prompts(tokens, is_told):
    """The same rates of calls, of two short answers and of eight."""
    easy, hard = (drafted(tokens, rate * tokens) for rate in (0.53, 0.72))
    assert is_easier(easy, hard) is is_told and not is_easier(hard, easy)


def test_what_is_brought_back_is_a_share_of_what_is_lost():
    """Sixty tokens take twenty calls where both drafts are always right."""
    for calls, base, share in ((30.0, 40.0, 0.5), (44.0, 40.0, -0.2), (20.0, 20.0, 0)):
        assert brings_back(drafted(60, calls), drafted(60, base)) == share


def test_heads_that_run_layers_of_the_model(tmp_path):
    """Their float32 weights are read for the same model."""
    model, _ = written("mtpc heads on draft layers", tmp_path)
    tokenizer = letters(model.config.vocab_size)
    found = diagnose_source(model.bfloat16(), tokenizer, f"heads:{tmp_path}", [Prompt("0", ("abcab",))], new_tokens=8)
    assert "float32" in next(each.words for each in found.findings if each.check == "dtype")


@pytest.mark.parametrize(
    "new",
    [torch.zeros_like, lambda weight: torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * 0.02],
)
def test_tensors_that_never_learned(copied, new):
    found = seen(copied(tensors=lambda state: state | {"fc.weight": new(state["fc.weight"])}))
    assert "untrained tensors" in faults(found) and "fc.weight" in found.verdict


@pytest.mark.parametrize("head", ["eagle1", "hydra"])
def test_no_matrix_of_a_released_head_is_new(head):
    (file,) = (RELEASED / head).glob("*.safetensors")
    matrices = {name: tensor for name, tensor in load_file(file).items() if tensor.dim() > 1}
    assert matrices and not [name for name, tensor in matrices.items() if is_new(tensor)]


@pytest.mark.parametrize("shape", [(16, 16), (32, 96), (700, 40), (4, 64, 64)])
def test_noise_is_new_and_a_direction_is_not(shape):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(shape, generator=generator) * 0.05
        uniform = (torch.rand(shape, generator=generator) * 2 - 1) / shape[-1] ** 0.5
        assert is_new(noise, 0.05) and is_new(uniform) and is_new(uniform.bfloat16()) and not is_new(noise, 0.08)
        rows, columns = noise.flatten(0, -2).shape
        step = torch.outer(torch.randn(rows, generator=generator), torch.randn(columns, generator=generator))
        learned = noise.flatten(0, -2) + step * 0.3 * (rows**0.5 + columns**0.5) / (rows * columns) ** 0.5
        assert not is_new(learned, float(learned.std()))
