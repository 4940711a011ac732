"""PTPForCausalLM: layouts, backbones, packing, gradients, directories, and what it refuses."""

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, CohereConfig, MambaConfig, MistralConfig, RwkvConfig

from tests.ptp_models import CONFIGS, backbone, ids, student
from tokenahead import PTPConfig, PTPForCausalLM, PTPStudent
from tokenahead.modeling.ptp.inputs import packed_mask, packed_positions, stepwise_mask, token_mask, token_positions


@pytest.mark.by_day("one_hot-llama", "one_hot-gpt2", "mask-opt")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("variant", ["one_hot", "mask"])
@torch.no_grad()
def test_tokens_are_the_backbones_bit_for_bit(variant, name):
    base = backbone(CONFIGS[name]())
    model, closed = (student(variant, backbone(CONFIGS[name]())) for _ in range(2))
    for parameter in closed.parameters():
        if parameter.requires_grad:
            parameter.zero_()  # neither adapters nor embeddings: yet the same rows are computed
    tokens, masks = ids(2, 9), torch.tensor([[0, 1, 2]])
    slots = {"masks": masks} if variant == "mask" else {"uniforms": torch.rand(2, 4)}
    plain = model(tokens, labels=tokens)
    assert torch.equal(plain.logits, base(tokens).logits)
    torch.testing.assert_close(plain.loss, base(tokens, labels=tokens).loss)
    got, want = (each(tokens, **slots).logits for each in (model, closed))
    assert torch.equal(got[:, :9], want[:, :9]) and not torch.equal(got[:, 9:], want[:, 9:])


@torch.no_grad()
def test_slots_of_a_new_student_are_what_its_backbone_computes():
    base = backbone()
    student = PTPStudent.from_backbone(base, num_slots=3)
    model, tokens, uniforms = student.whole, ids(2, 5), torch.rand(2, 3)
    embeds = model.with_slots(model.get_input_embeddings()(tokens), uniforms, None)
    plain = base(inputs_embeds=embeds, position_ids=torch.tensor([[0, 1, 2, 3, 4, 4, 5, 6]])).logits
    torch.testing.assert_close(model(tokens, uniforms=uniforms).logits, plain)
    adapters = {name: each for name, each in PTPStudent(student.config).named_parameters() if "lora_" in name}
    assert all(bool(each.any()) == ("lora_A" in name) for name, each in adapters.items())


@pytest.mark.by_day("qwen3", "gpt2")
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_folders_keep_the_logits(name, tmp_path):
    model = student(base=backbone(CONFIGS[name]()))
    model.save_pretrained(tmp_path)
    again = PTPForCausalLM.from_pretrained(tmp_path).eval()
    tokens, uniforms = ids(2, 5), torch.rand(2, 3)
    assert torch.equal(model(tokens, uniforms=uniforms).logits, again(tokens, uniforms=uniforms).logits)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, PTPForCausalLM) and loaded.config.variant == "one_hot"


@pytest.mark.by_day("llama-one_hot", "gpt2-categorical", "opt-one_hot")
@pytest.mark.parametrize("variant", ["one_hot", "categorical"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
@torch.no_grad()
def test_completions_packed_are_completions_one_by_one(name, variant):
    model = student(variant, backbone(CONFIGS[name]()).double())
    tokens, starts = ids(2, 10), torch.tensor([[3, 9, 3], [1, 4, 7]])
    documents = torch.ones(2, 10, dtype=torch.long)
    documents[1, 6:] = 2  # two documents in the second row
    documents[0, 0] = 0  # padding in the first
    uniforms = torch.rand(2, 3, 4)
    offset = -int(variant == "one_hot")
    packed = model(
        tokens,
        uniforms=uniforms.flatten(1),
        attention_mask=packed_mask(documents, starts, 4),
        position_ids=packed_positions(documents, starts, 4, offset),
    ).logits[:, 10:]
    packed = packed.unflatten(1, (3, 4))
    for row, completion, begin in [(0, 0, 1), (0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 2, 6)]:
        start = int(starts[row, completion])
        alone = model(tokens[row : row + 1, begin:start], uniforms=uniforms[row : row + 1, completion])
        torch.testing.assert_close(alone.logits[0, start - begin :], packed[row, completion])


def test_masks_by_hand():
    documents = torch.tensor([[0, 1, 1, 2]])
    assert token_mask(documents)[0, 0].int().tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert token_positions(documents).tolist() == [[0, 0, 1, 0]]
    starts = torch.tensor([[2, 3]])
    seen = packed_mask(documents, starts, 2)[0, 0, 4:].int().tolist()
    assert seen[0] == [0, 1, 0, 0, 1, 0, 0, 0] and seen[1] == [0, 1, 0, 0, 1, 1, 0, 0]
    assert seen[3] == [0, 0, 0, 0, 0, 0, 1, 1]  # nothing of its document stands before
    assert packed_positions(documents, starts, 2, 0)[0, 4:].tolist() == [1, 2, 0, 1]
    assert packed_positions(documents, starts, 2, -1)[0, 4:].tolist() == [0, 1, 0, 0]
    step = stepwise_mask(documents, starts, 1)[0, 0].int().tolist()
    assert step == [[0, 1, 0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 0, 1]]


@torch.no_grad()
def test_padding_on_the_left_changes_nothing():
    model, tokens, uniforms = student(base=backbone().double()), ids(1, 6), torch.rand(1, 3)
    alone = model(tokens, uniforms=uniforms).logits
    padded, mask = torch.cat([ids(1, 2, seed=5), tokens], dim=1), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    positions = model._positions(torch.zeros(1, 11, 1), 8, mask, None)
    seen = torch.zeros(1, 1, 11, 11, dtype=torch.bool)
    seen[:, :, :8, :8] = token_mask(mask)
    seen[:, :, 8:, 2:8] = True
    seen[:, :, 8:, 8:] = torch.ones(3, 3).tril().bool()
    got = model(padded, uniforms=uniforms, attention_mask=seen, position_ids=positions).logits
    torch.testing.assert_close(got[:, 2:], alone)


@torch.no_grad()
def test_slots_behind_a_cache():
    model, tokens, uniforms = student(base=backbone().double()), ids(2, 6), torch.rand(2, 3)
    whole = model(tokens, uniforms=uniforms).logits[:, 6:]
    cache = model(tokens, use_cache=True).past_key_values
    behind = model(tokens[:, :0], uniforms=uniforms, past_key_values=cache, position_ids=torch.tensor([[5, 6, 7]]))
    torch.testing.assert_close(behind.logits, whole)


@pytest.mark.by_day("scalar")
@pytest.mark.parametrize("features", ["bits", "arithmetic", "scalar"])
def test_only_the_student_learns(features):
    model = student(features=features, projection="mlp" if features == "scalar" else "linear")
    model(ids(2, 4), uniforms=torch.rand(2, 3)).logits[:, 4:].square().sum().backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learned and all("lora_" in name or name.startswith("uniform_embedding") for name in learned)
    assert {"lora_A", "lora_B"} <= {part for name in learned for part in name.split(".")}
    assert not model.trains_backbone
    model.train_only("all")
    assert model.trains_backbone
    with pytest.raises(ValueError, match="'all'.*'drafter'"):
        model.train_only("heads")


def test_the_student_trains_in_float32_whatever_the_backbones_dtype(tmp_path):
    """At the paper's rate AdamW moves next to no entry of a bfloat16 adapter; and directories read it back as it
    was."""
    model = student(base=backbone().bfloat16(), features="arithmetic")

    def kinds(some: PTPForCausalLM) -> set[torch.dtype]:
        return {p.dtype for p in some.parameters() if p.requires_grad}

    assert kinds(model) == {torch.float32} and model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    for dtype in ("auto", torch.bfloat16):
        again = PTPForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        again.train_only("drafter")
        assert kinds(again) == {torch.float32} and again.dtype == torch.bfloat16
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0)
    model(ids(2, 4), uniforms=torch.rand(2, 3)).logits[:, 4:].float().square().sum().backward()
    optimizer.step()
    moved = [(p != before[name])[p.grad != 0] for name, p in model.named_parameters() if name in before]
    assert torch.cat([part.flatten() for part in moved]).float().mean() > 0.99
    assert model(ids(2, 4), uniforms=torch.rand(2, 3)).logits.dtype == torch.bfloat16


def test_calls_in_two_threads_do_not_meet():
    """One thread stops inside of a forward with slots while another one reads tokens alone."""
    model, tokens, uniforms = student(), ids(1, 6), torch.rand(1, 3)
    expected = [model(tokens).logits, model(tokens, uniforms=uniforms).logits]
    inside, go_on, found = threading.Event(), threading.Event(), []

    def wait(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go_on.wait(10)

    hook = model.backbone.model.layers[0].register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: found.append(model(tokens, uniforms=uniforms).logits))
    thread.start()
    assert inside.wait(10)
    alone = model(tokens).logits
    go_on.set()
    thread.join()
    hook.remove()
    assert torch.equal(alone, expected[0]) and torch.equal(found[0], expected[1])


@torch.no_grad()
def test_greedy_slots_have_an_embedding_of_their_own():
    model, tokens = student(greedy=True), ids(1, 4)
    uniforms = torch.tensor([[0.3, -1.0, 0.7]])
    before = model(tokens, uniforms=uniforms).logits
    model.uniform_embedding.greedy.weight += 1
    changed = (model(tokens, uniforms=uniforms).logits != before)[0].any(-1)
    assert changed.tolist() == [False] * 5 + [True, True]  # a slot sees its own uniform and those before
    with pytest.raises(ValueError, match="uniforms have dtype"):
        student()(tokens, uniforms=uniforms.half())


REFUSED = [
    (lambda: MistralConfig(sliding_window=4, hidden_size=16, num_attention_heads=2, vocab_size=7), "sliding_window=4"),
    (lambda: CohereConfig(hidden_size=16, num_attention_heads=2, vocab_size=7, logit_scale=0.5), "logit_scale=0.5"),
    (lambda: MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=7), "mamba: layers of"),
    (lambda: RwkvConfig(hidden_size=8, num_hidden_layers=2, vocab_size=7), "rwkv: a recurrent state"),
    (lambda: BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=7), "takes no position_ids"),
]


def test_backbones_that_cannot_carry_slots_are_refused_by_name():
    base = backbone()
    base.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation=.*'flash_attention_2'"):
        PTPForCausalLM.from_backbone(base)
    for config, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            PTPForCausalLM(PTPConfig(backbone_config=config()))


def test_texts_up_to_the_end_of_a_table():
    model, prompt = student(base=backbone(CONFIGS["gpt2"]())), ids(1, 50)
    for options in ({"do_sample": True, "seed": 3}, {}):
        out, plain = (model.generate(prompt, max_new_tokens=15, use_mtp=how, **options) for how in (True, False))
        assert out.shape == (1, 65) and torch.equal(out, plain)
        with pytest.raises(IndexError):  # torch's own, as in plain decoding
            model.generate(prompt, max_new_tokens=17, **options)


def test_bad_configurations():
    for options, message in [
        ({"variant": "both"}, "variant='both'"),
        ({"features": "sine"}, "features='sine'"),
        ({"projection": "cubic"}, "projection='cubic'"),
        ({"features": "bits", "feature_dim": 16}, "feature_dim=16"),
        ({"num_slots": 0}, "num_slots=.*0.*1"),
        ({"lora_rank": 0}, "lora_rank=.*0.*1"),
        ({"sampling": {"typical_p": 0.2}}, "typical_p"),
    ]:
        with pytest.raises(Exception, match=message):
            PTPConfig(backbone_config=CONFIGS["llama"](), **options)
