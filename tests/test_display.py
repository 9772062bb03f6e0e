"""Texts of several lines, short calls and progress bars."""

import io
import pickle
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from tqdm import tqdm

from headrace.display import Lines, progress_bar
from tests.testing.test_contract import SquareDataset


def test_explanations_show_as_lines() -> None:
    text = SquareDataset().explain()
    assert repr(text) == str(text) and "\n" in repr(text) and "\\n" not in repr(text)
    again = pickle.loads(pickle.dumps(text))
    assert type(again) is Lines and again == text


def test_bars_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of Jupyter, without ipywidgets."""
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with progress_bar(None, total=3) as bar, progress_bar(None, is_short=True, total=3) as short:
        assert not bar.disable and short.disable


def test_a_bar_starts_no_thread() -> None:
    before, interval = set(threading.enumerate()), tqdm.monitor_interval
    with progress_bar(True, total=2, file=io.StringIO()) as bar:
        bar.update()
        assert set(threading.enumerate()) <= before
    assert tqdm.monitor_interval == interval, "the user's own bars are as they were"
