"""The storage tier where storage is full, and where it is an object store."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memckpt
from memckpt.comm.local import LocalComm
from memckpt.storage import checkpoints, open, reading
from tests.ranks import fake_nodes, raise_errors, run_ranks
from tests.training import Training, make

pytestmark = [
    pytest.mark.filterwarnings("ignore:step .* is not persisted"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(moto|botocore|aiobotocore|s3fs|werkzeug|flask|fsspec).*"),
]


@pytest.fixture(autouse=True)
def memory(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "shm").mkdir(mode=0o700)
    with fake_nodes(str(tmp_path / "shm")):
        yield tmp_path / "shm"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 8 MiB."""
    target = tmp_path / "small"
    target.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(target)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs of our own: {done.stderr.decode().strip()}")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def test_a_full_file_system_costs_no_checkpoint_and_no_training(small: Path) -> None:  # C24
    filler = small / "filler"

    def work(comm: LocalComm) -> tuple[memckpt.Stats, memckpt.Stats, str]:
        training = Training(seed=comm.rank, width=64)
        ckpt = make(training, comm=comm, persist=memckpt.Persist(small / "ckpts", every=2, keep=1, stagger=0))
        ckpt.restore()

        def steps(first: int, last: int) -> memckpt.Stats:
            for n in range(first, last + 1):
                training.step()
                ckpt.step(n)
                ckpt.wait(persisted=True)
            return ckpt.stats()

        steps(1, 2)
        if comm.rank == 0:
            filler.write_bytes(bytes(6 << 20))
            try:
                with filler.open("ab") as file:
                    while True:
                        file.write(bytes(4096))
                        file.flush()
            except OSError:
                pass  # to the last page
        full = steps(3, 5)
        if comm.rank == 0:
            assert [s.step for s in checkpoints.scan(open(str(small / "ckpts")), "run") if s.complete] == [2]
            filler.unlink()
        later = steps(6, 8)
        digest = training.digest(rng=False)
        ckpt.close()
        return full, later, digest

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = raise_errors(run_ranks(2, work, nodes=["a", "b"], timeout_s=90))
    for full, later, _ in results:
        assert full.commits == 5, "memory snapshots went on"
        assert (full.persisted_step, full.persist_failed) in {(2, 1), (2, 2)}
        assert any("step 4: not persisted: rank" in e and "No space left" in e for e in full.errors), full.errors
        assert later.persisted_step == 8
    found = checkpoints.scan(open(str(small / "ckpts")), "run")
    assert [(s.step, s.complete) for s in found] == [(8, True)], "nothing half written is left"


@pytest.fixture
def s3() -> Iterator[dict[str, Any]]:
    """Options for a bucket of moto's server on the loopback."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    import s3fs

    s3fs.S3FileSystem(**options, skip_instance_cache=True).makedirs("bucket", exist_ok=True)
    yield options
    server.stop()


def test_an_object_store_holds_checkpoints_and_gives_them_back(memory: Path, s3: dict[str, Any]) -> None:
    persist = memckpt.Persist("s3://bucket/ckpts", every=2, keep=2, stagger=0, storage_options=s3)
    assert "secret" not in repr(persist)

    def work(comm: LocalComm, seed: int, until: int) -> tuple[memckpt.RestoreReport, str]:
        training = Training(seed=seed + comm.rank)
        ckpt = make(training, comm=comm, persist=persist, deadline=60.0)
        report = ckpt.restore()
        for n in range(report.step + 1, until + 1):
            training.step()
            ckpt.step(n)
            ckpt.wait(persisted=True)
        digest = training.digest(rng=False)
        ckpt.close()
        return report, digest

    saved = raise_errors(run_ranks(2, lambda c: work(c, 0, 8), nodes=["a", "b"], timeout_s=90))
    storage = open("s3://bucket/ckpts", s3)
    found = checkpoints.scan(storage, "run")
    assert [(s.step, s.complete) for s in found] == [(6, True), (8, True)]
    assert reading.verify(storage, found[-1]) == []
    for path in memory.iterdir():
        subprocess.run(["rm", "-r", str(path)], check=True)
    restored = raise_errors(run_ranks(2, lambda c: work(c, 9, 8), nodes=["a", "b"], timeout_s=90))
    for (_, before), (report, after) in zip(saved, restored, strict=True):
        assert (report.step, report.source) == (8, "storage")
        assert after == before
