"""headrace carries training data to PyTorch: repeatable, resumable, within a memory budget.

The public names are listed in ``__init__.pyi``. Each is imported when it is first used, so that
the `headrace` command begins without torch.
"""

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

__version__ = "0.1.0"

_HOMES = {}  # by public name: its module, and its name there
for _line in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body:
    if isinstance(_line, ast.ImportFrom):
        _HOMES.update({_name.asname: (_line.module, _name.name) for _name in _line.names})
__all__: list[str] = sorted(_HOMES)


def __dir__():
    return sorted({*globals(), *__all__})


def __getattr__(name):
    """Imports a public name, or a module of the package. Of a name that is not there it says
    which to use; of older ones in ``from headrace import ...`` too, which drops the message of
    an AttributeError.
    """
    if name in _HOMES:
        module, original = _HOMES[name]
        globals()[name] = value = getattr(importlib.import_module(module), original)
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"headrace.{name}") is not None:
        return importlib.import_module(f"headrace.{name}")
    from headrace.arguments import explain_missing
    from headrace.synonyms import NAMES

    is_import = sys._getframe(1).f_globals.get("__name__") in (
        "importlib._bootstrap",
        "_frozen_importlib",
    )
    error = ImportError if is_import and name in NAMES else AttributeError
    raise error(explain_missing(name, __all__))
