"""`headrace cache` and `headrace env`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import headrace
from headrace.cli.main import main
from headrace.io.array_file import ArrayFile


def test_cache_lists_and_prunes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ArrayFile(str(tmp_path), "lines", {}, 1, ["<i8"])
    file.write([np.arange(9)])
    size = os.path.getsize(file.path)
    assert main(["cache", "--dir", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["nbytes"] == size and [kind["files"] for kind in told["kinds"]] == [1]
    assert main(["cache", "--dir", str(tmp_path)]) == 0
    assert (
        f"headrace cache --dir {tmp_path} --prune removes what was not used for 30 days"
        in capsys.readouterr().out
    )
    assert main(["cache", "--dir", str(tmp_path), "--prune"]) == 0
    assert (
        "1 files  tables of the lines of texts" in (shown := capsys.readouterr().out)
        and "removed: 0 files" in shown
    )
    assert main(["cache", "--dir", str(tmp_path), "--prune", "--older", "0d"]) == 0
    assert "removed: 1 files" in capsys.readouterr().out and not os.path.exists(file.path)
    assert (
        main(["cache", "--dir", str(tmp_path / "none")]) == 0
        and "nothing is kept here" in capsys.readouterr().out
    )


def test_an_age_has_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cache", "--prune", "--older", "30"])
    assert caught.value.code == 2 and "is no age" in capsys.readouterr().err


def test_env_tells_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (
        told["headrace"] == headrace.__version__ and told["packages"]["torch"] == torch.__version__
    )
    assert (
        told["cores"]["usable"] == len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else True
    )
    assert told["memory"]["limit"] <= psutil.virtual_memory().total and told["memory"]["all_limits"]
    assert len(told["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert main(["env", "--no-gpu"]) == 0
    shown = capsys.readouterr().out
    assert "cache folder" in shown and "GPU " not in shown
