"""A file system that is really full, at each file in turn: the last good checkpoint stays, and the next save works."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from memckpt import storage
from memckpt.storage.base import Storage
from memckpt.storage.checkpoints import scan, write_marker
from memckpt.storage.reading import verify
from tests.test_storage_checkpoints import save, write

PAGE = os.sysconf("SC_PAGE_SIZE")
NBYTES = 20 * PAGE


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of a hundred pages, or a skip where mounting is not permitted."""
    target = tmp_path / "small"
    target.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={100 * PAGE}", "none", str(target)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs of our own: {done.stderr.strip()}")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def leave(root: Path, pages: int) -> None:
    """Fill the file system but for so many pages."""
    with open(root / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"f" * PAGE)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        file.truncate((file.tell() // PAGE - pages) * PAGE)


def check_last_good(disk: Storage, root: Path) -> None:
    complete = [s for s in scan(disk, "gpt") if s.complete]
    assert [s.step for s in complete] == [1]
    assert verify(disk, complete[0]) == []
    assert not list(root.rglob(".tmp-*")), "half written files take space from the next attempt"


@pytest.mark.parametrize(
    ("what", "pages"), [("rank-00000.safetensors", 0), ("rank-00000.safetensors", 7), ("rank-00000.seal.json", 20),
                        ("rank-00001.safetensors", 25), ("rank-00001.seal.json", 41)],
)  # fmt: skip
def test_full_while_a_shard_is_written(small: Path, what: str, pages: int) -> None:
    disk = storage.open(small / "ckpts")
    save(disk, 1, nbytes=NBYTES)
    leave(small, pages)
    with pytest.raises(OSError) as caught:
        save(disk, 2, nbytes=NBYTES)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename).endswith(what)
    check_last_good(disk, small)
    (small / "filler").unlink()
    save(disk, 2, nbytes=NBYTES)
    assert [(s.step, verify(disk, s)) for s in scan(disk, "gpt") if s.complete] == [(1, []), (2, [])]


def test_full_while_the_marker_is_written(small: Path) -> None:
    disk = storage.open(small / "ckpts")
    save(disk, 1, nbytes=NBYTES)
    marker = write(disk, 2, nbytes=NBYTES)
    leave(small, 0)
    with pytest.raises(OSError) as caught:
        write_marker(disk, "gpt", marker)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename).endswith("checkpoint.json")
    check_last_good(disk, small)
    (small / "filler").unlink()
    write_marker(disk, "gpt", marker)
    assert [(s.step, verify(disk, s)) for s in scan(disk, "gpt")] == [(1, []), (2, [])]


def test_full_of_names(tmp_path: Path, small: Path) -> None:
    """No bytes are lacking but inodes, so not even an empty file can be made."""
    subprocess.run(["mount", "-o", "remount,nr_inodes=16", str(small)], check=True)
    disk = storage.open(small / "ckpts")
    save(disk, 1)
    for number in range(16):
        try:
            (small / f"filler{number}").touch()
        except OSError:
            break
    with pytest.raises(OSError) as caught:
        save(disk, 2)
    assert caught.value.errno == errno.ENOSPC
    check_last_good(disk, small)
    for filler in small.glob("filler*"):
        filler.unlink()
    save(disk, 2)
    assert [s.step for s in scan(disk, "gpt") if s.complete] == [1, 2]


def test_free_space_is_told(small: Path) -> None:
    disk = storage.open(small / "not" / "made" / "yet")
    before = disk.free_nbytes()
    leave(small, 7)
    assert (before, disk.free_nbytes()) == (100 * PAGE, 7 * PAGE)
