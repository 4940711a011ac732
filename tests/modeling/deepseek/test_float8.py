"""Float8 checkpoints: codes never pass as weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families import family_model, random_ids
from tokenahead import DeepSeekMTP
from tokenahead.modeling.deepseek.conversion import dequantize

BLOCK = 32  # 48 rows end in the middle of a block, as 576 rows do in blocks of 128


def quantize(weight):
    """Codes and scales of a weight in square blocks."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    codes = (blocks / scales[:, None, :, None]).view_as(padded)[: weight.shape[0], : weight.shape[1]]
    return codes.contiguous().to(torch.float8_e4m3fn), scales


def put_in_float8(path):
    """Quantize a directory in DeepSeek's manner, with `eh_proj` in full precision."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name and "eh_proj" not in name]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensors[name])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    announce(path, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]})


@pytest.fixture
def folder(tmp_path):
    """A float8 directory, and the model it was made from."""
    model = family_model("deepseek_v3")
    model.save_pretrained(tmp_path)
    put_in_float8(tmp_path)
    return tmp_path, model


def announce(folder, quantization):
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes with the codes")
def test_weights_are_multiplied_by_their_scales(folder):
    path, original = folder
    model = DeepSeekMTP.from_pretrained(path)
    for (name, expected), found in zip(original.named_parameters(), model.parameters()):
        assert (found - expected).abs().max() <= expected.abs().max() / 16 + 1e-6, name
    biggest = max(float(p.detach().abs().max()) for p in model.mtp.parameters())
    assert biggest < 2  # raw codes would reach 448
    assert getattr(model.config, "quantization_config", None) is None
    plain = DeepSeekMTP.from_pretrained(path, inference_only=True)
    ids = random_ids()
    assert torch.equal(plain(ids).logits, model(ids).logits)


@pytest.mark.core
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes with the codes")
def test_what_was_dequantised_is_saved_in_full(folder, tmp_path):
    path, _ = folder
    model = DeepSeekMTP.from_pretrained(path)
    model.save_pretrained(tmp_path / "full")
    again = DeepSeekMTP.from_pretrained(tmp_path / "full")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


@pytest.mark.parametrize("part", ["model.layers.2.", "model.layers.0."])
def test_missing_scales_are_refused(folder, part):
    path, _ = folder
    tensors = load_file(path / "model.safetensors")
    tensors = {k: v for k, v in tensors.items() if not (k.endswith("scale_inv") and k.startswith(part))}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"float8.*scales.*{part}"):
        DeepSeekMTP.from_pretrained(path)


def test_codes_that_are_not_announced_are_refused(folder):
    path, _ = folder
    announce(path, None)
    with pytest.raises(ValueError, match="8.*config.json.*quantization_config"):
        DeepSeekMTP.from_pretrained(path)


def test_dequantize():
    weight = torch.randn(48, 70) * 0.1
    codes, scales = quantize(weight)
    torch.testing.assert_close(dequantize(codes, scales, (BLOCK, BLOCK)), weight, atol=0.03, rtol=0.07)
    assert torch.equal(dequantize(codes, torch.tensor(2.0)), codes.float() * 2)
    exponents = torch.full((2, 3), 126, dtype=torch.uint8)
    assert torch.equal(dequantize(codes, exponents, (BLOCK, BLOCK)), codes.float() / 2)
    with pytest.raises(ValueError, match="needs.*2.*3.*1.*3"):
        dequantize(codes, scales[:1], (BLOCK, BLOCK))
