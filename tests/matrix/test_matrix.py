"""Every model does what users of transformers do with models."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model

from tests.assisted import assisted_generate
from tests.conformance import DrafterConformance
from tests.matrix import models
from tokenahead import DrafterCascade


class LookUpConformance(DrafterConformance):
    """A drafter that remembers texts, of all rows and calls."""

    @pytest.fixture
    def entry(self):
        """Without memories of other tests."""
        entry = models.entry(self.name)
        look_ups = entry.drafter.drafters[0] if isinstance(entry.drafter, DrafterCascade) else entry.drafter
        look_ups.forget()
        return entry

    test_rows_draft_what_they_draft_alone = None  # they read each other

    def test_sampled(self, entry):
        """A seed does not repeat a run, for drafts come from what was read meanwhile."""
        assert torch.equal(entry.generate(entry.inputs(2), do_sample=True, top_k=1), entry.text(2))


class ParallelConformance(DrafterConformance):
    """A model with parallel token prediction."""

    def test_peft(self, entry):
        """Its own adapters are gated, and LoRA would wrap them: it is refused and leaves the model as it was."""
        model = copy.deepcopy(entry.model)
        with pytest.raises(ValueError, match="gated adapters"):
            get_peft_model(model, LoraConfig(target_modules=[entry.lora_target]))
        assert torch.equal(model.generate(**entry.inputs(3), max_new_tokens=16, do_sample=False), entry.text())


class StudentConformance(DrafterConformance):
    """A student apart from its backbone."""

    def test_offloaded(self, entry):
        """A student's adapters join layers that are there: it is refused at `attach`."""
        model = cpu_offload(copy.deepcopy(entry.model), execution_device="cpu")
        with pytest.raises(ValueError, match="LlamaForCausalLM"):
            copy.deepcopy(entry.drafter).attach(model)

    def test_assisted_loop_of_transformers(self, entry):
        """Slots ride along in the backbone's forward, which that loop does not feed."""
        with pytest.raises(ValueError, match="PTPStudent drafts in slots"):
            assisted_generate(entry.model, entry.inputs(1)["input_ids"], entry.drafter, max_new_tokens=4)


KINDS = {
    "suffix-mistral": LookUpConformance,
    "recycling-qwen3": LookUpConformance,
    "lookahead-mistral": LookUpConformance,
    "cascade-qwen3": LookUpConformance,
    "ptp-one_hot": ParallelConformance,
    "ptp-categorical": ParallelConformance,
    "ptp-mask": ParallelConformance,
    "ptp-student-llama": StudentConformance,
}
"""Conformance tests of names that begin so; all others do what every drafter does."""
for name in models.NAMES:
    kind = next((KINDS[start] for start in KINDS if name.startswith(start)), DrafterConformance)
    own = f"Test_{name.replace('-', '_')}"
    globals()[own] = type(own, (kind,), {"name": name, "__module__": __name__})
