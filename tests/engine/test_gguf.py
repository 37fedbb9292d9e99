"""When a GGUF file is unpacked again."""

import os

import pytest

from ragcache.engine import gguf


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file that unpacks to an empty folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf, "_unpack_into", lambda _, folder: folder.mkdir(parents=True))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"weights")
    return path


def test_what_was_unpacked_for_an_image_is_found_in_its_containers(file):
    """Archived in a layer, the file's time loses its fraction of a second."""
    os.utime(file, ns=(0, 1_700_000_000_987_654_321))
    folder = gguf.unpack(file)
    os.utime(file, ns=(0, 1_700_000_000_000_000_000))
    assert gguf.unpack(file) == folder


def test_a_changed_file_is_unpacked_into_a_folder_of_its_own(file):
    os.utime(file, ns=(0, 1_700_000_000_000_000_000))
    folder = gguf.unpack(file)
    os.utime(file, ns=(0, 1_700_000_001_000_000_000))
    assert gguf.unpack(file) != folder
    file.write_bytes(b"others")
    os.utime(file, ns=(0, 1_700_000_000_000_000_000))
    assert gguf.unpack(file) != folder
