"""Samples of tar files."""

from headrace.formats.tar.source import TarSource

__all__ = ["TarSource"]
