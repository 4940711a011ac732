"""Fields of foreign configs: what says nothing, what is read or known, what is refused, and names of one thing."""

import pytest

from tokenahead.configuration.foreign_fields import (
    ROPE,
    FieldTable,
    agreed,
    is_neutral,
    is_same,
    refuse_unread,
    settled,
    stated,
)

TABLE = FieldTable(
    "mine",
    read={"": {"size", "nested_whole"}, "inner": {"depth"}, "rope_parameters": ROPE},
    known={"": {"copied", "free_*"}, "inner.deeper": {"note"}},
    only={"is_neox_style": (True,), "mode": ("a", "b")},
)


@pytest.mark.parametrize("value", [None, False, [], {}])
@pytest.mark.parametrize("level", [(), ("inner",), ("inner", "deeper"), ("rope_parameters",)])
def test_that_fields_which_say_nothing_pass_at_every_level(value, level):
    raw = {"unheard_of": value}
    for name in reversed(level):
        raw = {name: raw}
    refuse_unread("folder", raw, TABLE)


@pytest.mark.parametrize("name", ["logit_scale", "scale_emb", "residual_multiplier", "partial_rotary_factor"])
@pytest.mark.parametrize("value", [1, 1.0])
def test_that_a_multiplier_of_one_says_nothing(name, value):
    assert is_neutral(name, value)
    refuse_unread("folder", {name: value}, TABLE)
    for other in (2.0, 0, True, "1"):
        with pytest.raises(ValueError, match=name):
            refuse_unread("folder", {name: other}, TABLE)


@pytest.mark.parametrize("value", [1, 1.0, 0, 0.0, True, "", "x", [None], {"a": None}, -1])
def test_that_other_values_of_unknown_fields_are_refused_by_name(value):
    for raw in ({"unheard_of": value}, {"inner": {"unheard_of": value}}, {"rope_parameters": {"unheard_of": value}}):
        with pytest.raises(ValueError, match=r"unheard_of.*ignore_fields=\['unheard_of'\]$"):
            refuse_unread("folder", raw, TABLE)
        refuse_unread("folder", raw, TABLE, ["unheard_of"])


def test_that_one_error_names_all_fields():
    raw = {"one": 3, "size": 4, "inner": {"two": 3, "depth": 1, "deeper": {"three": 3, "note": 4, "one": 5}}}
    with pytest.raises(ValueError) as caught:
        refuse_unread("folder", raw, TABLE)
    assert all(path in str(caught.value) for path in ("one=3", "inner.two=3", "inner.deeper.three=3", "deeper.one=5"))
    assert str(caught.value).endswith("ignore_fields=['one', 'two', 'three']")
    with pytest.raises(ValueError, match=r"ignore_fields=\['three'\]$"):
        refuse_unread("folder", raw, TABLE, ["one", "two"])


def test_that_a_level_is_no_name_of_its_fields():
    refuse_unread("folder", {"nested_whole": {"anything": 3}, "copied": {"anything": 3}, "free_will": 3}, TABLE)
    for raw in ({"depth": 3}, {"inner": {"size": 3}}, {"inner": {"copied": 3}}, {"inner": 3}, {"note": 3}):
        with pytest.raises(ValueError, match="depth|size|copied|inner|note"):
            refuse_unread("folder", raw, TABLE)


def test_that_fields_with_values_of_their_own_allow_no_others():
    refuse_unread("folder", {"is_neox_style": True, "mode": "b", "num_nextn_predict_layers": 0}, TABLE)
    refuse_unread("folder", {"is_neox_style": None, "mode": None}, TABLE)
    for raw in ({"is_neox_style": False}, {"is_neox_style": 1}, {"mode": []}, {"num_nextn_predict_layers": False}):
        with pytest.raises(ValueError, match=next(iter(raw))):
            refuse_unread("folder", raw, TABLE)


def test_what_ignore_fields_takes():
    for name in ("size", "depth", "rope_theta"):
        with pytest.raises(ValueError, match=name):
            refuse_unread("folder", {}, TABLE, [name])
    refuse_unread("folder", {"new": 3}, TABLE, "new")
    with pytest.raises(ValueError, match="ignore_fields.*'n'"):
        refuse_unread("folder", {"n": 3}, TABLE, "new")


def test_that_names_of_one_thing_agree():
    paths = ("causal", "inner.causal", "inner.is_free")
    meanings = {"inner.is_free": lambda free: not free}
    for raw, expected in (
        ({}, None),
        ({"causal": None, "inner": {"causal": [], "is_free": {}}}, None),
        ({"causal": False}, False),
        ({"inner": {"is_free": False}}, True),
        ({"causal": True, "inner": {"causal": True, "is_free": False}}, True),
        ({"causal": None, "inner": {"causal": False, "is_free": True}}, False),
        ({"inner": 3}, None),
    ):
        assert agreed("folder", raw, *paths, meanings=meanings) is expected
    for raw, names in (
        ({"causal": False, "inner": {"causal": True}}, ("causal=False", "inner.causal=True")),
        ({"causal": True, "inner": {"is_free": True}}, ("causal=True", "inner.is_free=True")),
        ({"causal": 1, "inner": {"causal": True}}, ("causal=1", "inner.causal=True")),
    ):
        with pytest.raises(ValueError) as caught:
            agreed("folder", raw, *paths, meanings=meanings)
        assert all(name in str(caught.value) for name in names)


def test_that_a_meaning_may_stand_by_its_last_name_and_say_nothing():
    meanings = {"bonus": lambda bonus: None if not bonus else False}
    assert agreed("f", {"first": True, "inner": {"bonus": False}}, "first", "inner.bonus", meanings=meanings) is True
    with pytest.raises(ValueError, match="first=True and inner.bonus=True"):
        agreed("f", {"first": True, "inner": {"bonus": True}}, "first", "inner.bonus", meanings=meanings)


@pytest.mark.parametrize(("said", "shown", "found"), [(None, 4, 4), (4, None, 4), (4, 4, 4), (None, None, None)])
def test_that_tensors_show_what_a_config_does_not_say(said, shown, found):
    assert settled("folder", "rank", said, shown) == found


@pytest.mark.parametrize(("said", "shown"), [(4, 5), (True, 1), (False, True), (0, False)])
def test_that_a_config_which_contradicts_tensors_is_refused(said, shown):
    with pytest.raises(ValueError, match=f"rank={said}.*{shown}"):
        settled("folder", "rank", said, shown)


def test_paths_and_equal_values():
    raw = {"a": {"b": {"c": 0}}, "d": 3}
    assert [stated(raw, path) for path in ("a.b.c", "a.b", "a.x.c", "d.x", "x")] == [0, {"c": 0}, None, None, None]
    assert is_same(1, 1.0) and is_same([1], [1]) and not is_same(1, True) and not is_same(False, 0)
