"""A pack of tokens that is cut short while it is read is an error, and no signal (SIGBUS) that ends
the process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace import TextDataset, pack

CUT = """
import os, sys, threading
import numpy as np
from headrace import FileChangedError, FormatError, TextDataset

dataset = TextDataset(sys.argv[1], max_length=128, packing=True)
random = np.random.default_rng(0)
threading.Timer(0.1, os.truncate, (sys.argv[1], 0)).start()
try:
    while True:
        dataset.__getitems__(random.integers(len(dataset), size=256).tolist())
except (FileChangedError, FormatError) as error:
    print("error:", error)
"""


@pytest.mark.slow
def test_tokens_that_are_cut_short_while_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("the mill stands and the wheel turns\n" * 200_000)
    packed = Path(pack(TextDataset(tmp_path / "texts.txt", unit="line"), tmp_path / "x.h5"))
    whole = packed.read_bytes()
    for _ in range(3):
        packed.write_bytes(whole)
        command = [sys.executable, "-c", CUT, str(packed)]
        job = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (job.returncode, job.stdout[:6]) == (0, "error:"), job.stderr
