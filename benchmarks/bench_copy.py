"""Copying into and out of a slot, against the fastest plain copy of this machine.

    python benchmarks/bench_copy.py [--json] [--size MIB] [--rounds N] [--threads N]

All memory is touched before; every result is checked byte for byte before anything is timed. Values in GB/s of payload,
ratio = value over what it is measured against (more is better):

copy, copy_crc        gather of 64 pieces, without and with the checksum, against the fastest of three plain copies
                      with as many threads (memcpy, non-temporal stores, rep movsb; one contiguous part each)
copy_crc_sse42        the same with the checksum, on the path for CPUs without AVX
scatter_crc           out of the slot into tensors, verified on the way, against the same limit
copy_small            20,000 tensors of 1 KiB, with the checksum, the comparison of all addresses and sizes and the
                      planning of the copy, against torch._foreach_copy_ into views of the same slot
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import _common
import numpy as np
import numpy.typing as npt
import torch

from memckpt import _native

MIB = 1 << 20
HEAD = 4096  # a slot's data area begins here
LIMITS = ("memcpy", "stream", "string")


def slot(nbytes: int) -> _native.SharedMemory:
    """Memory as a slot has it, without a name, so that nothing is left behind."""
    directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    memory = _native.SharedMemory.create(f"{directory}/memckpt-bench-{os.getpid()}-{nbytes}", nbytes)
    os.unlink(memory.path)
    memory.populate()
    return memory


def array(values: Any) -> npt.NDArray[np.uint64]:
    """As the native calls want it."""
    return np.asarray(values, dtype=np.uint64)


def check(condition: bool, what: str) -> None:
    """A wrong copy is no result."""
    if not condition:
        raise SystemExit(f"wrong result: {what}")


def large(nbytes: int, rounds: int, threads: int, forced: str | None) -> list[_common.Result]:
    """Copies of one big state; on a forced path only ``copy_crc_<path>``."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(-(2**63), 2**63 - 1, (nbytes // 8,), generator=generator).numpy().view(np.uint8)
    target, out = slot(HEAD + nbytes), np.ones(nbytes, np.uint8)
    whole = HEAD + nbytes
    piece = nbytes // 64
    places = np.random.default_rng(1).permutation(64)  # the pieces' order in memory is not their order in the file
    sources = array(source.ctypes.data + places * piece)
    targets = array(out.ctypes.data + places * piece)
    sizes, offsets = array(np.full(64, piece)), array(HEAD + np.arange(64) * piece)

    def gather(crc: bool) -> _native.CopyJob:
        job = _native.gather(sources, sizes, offsets, target, whole, crc=crc, threads=threads)
        job.wait()
        return job

    def scatter() -> _native.CopyJob:
        job = _native.scatter(target, whole, targets, sizes, offsets, crcs=crcs, threads=threads)
        job.wait()
        return job

    def plain(mode: str) -> None:
        _native.plain_copy(target, HEAD, source, mode, threads)

    data = np.frombuffer(memoryview(target), np.uint8)
    for mode in LIMITS:
        data[:] = 0
        plain(mode)
        check(np.array_equal(data[HEAD:], source), mode)
    expected = source.reshape(64, piece)[places].reshape(-1)
    for crc in (False, True):
        data[:] = 0
        job = gather(crc)
        check(np.array_equal(data[HEAD:], expected), "gather")
    del expected
    crcs = job.crcs()
    for chunk, value in enumerate(crcs.tolist()):
        part = data[chunk * _native.CHUNK_BYTES : (chunk + 1) * _native.CHUNK_BYTES]
        check(_native.crc32c(part) == value, "checksum")
    check(scatter().bad_chunks().size == 0 and np.array_equal(out, source), "scatter")

    cases = {mode: (lambda mode=mode: plain(mode)) for mode in LIMITS}
    names = {"copy": lambda: gather(False), "copy_crc": lambda: gather(True), "scatter_crc": scatter}
    if forced:
        names = {f"copy_crc_{forced}": lambda: gather(True)}
    seconds = _common.interleave({**cases, **names}, rounds)
    best = min(LIMITS, key=seconds.__getitem__)
    limit = _common.against(f"plain copy ({best}, {threads} threads)", nbytes / seconds[best] / 1e9)
    return [_common.result(name, nbytes / seconds[name] / 1e9, "GB/s", limit) for name in names]


def in_child(path: str, arguments: argparse.Namespace) -> list[_common.Result]:
    """The same in a process that takes another CPU path."""
    command = [sys.executable, __file__, "--json", "--forced", "--size", str(arguments.size)]
    command += ["--rounds", str(arguments.rounds), "--threads", str(arguments.threads)]
    environment = {**os.environ, "MEMCKPT_CPU": path}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    results: list[_common.Result] = json.loads(done.stdout.splitlines()[-1])["results"]
    return results


def small(rounds: int, threads: int, count: int = 20_000, elements: int = 256) -> list[_common.Result]:
    """Many small tensors: what counts is the cost of each."""
    tensors = [torch.randint(0, 2**31 - 1, (elements,), dtype=torch.int32) for _ in range(count)]
    piece = 4 * elements
    target = slot(HEAD + count * piece)
    flat = torch.frombuffer(memoryview(target), dtype=torch.int32)[HEAD // 4 :]
    views = [flat[i * elements : (i + 1) * elements] for i in range(count)]
    addresses, numbers = array([t.data_ptr() for t in tensors]), array(np.full(count, elements))
    sizes, offsets = array(np.full(count, piece)), array(HEAD + np.arange(count) * piece)
    address_methods, size_methods = [t.data_ptr for t in tensors], [t.numel for t in tensors]

    def gather() -> None:
        if _native.first_change(address_methods, size_methods, addresses, numbers) != -1:
            raise SystemExit("a tensor moved")
        _native.gather(addresses, sizes, offsets, target, HEAD + count * piece, threads=threads).wait()

    def foreach() -> None:
        torch._foreach_copy_(views, tensors)

    expected = torch.cat(tensors)
    for copy in (gather, foreach):
        flat.zero_()
        copy()
        check(torch.equal(flat, expected), "small tensors")
    seconds = _common.interleave({"gather": gather, "foreach": foreach}, 3 * rounds)
    nbytes = count * piece
    limit = _common.against("torch._foreach_copy_", nbytes / seconds["foreach"] / 1e9)
    return [_common.result("copy_small", nbytes / seconds["gather"] / 1e9, "GB/s", limit)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description="Copying into and out of a slot, against the fastest plain copy.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", type=int, default=1024, metavar="MIB", help="bytes of the large copies")
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds; the median counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--forced", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.size < 1 or arguments.rounds < 1 or arguments.threads < 1:
        parser.error("size, rounds and threads must be positive")
    torch.set_num_threads(arguments.threads)
    forced = str(_native.cpu_features()["path"]) if arguments.forced else None
    results = large(arguments.size * MIB, arguments.rounds, arguments.threads, forced)
    if not forced:
        if "sse42" in _native.cpu_features()["paths"]:  # type: ignore[operator]
            results[2:2] = in_child("sse42", arguments)
        results += small(arguments.rounds, arguments.threads)
    _common.report("copy", results, as_json=arguments.json)


if __name__ == "__main__":
    main()
