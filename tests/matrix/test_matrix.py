"""Every model does what users of transformers do with models; `python -m tests.matrix` prints the table."""

import copy

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model

from tests.assisted import assisted_generate
from tests.conformance import DrafterConformance
from tests.matrix import models
from tokenahead import DrafterCascade


class EvaByteConformance(DrafterConformance):
    """A model with a special cache."""

    def test_static_cache(self, entry):
        """Nothing is drafted there."""
        with pytest.raises(ValueError, match="use_mtp=True cannot be combined with cache_implementation"):
            entry.generate(entry.inputs(1), cache_implementation="static")


class TestEvaByteFF(EvaByteConformance):
    name = "evabyte-ff"


class TestEvaByteCP(EvaByteConformance):
    name = "evabyte-cp"


class TestEvaByteHMM(EvaByteConformance):
    name = "evabyte-hmm"


class TestEvaByteBTree(EvaByteConformance):
    name = "evabyte-btree"


class TestEvaByteContext(EvaByteConformance):
    name = "evabyte-context"


class TestHeadsContext(DrafterConformance):
    name = "context-llama"


class TestHeadsLlama(DrafterConformance):
    name = "heads-llama"


class TestHeadsGemma3(DrafterConformance):
    name = "heads-gemma3"


class TestHeadsGPT2(DrafterConformance):
    name = "heads-gpt2"


class TestMedusa(DrafterConformance):
    name = "medusa-llama"


class TestHydra(DrafterConformance):
    name = "hydra-qwen3"


class TestLayerHeads(DrafterConformance):
    name = "layer-mistral"


class TestBlock(DrafterConformance):
    name = "block-llama"


class TestEagle1(DrafterConformance):
    name = "eagle1-mistral"


class TestEagle3(DrafterConformance):
    name = "eagle-llama"


class TestModules(DrafterConformance):
    name = "deepseek-modules"


class TestNgrams(DrafterConformance):
    name = "ngram-llama"


class TestNgramTrees(DrafterConformance):
    name = "ngram-tree-llama"


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


class TestSuffixes(LookUpConformance):
    name = "suffix-mistral"


class TestRecycling(LookUpConformance):
    name = "recycling-qwen3"


class TestLookahead(LookUpConformance):
    name = "lookahead-mistral"


class TestCascade(LookUpConformance):
    name = "cascade-qwen3"


class TestAssistant(DrafterConformance):
    name = "assistant-llama"


class TestTranslation(DrafterConformance):
    name = "translation-llama"


class ParallelConformance(DrafterConformance):
    """A model with parallel token prediction."""

    def test_peft(self, entry):
        """Its own adapters are gated, and LoRA would wrap them: it is refused and leaves the model as it was."""
        model = copy.deepcopy(entry.model)
        with pytest.raises(ValueError, match="gated adapters"):
            get_peft_model(model, LoraConfig(target_modules=[entry.lora_target]))
        assert torch.equal(model.generate(**entry.inputs(3), max_new_tokens=16, do_sample=False), entry.text())


class TestParallelOneHot(ParallelConformance):
    name = "ptp-one_hot"


class TestParallelCategorical(ParallelConformance):
    name = "ptp-categorical"


class TestParallelMask(ParallelConformance):
    name = "ptp-mask"


class TestParallelStudent(DrafterConformance):
    name = "ptp-student-llama"

    def test_offloaded(self, entry):
        """A student's adapters join layers that are there: it is refused at `attach`."""
        model = cpu_offload(copy.deepcopy(entry.model), execution_device="cpu")
        with pytest.raises(ValueError, match="LlamaForCausalLM"):
            copy.deepcopy(entry.drafter).attach(model)

    def test_assisted_loop_of_transformers(self, entry):
        """Slots ride along in the backbone's forward, which that loop does not feed."""
        with pytest.raises(ValueError, match="PTPStudent drafts in slots"):
            assisted_generate(entry.model, entry.inputs(1)["input_ids"], entry.drafter, max_new_tokens=4)


class TestParallelAssistant(DrafterConformance):
    name = "ptp-assistant-llama"


def test_every_model_has_a_class():
    kinds = [kind for name, kind in globals().items() if name.startswith("Test")]
    assert {kind.name for kind in kinds} == set(models.NAMES)
