"""Fixtures for tests of user code."""

from support.processes import heard  # noqa: F401
