"""All settings of a config as help text: their types, docstrings and present values, laid out by tyro.

Its own module, imported when help is asked for: tyro costs some 50 ms.
"""
# no `from __future__ import annotations`: tyro evaluates the annotations of a local class, which then must be objects

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro


def print_help(config: Any, *, prog: str) -> None:
    """Print the options of a training command whose config would start as `config`."""

    settings: Any = Annotated[type(config), tyro.conf.arg(name="", prefix_name=False), tyro.conf.FlagConversionOff]

    @dataclass(kw_only=True)
    class Train:
        """Train a policy. Settings: the command line wins over --config, and that over the recipe; the values shown are
        the recipe's. Constructor arguments of a class are set as --environment.kwargs.NAME VALUE."""

        config: str = ""
        """TOML file: a recipe's name and settings. Relative file names in it start at its directory."""
        name: str = ""
        """Name of the run, as --logging.name."""
        dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """Print the resolved config and the placement, and start nothing."""
        run: settings = field(default_factory=lambda: config)

    # given `--help`, tyro parses nothing: it prints its help and exits
    with suppress(SystemExit):
        tyro.cli(Train, args=["--help"], prog=prog, config=(tyro.conf.AvoidSubcommands,))
