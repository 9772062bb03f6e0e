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
    cache = ["cache", "--dir", str(tmp_path)]
    assert main([*cache, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["nbytes"] == os.path.getsize(file.path)
    assert [kind["files"] for kind in told["kinds"]] == [1]
    for options, shown in (
        ([], f"headrace cache --dir {tmp_path} --prune"),
        (["--prune"], "removed: 0 files"),
        (["--prune", "--older", "0d"], "removed: 1 files"),
        ([], "the cache is empty"),
    ):
        assert main([*cache, *options]) == 0 and shown in capsys.readouterr().out
    assert not os.path.exists(file.path)
    assert main([*cache, "--older", "1h"]) == 2 and "--prune" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([*cache, "--prune", "--older", "30"])
    assert caught.value.code == 2 and "30" in capsys.readouterr().err, "an age has a unit"


def test_env_tells_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["headrace"] == headrace.__version__
    assert told["packages"]["torch"] == torch.__version__
    if hasattr(os, "sched_getaffinity"):
        assert told["cores"]["usable"] == len(os.sched_getaffinity(0))
    assert told["memory"]["limit"] <= psutil.virtual_memory().total and told["limits"]
    assert len(told["gpus"]) == torch.cuda.device_count()
    assert main(["env", "--no-gpu"]) == 0
    shown = capsys.readouterr().out
    assert "cache folder" in shown and "gpus" not in shown
