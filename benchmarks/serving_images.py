"""An image through vLLM: does it write behind one what is written here, drafts included?

    python benchmarks/serving_images.py --vllm vllm-env/bin/python

GLM-OCR, tiny, with a random tower and a trained text, is exported with a processor; vLLM is asked six prompts that end
in an image of 32 x 32 pixels (16 tokens of the text), each alone and all as one batch, plainly and with drafts, greedy,
float32. Printed: how many of 48-token texts equal ours, how many depend on the image at all, and for one that differs
the two largest logits here where it does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NEW_TOKENS, DRAFTED, IMAGE, GRID = 48, 3, 122, 8
SPECIAL = {
    "image_start_token_id": (118, "<|begin_of_image|>"),
    "image_end_token_id": (119, "<|end_of_image|>"),
    "video_start_token_id": (120, "<|begin_of_video|>"),
    "video_end_token_id": (121, "<|end_of_video|>"),
    "image_token_id": (IMAGE, "<|image|>"),
    "video_token_id": (123, "<|video|>"),
}


def answer(folder: Path) -> None:
    """Write what vLLM answers; runs in vLLM's own interpreter."""
    import numpy
    import serving_engine
    from PIL import Image

    serving_engine.declare_images()
    serving_engine.look_at_classes_here()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Glm46VImageProcessor, Glm46VProcessor, Glm46VVideoProcessor, PreTrainedTokenizerFast
    from vllm import LLM, SamplingParams

    names = dict(SPECIAL.values())
    characters = Tokenizer(models.WordLevel({names.get(i, chr(256 + i)): i for i in range(128)}, unk_token=chr(256)))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, additional_special_tokens=list(names.values()))
    sizes = {"size": {"shortest_edge": 256, "longest_edge": 4096}}
    sizes |= {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    processor = Glm46VProcessor(Glm46VImageProcessor(**sizes), tokenizer, Glm46VVideoProcessor(**sizes))
    processor.save_pretrained(folder)
    pixels = numpy.random.RandomState(0).randint(0, 256, (32, 32, 3)).astype("uint8")
    image = Image.fromarray(pixels)
    numpy.save(folder / "pixels.npy", processor.image_processor(images=[image], return_tensors="np")["pixel_values"])
    prompts = [{"prompt_token_ids": ids} for ids in json.loads((folder / "prompts.json").read_text())]
    asked = [prompt | {"multi_modal_data": {"image": image}} for prompt in prompts]
    wanted = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)

    def texts(llm: Any, prompts: list[Any]) -> list[list[int]]:
        outputs = sorted(llm.generate(prompts, wanted, use_tqdm=False), key=lambda output: int(output.request_id))
        return [list(output.outputs[0].token_ids) for output in outputs]

    found = {}
    common = dict(dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8, disable_log_stats=False)
    for name, drafter in (("plain", None), ("drafts", {"method": "mtp", "num_speculative_tokens": DRAFTED})):
        limits = {"image": 1, "video": 0}
        llm = LLM(str(folder), **common, limit_mm_per_prompt=limits, speculative_config=drafter)
        found[name] = {"alone": [texts(llm, [prompt])[0] for prompt in asked]}
        found[name]["counts"] = serving_engine._counts(llm)
        found[name]["together"] = texts(llm, asked)
        del llm
    (folder / "found.json").write_text(json.dumps(found))


def compare(folder: Path, steps: int, interpreter: str) -> bool:
    """Print how many texts are equal, and return whether each is, or parts at a near-tie."""
    import numpy
    import torch
    from serving import HERE, SETTINGS
    from serving_cases import PROMPTS
    from serving_models import with_modules

    from tokenahead.model_cards.export import export

    model = with_modules("glm_ocr", steps)
    for name, (token, _) in SPECIAL.items():
        setattr(model.config, name, token)
    export(model, folder)
    marks = dict(SPECIAL.values())
    plain = [[token if token not in marks else 1 for token in prompt] for prompt in PROMPTS]
    asked = [prompt + [118, IMAGE, 119] for prompt in plain]
    (folder / "prompts.json").write_text(json.dumps(asked))
    environment = os.environ | SETTINGS | {"PYTHONPATH": str(HERE.parent)}
    subprocess.run([interpreter, __file__, "--engine", str(folder)], check=True, env=environment)
    found, is_right = json.loads((folder / "found.json").read_text()), True
    pixels = torch.from_numpy(numpy.load(folder / "pixels.npy"))
    image = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, GRID, GRID]])}
    wide = [prompt + [118, *[IMAGE] * (GRID * GRID // 4), 119] for prompt in plain]
    common = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def inputs(tokens: list[int], given: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor([tokens])
        kinds = {"mm_token_type_ids": (ids == IMAGE).int()} if given else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | given | kinds

    ours = [model.generate(**inputs(ids, image), **common, use_mtp=False)[0, len(ids) :].tolist() for ids in wide]
    blind = [model.generate(**inputs(ids, {}), **common, use_mtp=False)[0, len(ids) :].tolist() for ids in plain]
    print(f"texts that depend on the image: {sum(a != b for a, b in zip(ours, blind))} of {len(ours)}")
    for name, results in found.items():
        equal = [sum(a == b for a, b in zip(results[way], ours)) for way in ("alone", "together")]
        print(f"{name}: equal alone and as a batch: {equal} of {len(ours)}; {results['counts']}")
        for ids, text, other in zip(wide, ours, results["alone"]):
            if text != other:
                first = next(index for index in range(NEW_TOKENS) if text[index] != other[index])
                with torch.no_grad():
                    logits = model.main(**inputs(ids + text[:first], image)).logits[0, -1]
                best = logits.topk(2).values.tolist()
                print(f"  one differs from token {first} on, where the largest logits here are {best}")
                is_right = is_right and best[0] - best[1] < 0.01
    return is_right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", help="vLLM's interpreter")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=120, help="of training")
    arguments = parser.parse_args()
    if arguments.engine:
        answer(arguments.engine)
    elif not arguments.vllm:
        parser.error("--vllm: the interpreter of an environment with vLLM")
    else:
        with tempfile.TemporaryDirectory() as scratch:
            sys.exit(not compare(Path(scratch), arguments.steps, arguments.vllm))
