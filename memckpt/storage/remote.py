"""Storage that fsspec reaches: S3, Google Cloud Storage, Azure, SFTP and whatever else has a file system there.

An object store shows an object when its upload is complete and never before, so nothing has to be renamed. An upload
that was killed is never listed; its parts are kept, and charged for, until the bucket's lifecycle rule
(``AbortIncompleteMultipartUpload``) removes them. File systems proper get a temporary name and a rename.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from memckpt.errors import UsageError
from memckpt.storage.base import Entry, Part, Reached, Storage, components, directory_of, unheard

_PART_NBYTES = 16 << 20
_MAX_PARTS = 9000  # S3 allows 10,000
_ERRNO: dict[type, int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
}


class RemoteStorage(Storage):
    """A directory of an fsspec file system.

    Parameters
    ----------
    url : str
        Such as ``s3://bucket/directory``.
    options : mapping, optional
        fsspec's storage options of that file system (credentials, endpoint); default is what its environment says.

    Raises
    ------
    UsageError
        fsspec, or the package that it needs for this kind of URL, is not installed; or there is no such kind.
    """

    read_nbytes = 16 << 20  # a request has its price

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        try:
            fsspec = import_module("fsspec.core")
            asynchronous: type = import_module("fsspec.asyn").AsyncFileSystem
            # Our own instance: listings that another user of the process has cached are not the storage's.
            self._fs, root = fsspec.url_to_fs(url, skip_instance_cache=True, **(options or {}))
        except ImportError as error:
            raise UsageError(f"{url} needs packages that are not here (memckpt[remote]): {error}") from error
        except ValueError as error:
            raise UsageError(f"{url} is no storage: {error}") from error
        self._objects = isinstance(self._fs, asynchronous)  # all of fsspec's object stores are
        self._root = root.rstrip("/")
        self.url = url

    def _full(self, path: str) -> str:
        return "/".join([self._root, *components(path)])

    @contextlib.contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        """Errors of many libraries as an OSError with errno and name."""
        try:
            yield
        except Exception as error:
            code = getattr(error, "errno", None) or _ERRNO.get(type(error), errno.EIO)
            raise OSError(code, f"{error}", f"{self.url.rstrip('/')}/{path}") from error

    def prepare(self) -> None:
        """See `Storage.prepare`; of an object store this asks whether the bucket is there. Local."""
        with self._naming(""):
            if not self._objects:
                self._fs.makedirs(self._root, exist_ok=True)
            elif (bucket := self._root.split("/")[0]) and not self._fs.exists(bucket):
                raise FileNotFoundError(errno.ENOENT, f"there is no {bucket}")

    def put(self, parts: Sequence[Part], reached: Reached = unheard) -> None:
        """See `Storage.put`; object stores show each file as soon as it is complete. Local."""
        directory = directory_of(parts)
        targets = [(part, self._full(part.path)) for part in parts]
        if not self._objects:
            with self._naming(directory):
                self._fs.makedirs(targets[0][1].rpartition("/")[0], exist_ok=True)
        for part, path in targets:
            if self._objects:
                self._upload(path, part, reached)
            else:
                head, _, name = path.rpartition("/")
                scratch = f"{head}/.tmp-{secrets.token_hex(8)}-{name}"
                try:
                    self._upload(scratch, part, reached)
                    with self._naming(part.path):
                        self._rename(scratch, path)
                except BaseException:
                    with contextlib.suppress(Exception):
                        self._fs.rm_file(scratch)
                    raise
            reached("named", part.path)
        reached("durable", parts[-1].path)

    def _rename(self, source: str, target: str) -> None:
        fs = self._fs
        if fs.isfile(target):
            fs.rm_file(target)  # SFTP does not replace
        if type(fs).mv is import_module("fsspec").AbstractFileSystem.mv:
            # fsspec's own way for who has none: it copies, and takes a name like "gpt[7]" for a pattern.
            fs.cp_file(source, target)
            fs.rm_file(source)
        else:
            fs.mv(source, target)

    def _upload(self, path: str, part: Part, reached: Reached) -> None:
        with self._naming(part.path):
            block_nbytes = max(_PART_NBYTES, -(-part.nbytes // _MAX_PARTS))
            file = self._fs.open(path, "wb", block_size=block_nbytes)
        try:
            nbytes = 0
            for piece in part.pieces:
                with self._naming(part.path):
                    file.write(piece)
                nbytes += len(piece)
            if nbytes != part.nbytes:
                raise UsageError(f"{nbytes} bytes came, {part.nbytes} were announced", path=path)
            reached("written", part.path)
            with self._naming(part.path):
                file.close()
        except BaseException:
            # Closing it, which its destructor would do, would complete the upload of half a file.
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(AttributeError):
                file.closed = True
            raise
        reached("synced", part.path)

    def get(self, path: str, offset: int, buffer: memoryview) -> int:
        """See `Storage.get`. Local."""
        full = self._full(path)
        with self._naming(path):
            try:
                data = self._fs.cat_file(full, start=offset, end=offset + len(buffer))
            except Exception:
                # A range behind the end is an error to some; which one differs.
                if self._fs.info(full)["size"] > offset:
                    raise
                return 0
        buffer[: len(data)] = data
        return len(data)

    def entries(self, prefix: str = "", depth: int = 3) -> list[Entry]:
        """See `Storage.entries`. Local."""
        full = self._full(prefix)
        with self._naming(prefix):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(full, detail=True)
            except FileNotFoundError:
                return []
        base = components(prefix)
        entries: dict[str, int] = {}
        for name, info in found.items():
            below = name[len(full) + 1 :].split("/")
            if not name.startswith(f"{full}/") or info.get("type") == "directory" or not below[-1]:
                continue
            cut = below[:depth]
            entries["/".join([*base, *cut]) + ("" if cut == below else "/")] = info["size"] if cut == below else 0
        return sorted(Entry(path, nbytes) for path, nbytes in entries.items())

    def remove(self, paths: Iterable[str]) -> None:
        """See `Storage.remove`; object stores have no directories. Local."""
        directories: dict[str, str] = {}
        for path in paths:
            full = self._full(path)
            if path.endswith("/"):
                directories[full] = path
                continue
            with self._naming(path):
                try:
                    self._fs.rm_file(full)
                except FileNotFoundError:
                    continue
            directories[full.rpartition("/")[0]] = path
        for full, path in {} if self._objects else directories.items():
            with self._naming(path):
                if full != self._root and self._fs.isdir(full) and not self._fs.ls(full, detail=False):
                    self._fs.rmdir(full)

    def free_nbytes(self) -> int | None:
        """See `Storage.free_nbytes`. Local."""
        return None
