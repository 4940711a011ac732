import subprocess
import sys

import pytest

import tokenahead


def test_public_names_are_pinned():
    names = """
        AssistantDrafter BlockDrafter BlockDrafterConfig DeepSeekMTP DrafterCascade EagleHead EagleHeadConfig
        EvaByteCache EvaByteConfig EvaByteForMTPC EvaByteModel EvaByteTokenizer GenerateSpeculativeOutput
        GrammarConstraint LookaheadDrafter MTPHeadConfig MTPHeads NgramDrafter PTPConfig PTPForCausalLM
        PTPStudent PTPStudentConfig RecyclingDrafter Speculation SuffixDrafter free_buffers
    """
    assert tokenahead.__all__ == names.split()
    assert all(hasattr(tokenahead, name) for name in tokenahead.__all__)


@pytest.mark.nightly
def test_configuration_needs_no_torch_of_its_own_and_models_no_trainer():
    code = (
        "import sys, tokenahead; "
        "assert not {'peft', 'trl', 'datasets', 'tokenahead.training', 'tokenahead.model_cards'} & set(sys.modules), "
        "sorted(name for name in sys.modules if name.split('.')[0] in ('peft', 'trl', 'datasets', 'tokenahead'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
