"""Folders of packs are known by the names in them, and a manifest says nothing that no pack
writes.
"""

import json
import os
import shutil

import pytest

from headrace import TextDataset, open_dataset
from headrace.errors import DataNotFoundError, FormatError
from headrace.formats.resolve.manifests import checked_text
from headrace.packing import pack, pack_status


@pytest.fixture
def packed(tmp_path):
    """A text pack of several parts."""
    lines = [f"line {number} of the text\n" for number in range(60)]
    (tmp_path / "lines.txt").write_text("".join(lines))
    dataset = TextDataset(tmp_path / "lines.txt", unit="line")
    return pack(dataset, tmp_path / "pk", shard_size="200B")


def test_a_damaged_pack_is_no_folder_of_texts(packed):
    assert len(TextDataset(packed)) == len(TextDataset(packed / "manifest.json")) == 60
    plan, manifest = packed / "plan.json", packed / "manifest.json"
    other_plan = manifest.read_bytes().replace(b'"plan"', b'"plao"')
    damages = [(plan, content) for content in (None, b"{\x1a", b"{}", b'{"version": 1}')]
    damages += [(manifest, content) for content in (b"[]", b"{", b"\xff", other_plan)]
    for damaged, content in damages:
        whole = damaged.read_bytes()
        if content is None:
            damaged.unlink()
        else:
            damaged.write_bytes(content)
        for path in (packed, manifest):
            for opens in (TextDataset, open_dataset):
                with pytest.raises(FormatError, match=r"plan\.json|manifest\.json"):
                    opens(path)
        damaged.write_bytes(whole)
    manifest.unlink()
    with pytest.raises(DataNotFoundError, match="incomplete"):
        TextDataset(packed)
    plan.unlink()
    with pytest.raises(FormatError, match="is a pack"):
        TextDataset(packed)


def test_a_pack_among_texts(packed, tmp_path, memory):
    with pytest.raises(FormatError, match="pk is a pack"):
        TextDataset(tmp_path)
    assert len(TextDataset(tmp_path / "*.txt", unit="line")) == 60
    memory.put(str(packed), "/a pack", recursive=True)
    with pytest.raises(FormatError, match="memory://a pack is a pack"):
        TextDataset("memory://a pack")
    assert len(TextDataset("memory://a pack/manifest.json")) == 60


def test_files_of_others_are_texts(tmp_path):
    (tmp_path / "plan.json").write_text('{"text": "a plan"}')
    (tmp_path / "manifest.json").write_text('{"text": "a manifest", "kind": "of another"}')
    assert len(TextDataset(tmp_path, unit="file")) == 2
    assert len(TextDataset(tmp_path / "manifest.json", unit="file")) == 1
    for name in ("plan.json", "manifest.json"):
        os.remove(tmp_path / name)
    (tmp_path / "part-00000-of-00001.json").write_text('{"text": "a part"}')
    assert len(TextDataset(tmp_path, unit="file")) == 1


def test_manifests_that_no_pack_writes(packed, tmp_path, memory):
    manifest = json.loads((packed / "manifest.json").read_bytes())
    del manifest["check"]
    shutil.copy(packed / manifest["parts"][0]["name"], tmp_path / "outside.h5")
    rows = [("parts", parts) for parts in ([], None, [{}], "x", [{"name": 5}], [None])]
    for name in ("../outside.h5", str(tmp_path / "outside.h5"), "", "part-00001-of-00009.h5"):
        rows.append(("parts", [{**manifest["parts"][0], "name": name}, *manifest["parts"][1:]]))
    rows += [("samples", count) for count in (-1, 61, True)]
    rows += [("classes", 5), ("classes", [5]), ("plan", None), ("left_out", "x")]
    rows.append(("kind", 5))
    memory.put(str(packed), "/pk", recursive=True)
    for name, value in rows:
        text = checked_text({**manifest, name: value})
        (packed / "manifest.json").write_bytes(text)
        memory.pipe_file("/pk/manifest.json", text)
        for path in (packed, "memory://pk/manifest.json"):
            with pytest.raises(FormatError, match=r"manifest\.json"):
                open_dataset(path)
        assert not pack_status(packed).joined, (name, value)


def test_a_damaged_key_of_a_remote_manifest(packed, memory):
    for key in ("plan", "parts", "kind", "store", "check"):
        text = (packed / "manifest.json").read_text().replace(f'"{key}"', f'"x{key}"')
        memory.pipe_file("/damaged/manifest.json", text.encode())
        with pytest.raises(FormatError, match=r"manifest\.json is damaged"):
            open_dataset("memory://damaged/manifest.json")


def test_plans_that_no_pack_writes(packed):
    plan = json.loads((packed / "plan.json").read_bytes())
    rows = [("edges", edges) for edges in ("x", [], [0, 5], plan["edges"][::-1])]
    rows += [("version", -1), ("version", 99), ("count", -1), ("nbytes", [None]), ("options", 5)]
    rows += [("classes", [5]), ("kind", 5), ("samples", "x"), ("more", 1)]
    for name, value in rows:
        (packed / "plan.json").write_text(json.dumps({**plan, name: value}))
        with pytest.raises(FormatError, match=r"plan\.json"):
            pack_status(packed)
