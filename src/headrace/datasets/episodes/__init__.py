"""Windows over episodes of a robot or an agent."""

from headrace.datasets.episodes.statistics import Statistics

__all__ = ["Statistics"]
