"""Tasks: `base.Environment` is what a task subclasses; the others are bundled ones."""

SHORT_NAMES = {"dataset": "titan_rl.environments.base:DatasetEnvironment", "copy": "titan_rl.environments.copy:Copy"}
"""Names that `environment.name` understands besides `pkg.mod:Class` and `file.py:Class`."""
