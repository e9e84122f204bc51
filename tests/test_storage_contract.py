"""One contract for every storage: a directory, fsspec's memory, and S3 as moto's server on the loopback serves it."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from memckpt import storage as storages
from memckpt.errors import UsageError
from memckpt.storage.base import HOPELESS, Entry, Part, Storage
from memckpt.storage.checkpoints import prune, scan
from memckpt.storage.posix import PosixStorage
from memckpt.storage.reading import read_shard, verify
from memckpt.storage.remote import RemoteStorage
from tests.test_storage_checkpoints import FIRST, SECOND, content, save

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:(moto|botocore|aiobotocore|s3fs|werkzeug|flask|fsspec).*"
)
Open = Callable[[], Storage]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """Options of an empty S3 server with the bucket ``bucket``."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = {"endpoint_url": f"http://{host}:{port}"}
    options = {"key": "k", "secret": "s", "client_kwargs": endpoint}
    import s3fs

    s3fs.S3FileSystem(**options, skip_instance_cache=True).makedirs("bucket", exist_ok=True)
    yield options
    server.stop()


@pytest.fixture(params=["posix", "memory", "s3"])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same empty storage anew, as another process would."""
    if request.param == "posix":
        return lambda: storages.open(tmp_path / "root")
    if request.param == "memory":
        pytest.importorskip("fsspec")
        return lambda: storages.open(f"memory://{tmp_path.name}/{request.node.name}")
    options = request.getfixturevalue("s3")
    return lambda: storages.open(f"s3://bucket/{tmp_path.name}", options)


@pytest.fixture
def storage(fresh: Open) -> Storage:
    return fresh()


def put(storage: Storage, **files: bytes) -> None:
    """Files of the directory ``d``."""
    storage.put([Part(f"d/{name}", len(data), [data]) for name, data in files.items()])


def read(storage: Storage, path: str, nbytes: int, offset: int = 0) -> bytes:
    buffer = bytearray(nbytes)
    got = storage.get(path, offset, memoryview(buffer))
    return bytes(buffer[:got])


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_001, (33 << 20) + 1])
def test_what_was_put_is_got(storage: Storage, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    whole = memoryview(bytearray(data))

    def pieces() -> Iterator[memoryview]:
        for at in range(0, nbytes, 7 << 20):
            with whole[at : at + (7 << 20)] as piece:
                yield piece  # ends with the next one: nobody may hold on to it

    storage.put([Part("run/step/x", nbytes, pieces()), Part("run/step/y", 3, [b"ab", b"", b"c"])])
    whole.release()
    assert read(storage, "run/step/x", nbytes + 5) == data
    assert read(storage, "run/step/y", 3) == b"abc"
    assert storage.entries() == [Entry("run/step/x", nbytes), Entry("run/step/y", 3)]


def test_get_reads_what_there_is(storage: Storage) -> None:
    put(storage, x=b"0123456789")
    assert read(storage, "d/x", 4, 3) == b"3456"
    assert read(storage, "d/x", 4, 8) == b"89"
    assert read(storage, "d/x", 4, 10) == b""
    assert read(storage, "d/x", 4, 11) == b""
    buffer = bytearray(b"....")
    assert storage.get("d/x", 9, memoryview(buffer)) == 1
    assert buffer == b"9..."


def test_what_is_not_there(storage: Storage) -> None:
    for path in ("d/x", "never/was"):
        with pytest.raises(FileNotFoundError) as caught:
            read(storage, path, 4)
        assert caught.value.errno == errno.ENOENT
        assert str(caught.value.filename).endswith(path)
    assert storage.entries() == []
    assert storage.entries("d", 1) == []
    storage.remove(["d/x", "never/was", "d/"])


def test_a_file_is_replaced_whole(storage: Storage) -> None:
    put(storage, x=b"older and longer")
    put(storage, x=b"new")
    assert read(storage, "d/x", 100) == b"new"


class Broken(Exception):
    pass


@pytest.mark.parametrize("nbytes", [100, 40 << 20])
def test_a_put_that_fails_shows_nothing(
    storage: Storage, fresh: Open, request: pytest.FixtureRequest, nbytes: int
) -> None:
    put(storage, x=b"as it was")

    def pieces() -> Iterator[bytes]:
        for _ in range(9):
            assert [e for e in fresh().entries("d", 1) if "/.tmp-" not in e.path] == [Entry("d/x", 9)]
            yield bytes(nbytes // 10)
        raise Broken

    with pytest.raises(Broken):
        storage.put([Part("d/x", nbytes, pieces())])
    assert storage.entries() == [Entry("d/x", 9)]
    assert read(storage, "d/x", 100) == b"as it was"
    if "s3:" in storage.url:
        options = request.getfixturevalue("s3")
        import s3fs

        uploads = s3fs.S3FileSystem(**options).list_multipart_uploads("bucket")
        assert uploads == [], "parts of it would be kept and paid for"


def test_too_few_and_too_many_bytes_are_refused(storage: Storage) -> None:
    for nbytes in (2, 4):
        with pytest.raises(UsageError, match="announced"):
            storage.put([Part("d/x", nbytes, [b"abc"])])
    assert [e for e in storage.entries() if not e.path.endswith("/")] == []


def test_stages_are_told_in_order(storage: Storage) -> None:
    told: list[tuple[str, str]] = []
    storage.put([Part("d/x", 1, [b"1"]), Part("d/y", 1, [b"2"])], lambda *stage: told.append(stage))
    assert told[-1] == ("durable", "d/y")
    assert sorted(told[:-1]) == sorted(
        (stage, path) for stage in ("written", "synced", "named") for path in ("d/x", "d/y")
    )
    for path in ("d/x", "d/y"):
        assert [stage for stage, of in told if of == path][:3] == ["written", "synced", "named"]


def test_entries_are_sorted_and_as_deep_as_wanted(storage: Storage, fresh: Open) -> None:
    for path in ("b/1/x", "a/2/x", "a/2/deep/x", "a/2/deep/y", "a/x", "a-b/x"):
        storage.put([Part(path, 1, [b"1"])])
    expected = ["a-b/x", "a/2/deep/", "a/2/x", "a/x", "b/1/x"]
    assert [path for path, _ in storage.entries()] == expected
    assert [path for path, _ in storage.entries("a", 2)] == ["a/2/deep/", "a/2/x", "a/x"]
    assert [path for path, _ in storage.entries("a", 3)] == ["a/2/deep/x", "a/2/deep/y", "a/2/x", "a/x"]
    assert [path for path, _ in storage.entries("a/2/", 1)] == ["a/2/deep/", "a/2/x"]
    assert storage.entries("a/x", 1) == []
    other = fresh()
    other.put([Part("a/new", 1, [b"1"])])
    assert "a/new" in [path for path, _ in storage.entries()], "not from a cache"
    other.remove(["a/new"])
    assert "a/new" not in [path for path, _ in storage.entries()]


def test_remove_takes_files_and_what_that_leaves_empty(storage: Storage) -> None:
    put(storage, x=b"1", y=b"2")
    storage.remove(["d/x"])
    assert storage.entries() == [Entry("d/y", 1)]
    told: list[str] = []

    def paths() -> Iterator[str]:
        for path in ("d/y", "d/z"):
            yield path
            told.append(f"{path} {len(storage.entries('d', 1))}")

    storage.remove(paths())
    assert told[0].startswith("d/y"), "one after the other"
    assert storage.entries() == []
    put(storage, x=b"3")
    assert read(storage, "d/x", 9) == b"3"


def test_the_root_stays(storage: Storage, tmp_path: Path) -> None:
    storage.put([Part("x", 1, [b"1"])])
    assert storage.entries() == [Entry("x", 1)]
    storage.remove(["x"])
    assert storage.entries() == []
    if isinstance(storage, PosixStorage):
        assert (tmp_path / "root").is_dir()


def test_paths_stay_below_the_root(storage: Storage) -> None:
    for path in ("../x", "d/../../x", "/etc/x", "./x", "d/a\0b"):
        with pytest.raises(UsageError):
            storage.put([Part(path, 1, [b"1"])])
        with pytest.raises(UsageError):
            read(storage, path, 1)
        with pytest.raises(UsageError):
            storage.remove([path])
    with pytest.raises(UsageError, match="one directory"):
        storage.put([Part("a/x", 1, [b"1"]), Part("b/x", 1, [b"1"])])
    assert storage.entries() == []


def test_many_threads_read_one_file(storage: Storage) -> None:
    data = random.Random(1).randbytes(1 << 20)
    put(storage, x=data)
    with ThreadPoolExecutor(8) as pool:
        parts = [*pool.map(lambda at: read(storage, "d/x", 1 << 15, at), range(0, 1 << 20, 1 << 15))]
    assert b"".join(parts) == data


def test_a_checkpoint_from_save_to_prune(storage: Storage, fresh: Open) -> None:
    nbytes = (18 << 20) + 5
    save(storage, 1)
    save(storage, 2, SECOND, nbytes=nbytes)
    older, newer = scan(fresh(), "gpt")
    assert (older.complete, newer.complete) == (True, True)
    assert newer.generation == SECOND
    memory = bytearray(nbytes)
    read_shard(fresh(), newer, 1, memory)
    assert memory == content(1, 2, nbytes)
    assert verify(storage, older) == verify(storage, newer) == []
    assert prune(storage, [older], running=FIRST.id) == [older]
    assert scan(fresh()) == [newer]
    prune(storage, [newer])
    assert [e for e in fresh().entries() if not e.path.endswith("/")] == []


def test_free_space(storage: Storage, tmp_path: Path) -> None:
    free = storage.free_nbytes()
    if isinstance(storage, PosixStorage):
        status = os.statvfs(tmp_path)
        assert free is not None
        assert abs(free - status.f_bavail * status.f_frsize) < 1 << 30
    else:
        assert free is None


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_root_is_made_ready_as_often_as_one_likes(storage: Storage, fresh: Open) -> None:
    storage.prepare()
    assert storage.entries() == []
    fresh().prepare()
    put(storage, x=b"1")
    fresh().prepare()
    assert read(storage, "d/x", 1) == b"1"


def test_a_root_that_cannot_be_had(tmp_path: Path, s3: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("x")
    for target in (tmp_path / "file", tmp_path / "file" / "x", "/proc/nope"):
        with pytest.raises(OSError) as caught:
            storages.open(target).prepare()
        assert caught.value.errno in HOPELESS
    with pytest.raises(OSError, match="there is no nobucket") as caught:
        storages.open("s3://nobucket/x", s3).prepare()
    assert caught.value.errno in HOPELESS


def test_a_root_that_is_not_ours_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(PermissionError):
        storages.open(tmp_path / "x").prepare()


def test_open_knows_paths_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for target in (tmp_path / "a", str(tmp_path / "a"), f"file://{tmp_path}/a", f"local://{tmp_path}/a", "a", "./a"):
        found = storages.open(target)
        assert isinstance(found, PosixStorage)
        assert found.url == str(tmp_path / "a")
    monkeypatch.chdir("/")
    put(found, x=b"1")
    assert (tmp_path / "a" / "d" / "x").read_bytes() == b"1"
    pytest.importorskip("fsspec")
    assert isinstance(storages.open("memory://x"), RemoteStorage)
    for bad in ("", "no-such-thing://x"):
        with pytest.raises(UsageError):
            storages.open(bad)


def test_fsspec_is_loaded_only_for_urls(tmp_path: Path) -> None:
    code = (
        f"import sys; from memckpt import storage; storage.open({str(tmp_path)!r}); assert 'fsspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_without_fsspec_a_url_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UsageError, match=r"memckpt\[remote\]"):
        storages.open("s3://bucket/x")


class Vague(Exception):
    """As some libraries raise it: neither an OSError nor a number."""


def test_errors_of_other_libraries_have_a_number_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    remote = storages.open("memory://vague")
    assert isinstance(remote, RemoteStorage)
    for raised, code in [
        (Vague("no route to host"), errno.EIO), (PermissionError("no"), errno.EACCES),
        (OSError(errno.EDQUOT, "quota"), errno.EDQUOT),
    ]:  # fmt: skip

        def fail(*args: Any, error: Exception = raised, **more: Any) -> None:
            raise error

        monkeypatch.setattr(remote._fs, "open", fail)
        with pytest.raises(OSError) as caught:
            put(remote, x=b"1")
        assert caught.value.errno == code
        assert caught.value.filename == "memory://vague/d/x"
        assert caught.value.__cause__ is raised


def test_a_rename_that_does_not_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SFTP's: the older file, which no marker speaks of, goes first."""
    memory = pytest.importorskip("fsspec.implementations.memory")
    renamed: list[str] = []

    class Strict(memory.MemoryFileSystem):  # type: ignore[name-defined,misc]
        protocol = "strict"

        def mv(self, source: str, target: str) -> None:
            if self.exists(target):
                raise FileExistsError(target)
            renamed.append(target)
            self.store[target] = self.store.pop(source)

    remote = storages.open("memory://strict")
    assert isinstance(remote, RemoteStorage)
    monkeypatch.setattr(remote, "_fs", Strict())
    put(remote, x=b"older")
    put(remote, x=b"new")
    assert renamed == ["/strict/d/x"] * 2
    assert read(remote, "d/x", 9) == b"new"
    assert remote.entries() == [Entry("d/x", 3)]


def test_listings_are_never_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    remote = storages.open("memory://listings")
    assert isinstance(remote, RemoteStorage)
    calls: list[str] = []
    monkeypatch.setattr(remote._fs, "invalidate_cache", lambda: calls.append("forget"))
    monkeypatch.setattr(remote._fs, "find", lambda path, detail: calls.append("find") or {})
    remote.entries()
    remote.entries("d", 1)
    assert calls == ["forget", "find"] * 2
