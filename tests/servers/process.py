"""A server in a process of its own, which ends with the one that started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Self


class ServerProcess:
    """Runs a module that prints its port and serves on loopback until its stdin ends; a context
    manager.

    Args:
        module: its name.
        *arguments: on its command line.

    Attributes:
        url: of the server.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]

    def __enter__(self) -> Self:
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=root
        )
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdout, self._process.stdin):
            if pipe is not None:
                pipe.close()
