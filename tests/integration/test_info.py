"""What `headrace info` tells of files that other libraries wrote: what h5py says of them, and
who wrote them.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  (for h5py: blosc2 and bzip2)
import pytest

from headrace.cli.main import main
from headrace.inspecting import inspect

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "foreign_files.py"
PACKAGES = {"netcdf4": "netCDF4", "pytables": "tables", "anndata": "anndata", "matlab": "h5py"}
FORMATS = {
    "netcdf4": "netCDF-4 HDF5",
    "pytables": "PyTables HDF5",
    "anndata": "AnnData HDF5",
    "matlab": "MATLAB 7.3 HDF5",
}


@pytest.mark.parametrize("kind", PACKAGES)
def test_files_of_other_libraries_are_told(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        pytest.skip(
            f"{PACKAGES[kind]} is not installed: pip install -c constraints.txt -e '.[integration]'"
        )
    run = subprocess.run(
        [sys.executable, SCRIPT, kind, tmp_path], capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    paths = [path for path in tmp_path.iterdir() if path.suffix != ".pickle" and h5py.is_hdf5(path)]
    assert paths
    for path in paths:
        report = inspect(path)
        assert report.format == FORMATS[kind], path
        nodes = {node.path: node for node in report.nodes}
        with h5py.File(path) as file:
            names: list[str] = []
            file.visit(names.append)
            assert set(names) <= set(nodes)
            for name in names:
                if isinstance(item := file[name], h5py.Dataset) and nodes[name].kind == "array":
                    assert (nodes[name].shape, nodes[name].chunks) == (item.shape, item.chunks), (
                        name
                    )
                    if item.shape is not None and not item.is_virtual and not item.external:
                        assert nodes[name].stored == item.id.get_storage_size(), name
        assert (
            main(["info", "--json", str(path)]) == 0
            and json.loads(capsys.readouterr().out)["format"] == FORMATS[kind]
        )
        assert main(["info", str(path)]) == 0 and FORMATS[kind] in capsys.readouterr().out


def test_anndata_tells_cells_and_genes(tmp_path: Path) -> None:
    if importlib.util.find_spec("anndata") is None:
        pytest.skip("anndata is not installed: pip install -c constraints.txt -e '.[integration]'")
    code = (
        "import anndata, numpy, scipy.sparse, pandas, sys; x = scipy.sparse.random(30, 12, 0.2, "
        "'csr'); "
        "anndata.AnnData(x, obs=pandas.DataFrame({'kind': pandas.Categorical(['a', 'b', 'c'] * "
        "10)}, "
        "index=[f'c{i}' for i in range(30)])).write_h5ad(sys.argv[1])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.h5ad"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    report = inspect(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad") as file:
        values = len(file["X/data"])
    assert (report.details["obs"], report.details["var"]) == (30, 12) and report.details[
        "X"
    ] == f"csr_matrix, {values} values"
