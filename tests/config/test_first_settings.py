"""What a run needs is chosen from its task alone (10 s: one process of user code per task)."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from titan_rl.config_registry import task
from titan_rl.environments.base import find_task
from titan_rl.errors import ConfigError, TaskError
from titan_rl.isolation.wire import TaskInfo
from titan_rl.rollout.config import EnvironmentConfig
from titan_rl.run.first_settings import Survey, choose, is_marked, survey
from titan_rl.train import VERB, for_task
from titan_rl.types import ToolSpec

HEAD = "from titan_rl.environments.base import *\n"
ROWS = """
ROWS = [{"prompt": f"{a}{b}=", "answer": f"{b}{a}"} for a in "abcd" for b in "abcd"]
def right(example, transcript):
    return float(transcript.answer == example.answer)
"""
SWAP = HEAD + ROWS + "Swap = Environment.from_examples(ROWS, right)\n"
ASKS = """
class Asks(Environment):
    size = 9
    def example(self, index):
        return Example(prompt=(Message("user", f"{index % 9}?"),), answer="xx")
    def held_out(self, count):
        return [self.example(9)]
    def respond(self, example, transcript):
        done = len(transcript.finish_reasons) > 1
        return EnvironmentReply(done=True) if done else EnvironmentReply(messages=(Message("user", "more!"),))
    def rubric(self):
        def right(example, transcript):
            return float(transcript.answer == "zzz")
        return Rubric(right)
    def demonstration(self, index):
        turns = (Message("assistant", "x"), Message("user", "more!"), Message("assistant", "zzz"))
        return Demonstration(prompt=self.example(index).prompt, messages=turns, answer="xx")
"""


def chosen_for(source: str, tmp_path: Path) -> tuple[Survey, dict[str, object]]:
    file = tmp_path / "mine.py"
    file.write_text(source)
    config = replace(task(), environment=EnvironmentConfig(name=find_task(str(file))))
    found = asyncio.run(survey(config))
    return found, {each.setting: each.value for each in choose(found)}


def test_symbols_and_room_come_from_prompts_and_right_answers(tmp_path):
    found, chosen = chosen_for(SWAP, tmp_path)
    assert chosen["policy.tiny.symbols"] == "=abcd"
    assert chosen["rollout.sampling.max_new_tokens"] == 4, "two letters, what ends them, and one more"
    assert chosen["generator.max_model_len"] == 32 and "rollout.max_turns" not in chosen
    assert found.best == 1 and found.demonstrations
    assert "rollout.most_samples" not in chosen, "right answers are taught"


def test_where_prompts_do_not_say_where_they_end_a_symbol_does(tmp_path):
    _, chosen = chosen_for(SWAP, tmp_path)
    assert "policy.tiny.special_tokens" not in chosen
    _, chosen = chosen_for(SWAP.replace("{b}=", "{b}"), tmp_path)
    assert chosen["policy.tiny.special_tokens"] == ("<turn>",)


@pytest.mark.parametrize(
    ("prompts", "answers", "marked"),
    [
        (["ab=", "a="], ["b"], True),
        (["ab=", "a"], ["b"], False),
        (["ab=", "a="], ["b=a"], False),
        (["a=b=", "a="], ["b"], False),
        ([], [], False),
    ],
)
def test_a_prompts_end_is_marked_by_a_character_that_is_nowhere_else(prompts, answers, marked):
    assert is_marked(prompts, answers) is marked


def test_groups_may_grow_where_nothing_at_random_is_rewarded_and_nobody_shows_what_is():
    found = Survey(info=TaskInfo(size=9, held_out=9, multi_turn=False), texts={"a"}, best=0.0)
    assert {each.setting: each.value for each in choose(found)}["rollout.most_samples"] == 64
    (grown,) = (each for each in choose(replace(found, best=1.0, different=0.2)) if each.value == 64)
    assert grown.setting == "rollout.most_samples" and grown.reason.startswith("20% of groups")
    rewarded, shown = replace(found, best=0.1, different=0.6), replace(found, demonstrations=True, lucky=0.0)
    for chosen in (choose(rewarded), choose(shown), choose(found, positions=64)):
        assert all(each.setting != "rollout.most_samples" for each in chosen)


def test_a_reward_that_fails_where_an_answer_is_wrong_is_refused_with_its_line(tmp_path):
    falls_through = SWAP.replace("return float(", "if ").replace("example.answer)", "example.answer: return 1.0")
    refusal = r"384 of 384 answers at random cannot be graded: .*reward right .*mine.py:4. returned None"
    with pytest.raises(TaskError, match=refusal):
        chosen_for(falls_through, tmp_path)


def test_the_share_of_groups_with_different_rewards_is_that_of_answers_at_random(tmp_path):
    partly = SWAP.replace("transcript.answer == example", "transcript.answer[:1] == example").replace(
        "answer)", "answer[:1])"
    )
    found, _ = chosen_for(partly, tmp_path)
    assert found.different > 0.5, "a first letter of six is right: 95% of groups of 16 have both"


def test_where_the_user_wants_no_warm_up_groups_may_grow():
    found = Survey(
        info=TaskInfo(size=9, held_out=9, multi_turn=False), texts={"a"}, best=1.0, demonstrations=True, lucky=0.0
    )
    for warmup, grows in ((None, False), (0, True), (9, False)):
        chosen = {each.setting for each in choose(found, warmup=warmup)}
        assert ("rollout.most_samples" in chosen) is grows and ("trainer.optimizer.lr" in chosen) is not grows


def test_turns_replies_and_a_warm_up_come_from_demonstrations(tmp_path):
    found, chosen = chosen_for(HEAD + ASKS, tmp_path)
    assert {*chosen["policy.tiny.symbols"]} == {*"012345678?xzmore!"}
    assert chosen["rollout.max_turns"] == 2 and chosen["rollout.sampling.max_new_tokens"] == 5
    assert found.best == 1 and chosen["trainer.warmup.steps"] == 2000, "by chance nobody says zzz"


def test_demonstrations_that_are_not_graded_are_taught_where_nothing_at_random_is_rewarded(tmp_path):
    ungraded = ASKS.replace('messages=turns, answer="xx")', "messages=turns)")
    found, chosen = chosen_for(HEAD + ungraded, tmp_path)
    assert found.best == 0 and found.lucky == 0, "all rewards are 0: none of them is a right answer"
    assert chosen["trainer.warmup.steps"] == 2000


FIND = """
from titan_rl.environments.base import Environment, ToolError, tool
def right(example, transcript): return float(transcript.answer == example.answer)
@tool
def find(code: str) -> str:
    \"\"\"Finds.

    Args:
        code: two letters
    \"\"\"
    if code[0] == "a":
        raise ToolError("QUITE WRONG")
    return "none"
ROWS = [{"prompt": f"{code}?", "answer": "7"} for code in ("ab", "bc", "cd")]
class Finds(Environment.from_examples(ROWS, right)):
    def tools(self): return (find,)
"""


def test_what_a_tool_says_to_whatever_call_can_be_written_and_what_is_wrong_is_unknown(tmp_path):
    _, chosen = chosen_for(FIND, tmp_path)
    assert {*"none"} <= {*chosen["policy.tiny.symbols"]} and not {*"QUITE"} & {*chosen["policy.tiny.symbols"]}
    assert "<unknown>" in chosen["policy.tiny.special_tokens"]
    assert chosen["rollout.sampling.max_new_tokens"] >= len("<tool>bc</tool>") - len("tool/tool<>")


@pytest.mark.parametrize(
    ("source", "refusal"),
    [
        (HEAD, "has no task"),
        (SWAP + "Other = Environment.from_examples(ROWS, right)\n", "mine.py:Swap or .*mine.py:Other"),
        ("from titan_rl.environments.copy import Copy\n", "has no task"),
        ("1 / 0\n", "mine.py, line 1: ZeroDivisionError"),
    ],
)
def test_a_file_without_one_task_of_its_own_is_refused(source, refusal, tmp_path):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=refusal):
        find_task(str(tmp_path / "mine.py"))


def test_the_subclass_is_the_task(tmp_path):
    (tmp_path / "mine.py").write_text(HEAD + ASKS + "class Later(Asks):\n    size = 3\n")
    assert find_task(str(tmp_path / "mine.py")).endswith("mine.py:Later")


@pytest.mark.parametrize(("arguments", "by"), [(("expression",), "symbols"), (("first", "second"), "chat")])
def test_symbols_can_call_one_tool_with_one_argument(arguments, by):
    tool = ToolSpec("add", "", {"properties": dict.fromkeys(arguments, {})})
    info = TaskInfo(size=9, held_out=1, multi_turn=False, tools=(tool,))
    chosen = {each.setting: each.value for each in choose(Survey(info=info, texts={*"12"}, prompt=2, answer=1))}
    assert ("policy.tiny.special_tokens" in chosen) == (by == "symbols")
    assert chosen.get("policy.tiny.tokenizer", "symbols") == by


def test_many_characters_are_written_as_bytes():
    info = TaskInfo(size=9, held_out=1, multi_turn=False)
    texts = {chr(0x3040 + each) for each in range(100)}
    chosen = {each.setting: each.value for each in choose(Survey(info=info, texts=texts, prompt=2, answer=1))}
    assert chosen["policy.tiny.tokenizer"] == "chat"
    assert chosen["rollout.sampling.max_new_tokens"] == 5, "three bytes"


@pytest.mark.parametrize(
    ("lucky", "demonstrations", "trained", "taught"),
    [(0.04, True, False, True), (0.06, True, False, False), (0.0, False, False, False), (0.0, True, True, False)],
)
def test_right_answers_are_taught_where_answers_at_random_are_hardly_ever_right(lucky, demonstrations, trained, taught):
    info = TaskInfo(size=9, held_out=1, multi_turn=False)
    found = Survey(info=info, texts={*"12"}, prompt=2, answer=1, lucky=lucky, demonstrations=demonstrations)
    chosen = {each.setting: each.value for each in choose(found, positions=4096 * trained)}
    assert (chosen.get("trainer.warmup.steps", 0) > 0) is taught
    assert ("trainer.warmup.steps" in chosen) is (lucky < 0.05 and not trained), "that nothing is taught is said"
    assert (chosen.get("trainer.loss.kwargs.entropy_bonus") == 0.05) is taught, "what was taught is not forgotten"


def test_runs_of_programs_make_smaller_steps():
    info = TaskInfo(size=9, held_out=1, multi_turn=False, plays=True)
    chosen = {each.setting: each.value for each in choose(Survey(info=info, texts={*"12"}, prompt=2, answer=1))}
    assert chosen["loop.groups_per_step"] < task().loop.groups_per_step


def test_weights_that_were_trained_before_get_room_to_think_and_small_steps():
    info = TaskInfo(size=9, held_out=1, multi_turn=False)
    found = Survey(info=info, texts={*"12"}, prompt=2, answer=1)
    chosen = {each.setting: each.value for each in choose(found, positions=4096)}
    assert chosen["trainer.optimizer.lr"] == 1e-6 and chosen["rollout.sampling.max_new_tokens"] == 256
    assert not any(setting.startswith("policy.tiny") for setting in chosen)


def test_weights_with_few_positions_get_what_fits_into_them():
    info = TaskInfo(size=9, held_out=1, multi_turn=True)
    found = Survey(info=info, texts={*"12"}, prompt=2, answer=1)
    chosen = {each.setting: each.value for each in choose(found, positions=64)}
    assert chosen["generator.max_model_len"] == 64 and chosen["rollout.sampling.max_new_tokens"] == 16


def test_a_length_that_the_user_gives_takes_the_place_of_the_chosen_one(tmp_path):
    (tmp_path / "mine.py").write_text(SWAP)
    words = [str(tmp_path / "mine.py"), "--generator.max-model-len", "16", "--rollout.samples-per-group", "4"]
    config = for_task(words[0], VERB.read(words), "train")
    assert config.generator.max_model_len == 16 and config.policy.tiny.max_length == 32
    assert config.rollout.samples_per_group == 4 and config.rollout.most_samples == 0
