"""Settings that override a config: read from TOML or from the command line, applied in layers, written as TOML.

Always true:

- A later layer wins over an earlier one. Values are checked together only after the last layer: a combination that only
  exists between two layers is never refused.
- A setting keeps the type and the bounds that its dataclass gives it. Text from the command line is converted; a TOML
  value has to have the type already (an integer passes for a float).
- `to_toml(config)`, read again over the recipe that the config came from, gives that config again.
- Every refusal is one sentence that names the setting as its author wrote it.

A setting is named by its path of fields, `trainer.optimizer.lr`. Below a `dict` field the rest of the path are keys,
which need not exist yet. The package knows no particular config: callers pass special cases as `Rules`.
"""

from titan_rl.overrides.command import EXIT_FAILED, EXIT_OK, EXIT_USAGE, Command, Verb, option_overrides, print_error
from titan_rl.overrides.settings import Rules, apply, check, convert_value, did_you_mean, flat, to_toml, variant
