"""`importing.left_out`: libraries are imported without modules that they do not use here."""

from __future__ import annotations

import sys

from titan_rl.importing import left_out


def test_a_module_that_is_left_out_is_not_imported_and_can_be_imported_later() -> None:
    sys.modules.pop("this", None)
    with left_out({"this": {"poem": "none"}}):
        from this import poem  # type: ignore[attr-defined]
    assert poem == "none" and "this" not in sys.modules


def test_a_module_that_was_imported_before_is_left_as_it_is() -> None:
    import json

    with left_out({"json": {}}):
        assert sys.modules["json"] is json
    assert sys.modules["json"] is json
