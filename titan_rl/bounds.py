"""Numbers with bounds, for the fields of configs.

A constructor of a dataclass holds nobody to them; `overrides` does, for every value that is set, and `RunConfig` for
all of its own values.
"""

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
TwoOrMore = Annotated[int, Meta(ge=2)]
CountOrZero = Annotated[int, Meta(ge=0)]
"""0 usually means none, or no bound; the field says which."""
Positive = Annotated[float, Meta(gt=0)]
AtLeastOne = Annotated[float, Meta(ge=1)]
MoreThanOne = Annotated[float, Meta(gt=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
PositiveShare = Annotated[float, Meta(gt=0, le=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
