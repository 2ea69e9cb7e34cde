"""A task that cannot work is refused in one sentence before anything starts (30 s)."""

from dataclasses import replace
from pathlib import Path

import pytest
from checked_task import recipe

from titan_rl.config_registry import RECIPES, load_recipe
from titan_rl.errors import AbsentError, ConfigError, ConfigWarning
from titan_rl.overrides import variant
from titan_rl.run.task_check import check_task

TASK = Path(__file__).with_name("checked_task.py")
LINES = TASK.read_text().splitlines()


def line(text: str) -> str:
    """Where a line that begins so stands in the task's file."""
    (number,) = (number for number, each in enumerate(LINES, start=1) if each.strip().startswith(text))
    return f"{TASK}:{number}"


def checked(wrong="", config=None, **changes):
    config = config or recipe()
    seconds = 1.0 if "hangs" in wrong else config.environment.grade_seconds
    environment = replace(config.environment, kwargs={"wrong": wrong}, grade_seconds=seconds)
    config = replace(config, environment=environment, **changes)
    return check_task(config)


WRONG = {
    "cannot be made": ("could not be made: ValueError: no data today", line('raise ValueError("no data today")')),
    "refuses": ("environment.kwargs.wrong must be right",),
    "example raises": ("ValueError: no example", line('raise ValueError("no example")')),
    "example 17 raises": ("a look at its prompts: example(17): ValueError: two lines", line('raise ValueError("two')),
    "size": ("size is 0; it is the number of training prompts",),
    "no list": ("held_out gave None, which is no sequence",),
    "no rubric": ("rubric returned NoneType, expected Rubric",),
    "no function": ("a rubric takes reward functions, and 'right' cannot be called",),
    "huge": ("reward huge (" + line("def huge") + ") returned inf, which is not finite",),
    "long": ("a rollout of train prompt 0 fails: the prompt of 100 tokens leaves no room in 64",),
    "no example": ("example gave None, which is no Example",),
    "letters": ("training prompt 0 cannot be given to the policy: the tokenizer has no symbol 'L'", "policy.tiny.symb"),
    "held out letters": ("held-out prompt 1 cannot be given", "no symbol 'L', in 'Lot'", "policy.tiny.symbols"),
    "tool": ("this tokenizer has no symbols <tool> and </tool>", "policy.tiny.special_tokens"),
    "nothing": ("held_out(1000) gave no prompts",),
    "call": ("held_out(1000) gives other prompts when it is called again, the first at 0: '0=', then '1='",),
    "demonstration raises": ("ValueError: no demonstration", line('raise ValueError("no demonstration")')),
    "demonstration letters": ("demonstration 0: the tokenizer has no symbol 'y'", "policy.tiny.symbols"),
    "raises": ("score of train prompt 0: json.decoder.JSONDecodeError", line("return json.loads")),
    "nan": ("the policy says '1' fails", "reward nan (" + line("def nan") + ") returned nan, which is not finite"),
    "kills its host": (
        "environment ",
        "a look at its prompts: its process ended: ",
        "was killed by signal 9 (SIGKILL)",
    ),
    "hangs": ("score of train prompt 0: did not finish within 1 s (environment.grade_seconds)",),
}


def test_a_variable_that_user_code_does_not_see_is_named_with_the_setting(monkeypatch):
    monkeypatch.setenv("MY_GRADER_KEY", "secret")
    (problem,) = checked("wants a key")
    assert "KeyError: 'MY_GRADER_KEY'" in str(problem)
    assert "sees the variable MY_GRADER_KEY only if environment.variables names it" in str(problem)


def test_a_task_that_works_is_not_refused():
    assert checked() == []
    assert checked("wrong hangs") == []  # the right answers are tried, each with its prompt
    assert checked("fines") == []  # a reward of 0 is right where wrong answers get less
    assert checked("words") == []  # a right answer that cannot be written is not the tokenizer's fault


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_task_is_one_sentence_that_says_where(wrong):
    (problem,) = checked(wrong)
    assert all(words in str(problem) for words in WRONG[wrong]), str(problem)
    assert "\n" not in str(problem) and len(str(problem)) < 1000 and type(problem) is ConfigError


def test_held_out_prompts_that_chance_draws_are_refused():
    (problem,) = checked("chance")
    assert "gives other prompts when it is called again" in str(problem)


def test_what_is_absent_on_this_host_is_told_apart():
    (problem,) = checked("lacks")
    assert isinstance(problem, AbsentError) and str(problem) == "there is no file of words"


def test_a_target_that_group_rewards_cannot_judge_is_refused():
    (problem,) = checked("only compares")
    assert "evaluation.target_exact_match is set" in str(problem) and "`exact_match`" in str(problem)
    assert checked("only compares", evaluation=replace(recipe().evaluation, target_exact_match=0.0)) == []


def test_what_the_environment_warns_of_is_said_and_ends_nothing():
    (problem,) = checked("warns")
    assert isinstance(problem, ConfigWarning) and str(problem) == "half of the rows are one"


def test_right_answers_that_get_no_reward_are_said():
    (problem,) = checked("unpaid")
    assert isinstance(problem, ConfigWarning)
    assert (
        "examples, '1' for training prompt 0, get a reward of 0, as wrong ones do: is their column the right one"
        in str(problem)
    )


def test_right_answers_that_would_be_cut_are_said():
    (problem,) = check_task(variant(load_recipe("copy4"), {"rollout.sampling.max_new_tokens": 4}))
    assert isinstance(problem, ConfigWarning)
    assert "a right answer has 4 tokens and its end, rollout.sampling.max_new_tokens is 4: it is cut" in str(problem)


def test_demonstrations_are_tried_only_where_a_warm_up_asks_for_them():
    base = recipe()
    trainer = replace(base.trainer, warmup=replace(base.trainer.warmup, steps=0))
    assert checked("demonstration raises", base, trainer=trainer) == []


@pytest.mark.parametrize("name", [name for name in RECIPES if load_recipe(name).policy.tiny is not None])
def test_bundled_tasks_pass(name):
    assert check_task(load_recipe(name)) == []
