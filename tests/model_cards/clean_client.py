"""Run by test_remote_code.py as a separate process in which neither tokenahead nor anything except torch and
transformers can be imported: loads what the test saved, and does with it what the test did.

Usage: python -I clean_client.py FOLDER. Leaves `found.json` in FOLDER.
"""

import json
import pickle
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

HIDDEN = {"tokenahead", "peft", "accelerate", "trl", "datasets", "evaluate", "rich", "matplotlib", "scipy"}


class Hiding:
    """A finder of modules that does not find those that are hidden."""

    def __init__(self, finder) -> None:
        self.finder = finder

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        """As every finder."""
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str):
        return getattr(self.finder, name)


def spoken(model, prompt, assistant=None) -> dict:
    """Logits, greedy and sampled ids of a model, and what was accepted on the way."""
    import torch

    options = {"max_new_tokens": 9, "pad_token_id": 0, "return_dict_in_generate": True}
    options |= {} if assistant is None else {"assistant_model": assistant}
    model = model.eval()
    with torch.no_grad():
        logits = model(prompt).logits
    greedy = model.generate(prompt, do_sample=False, **options)
    torch.manual_seed(3)
    sampled = model.generate(prompt, do_sample=True, top_k=0, **options)
    return {
        "logits": logits,
        "greedy": greedy.sequences,
        "sampled": sampled.sequences,
        "accepted": [output.speculation.rows_accepted for output in (greedy, sampled)],
    }


def same(found: dict, expected: dict) -> dict:
    """Which of these are equal, bit for bit."""
    import torch

    equal = {key: torch.equal(found[key], expected[key]) for key in ("logits", "greedy", "sampled")}
    return equal | {"accepted": found["accepted"] == expected["accepted"]}


def attempt(call, *args, **options):
    """What a call returns, or its error in words: one failure must not hide what the rest finds."""
    try:
        return call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def load_model(case: Path, expected: dict) -> dict:
    """A model by the Auto classes, what it says, and what it says after it was saved and loaded once more."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(case, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(case, config=config, trust_remote_code=True)
    found = same(spoken(model, expected["prompt"]), expected)
    again = case.with_name(f"{case.name}_again")
    model.save_pretrained(again)
    handed_on = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
    found["handed on"] = all(same(spoken(handed_on, expected["prompt"]), expected).values())
    found["same files"] = files_of(again) == files_of(case)
    return found | {"config": type(config).__name__, "own": type(model).__module__.startswith("transformers_modules.")}


def files_of(folder: Path) -> dict[str, bytes]:
    """The code in a directory, and the names of everything else."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.suffix == ".py" else b"" for path in paths}


def load_drafters(folder: Path, cases: dict) -> dict:
    """Drafters of several directories, all attached to one backbone that is plain transformers."""
    from transformers import AutoModel, AutoModelForCausalLM

    backbone = AutoModelForCausalLM.from_pretrained(folder / "backbone")
    generate = backbone.generate
    drafters = {name: AutoModel.from_pretrained(folder / name, trust_remote_code=True).eval() for name in cases}
    for drafter in drafters.values():
        drafter.attach(backbone)
    found = {name: same(spoken(backbone, cases[name]["prompt"], drafters[name]), cases[name]) for name in cases}
    for name, drafter in drafters.items():
        drafter.detach()
        drafter.save_pretrained(folder / f"{name}_again")
        found[name]["same files"] = files_of(folder / f"{name}_again") == files_of(folder / name)
    return found | {"detached": backbone.generate == generate}


def load_tokenizer(case: Path, expected: dict) -> dict:
    """A tokenizer, once more after it was saved, and a pipeline of it and its model."""
    from transformers import AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained(case, trust_remote_code=True)
    found = {"ids": tokenizer(expected["text"])["input_ids"] == expected["ids"]}
    tokenizer.save_pretrained(case.with_name("tokenizer_again"))
    again = AutoTokenizer.from_pretrained(case.with_name("tokenizer_again"), trust_remote_code=True)
    found["handed on"] = again(expected["text"])["input_ids"] == expected["ids"]
    write = pipeline("text-generation", model=str(case), trust_remote_code=True, device="cpu")
    text = write(expected["text"], max_new_tokens=8, do_sample=False)[0]["generated_text"]
    return found | {"pipeline": text == expected["written"]}


def refusals(folder: Path) -> dict:
    """What users are told who do not trust, or lack peft."""
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    return {
        "no trust": attempt(load, folder / "evabyte_ff", trust_remote_code=False),
        "plain": type(load(folder / "deepseek", trust_remote_code=False)).__name__,
        "no peft": attempt(load, folder / "ptp_one_hot", trust_remote_code=True),
    }


def needs_peft(name: str) -> bool:
    """Whether the code of a case imports peft."""
    return name.startswith("ptp")


def main(folder: Path) -> None:
    sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
    expected = pickle.loads((folder / "expected.pickle").read_bytes())
    found = {"refusals": attempt(refusals, folder)}
    found["tokenizer"] = attempt(load_tokenizer, folder / "both", expected["tokenizer"])
    apart = {name: case for name, case in expected["drafters"].items() if not needs_peft(name)}
    found["without peft"] = attempt(load_drafters, folder, apart)
    for name in sorted(expected["models"], key=needs_peft):
        if needs_peft(name):
            HIDDEN.difference_update({"peft", "accelerate"})
        found[name] = attempt(load_model, folder / name, expected["models"][name])
    found["drafters"] = attempt(load_drafters, folder, expected["drafters"])
    found["imported"] = sorted(set(sys.modules) & {*HIDDEN, "scipy", "sklearn", "pandas"})
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
