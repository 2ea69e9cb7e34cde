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

from titan_rl.overrides.command import EXIT_FAILED as EXIT_FAILED
from titan_rl.overrides.command import EXIT_OK as EXIT_OK
from titan_rl.overrides.command import EXIT_USAGE as EXIT_USAGE
from titan_rl.overrides.command import Command as Command
from titan_rl.overrides.command import Verb as Verb
from titan_rl.overrides.command import option_overrides as option_overrides
from titan_rl.overrides.command import print_error as print_error
from titan_rl.overrides.settings import Rules as Rules
from titan_rl.overrides.settings import apply as apply
from titan_rl.overrides.settings import check as check
from titan_rl.overrides.settings import convert_value as convert_value
from titan_rl.overrides.settings import did_you_mean as did_you_mean
from titan_rl.overrides.settings import flat as flat
from titan_rl.overrides.settings import to_toml as to_toml
from titan_rl.overrides.settings import variant as variant
