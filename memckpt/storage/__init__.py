"""Checkpoints that outlive the machines: whole files on a file system or in an object store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memckpt.storage.base import Storage


def open(target: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Storage:
    """The storage at a path or URL; nothing is made or read yet. Local.

    Parameters
    ----------
    target : str or path
        A directory, or a URL: ``file://`` is a directory too, everything else goes through fsspec (``s3://``).
    options : mapping, optional
        fsspec's storage options; not for directories.

    Raises
    ------
    UsageError
        It is neither, or a package is lacking for it.
    """
    from memckpt.storage.posix import PosixStorage
    from memckpt.storage.remote import RemoteStorage

    where = os.fspath(target)
    scheme, separator, path = where.partition("://")
    if separator and scheme not in ("file", "local"):
        return RemoteStorage(where, options)
    return PosixStorage(path if separator else where)
