"""Texts of several lines, short calls and progress bars."""

import io
import pickle
import runpy
import sys
import threading
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm

from headrace import display as display_module
from headrace.display import Lines, progress_bar, short_call
from tests.testing.test_contract import SquareDataset


def test_explanations_show_as_lines() -> None:
    text = SquareDataset().explain()
    assert repr(text) == str(text) and "\n" in repr(text) and "\\n" not in repr(text)
    again = pickle.loads(pickle.dumps(text))
    assert type(again) is Lines and again == text


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of Jupyter, without ipywidgets."""
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)


def test_bars_without_a_terminal() -> None:
    for progress, is_short, hidden in [
        (True, True, False),
        (False, False, True),
        (None, False, True),
    ]:
        with progress_bar(progress, is_short=is_short, total=3, desc="x") as bar:
            assert bar.disable == hidden, progress


def test_bars_in_a_notebook(notebook: None) -> None:
    with progress_bar(None, total=3) as bar, progress_bar(None, is_short=True, total=3) as short:
        assert not bar.disable and short.disable


def test_no_warning_without_ipywidgets(notebook: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tqdm.auto", "tqdm.autonotebook", "tqdm.notebook"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(display_module.__file__)


def test_short_calls() -> None:
    def function(
        tokenizer: Any = None, length: int = 3, mean: Any = 0, names: Any = ()
    ) -> None: ...

    for values, said in [
        ({"tokenizer": None, "length": 3}, "f()"),
        ({"length": 4, "tokenizer": len}, "f(tokenizer=len, length=4)"),
        (
            {"tokenizer": SquareDataset(), "mean": np.zeros(3)},
            "f(tokenizer=<SquareDataset>, mean=<ndarray>)",
        ),
        ({"names": list(range(100))}, "f(names=[0, 1, 2, 3, 4, 5, ...])"),
    ]:
        assert short_call("f", function, values) == said


def test_a_bar_starts_no_thread() -> None:
    before, interval = set(threading.enumerate()), tqdm.monitor_interval
    with progress_bar(True, total=2, file=io.StringIO()) as bar:
        bar.update()
        assert set(threading.enumerate()) <= before
    assert tqdm.monitor_interval == interval, "the user's own bars are as they were"
