"""The private APIs of torch that headrace uses, and what it does where a version of torch lacks
them.

==================================  ================================  ==============================
private API                         used for                          without it
==================================  ================================  ==============================
`_MultiProcessingDataLoaderIter`,   deaths of workers that are        torch's own iterator: deaths
`_worker_loop`,                     reported while a batch is         are reported by torch's signal
`_set_worker_pids`,                 awaited, workers replaced that    handler, without fate and
`_remove_worker_pids`               were born deadlocked, knowing     batch; batches are copied to a
                                    that a batch is ready             device when asked for

`_is_profiler_enabled`              no profiler mark for each batch   the mark is made

`_get_default_store`                comparing the loaders of all      they are not compared
                                    ranks
==================================  ================================  ==============================
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler
from torch.utils.data import dataloader
from torch.utils.data._utils import worker

from headrace.errors import warn

TRIED = ("2.6", "2.13", "2.14")
"""Versions of torch that these have been tried with; others are used as long as nothing is
missing.
"""

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    TorchIterator = _MultiProcessingDataLoaderIter
else:
    TorchIterator = getattr(dataloader, "_MultiProcessingDataLoaderIter", object)

set_worker_pids: Any = getattr(torch._C, "_set_worker_pids", None)
remove_worker_pids: Any = getattr(torch._C, "_remove_worker_pids", None)
worker_loop: Any = getattr(worker, "_worker_loop", None)


def worker_dataset(dataset: Any) -> Any:
    """What `worker_loop` takes as its second argument: the dataset, or since torch 2.14 a list
    of it, which the worker empties.
    """
    return [dataset] if "dataset_holder" in inspect.signature(worker_loop).parameters else dataset


_METHODS = ("_next_data", "_reset", "_shutdown_workers", "_try_get_data")
_ATTRIBUTES = (
    *(
        "_base_seed",
        "_collate_fn",
        "_data_queue",
        "_dataset_kind",
        "_index_queues",
        "_persistent_workers",
        "_pin_memory",
        "_rcvd_idx",
    ),
    *(
        "_shared_seed",
        "_shutdown",
        "_task_info",
        "_worker_init_fn",
        "_worker_pids_set",
        "_worker_result_queue",
        "_workers",
    ),
    "_workers_done_event",
)


@functools.cache
def has_worker_internals() -> bool:
    """True if this torch has all that `WorkerIterator` builds on; warns once where it lacks
    something.
    """
    functions = {
        "_set_worker_pids": set_worker_pids,
        "_remove_worker_pids": remove_worker_pids,
        "_worker_loop": worker_loop,
    }
    missing = [name for name, function in functions.items() if function is None]
    missing += [name for name in _METHODS if not hasattr(TorchIterator, name)]
    methods = [
        method
        for cls in TorchIterator.__mro__
        for method in map(vars(cls).get, ("__init__", "_reset"))
        if method is not None
    ]
    names = {
        name
        for method in methods
        if hasattr(method, "__code__")
        for name in method.__code__.co_names
    }
    missing += [name for name in _ATTRIBUTES if name not in names]
    if missing:
        warn(
            f"torch {torch.__version__} lacks {', '.join(missing)}, which headrace uses (tried "
            f"with torch {', '.join(TRIED)}): "
            "a worker's death is reported without its cause, and batches are not prefetched to "
            "devices"
        )
    return not missing


def note_version(error: Exception) -> None:
    """Adds to an error in torch's internals which versions they have been tried with."""
    error.add_note(
        f"headrace: private APIs of torch {torch.__version__} failed; they have been tried with "
        f"torch {', '.join(TRIED)}"
    )


def is_profiling() -> bool:
    """True if torch's profiler is on, or can't be asked."""
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def default_store(dist: Any) -> Any:
    """The store of torch.distributed's default process group; None where it can't be had."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def workers_of(loader: Any) -> tuple[Any, ...]:
    """The worker processes of a DataLoader's current iterator, as far as they are known."""
    return tuple(getattr(getattr(loader, "_iterator", None), "_workers", ()))
