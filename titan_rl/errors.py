"""Errors of the project: each one says what was wrong, where, and what to do.

Nothing above `actors/` ever sees an exception type of Monarch, vLLM or torchtitan: the actors translate. An
error that crosses a process boundary must survive pickling, so every class here takes plain positional strings
and numbers and keeps them in `args`.
"""

import signal


class TitanError(Exception):
    """Base of every error that titan_rl raises on purpose. The first argument is the message."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ConfigError(TitanError):
    """The run config is wrong. Raised before any process starts; the command line turns it into exit code 2."""


class AbsentError(ConfigError):
    """Something that the run needs is missing on this host: a device, a data file, a package, memory, a port. It may be
    there on the host that the run is meant for, so a dry run warns of it where it would refuse."""


class ConfigWarning(ConfigError):
    """The run starts, but may not do what its author expects. Printed and not raised."""


class InvariantError(TitanError):
    """What must always hold does not, which is a bug of ours: ranks of a generator that disagree, a sample that is
    released twice or held after the end, a token older than the bound. What is affected ends."""


class RequestError(TitanError):
    """A generation request cannot be served (over-long, empty, out of vocabulary, …). Only that request fails."""


class RequestTooLong(RequestError):
    """Prompt and completion together would be longer than the generators' `max_model_len`."""


class RequestAborted(RequestError):
    """A completion was aborted."""


class RequestLost(RequestError):
    """Generators died under a request, one after another, so it is not given to more of them."""


class GatewayClosing(TitanError):
    """The gateway ends, and with it every call that is open."""


class RolloutOver(RequestError):
    """A rollout's program may ask for nothing more: its turns or tokens are used up, or its rollout has ended."""


class GeneratorFailed(TitanError):
    """A generator cannot serve: its engine loop crashed, its process died, or it was closed."""


class GeneratorNotServing(GeneratorFailed):
    """A generator is alive but serves nothing now: asleep, or stale after a failed pull. Ask another one."""


class WeightsError(TitanError):
    """Published weights are missing, damaged or not what the engine computes with. The version is not served."""


class SampleError(TitanError):
    """A sample is missing or damaged where its reference says it is. Its group has to be run again."""

    def __init__(self, message: str, group_id: int, sample: int) -> None:
        super().__init__(message, group_id, sample)
        self.group_id = group_id
        self.sample = sample
        """Position within the group."""

    def __str__(self) -> str:
        return f"group {self.group_id} sample {self.sample}: {self.args[0]}"


class SamplesLost(TitanError):
    """A train step could not have all its samples; it changed nothing. These groups have to be run again."""

    def __init__(self, message: str, group_ids: tuple[int, ...]) -> None:
        super().__init__(message, group_ids)
        self.group_ids = group_ids


class SampleStoreFull(TitanError):
    """A sample store has no room for more samples, by its own bound or the host's. Nothing was stored."""


class SharedMemoryFull(SampleStoreFull):
    """The host has no room, which others may free."""


class GroupStopped(TitanError):
    """A group was ended before it was finished, because nobody needs it any more."""


class TrainingError(TitanError):
    """The trainer cannot go on: NaN or inf in loss or gradient, or ranks that were called in different order."""


class RollbackNeeded(TitanError):
    """The trainer died and was replaced, but its weights and optimizer are lost: no copy in memory is usable. Or older
    weights are lost that groups in flight need; or a group of a deterministic run was played again and ended otherwise
    than before, which later groups rely on. The run goes on from its newest checkpoint, or from the beginning."""


class TaskError(TitanError):
    """User code (an environment or a reward function) raised, ran out of time, or killed its process."""


class TaskTimeout(TaskError):
    """User code ran out of time."""


class ToolFailed(TaskError):
    """A tool failed, and not the policy's call of it."""


class GraderFailed(TaskError):
    """A reward function failed."""


class InfrastructureFailed(TaskError):
    """What user code runs in failed: its process died, had no memory left or could not be made; or the gateway that its
    program talks to."""


class ActorFailed(TitanError):
    """A process or actor is gone, or failed a call. Names the mesh, the rank and the cause."""


class CallTimeout(TitanError):
    """A call was not answered within its bound. Its process may be slow, or stopped: only its end means that."""


class ActorGone(ActorFailed):
    """The process of an actor is gone, with everything that it was doing. It may be replaced."""


class GatewayGone(ActorGone):
    """The gateway of a rollout's programs is gone, and the rollout with it: no program is to blame."""


class MeshFailed(ActorGone):
    """A process of a mesh ended or an actor on it failed, by itself."""

    def __init__(self, message: str, mesh: str, *, still: float = 0.0) -> None:
        """`still`: seconds without progress, after which it was taken for dead."""
        super().__init__(message, mesh)
        self.mesh, self.still = mesh, still


class MeshLeaves(MeshFailed):
    """A mesh is stopped or moved by command: nothing has failed."""


class HostLost(TitanError):
    """A host does not answer."""


class StorageError(TitanError):
    """A file of the run could not be written: the disk is full, or its directory was removed."""


class CheckpointError(TitanError):
    """A checkpoint is torn, damaged or of another format. Nothing was restored from it."""


class Stopped(TitanError):
    """Somebody asked the run to end, by a signal, whose number is the argument."""

    def __str__(self) -> str:
        name = signal.Signals(self.args[0]).name
        return "Ctrl-C (SIGINT)" if name == "SIGINT" else name

    @property
    def exit_code(self) -> int:
        """As shells have it: 130 for SIGINT, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.args[0]


class NothingToTrain(TitanError):
    """So many groups in a row could not teach anything, or so many rollouts failed, that the run stops; says why."""
