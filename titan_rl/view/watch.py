"""usage: {prog} RUN [--once]

Show the rollouts that a run records: what was said, the reward, why it ended. Goes on while the run does; Ctrl-C ends
it. RUN is a run directory, of which only rollouts.jsonl is read, or one that holds run directories: then it is the
newest of them.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from titan_rl.config import LoggingConfig
from titan_rl.directories import CONFIG, is_going_on
from titan_rl.errors import ConfigError
from titan_rl.metrics.json_lines import json_lines
from titan_rl.metrics.rollout_record import ROLLOUTS, RolloutRecord, read_record
from titan_rl.overrides import Command, Verb
from titan_rl.view.conversation import draw_rollout

PAUSE_SECONDS = 1.0


def _act(command: Command, prog: str) -> int:
    console = Console()
    file = newest_run(Path(command.word("run: its directory", LoggingConfig().directory))) / ROLLOUTS
    try:
        for records in _looks(file, once="--once" in command.flags):
            for record in records:
                console.print(draw_rollout(record), end="\n\n", soft_wrap=True)
    except KeyboardInterrupt:
        pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {type(error).__name__}: {error}") from error
    return 0


def newest_run(directory: Path) -> Path:
    """`directory` itself, if it is a run, else the newest run in it. Raises ConfigError if there is none."""
    directory = directory.expanduser()
    if (directory / CONFIG).is_file():
        return directory
    runs = sorted(directory.glob(f"*/{CONFIG}"), key=lambda config: config.stat().st_mtime)
    if not runs:
        raise ConfigError(f"{directory} is no run directory, and holds none")
    return runs[-1].parent


def _looks(path: Path, *, once: bool) -> Iterator[list[RolloutRecord]]:
    """What is new at each look, until the run is over."""
    seen = -1  # where the last line begins
    while True:
        over = once or not is_going_on(path.parent)  # before the look, so that nothing is missed
        if path.is_file():
            if path.stat().st_size <= seen:
                seen = -1  # it was cut: the run went on from a checkpoint
            lines = [line for line in json_lines(path, start=max(seen, 0), strict=True) if line[0] > seen]
            records = [read_record(line) for _, line in lines]
            newest = {record.purpose: record.step for record in records}  # the last step, and the last evaluation
            yield [record for record in records if record.step == newest[record.purpose]]
            seen = lines[-1][0] if lines else seen
        if over:
            return
        time.sleep(PAUSE_SECONDS)


VERB = Verb(
    act=_act, about=__doc__, options={"--once": "show what is there, and end"}, takes_words=True, takes_settings=False
)
