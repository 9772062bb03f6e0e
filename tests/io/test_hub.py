"""hf://: datasets of Hugging Face's Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from headrace import StreamingDataset, create_dataloader
from headrace.errors import AccessError, DataNotFoundError
from headrace.testing.contract import same
from tests.data.make import make_shards
from tests.servers.hub import hub
from tests.servers.ranges import RangeServer

pytestmark = pytest.mark.integration
TOKEN = "hf_secret"


@mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # as other tests have it
def test_shards_of_the_hub(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are those on this machine; tokens are never shown."""
    shards = make_shards(tmp_path / "served" / "data", (7, 0, 14), "tar").parent
    make_shards(shards / "test", (3,), "tar")
    (shards / "README.md").write_text("---\nconfigs:\n- data_files: data/part*\n---\nMill wheels")
    with RangeServer(shards) as cdn, hub(shards, cdn.url, TOKEN) as url:

        def opened(path: str, **options: Any) -> StreamingDataset:
            where = f"hf://datasets/owner/name{path}"
            options = {"endpoint": url, "token": TOKEN, **options}
            return StreamingDataset(where, storage_options=options, cache_dir=tmp_path / "kept")

        def batches(dataset: StreamingDataset) -> list[Any]:
            how: Any = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"}
            return [{**one, "__url__": None} for one in create_dataloader(dataset, seed=1, **how)]

        for path in ("", "@v1/data/*.tar"):
            dataset = opened(path)
            assert same(batches(dataset), batches(StreamingDataset(shards / "data"))), path
            assert TOKEN not in repr(dataset) + dataset.explain()
        for path, token in (("@v2/data", TOKEN), ("/none", TOKEN), ("/data", "hf_other")):
            error = AccessError if token != TOKEN else DataNotFoundError
            with pytest.raises(error, match="hf://datasets/owner/name") as caught:
                opened(path, token=token)
            assert "hf_" not in str(caught.value)
        assert "hf_" not in caplog.text
