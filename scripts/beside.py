#!/usr/bin/env python
"""Runs Python in an environment that has one client of tests/clients/requirements.toml over this one.

    .venv/bin/python scripts/beside.py smolagents DIRECTORY -m titan_rl.train --recipe …

The client's packages go into an environment of its own below DIRECTORY, which sees the packages of this one behind its
own: this one stays as its lock files have it. It is made at the first time, and again when the packages change.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[1] / "tests" / "clients" / "requirements.toml"


def python_with(packages: list[str], place: Path) -> Path:
    """The interpreter of an environment there that has these packages."""
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        venv.create(place, clear=True, symlinks=True)
        own, ours = (sysconfig.get_path("purelib", vars={"base": str(base)}) for base in (place, sys.prefix))
        Path(own, "this.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        if packages:
            subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "-q", *packages], check=True)
        done.touch()
    return python


if __name__ == "__main__":
    _, client, directory, *arguments = sys.argv
    packages = tomllib.loads(REQUIREMENTS.read_text())[client]
    digest = hashlib.blake2b(" ".join(packages).encode(), digest_size=4).hexdigest()
    python = python_with(packages, Path(directory).resolve() / f"{client}-{digest}")
    os.execv(python, [str(python), *arguments])
