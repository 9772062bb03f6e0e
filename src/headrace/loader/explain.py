"""What did a loader choose, why, and what follows from it? In words."""

from __future__ import annotations

from headrace.loader.build import Reasons
from headrace.loader.config import DataLoaderConfig


def explain_config(config: DataLoaderConfig, reasons: Reasons) -> str:
    """One line for each option that matters: its value, and why it is what it is."""
    shown = {
        "batch_size": config.batch_size, "shuffle": config.shuffle, "seed": config.seed, "num_workers": config.num_workers,
        "prefetch_factor": config.prefetch_factor, "persistent_workers": config.persistent_workers,
        "multiprocessing_context": config.multiprocessing_context and config.multiprocessing_context.get_start_method(),
        "pin_memory": config.pin_memory, "drop_last": config.drop_last, "pad": config.pad,
        "rank": config.rank, "world_size": config.world_size,
    }  # fmt: skip
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}} = {value!s:<7} {reasons.get(name, 'given, or the default')}" for name, value in shown.items())
