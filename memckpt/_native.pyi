"""The native engine: copy, checksum, shared memory. It sees addresses and sizes, no tensors.

All sizes and offsets are in bytes. Arrays must be one-dimensional, contiguous and of exactly the dtype named; they are
taken over by value. Wrong arguments raise ValueError or TypeError and do nothing. Everything long releases the GIL.
Local.
"""

from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Bytes = Buffer | npt.NDArray[Any]  # before Python 3.12 NumPy's own stubs do not say that an array is a buffer

CHUNK_BYTES: int
"""Size of a chunk: 4 MiB."""

@final
class SharedMemory:
    """A mapped file; offers its bytes through the buffer protocol (uint8), writable or not.

    The mapping ends with `close`, or with the object. A forked child does not inherit it: there, using it raises
    RuntimeError.
    """

    @staticmethod
    def create(path: str, nbytes: int, *, mode: int = 0o600) -> SharedMemory:
        """Make a new file and reserve all its bytes, so that writing to it never ends in SIGBUS.

        Raises
        ------
        OSError
            ENOSPC when there is not enough room (no file is left), EEXIST when there is such a file.
        """
    @staticmethod
    def open(path: str, *, writable: bool) -> SharedMemory:
        """Map a whole existing regular file; symbolic links are refused (OSError)."""
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def writable(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def populate(self, threads: int = 2) -> None:
        """Fill the page tables in parallel, so that the first copy meets no page fault; contents stay as they are."""
    def lock(self) -> bool:
        """Keep the pages from being swapped out; False where that is not permitted."""
    def close(self) -> None:
        """Unmap; BufferError while a buffer is exported or a job is at work. The file stays."""
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class CopyJob:
    """A copy in flight. Keeps its memory and `keep` alive until it is finished; dropping it waits for that."""

    @property
    def watermark(self) -> int:
        """Number of leading chunks that are complete; never goes back."""
    def start(self) -> None:
        """Begin, where that has not happened yet. Any thread may. RuntimeError in a forked child."""
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool:
        """True once finished. Starts it where needed; the caller's thread helps while a place is free."""
    def crcs(self) -> npt.NDArray[np.uint32]:
        """CRC-32C of each chunk of the file, from byte 0. RuntimeError before the end."""
    def bad_chunks(self) -> npt.NDArray[np.int64]:
        """Scatter: chunks whose CRC is not the expected one. RuntimeError before the end."""

def gather(
    sources: npt.NDArray[np.uint64],
    nbytes: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.uint64],
    target: SharedMemory,
    file_nbytes: int,
    *,
    crc: bool = True,
    threads: int = 2,
    keep: object = None,
    start: bool = True,
) -> CopyJob:
    """Copy pieces into the file, in chunks; CRC of every chunk in the same pass.

    Pieces are sorted by offset and do not overlap; empty ones are allowed. Bytes that no piece covers, and pieces whose
    source is their own place in the target, are only checksummed.
    """

def scatter(
    source: SharedMemory,
    file_nbytes: int,
    targets: npt.NDArray[np.uint64],
    nbytes: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.uint64],
    *,
    crcs: npt.NDArray[np.uint32] | None,
    threads: int = 2,
    keep: object = None,
) -> CopyJob:
    """Copy pieces out of the file and checksum every chunk of it in the same pass.

    Pieces are sorted by offset and may overlap in the file (aliases). Bytes arrive before they are known to be good:
    look at `bad_chunks` before using them.
    """

def audit(
    sources: npt.NDArray[np.uint64],
    nbytes: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.uint64],
    target: SharedMemory,
    file_nbytes: int,
    chunks: npt.NDArray[np.int64] | None = None,
    threads: int = 2,
) -> npt.NDArray[np.int64]:
    """Indices of pieces whose source differs from the bytes in the file, in the given chunks (None: all)."""

def crc_sources(
    sources: npt.NDArray[np.uint64],
    nbytes: npt.NDArray[np.uint64],
    offsets: npt.NDArray[np.uint64],
    base: SharedMemory,
    file_nbytes: int,
    chunks: npt.NDArray[np.int64] | None = None,
    threads: int = 2,
) -> npt.NDArray[np.uint32]:
    """CRC-32C that the given chunks (None: all) would have if gathered now; bytes without a piece from `base`."""

def crc32c(buffer: _Bytes, seed: int = 0) -> int:
    """CRC-32C (Castagnoli) of a contiguous buffer; `seed` is the CRC of what came before."""

def copy_crc(target: SharedMemory, offset: int, source_buffer: _Bytes | npt.NDArray[np.uint8]) -> int:
    """Copy a buffer to an offset of the target in the caller's thread; CRC-32C of what was written."""

def first_change(
    address_methods: list[Callable[[], int]],
    size_methods: list[Callable[[], int]],
    addresses: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
) -> int:
    """Call the methods in order; index of the first whose result is not the expected one, -1 when there is none."""

def plain_copy(target: SharedMemory, offset: int, source_buffer: _Bytes, mode: str, threads: int = 2) -> None:
    """The limit that benchmarks measure against: one contiguous part for each thread, no checksum.

    ``mode`` is ``memcpy`` (the C library's), ``stream`` (non-temporal stores, the widest this CPU has) or ``string``
    (``rep movsb``).
    """

def cpu_features() -> dict[str, object]:
    """Presence of each feature the kernels look for, ``paths`` that can run here, and the ``path`` in use."""

def select_cpu_path(name: str) -> None:
    """Use another path for jobs started from now on (``scalar``, ``sse42``, ``avx2``, ``avx512``); for tests."""

def shutdown_pool() -> None:
    """Let the pool's threads finish what was started, then end them; the next job starts new ones."""

def pool_threads() -> int:
    """Number of threads that this process's pool has; 0 in a forked child."""
