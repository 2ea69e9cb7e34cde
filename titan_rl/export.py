"""usage: {prog} --run RUN --directory DIR

Write the weights of a checkpoint in Hugging Face format, with config and tokenizer. They come in the dtype that the
trainer computes in; the checkpoint itself keeps float32.
"""

from pathlib import Path

from titan_rl.config import RunConfig
from titan_rl.directories import check_replaceable
from titan_rl.errors import CheckpointError, ConfigError
from titan_rl.loop.checkpoint_files import Checkpoint
from titan_rl.overrides import Command, Verb, print_error
from titan_rl.run.runs import find
from titan_rl.train import config_of_run


def _act(command: Command, prog: str) -> int:
    run, directory = command.values.get("--run"), command.values.get("--directory")
    if not run or not directory:
        raise ConfigError("say what to export, and where to: --run RUN --directory DIR")
    where = Path(directory).expanduser()
    check_replaceable(where)
    resume = find(Path(run))
    config = config_of_run(resume.run)
    if (checkpoint := resume.checkpoint(lambda text: print_error(prog, text))) is None:
        raise ConfigError(f"{resume.run} has no checkpoint")
    try:
        export_weights(checkpoint, config, where)
    except OSError as error:
        raise ConfigError(f"{where} cannot be written: {error.strerror or error}") from error
    print(f"the weights after step {checkpoint.step} are in {where}")
    return 0


def export_weights(checkpoint: Checkpoint, config: RunConfig, directory: Path) -> None:
    """In Hugging Face format. Raises ConfigError if the weights cannot be read, or `directory` must not be replaced."""
    from titan_rl.actors.trainer import STATE
    from titan_rl.policy.models.checkpoint import write_checkpoint
    from titan_rl.policy.models.tiny import model_directory
    from titan_rl.policy.training_state import WEIGHTS, read_tensors

    try:
        weights = read_tensors(checkpoint.directory / STATE, WEIGHTS)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    write_checkpoint(directory, model_directory(config), weights, config.trainer)


VERB = Verb(
    act=_act,
    about=__doc__,
    options={
        "--run RUN": "a run directory (its newest checkpoint) or one of its checkpoints",
        "--directory DIR": "where to: a new or an empty directory, or an earlier export, which is replaced",
    },
    takes_settings=False,
)
