"""usage: {prog} RUN --group N [--section.key VALUE ...]
       {prog} RUN --step N  [--section.key VALUE ...]

Play a recorded group (or all recorded groups of a step) again, from the weights of a checkpoint and the same seeds, and
say token by token whether it is the same. In a deterministic run it is, bit for bit, and the step's loss too.

RUN is a run directory; it is only read. It is resumed in a scratch directory, from its newest checkpoint before the
step that trained the group, and ends after that step. All groups of the step are sampled again, also those that the
checkpoint holds as finished. Settings may change as for --resume, such as --generator.count 1. The directory, with logs
and rollouts.jsonl of the replay, is left and named unless all is the same or nothing was started.

Request ids, generators, attempts and the incarnation of versions belong to one play, so they are not compared. Nor are
messages where there are several branches: those of the last answer are recorded, and which one that is may be chance.

exit codes: 0 the same; 1 not the same, or the replay failed; 2 it cannot be played: nothing was started
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from titan_rl.config import RunConfig
from titan_rl.directories import METRICS
from titan_rl.errors import ConfigError
from titan_rl.loop.checkpoint_files import CHECKPOINTS, checkpoints, directory_of
from titan_rl.metrics.json_lines import json_lines
from titan_rl.metrics.rollout_record import ROLLOUTS, RolloutRecord, read_records
from titan_rl.one_line import counted
from titan_rl.overrides import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Command, Verb, print_error
from titan_rl.playing.policies import number_of
from titan_rl.run.runs import Resume, check_differences, differences, find
from titan_rl.train import check_and_run, config_of_run, resolve, settings_of
from titan_rl.types import Purpose

NUMBERS = (
    "groups",
    "rollout/reward_mean",
    "rollout/reward_std",
    "rollout/tokens",
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "train/trained_tokens",
    "train/lr",
)
"""Of a step, in `metrics.jsonl`."""

NOT_DETERMINISTIC = (
    "the run is not deterministic (--deterministic): logprobs differ in their last bits with the batch that a request "
    "meets, and groups may be sampled by other versions, so the replay need not be the same"
)


def _act(command: Command, prog: str) -> int:
    run = find(Path(command.word("run: its directory"))).run
    recorded = _recorded(run, command)
    step = recorded[0].step
    config = _config(run, command)
    if not config.deterministic:
        print_error(prog, NOT_DETERMINISTIC)
    try:
        scratch = Path(tempfile.mkdtemp(prefix="titan-rl-replay-"))
        (scratch / CHECKPOINTS).mkdir()
    except OSError as error:
        raise ConfigError(f"no directory can be made in {tempfile.gettempdir()}: {error.strerror}") from error
    for checkpoint in checkpoints(run):
        if checkpoint < directory_of(run, step):
            (scratch / CHECKPOINTS / checkpoint.name).symlink_to(checkpoint.resolve())
    code = check_and_run(config, Resume(scratch), prog, replay_until=step)
    if not code:
        found = difference(recorded, [*_read(scratch)])
        found = found or difference_of_numbers(_numbers(run, step), _numbers(scratch, step))
        if found:
            print(f"not the same: step {step}, {found}; the replay is in {scratch}")
            return EXIT_FAILED
    if code in (EXIT_OK, EXIT_USAGE):  # else its logs say why
        shutil.rmtree(scratch)
    if code:
        return code
    values = [value for record in recorded for _, value in facts(record)]
    numbers = sum(isinstance(value, float) for value in values)
    tokens = sum(len(branch.token_ids) for record in recorded for branch in record.branches)
    groups = sorted({record.group for record in recorded})
    print(
        f"the same: step {step}, {counted(len(recorded), 'rollout')} of group {', '.join(map(str, groups))}: {tokens} "
        f"tokens and {numbers} numbers about them; loss and {len(NUMBERS) - 1} other numbers of the step"
    )
    return 0


# --- what is compared ------------------------------------------------------------------------------------------------


def difference(recorded: Sequence[RolloutRecord], replayed: Sequence[RolloutRecord]) -> str:
    """The first difference of recorded rollouts from those of the replay, in words; empty: there is none."""
    again = {(record.group, record.sample): record for record in replayed}
    for record in recorded:
        who = f"group {record.group}, sample {record.sample}"
        if (other := again.get((record.group, record.sample))) is None:
            return f"{who}: the replay did not train it"
        if not record.turns:  # it was finished before a resume, which keeps tokens only
            other = msgspec.structs.replace(other, turns=[], messages=[])
        for before, now in zip_longest(facts(record), facts(other), fillvalue=("", None)):
            if before[0] != now[0]:
                return f"{who}: recorded {before[0] or 'nothing more'}, replayed {now[0] or 'nothing more'}"
            if before[1] != now[1]:
                return f"{who}, {before[0]}: recorded {before[1]!r}, replayed {now[1]!r}"
    return ""


def difference_of_numbers(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> str:
    for name in NUMBERS:
        if recorded.get(name) != replayed.get(name):
            return f"{name}: recorded {recorded.get(name)!r}, replayed {replayed.get(name)!r}"
    return ""


def facts(record: RolloutRecord) -> Iterator[tuple[str, Any]]:
    """Everything that a replay repeats: where it stands in the record, and what. The tokens come first, because the
    rest follows from them."""
    for branch in record.branches:
        of = f" of branch {branch.sample}" if len(record.branches) > 1 else ""
        numbers = {
            "logprob": branch.logprobs,
            "version": [each and f"v{each.rpartition('.')[2].removeprefix('v')}" for each in branch.versions or ()],
            "trainer's logprob": branch.trainer_logprobs,
            "loss weight": branch.weights,
        }
        for place, token_id in enumerate(branch.token_ids):
            token, text = f"token {place}{of}", branch.texts and branch.texts[place]
            yield token, (token_id, text)
            yield f"whether {token} {text!r} is trained", branch.trained[place]
            for what, values in numbers.items():
                yield f"{what} of {token} {text!r}", values and values[place]
    for name in ("reward", "reward_parts", "advantage", "stop_reason"):
        yield name, getattr(record, name)
    for number, turn in enumerate(record.turns):
        yield f"turn {number}", {name: getattr(turn, name) for name in ("seed", "finish", "tokens")}
    for number, message in enumerate(record.messages if len(record.branches) == 1 else ()):
        yield f"message {number}", message


# --- files -----------------------------------------------------------------------------------------------------------


def _recorded(run: Path, command: Command) -> list[RolloutRecord]:
    """What is compared: the recorded rollouts of one step, or of one group of it."""
    given = [name for name in ("group", "step") if f"--{name}" in command.values]
    if len(given) != 1:
        raise ConfigError("say what to replay: --group N or --step N")
    name, number = given[0], number_of(command, f"--{given[0]}", 0, least=0)
    try:
        everything = [*_read(run)]
        found = [record for record in everything if getattr(record, name) == number]
        for record in found:
            [*facts(record)]  # one that is damaged is refused now, not after the play
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run / ROLLOUTS} cannot be read: {type(error).__name__}: {error}") from error
    if not found:
        there = sorted({getattr(record, name) for record in everything})
        near = sorted(there, key=lambda each: abs(each - number))[:5]
        rest = f"; near it are {', '.join(map(str, sorted(near)))}" if near else ": it has recorded nothing"
        raise ConfigError(f"{run} has recorded no rollout of {name} {number}{rest}")
    return found


def _read(run: Path) -> Iterator[RolloutRecord]:
    return (record for record in read_records(run / ROLLOUTS) if record.purpose is Purpose.TRAIN)


def _numbers(run: Path, step: int) -> dict[str, Any]:
    lines = json_lines(run / METRICS)
    return next((line for _, line in lines if line.get("step") == step and "train/loss" in line), {})


def _config(run: Path, command: Command) -> RunConfig:
    """The run's config, with the settings of the command, for a run that records one step and nothing else."""
    command.lay_over(settings_of(run))
    config = resolve(command)
    check_differences(differences(config_of_run(run), config), run)
    everyone = config.loop.groups_per_step * max(config.rollout.samples_per_group, config.rollout.most_samples)
    logging = replace(config.logging, rollouts=everyone, save_final=False, spans=False)
    logging = replace(logging, tensorboard=False, wandb_project="")
    return replace(config, logging=logging, checkpoint=replace(config.checkpoint, keep=0))


VERB = Verb(
    act=_act,
    about=__doc__,
    options={"--group N": "the group to compare", "--step N": "compare all recorded groups of this step"},
    takes_words=True,
)
