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

from headrace import create_dataloader
from headrace import display as display_module
from headrace.display import Lines, progress_bar, short_call
from tests.testing.test_contract import SquareDataset


def test_lines_are_their_own_repr() -> None:
    text = Lines("a\nb")
    assert (
        repr(text) == text == "a\nb" and f"{text!r}" == "a\nb" and text.splitlines() == ["a", "b"]
    )
    assert type(pickle.loads(pickle.dumps(text))) is Lines


def test_explanations_show_as_lines() -> None:
    dataset = SquareDataset()
    loader = create_dataloader(dataset, num_workers=0)
    for text in (dataset.explain(), loader.explain(), dataset.budget.explain()):
        assert repr(text) == str(text) and "\n" in repr(text) and "\\n" not in repr(text)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of Jupyter, without ipywidgets."""
    ipython = ModuleType("IPython")
    ipython.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)


@pytest.mark.parametrize(
    ("progress", "is_short", "hidden"),
    [(True, True, False), (False, False, True), (None, False, True)],
)
def test_bars_without_a_terminal(progress: bool | None, is_short: bool, hidden: bool) -> None:
    with progress_bar(progress, is_short=is_short, total=3, desc="x") as bar:
        assert bar.disable == hidden


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

    assert short_call("f", function, {"tokenizer": None, "length": 3}) == "f()"
    assert (
        short_call("f", function, {"length": 4, "tokenizer": len}) == "f(tokenizer=len, length=4)"
    )
    assert (
        short_call("f", function, {"tokenizer": SquareDataset(), "mean": np.zeros(3)})
        == "f(tokenizer=<SquareDataset>, mean=<ndarray>)"
    )
    assert (
        short_call("f", function, {"names": list(range(100))}) == "f(names=[0, 1, 2, 3, 4, 5, ...])"
    )


def test_a_bar_starts_no_thread() -> None:
    before, interval = set(threading.enumerate()), tqdm.monitor_interval
    with progress_bar(True, total=2, file=io.StringIO()) as bar:
        bar.update()
        assert set(threading.enumerate()) <= before
    assert tqdm.monitor_interval == interval, "the user's own bars are as they were"
