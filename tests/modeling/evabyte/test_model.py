"""The backbone against the official code, and padding, packing and dtypes against itself."""

import pytest
import torch
from safetensors.torch import load_file

from tests.models import GOLDENS, TRAINED, left_padded, tiny_model
from tokenahead import EvaByteForMTPC

CASES = sorted(path.name for path in GOLDENS.glob("vis_*"))


def load(case, dtype=torch.float32, **options):
    model = EvaByteForMTPC.from_pretrained(GOLDENS / case, dtype=dtype, **options).eval()
    return model, load_file(GOLDENS / case / "golden.safetensors")


def names(gold, prefix, suffix):
    return sorted(key.removesuffix(suffix) for key in gold if key.startswith(prefix) and key.endswith(suffix))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_full_forward(case, attention):
    model, gold = load(case, attn_implementation=attention)
    for name in names(gold, "full.", ".input_ids"):
        out = model(gold[f"{name}.input_ids"][None], output_hidden_states=-1, return_all_pred_logits=True)
        torch.testing.assert_close(out.hidden_states[-1][0], gold[f"{name}.hidden"], atol=5e-5, rtol=0)
        logits = out.logits[0, gold[f"{name}.pos"]]
        torch.testing.assert_close(logits, gold[f"{name}.logits"], atol=5e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_layers(case):
    model, gold = load(case)
    for name in names(gold, "layers.", ".hidden_states"):
        ids = gold[name.replace("layers", "full") + ".input_ids"]
        out = model(ids[None], output_hidden_states=True)
        torch.testing.assert_close(torch.cat(out.hidden_states), gold[f"{name}.hidden_states"], atol=5e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_chunk_summaries_in_the_cache(case):
    model, gold = load(case)
    keys = [key for key in gold if key.startswith("chunks.") and key.endswith(".k")]
    assert len(keys) >= 2
    for key in keys:
        name, layer = key.split(".layer")[0], int(key.split(".layer")[1].split(".")[0])
        cache = model(gold[f"{name}.input_ids"][None]).past_key_values
        folded = cache.sequences.starts[0] // model.config.chunk_size
        assert folded > 0
        for states, which in ((cache.layers[layer].keys, "k"), (cache.layers[layer].values, "v")):
            torch.testing.assert_close(states[0, :, :folded], gold[key[:-1] + which][:, :folded], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_single_steps_equal_the_full_forward(case):
    model, gold = load(case)
    for name in names(gold, "inc.", ".input_ids"):
        start, ids = int(name.split(".")[1][1:]), gold[f"{name}.input_ids"][None]
        out = model(ids[:, :start], output_hidden_states=-1)
        rows = [out.hidden_states[-1][0, -1:]]
        for position in range(start, ids.shape[1]):
            cache = out.past_key_values
            out = model(ids[:, position : position + 1], past_key_values=cache, output_hidden_states=-1)
            rows.append(out.hidden_states[-1][0])
        torch.testing.assert_close(torch.cat(rows), gold[f"{name}.hidden"], atol=5e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_per_head(case):
    model, gold = load(case)
    name = names(gold, "loss.", ".labels")[0]
    ids = gold[name.replace("loss", "full") + ".input_ids"]
    labels = gold[f"{name}.labels"]
    hidden = model.model(ids[None]).last_hidden_state
    logits = torch.stack([model.lm_head(hidden)[0], *model.draft_heads(hidden)[0].unbind(1)], dim=1)
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100
    )
    torch.testing.assert_close(loss.view_as(gold[f"{name}.loss"]), gold[f"{name}.loss"], atol=5e-5, rtol=0)
    loss.sum().backward()
    grads = dict(model.named_parameters())
    prefix = name.replace("loss", "grad") + "."
    wanted = {key.removeprefix(prefix): value for key, value in gold.items() if key.startswith(prefix)}
    assert wanted
    for key, want in wanted.items():
        torch.testing.assert_close(grads[key].grad, want, atol=2e-4 * float(want.abs().max()), rtol=0)


@torch.no_grad()
def test_bfloat16_is_faithful():
    model, gold = load(TRAINED.name, torch.bfloat16)
    for name in names(gold, "full.", ".logits"):
        logits = model(gold[f"{name}.input_ids"][None], return_all_pred_logits=True).logits[0]
        error = (logits[gold[f"{name}.pos"]].float() - gold[f"{name}.logits"]).abs()
        assert error.max() < 0.2 and error.mean() < 0.02


@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(use_cache):
    model = tiny_model()
    prompts = [torch.randint(64, 320, (n,)) for n in (70, 33, 5, 64)]
    batch = left_padded(prompts)
    right = {
        key: torch.stack([row.roll(-int((m == 0).sum())) for row, m in zip(value, batch["attention_mask"])])
        for key, value in batch.items()
    }
    for inputs in (batch, right):
        out = model(**inputs, use_cache=use_cache)
        for row, prompt in enumerate(prompts):
            alone = model(prompt[None], use_cache=use_cache).logits[0]
            real = out.logits[row][inputs["attention_mask"][row].bool()]
            torch.testing.assert_close(real, alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other():
    model = tiny_model()
    documents = [torch.randint(64, 320, (n,)) for n in (40, 7, 65)]
    packed = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    logits = model(packed, position_ids=positions, use_cache=False).logits[0]
    alone = torch.cat([model(document[None]).logits[0] for document in documents])
    torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)


def test_gradient_checkpointing_gives_the_same_gradients():
    ids = torch.randint(64, 320, (2, 80))
    grads = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1])


def test_fresh_weights_are_all_initialised():
    model = EvaByteForMTPC(tiny_model().config)
    d = model.config.head_dim
    for layer in model.model.layers:
        for parameter in (layer.self_attn.adaptive_mu_k, layer.self_attn.adaptive_phi):
            assert parameter.abs().max() <= d**-0.5 and parameter.std() > 0.1 * d**-0.5
    assert torch.equal(model.model.norm.weight, torch.ones_like(model.model.norm.weight))


@pytest.mark.by_day("3", "12")
@pytest.mark.parametrize("window", [1, 3, 8, 12])
def test_window_may_differ_from_the_stored_heads(window, tmp_path):
    official = load_file(TRAINED / "model.safetensors")["lm_head.weight"]
    model = EvaByteForMTPC.from_pretrained(TRAINED, mtp_head={"window": window}).eval()
    assert model.window == window
    assert torch.equal(torch.cat([model.lm_head.weight, model.draft_heads.weight])[: len(official)], official)
    assert model.config.num_pred_heads == max(8, window) == 1 + model.draft_heads.weight.shape[0] // 320
    model.save_pretrained(tmp_path)
    again = EvaByteForMTPC.from_pretrained(tmp_path)
    assert again.window == window
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert torch.equal(again.draft_heads.weight, model.draft_heads.weight)
