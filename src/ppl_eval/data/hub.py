"""Data sets and files on a hub or another server."""

import errno
import os
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

from ppl_eval.errors import UserError

_DISK_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENOTDIR)

_LOOK_S = 3.5
"""Seconds that a look-up and a connection may take before they count as slow."""


def load(name: str, config: str | None, revision: str | None) -> Any:
    """The splits of a data set on the hub, by name.

    Raises:
        UserError: there is no such data set, or the hub cannot be reached.
    """
    import datasets
    import datasets.config
    from datasets.exceptions import DatasetsError

    is_online = not datasets.config.HF_HUB_OFFLINE
    trouble = out_of_reach(datasets.config.HF_ENDPOINT) if is_online else None
    try:
        if trouble:
            raise OSError(trouble)
        return datasets.load_dataset(name, name=config, revision=revision)
    except (DatasetsError, OSError, ValueError) as error:
        reason = error if error.__cause__ is None else error.__cause__
        if isinstance(reason, OSError) and reason.errno in _DISK_ERRORS:
            raise UserError(unwritable(reason)) from error
        fetched = "; HF_HUB_OFFLINE=1 reads what was fetched before" if trouble else ""
        raise UserError(
            f"dataset.source is {name!r}, which is no file or folder here, and the hub does not"
            f" give it: {' '.join(str(reason).split()).rstrip('.')}: for files of your own set"
            f" dataset.data_files=FILE or dataset.source=FOLDER{fetched}"
        ) from error


def unwritable(error: OSError) -> str:
    """The sentence for a cache of the datasets library that cannot be written."""
    import datasets.config

    return (
        f"the cache of data sets {datasets.config.HF_DATASETS_CACHE} cannot be written:"
        f" {error.strerror or error}: set HF_DATASETS_CACHE to a folder that can"
    )


def out_of_reach(address: str) -> str | None:
    """Why the host of a URL cannot be reached, found out within 4 s; None if nothing is wrong.

    Slow hosts, and hosts behind a proxy, also give None: the library that connects to them has
    time-outs.
    """
    import urllib.request  # takes 40 ms, which most runs need not spend

    parts = urlsplit(address)
    host, port = parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)
    proxies = urllib.request.getproxies()
    is_bypassed = bool(urllib.request.proxy_bypass(host or ""))
    if not host or ((parts.scheme in proxies or "all" in proxies) and not is_bypassed):
        return None
    found: dict[str, str | None] = {"reason": f"the name {host} does not resolve"}

    def look() -> None:
        try:
            socket.getaddrinfo(host, port)
            found["reason"] = None
            socket.create_connection((host, port), timeout=_LOOK_S).close()
        except socket.gaierror as error:
            found["reason"] = f"the name {host} does not resolve ({error.strerror or error})"
        except TimeoutError:
            pass
        except OSError as error:
            found["reason"] = f"{host}:{port} does not answer ({error.strerror or error})"

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_LOOK_S)
    return found["reason"]


def download(names: list[str]) -> tuple[list[str], list[str]]:
    """Fetch remote files into the cache of the datasets library: (names, paths), in order.

    Args:
        names: URLs or patterns of the library (``https://``, ``hf://``, ...), and local files,
            which stay as they are.

    Raises:
        UserError: a file cannot be fetched.
    """
    import datasets
    import datasets.config
    from datasets.data_files import resolve_pattern

    found: list[str] = []
    name = ""
    try:
        for name in names:
            web = datasets.config.HF_ENDPOINT if name.startswith("hf://") else name
            if web.startswith(("http://", "https://")) and not datasets.config.HF_HUB_OFFLINE:
                trouble = out_of_reach(web)
                if trouble:
                    raise OSError(trouble)
            found += resolve_pattern(name, os.sep) if "://" in name else [name]
        remote = [name for name in found if "://" in name]
        name = ", ".join(remote)
        fetched = iter(datasets.DownloadManager().download(remote))
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"dataset.data_files: {name} cannot be fetched: {reason}") from error
    return found, [next(fetched) if "://" in name else name for name in found]
