"""Errors on their way from a worker to the user: those of samples and batches, which travel in
place of a batch, and the deaths of workers.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Sequence
from typing import Any

from torch.utils.data import get_worker_info

from headrace.errors import WorkerError
from headrace.loader.worker.processes import WORKER, has_ended
from headrace.memory.ring import Delivered

_LATE = "DataLoader timed out"  # torch's words where no worker answered in time
_PATIENCE = 0.5  # seconds
_EXITED = (
    "Its own code ended the process (sys.exit, os._exit), or the error that stands above. Workers "
    "that are not forked import the program again: begin it with `if __name__ == '__main__':`, and "
    "keep what workers need in a module or outside of that block; num_workers=0 shows where"
)
_CRASHED = (
    "A library that it calls has crashed: `python -X faulthandler` shows where, and so does "
    "num_workers=0"
)
_KILLED = "If it was killed for want of memory, use fewer workers or a smaller prefetch_factor"


class RemoteTraceback(Exception):
    """The traceback of a worker, as the cause of the error that is raised in the parent."""

    def __init__(self, text: str) -> None:
        super().__init__(f'\n"""\n{text}"""')


def worker_number() -> int:
    """The number of this worker; 0 in the main process."""
    info = get_worker_info()
    return 0 if info is None else info.id


def pickled(error: Exception) -> tuple[bytes, str, int]:
    """An exception as it travels: pickled, its traceback as text, and the worker's number."""
    text = "".join(traceback.format_exception(error))
    for travelling in (error, _Rebuilt(error)):
        try:
            data = pickle.dumps(travelling)
            # its class is called with `args`, and may format them again
            if str(pickle.loads(data)) == str(error):
                return data, text, worker_number()
        except Exception:  # whatever its class raises: its text at least
            continue
    lost = WorkerError(f"{type(error).__name__}: {error} (its own class can't be pickled)")
    return pickle.dumps(lost), text, worker_number()


class _Rebuilt:
    """An exception whose class pickle can't call with its `args`: it is made without its
    ``__init__``.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self._error), self._error.args, self._error.__dict__)


def _rebuild(cls: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def failure_of(delivered: Delivered) -> Exception:
    """The error that was delivered instead of a batch, with its place and, out of a worker, its
    traceback, ready to be raised.
    """
    failure = delivered.report.pop("failure")
    where = f"epoch {delivered.report['epoch']}, batch {delivered.report['step']}"
    if isinstance(failure, Exception):
        error = failure
    else:
        data, text, worker = failure
        where = f"worker {worker}, {where}"
        try:
            error = pickle.loads(data)
        except Exception as trouble:  # as where the worker alone finds the module of its class
            error = WorkerError(
                f"an error of a worker can't be unpickled here ({type(trouble).__name__}: "
                f"{trouble}); the traceback above names it"
            )
        error.__cause__ = RemoteTraceback(text)
    if isinstance(error, StopIteration):  # which would end the user's loop
        cause = error
        error = RuntimeError(f"a sample's code raised StopIteration: {cause}")
        error.__cause__ = cause
    error.add_note(f"headrace: in {where}")
    return error


def is_of_workers(error: RuntimeError) -> bool:
    """True if torch reports that a worker is gone, or that none answered in time."""
    return WORKER in str(error) or _LATE in str(error)


def death_of(
    error: RuntimeError, workers: Sequence[Any], epoch: int, step: int, timeout: float
) -> WorkerError:
    """What to raise where torch says that one of the workers is gone, or that none answered in
    time.
    """
    if _LATE in str(error):
        return WorkerError(
            f"no batch within timeout={timeout:g} s in epoch {epoch}, waiting for batch {step}: a "
            "read hangs or is slow; inspect the workers with `py-spy dump --pid`, or raise timeout"
        )
    fates = []
    remedy = _KILLED
    for number, worker in enumerate(workers):
        if not has_ended(worker):
            continue
        worker.join(_PATIENCE)  # its sentinel says so a moment before the system does
        code = worker.exitcode  # None: somebody else has asked the system, which tells it once
        if code is None:
            how = "is gone"
        elif code >= 0:
            how = f"exited with status {code}"
            remedy = _EXITED
        else:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
            if -code not in (signal.SIGKILL, signal.SIGTERM):
                remedy = _CRASHED
        fates.append(f"worker {number} (pid {worker.pid}) {how}")
    return WorkerError(
        f"a worker died in epoch {epoch}, while batch {step} was waited for: "
        f"{'; '.join(fates) or error}. {remedy}; the loader starts new workers with its next "
        "iterator"
    )
