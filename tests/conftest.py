"""Settings of every test: quiet logs, no network, one seed."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "HF_MODULES_CACHE" not in os.environ:  # code that travels with models is not to be kept in the user's cache
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="hf_modules_")
    atexit.register(shutil.rmtree, os.environ["HF_MODULES_CACHE"], ignore_errors=True)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch

from tests import covering, models
from tokenahead.configuration.transformers_names import obstacle_of_peft

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


hypothesis.settings.register_profile("repeats", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explores", deadline=None, database=None, print_blob=True)


def explores(config):
    """Whether slow tests are asked for: then property tests run as well, on examples that nobody has seen."""
    return "slow" in config.option.markexpr.replace("not slow", "")


def pytest_configure(config):
    """Choose what property tests try, before modules are imported whose settings build on it."""
    hypothesis.settings.load_profile("explores" if explores(config) else "repeats")


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(config, items):
    """Mark the cases that `core_cases` and `by_day` name, or do not name, and as `slow` property tests that explore."""
    unknown = {}  # names of cases that no test has, by marker and test
    covered = {}  # cases of which some cover the others' values, by test and how many values together
    for item in items:
        for name in ("core_cases", "by_day"):
            for mark in filter(lambda mark: mark.args, item.iter_markers(name)):
                unknown.setdefault((name, item.nodeid.partition("[")[0]), set(mark.args)).discard(item.callspec.id)
                if name == "core_cases" and item.callspec.id in mark.args:
                    item.add_marker("core")
                if name == "by_day" and item.callspec.id not in mark.args:
                    item.add_marker("nightly")
        for mark in item.iter_markers("by_day"):
            for how in mark.kwargs.items():
                covered.setdefault((item.nodeid.partition("[")[0], *how), []).append(item)
        if explores(config) and (hypothesis.is_hypothesis_test(item.obj) or item.path.stem == "test_fuzz"):
            item.add_marker("slow")
    for (_, how, size), cases in covered.items():
        spread = range(0, len(cases), -(-len(cases) // size))  # how == "most"
        chosen = covering.few([item.callspec.params for item in cases], size) if how == "each" else spread
        for place, item in enumerate(cases):
            if place not in chosen and item.get_closest_marker("core") is None:
                item.add_marker("nightly")
    unknown = {test: cases for test, cases in unknown.items() if cases}
    if unknown and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"markers name cases that are not there: {unknown}")


def _waiting():
    """Skip a test that meets transformers' refusal of the installed peft: nothing here can change that."""
    try:
        return (yield)
    except (ImportError, ValueError) as error:
        reason = obstacle_of_peft()
        if reason and ("version of PEFT" in str(error) or reason in str(error)):
            pytest.skip(reason)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    """Let fixtures wait for peft."""
    return (yield from _waiting())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Let tests wait for peft."""
    return (yield from _waiting())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def trained():
    """The golden model of `tests.models.trained_model`; tests must not change it."""
    return models.trained_model()
