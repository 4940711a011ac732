"""Property tests try the same examples in every run but where slow tests are asked for."""

from hypothesis import settings

from tests.conftest import explores


def test_examples_repeat_unless_slow_tests_are_asked_for(request, monkeypatch):
    asked = request.config.option
    assert settings().derandomize is not explores(request.config)
    for expression, expected in {
        "": False,
        "not slow": False,
        "core": False,
        "slow": True,
        "slow or core": True,
    }.items():
        monkeypatch.setattr(asked, "markexpr", expression)
        assert explores(request.config) is expected
