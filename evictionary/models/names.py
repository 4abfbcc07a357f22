"""Which model a name means: found out before torch is imported, and with one question to the hub."""

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from evictionary.errors import did_you_mean, require
from evictionary.models import embedded

EMBEDDED = "embedded"


class Place(NamedTuple):
    """What transformers loads a model from: a folder, or a name on the hub. A local one needs no network.
    `file` is the argument that names a GGUF file of the folder, or nothing.
    """

    name: str
    is_local: bool
    file: Mapping[str, str] = MappingProxyType({})


def located(name: str) -> Place:
    """Where the model of this name is: the embedded one (which is installed then), a folder, or the hub.

    Raises UsageError as `require_model` does, InstallError where the embedded model cannot be installed.
    """
    require_model(name)
    if name == EMBEDDED:
        return Place(str(embedded.install()), is_local=True)
    path = Path(name).expanduser()
    if path.is_file():
        return Place(str(path.parent), is_local=True, file={"gguf_file": path.name})
    return Place(str(path), is_local=True) if path.is_dir() else Place(name, bool(_unreached(name)))


def require_model(name: str) -> None:
    """Raise UsageError for no name, a folder that does not exist, or a model that only the hub could have
    while nobody reaches it.
    """
    require(name.strip(), f"model: got {name!r}, wanted a hub name, a folder, or {EMBEDDED}")
    path = Path(name).expanduser()
    if name == EMBEDDED:
        return
    require(
        not path.is_file() or path.suffix == ".gguf",
        f"model: got {name!r}, a file, wanted the folder with its config.json, or a GGUF file",
    )
    files = [] if (path / "config.json").exists() else sorted(each.name for each in path.glob("*.gguf"))
    require(
        not files,
        f"model: got {name!r}, a folder without a config.json, wanted one of its files, such as "
        f"{path / (files or [''])[0]}",
    )
    if path.exists():
        return
    require(
        not name.startswith((".", "/", "~")) and name.count("/") <= 1,
        f"model: got {name!r}{hint(name)}, wanted a folder that exists, a hub name, or {EMBEDDED}",
    )
    reason = _unreached(name)
    require(
        not reason or _is_stored(name),
        f"model: got {name!r}{hint(name)}, wanted a folder that exists, {EMBEDDED}, or a hub name: the hub "
        f"cannot be reached ({reason}), and no earlier download of that name is here",
    )


def hint(name: str) -> str:
    """The embedded model or a folder that a name is a typo of, as ` (did you mean embedded?)`."""
    before, slash, last = name.rstrip("/").rpartition("/")
    beside = Path(before + slash or ".").expanduser()
    folders = [path.name for path in beside.iterdir() if path.is_dir()] if beside.is_dir() else []
    close = did_you_mean(last, folders)
    if not slash:
        close = did_you_mean(name.lower(), [EMBEDDED]) or close
    return close.replace("mean ", f"mean {before}{slash}") if slash else close


@functools.cache
def _unreached(name: str) -> str:
    """Why the hub cannot be reached, asked once and without waiting for a second try; else no text."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except Exception as error:  # of any library that it asks with
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, OSError) and not hasattr(cause, "response"):
                return " ".join(str(error).split())
            cause = cause.__cause__ or cause.__context__
    return ""  # it answered, if only that it has no such model


def _is_stored(name: str) -> bool:
    """Whether an earlier download left the configuration of a model here."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)
