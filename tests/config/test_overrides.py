"""Layers of overrides over a config, and configs as TOML (2 s, most of it hypothesis)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.bounds import NotNegative
from titan_rl.errors import ConfigError
from titan_rl.overrides import Rules, apply, check, did_you_mean, option_overrides, to_toml, variant
from titan_rl.overrides.command import read_toml, split_options, toml_overrides

HERE = Path("/somewhere")


@dataclass(kw_only=True, slots=True)
class Oven:
    degrees: int = 200
    mode: Literal["fan", "grill"] = "fan"
    limits: tuple[float, float] = (0.0, 250.0)

    def __post_init__(self) -> None:
        if not self.limits[0] <= self.degrees <= self.limits[1]:
            raise ConfigError(f"oven.degrees ({self.degrees}) must be within oven.limits {self.limits}")


@dataclass(kw_only=True, slots=True)
class Timer:
    minutes: NotNegative = 30.0
    rings: bool = True


@dataclass(kw_only=True, slots=True)
class Cake:
    name: str = "plain"
    seed: int | None = None
    toppings: tuple[str, ...] = ()
    recipe: str = "sponge"
    recipe_kwargs: dict[str, Any] = field(default_factory=dict)
    oven: Oven = field(default_factory=Oven)
    timer: Timer | None = None
    clock: str = ""


RULES = Rules(
    alternatives=(("clock", "timer"),),
    arguments_of={"recipe": "recipe_kwargs"},
    file_settings={"clock": lambda value, base: str(base / value) if value else value},
)


def options(*arguments: str):
    words = ((option, option.removeprefix("--"), words) for option, words in split_options(arguments))
    return option_overrides(words, HERE)


def toml(text: str, file: str = "/there/cake.toml"):
    return toml_overrides(tomli.loads(text), Path(file))


def baked(*layers, config: Cake | None = None) -> Cake:
    return apply(config or Cake(), layers, RULES)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--oven.degrees", "180"], Cake(oven=Oven(degrees=180))),
        (["--oven.degrees=180"], Cake(oven=Oven(degrees=180))),
        (["--oven.mode", "grill"], Cake(oven=Oven(mode="grill"))),
        (["--oven.limits", "-10", "300"], Cake(oven=Oven(limits=(-10.0, 300.0)))),
        (["--toppings", "a", "b"], Cake(toppings=("a", "b"))),
        (["--name", "123"], Cake(name="123")),
        (["--name=--odd"], Cake(name="--odd")),
        (["--name", ""], Cake(name="")),
        (["--seed", "7"], Cake(seed=7)),
        (["--seed", "7", "--seed", "none"], Cake()),
        (["--timer.minutes", "5"], Cake(timer=Timer(minutes=5.0))),
        (["--timer.minutes", ".5"], Cake(timer=Timer(minutes=0.5))),
        (["--oven.limits", "-.5", "1_000"], Cake(oven=Oven(limits=(-0.5, 1000.0)))),
        (["--timer.rings", "False"], Cake(timer=Timer(rings=False))),
        (["--timer.rings"], Cake(timer=Timer())),
        (["--recipe-kwargs.eggs", "4"], Cake(recipe_kwargs={"eggs": 4})),
        (["--recipe_kwargs.fold", "true"], Cake(recipe_kwargs={"fold": True})),
        (["--recipe_kwargs.flour", "rye"], Cake(recipe_kwargs={"flour": "rye"})),
        (["--recipe_kwargs.day", "2026-01-01"], Cake(recipe_kwargs={"day": "2026-01-01"})),
        (["--recipe_kwargs.layers", "[1, 2]"], Cake(recipe_kwargs={"layers": [1, 2]})),
        (["--recipe_kwargs.deep.er", "1"], Cake(recipe_kwargs={"deep": {"er": 1}})),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words_of_the_command_line_become_the_type_of_the_setting(arguments, expected):
    assert baked(options(*arguments)) == expected


def test_a_text_argument_stays_a_text_when_it_looks_like_a_number():
    config = Cake(recipe_kwargs={"label": "old"})
    assert baked(options("--recipe_kwargs.label", "42"), config=config).recipe_kwargs == {"label": "42"}


def test_an_integer_of_toml_passes_for_a_float():
    assert baked(toml("[timer]\nminutes = 5")).timer == Timer(minutes=5.0)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ("--oven.degrees warm", "expected an integer, got 'warm'"),
        ("--oven.degrees", "got nothing"),
        ("--oven.degrees 1 2", "got '1 2'"),
        ("--oven.mode steam", "one of fan, grill"),
        ("--oven.limits 1", "2 values (a finite number, a finite number)"),
        ("--timer.minutes nan", "a finite number"),
        ("--timer.minutes -1", "a finite number of at least 0, got '-1'"),
        ("--timer.rings maybe", "true or false"),
        ("--seed x", "an integer or none"),
        ("--oven hot", "set oven.NAME"),
        ("--name.first x", "name has no settings below it"),
        ("--oven.degree 180", "(did you mean --oven.degrees?)"),
        ("--minutes 1", "(did you mean --timer.minutes?)"),
        ("--zzz 1", "there is no such setting"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name_and_what_would_be_right(arguments, remedy):
    with pytest.raises(ConfigError) as refusal:
        baked(options(*arguments.split()))
    assert str(refusal.value).startswith(f"{arguments.split()[0]}: ") and remedy in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "setting", "remedy"),
    [
        ("[oven]\ndegrees = 180.0", "oven.degrees", "expected an integer, got 180.0"),
        ("[oven]\ndegrees = true", "oven.degrees", "expected an integer, got True"),
        ('[oven]\ndegrees = "180"', "oven.degrees", "expected an integer, got '180'"),
        ("[timer]\nminutes = inf", "timer.minutes", "got inf"),
        ("name = 3", "name", "expected one text, got 3"),
        ("[owen]\ndegrees = 3", "owen.degrees", "(did you mean oven.degrees?)"),
        ("oven = 3", "oven", "set oven.NAME"),
        ("[name]", "name", "expected one text, got {}"),
    ],
)
def test_a_wrong_value_of_toml_is_refused_with_its_file_and_what_would_be_right(text, setting, remedy):
    with pytest.raises(ConfigError) as refusal:
        baked(toml(text))
    assert str(refusal.value).startswith(f"cake.toml: {setting}: ") and str(refusal.value).endswith(remedy)


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        (Cake(seed="7"), "seed"),
        (Cake(oven=Oven(mode="steam")), "oven.mode"),
        (Cake(timer=Timer(minutes=-1.0)), "timer.minutes"),
        (Cake(timer=Timer(minutes=math.nan)), "timer.minutes"),
    ],
)
def test_a_config_made_in_python_is_held_to_types_and_bounds(wrong, setting):
    check(Cake())
    with pytest.raises(ConfigError, match=f"^{setting}: expected "):
        check(wrong)


def test_numbers_of_numpy_and_paths_of_a_recipe_are_numbers_and_texts():
    cake = Cake(timer=Timer(minutes=np.float64(2.5)), clock=Path("/wall"))
    assert variant(cake, {}) == Cake(timer=Timer(minutes=2.5), clock="/wall")


def test_a_group_that_may_be_absent_is_taken_away_by_its_name():
    assert baked(options("--timer", "none"), config=Cake(timer=Timer())).timer is None


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.toml: there is no such file"):
        read_toml(tmp_path / "nowhere.toml")
    (tmp_path / "broken.toml").write_text("name = = 1")
    with pytest.raises(ConfigError, match="broken.toml: is not valid TOML: .*line 1"):
        read_toml(tmp_path / "broken.toml")


# --- layers ----------------------------------------------------------------------------------------------------------


def test_a_later_layer_wins_and_the_config_underneath_is_left_alone():
    underneath = Cake()
    config = baked(toml("[oven]\ndegrees = 150\nmode = 'grill'"), options("--oven.degrees", "170"), config=underneath)
    assert config.oven == Oven(degrees=170, mode="grill")
    assert underneath == Cake()


def test_values_are_checked_together_only_after_the_last_layer():
    limits = options("--oven.limits", "0", "400")
    assert baked(toml("[oven]\ndegrees = 300"), limits).oven.degrees == 300
    with pytest.raises(ConfigError, match=r"oven.degrees \(300\) must be within"):
        baked(toml("[oven]\ndegrees = 300"))


def test_setting_one_of_two_alternatives_empties_the_other():
    with_timer = Cake(timer=Timer())
    assert baked(options("--clock", "wall"), config=with_timer) == Cake(clock="/somewhere/wall")
    assert baked(options("--timer.minutes", "5"), config=Cake(clock="/wall")) == Cake(timer=Timer(minutes=5.0))


def test_setting_both_alternatives_in_one_layer_sets_both():
    config = baked(options("--clock", "wall", "--timer.minutes", "5"))
    assert config.clock and config.timer


def test_another_class_starts_without_the_arguments_of_the_former_one():
    config = Cake(recipe="sponge", recipe_kwargs={"eggs": 4})
    assert baked(options("--recipe", "sponge"), config=config).recipe_kwargs == {"eggs": 4}
    assert baked(options("--recipe", "brownie"), config=config).recipe_kwargs == {}
    either_order = (
        ["--recipe", "brownie", "--recipe_kwargs.nuts", "1"],
        ["--recipe_kwargs.nuts", "1", "--recipe", "brownie"],
    )
    for arguments in either_order:
        assert baked(options(*arguments), config=config).recipe_kwargs == {"nuts": 1}


def test_an_empty_table_empties_a_dict_and_makes_an_optional_group():
    empties = toml("[recipe_kwargs]\n[timer]")
    for _ in range(2):  # layers are not changed by being applied
        assert baked(empties, config=Cake(recipe_kwargs={"eggs": 4})) == Cake(timer=Timer())
        assert baked(empties, options("--recipe_kwargs.nuts", "1")).recipe_kwargs == {"nuts": 1}


def test_a_variant_differs_in_the_settings_it_names():
    cake = Cake(recipe_kwargs={"eggs": 4})
    assert variant(cake, {"oven.degrees": 150, "timer.minutes": 3, "recipe_kwargs": {"nuts": 1}}) == Cake(
        recipe_kwargs={"nuts": 1}, oven=Oven(degrees=150), timer=Timer(minutes=3.0)
    )
    with pytest.raises(ConfigError, match="did you mean oven.degrees"):
        variant(cake, {"oven.degree": 150})


def test_relative_file_names_start_where_they_were_written():
    assert baked(toml("clock = 'wall'")).clock == "/there/wall"
    assert baked(options("--clock", "wall")).clock == "/somewhere/wall"


ODD = {"a.b": 1, "": [[], {}, 2.0, 3, math.inf, 2**70], "day": date(2026, 1, 1), "no": False, "ключ": {"é.x": -0.0}}


def test_arguments_come_back_from_a_variant_and_from_toml_as_they_were():
    for cake in (variant(Cake(recipe_kwargs=ODD), {"seed": 1}), variant(Cake(seed=1), {"recipe_kwargs": ODD})):
        for again in (cake, baked(toml(to_toml(cake)))):
            assert repr(again) == repr(Cake(seed=1, recipe_kwargs=ODD))


def test_a_tuple_is_a_list_and_a_path_its_name_before_a_run_as_after_a_resume():
    cake = Cake(recipe_kwargs={"range": (1, (2, 3)), "file": Path("a/b")})
    assert variant(cake, {}).recipe_kwargs == {"range": [1, [2, 3]], "file": "a/b"}
    assert baked(toml(to_toml(cake))).recipe_kwargs == {"range": [1, [2, 3]], "file": "a/b"}


@pytest.mark.parametrize("value", [None, {1: 2}, {1, 2}, b"ab", Decimal("1.5"), math.nan, Oven(), Oven, print])
@pytest.mark.parametrize("outer", [lambda value: value, lambda value: [value], lambda value: {"in": value}])
def test_an_argument_that_toml_cannot_give_back_is_refused_by_name(value, outer):
    wrong = {"eggs": outer(value)}
    for refused in (
        lambda: variant(Cake(recipe_kwargs=wrong), {"seed": 1}),
        lambda: variant(Cake(), {"recipe_kwargs": wrong}),
        lambda: to_toml(Cake(recipe_kwargs=wrong)),
    ):
        with pytest.raises(ConfigError, match=r"^recipe_kwargs\.eggs(\.in|\.0)?: (.* is no text, number|.*got nan)"):
            refused()


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("lr", "trainer.lr"), ("trianer.lr", "trainer.lr"), ("loop.step", "loop.steps"), ("steps", "loop.steps")],
)
def test_the_suggestion_is_the_setting_that_was_meant(name, nearest):
    assert did_you_mean(name, ["trainer.lr", "loop.steps", "generator.count"]) == f" (did you mean {nearest}?)"


# --- TOML ------------------------------------------------------------------------------------------------------------

plain_values = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=("Cs",))),
)
arguments = st.dictionaries(
    st.text(st.characters(exclude_categories=("Cs",)), min_size=1),
    st.one_of(plain_values, st.lists(plain_values, max_size=3)),
    max_size=3,
)
cakes = st.builds(
    Cake,
    name=st.text(st.characters(exclude_categories=("Cs",))),
    seed=st.none() | st.integers(0, 2**62),
    toppings=st.lists(st.text(), max_size=3).map(tuple),
    recipe_kwargs=arguments,
    oven=st.builds(Oven, degrees=st.integers(0, 250), mode=st.sampled_from(["fan", "grill"])),
    timer=st.none() | st.builds(Timer, minutes=st.floats(0, 1e300), rings=st.booleans()),
)


@given(cakes)
def test_a_config_written_as_toml_and_read_again_is_the_same(cake):
    text = to_toml(cake)
    assert baked(toml(text)) == cake
    assert to_toml(baked(toml(text))) == text
