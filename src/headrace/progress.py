"""The progress bar of everything that takes long."""

from __future__ import annotations

from tqdm import tqdm


class Bar(tqdm):  # type: ignore[type-arg]
    """A tqdm bar that starts no thread: tqdm's monitor might hold a lock while workers are forked."""

    monitor_interval = 0
