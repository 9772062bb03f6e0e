"""Samples of tar files."""

from headrace.storage.tar.source import TarSource

__all__ = ["TarSource"]
