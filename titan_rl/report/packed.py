"""Data inside HTML: JSON, gzipped, in base64.

Its letters can neither end a script element nor begin one, whatever a policy wrote.
"""

from __future__ import annotations

import base64
import gzip


def packed(text: str) -> str:
    """The inverse is `unpack` in page/base.js."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), compresslevel=6, mtime=0)).decode("ascii")
