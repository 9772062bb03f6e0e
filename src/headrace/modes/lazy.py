"""Lazy: samples are read at each access, and nothing is cached."""

from __future__ import annotations

from headrace.modes.mode import Mode


class Lazy(Mode):
    """Reads each sample at each access."""
