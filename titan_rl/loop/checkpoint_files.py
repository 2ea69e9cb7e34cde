"""Checkpoints on disk. Torn and damaged ones are recognised and named.

    RUN/checkpoints/step-00000040/manifest.json    format, and the size and checksum of every other file
                                 /…                what the parts of the run wrote
    RUN/checkpoints/.step-00000050.4f2a…/          a draft: being written, or torn when its run was killed

- A checkpoint gets its name only after all its files and their manifest are on disk, by one rename. So whatever has
  that name was complete once, and a run that is killed at any moment leaves the checkpoints before it untouched.
- `check` compares every file with the manifest: names, sizes and xxh3 checksums of 128 bits. It refuses other
  formats.
- Each attempt has a draft of its own: a trainer that is cut off with its host may write for a while beside the one
  that has replaced it.
- Older checkpoints are removed only after a newer one has its name.
"""

import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from titan_rl.errors import CheckpointError, StorageError

FORMAT = 6
"""Changes when what a checkpoint holds can no longer be read; other formats are refused by name."""

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
_PREFIX = "step-"


class Checkpoint(NamedTuple):
    """A checkpoint that is as it was written."""

    directory: Path
    step: int


def directory_of(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"{_PREFIX}{step:08d}"


def new_draft(run: Path, step: int) -> Path:
    """An empty directory for the files of a checkpoint; what earlier attempts have left is removed. Raises
    StorageError: it cannot be made."""
    remove_drafts(run)
    draft = run / CHECKPOINTS / f".{directory_of(run, step).name}.{uuid.uuid4().hex}"
    try:
        draft.parent.mkdir(exist_ok=True)  # but never the run's directory, which somebody has removed
        draft.mkdir()
    except OSError as error:
        raise StorageError(f"{draft}: the checkpoint of step {step} cannot be begun: {error}") from error
    return draft


def commit(draft: Path) -> Path:
    """Make a draft a checkpoint; returns its directory. Blocks until it is on disk. Raises StorageError: it could not
    be written; the draft is removed, and older checkpoints are as they were."""
    final = draft.with_name(draft.stem.removeprefix("."))
    try:
        files = {str(file.relative_to(draft)): _synced(file) for file in sorted(draft.rglob("*")) if file.is_file()}
        manifest = draft / MANIFEST
        manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n")
        _synced(manifest)
        for directory in [*(each for each in draft.rglob("*") if each.is_dir()), draft]:
            _sync(directory)
        os.rename(draft, final)
        _sync(final.parent)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise StorageError(f"{final}: the checkpoint could not be written: {error}") from error
    return final


def check(directory: Path) -> Checkpoint:
    """Compare a checkpoint with its manifest. Raises CheckpointError: it is not a checkpoint, torn, damaged, or of
    another format; names the file."""
    manifest = directory / MANIFEST
    try:
        step = int(directory.name.removeprefix(_PREFIX))
        content = json.loads(manifest.read_bytes())
        found, files = content["format"], content["files"]
        expected = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in files.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} is no checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest} is damaged: {type(error).__name__}: {error}") from error
    if found != FORMAT:
        raise CheckpointError(
            f"{directory} has format {found}; this version of titan_rl reads format {FORMAT}. Go on with the version "
            f"that wrote it, or start a new run from its weights"
        )
    present = {str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file()} - {MANIFEST}
    if missing := sorted(expected.keys() - present):
        raise CheckpointError(f"{directory} is damaged: {missing[0]} is missing")
    if foreign := sorted(present - expected.keys()):
        raise CheckpointError(f"{directory} is damaged: {foreign[0]} is not in its manifest")
    for name, (nbytes, checksum) in expected.items():
        try:
            size = (directory / name).stat().st_size
            same = size == nbytes and _checksum(directory / name) == checksum
        except OSError as error:
            raise CheckpointError(f"{directory} is damaged: {name} cannot be read: {error}") from error
        if size != nbytes:
            raise CheckpointError(f"{directory} is damaged: {name} has {size} bytes, {nbytes} were written")
        if not same:
            raise CheckpointError(f"{directory} is damaged: {name} is not as it was written (checksum)")
    return Checkpoint(directory, step)


def checkpoints(run: Path) -> list[Path]:
    """Directories of all checkpoints, oldest first; whether they are sound is not looked at."""
    return sorted((run / CHECKPOINTS).glob(f"{_PREFIX}*"))


def prune(run: Path, *, keep: int, newest: int) -> None:
    """Remove the checkpoints after step `newest`, which the run has left, and all but `keep` of the others; also all
    drafts, so none may be under way. Never raises."""
    remaining = [each for each in checkpoints(run) if each <= directory_of(run, newest)][-keep:]
    for directory in checkpoints(run):
        if directory not in remaining:
            shutil.rmtree(directory, ignore_errors=True)
    remove_drafts(run)


def remove_drafts(run: Path) -> None:
    """None may be under way. Never raises."""
    for draft in (run / CHECKPOINTS).glob(f".{_PREFIX}*"):
        shutil.rmtree(draft, ignore_errors=True)


def _checksum(file: Path) -> str:
    import xxhash  # here, because the command line starts without it

    with open(file, "rb", buffering=0) as content:
        return hashlib.file_digest(content, xxhash.xxh3_128).hexdigest()


def _synced(file: Path) -> dict[str, Any]:
    """Size and checksum of a file that is on disk now."""
    _sync(file)
    return {"bytes": file.stat().st_size, "xxh3_128": _checksum(file)}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
