"""The progress bar of everything that takes long."""

import io
import threading

from tqdm import tqdm

from headrace.progress import Bar


def test_a_bar_starts_no_thread() -> None:
    before, interval = set(threading.enumerate()), tqdm.monitor_interval
    with Bar(total=2, file=io.StringIO(), disable=False) as bar:
        bar.update()
        assert set(threading.enumerate()) <= before
    assert tqdm.monitor_interval == interval, "the user's own bars are as they were"
