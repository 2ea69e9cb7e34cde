"""Tasks: `base.Environment` is what a task subclasses; the others are bundled ones."""

SHORT_NAMES = {
    "dataset": "titan_rl.environments.base:DatasetEnvironment",
    "copy": "titan_rl.environments.copy:Copy",
    "sort": "titan_rl.environments.sort:Sort",
    "tool_sum": "titan_rl.environments.tool_sum:ToolSum",
    "tool_sum_openai": "titan_rl.environments.tool_sum:ToolSumOpenAI",
}
"""Names that `environment.name` understands besides `pkg.mod:Class` and `file.py:Class`."""
