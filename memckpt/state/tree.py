"""Plain objects as a typed tree of JSON, so that what comes back has the types, order and bits of what was saved.

No pickle: a value of a type that is not listed in ``docs/format.md`` is refused with the path to it, unless
``allow_pickle=True`` was said on both sides. Tensors are not part of the tree; it holds the key of their entry.
"""

from __future__ import annotations

import base64
import binascii
import enum
import pickle
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from memckpt.errors import CorruptSnapshot, StateError
from memckpt.format.dtypes import BY_NAME, NAMES

MAX_DEPTH = 64
#: NumPy arrays above this many bytes become entries of their own.
ARRAY_NBYTES = 4096
_EXACT = 1 << 53  # integers below this are the same in every JSON reader

#: A place in the state: (place of the container, "k" for a key or "i" for an index or "t" for an inner tensor, item).
Where = tuple["Where", str, Any] | None
#: Stores a tensor found at a place and returns the key of its entry.
Store = Callable[[torch.Tensor, Where], str]
#: Returns the tensor whose entry has this key.
Fetch = Callable[[str], torch.Tensor]

_FACTORIES: dict[str, Any] = {f.__name__: f for f in (int, float, str, list, dict, set)} | {"None": None}
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSUmMV]\d{1,9}(\[\d{0,9}[a-zA-Z]{1,2}\])?")


def escape(text: str) -> str:
    """One component of a key: ``~`` and ``/`` escaped as in a JSON pointer, lone surrogates as ``~u`` and 4 digits."""
    out = text.replace("~", "~0").replace("/", "~1")
    return out if out.isascii() else re.sub("[\ud800-\udfff]", lambda m: f"~u{ord(m.group()):04x}", out)


def unescape(text: str) -> str:
    """Inverse of `escape`."""
    out = re.sub("~u([0-9a-f]{4})", lambda m: chr(int(m.group(1), 16)), text)
    return out.replace("~1", "/").replace("~0", "~")


def key_of(where: Where) -> str:
    """The key of an entry: components joined by ``/``, different for different places."""
    parts: list[str] = []
    while where is not None:
        where, kind, item = where
        if kind == "i":
            parts.append(str(item))
        elif kind == "t":
            parts.append("~t" + escape(item))
        elif type(item) is str:
            parts.append(escape(item))
        elif type(item) is int:
            parts.append(f"~i{item}")
        else:
            parts.append("~k" + escape(msgspec.json.encode(Encoder(_no_tensor).encode(item, None)).decode()))
    return "/".join(reversed(parts))


def path_of(where: Where) -> str:
    """The same place as a person would write it: ``optimizer.param_groups[0].foo``."""
    parts: list[str] = []
    while where is not None:
        where, kind, item = where
        if kind == "t" or (kind == "k" and type(item) is str and (item.isidentifier() or where is None)):
            parts.append(f".{item}")
        else:
            parts.append(f"[{item!r}]")
    return "".join(reversed(parts)).removeprefix(".")


def _no_tensor(value: torch.Tensor, where: Where) -> str:
    raise StateError("a tensor within a dictionary key or a tensor subclass's context", path=path_of(where))


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class Encoder:
    """Turns plain objects into nodes that `msgspec.json.encode` writes. Local.

    Parameters
    ----------
    store : callable
        Called for every tensor with the place where it was found; returns its key.
    allow_pickle : bool
        Pickle what has no plain form instead of refusing it.
    """

    def __init__(self, store: Store, *, allow_pickle: bool = False) -> None:
        self._store = store
        self._allow_pickle = allow_pickle

    def encode(self, value: Any, where: Where, depth: int = 0) -> Any:
        """The node of `value`.

        Raises
        ------
        StateError
            The value, or one inside it, is of no plain type, or nested deeper than 64 (or in itself).
        """
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            return value if -_EXACT < value < _EXACT else {"int": hex(value)}
        if kind is float:
            return value if value - value == 0.0 else {"float": struct.pack(">d", value).hex()}
        if kind is str:
            return _text(value)
        if depth >= MAX_DEPTH:
            raise StateError(f"nested deeper than {MAX_DEPTH} levels, or inside itself", path=path_of(where))
        writer = _WRITERS.get(kind)
        if writer is not None:
            return writer(self, value, where, depth + 1)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, enum.Enum):
            return _enum(value, where)
        if isinstance(value, np.generic):
            return {"scalar": [_array_dtype(value.dtype, where), _b64(value.tobytes())]}
        if self._allow_pickle:
            try:
                return {"pickle": _b64(pickle.dumps(value, protocol=4))}
            except Exception as error:
                raise StateError(f"{_name(kind)} cannot be pickled: {error}", path=path_of(where)) from error
        raise StateError(
            f"{_name(kind)} is no plain value; save its parts, give it state_dict() and load_state_dict(), "
            "or say allow_pickle=True (then also needed to restore)",
            path=path_of(where),
        )

    def _tensor(self, value: torch.Tensor, where: Where) -> Any:
        node: dict[str, Any] = {"tensor": self._store(value, where)}
        if isinstance(value, torch.nn.Parameter):
            node["parameter"] = True
        if value.requires_grad and value.is_leaf:
            node["grad"] = True
        return node

    def items(self, value: Any, where: Where, depth: int) -> list[Any]:
        return [self.encode(v, (where, "i", i), depth) for i, v in enumerate(value)]

    def pairs(self, value: Any, where: Where, depth: int) -> list[Any]:
        return [[self.encode(k, where, depth), self.encode(v, (where, "k", k), depth)] for k, v in value.items()]

    def mapping(self, value: dict[Any, Any], where: Where, depth: int) -> Any:
        if all(type(k) is str and (k.isascii() or _valid(k)) for k in value):
            return {"map": {k: self.encode(v, (where, "k", k), depth) for k, v in value.items()}}
        return {"dict": self.pairs(value, where, depth)}

    def unordered(self, value: Any, where: Where, depth: int) -> list[Any]:
        return sorted((self.encode(v, (where, "k", v), depth) for v in value), key=msgspec.json.encode)

    def array(self, value: np.ndarray[Any, Any], where: Where, depth: int) -> Any:
        dtype = _array_dtype(value.dtype, where)
        order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        data: Any
        if value.nbytes > ARRAY_NBYTES:
            flat = np.ascontiguousarray(value.reshape(-1, order=order))  # type: ignore[call-overload]
            raw = (flat if flat.flags.writeable else flat.copy()).view(np.uint8)
            data = {"tensor": self._store(torch.from_numpy(raw), where)}
        else:
            data = _b64(value.tobytes(order=order))  # type: ignore[arg-type]
        return {"array": [dtype, list(value.shape), order, data]}


def _valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(value: str) -> Any:
    return value if value.isascii() or _valid(value) else {"str": _b64(value.encode("utf-8", "surrogatepass"))}


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _array_dtype(dtype: np.dtype[Any], where: Where) -> str:
    if dtype.fields is not None or dtype.subdtype is not None or not _ARRAY_DTYPE.fullmatch(dtype.str):
        raise StateError(f"NumPy dtype {dtype} is no plain one", path=path_of(where))
    return dtype.str


def _enum(value: enum.Enum, where: Where) -> Any:
    kind = type(value)
    name = [kind.__module__, kind.__qualname__]
    if _find_enum(*name) is not kind:
        raise StateError(f"enum {_name(kind)} cannot be found again by its name", path=path_of(where))
    if kind.__members__.get(value._name_ or "") is value:
        return {"enum": [*name, value._name_]}
    if isinstance(value, enum.Flag):
        return {"flag": [*name, hex(value._value_)]}
    raise StateError(f"enum member {value!r} has no name", path=path_of(where))


def _find_enum(module: str, qualname: str) -> type[enum.Enum] | None:
    """The Enum class of that name if its module is already imported; looks only into dictionaries, so runs no code."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part) if found is not None else None
    return found if isinstance(found, enum.EnumMeta) and issubclass(found, enum.Enum) else None


def _default(coder: Encoder, value: Any, where: Where, depth: int) -> Any:
    for name, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return {"defaultdict": [name, coder.pairs(value, where, depth)]}
    raise StateError("defaultdict with a factory of one's own is no plain value", path=path_of(where))


_WRITERS: dict[type, Callable[[Encoder, Any, Where, int], Any]] = {
    list: lambda c, v, w, d: c.items(v, w, d),
    tuple: lambda c, v, w, d: {"tuple": c.items(v, w, d)},
    dict: lambda c, v, w, d: c.mapping(v, w, d),
    OrderedDict: lambda c, v, w, d: {"ordereddict": c.pairs(v, w, d)},
    Counter: lambda c, v, w, d: {"counter": c.pairs(v, w, d)},
    defaultdict: _default,
    deque: lambda c, v, w, d: {"deque": [v.maxlen, c.items(v, w, d)]},
    set: lambda c, v, w, d: {"set": c.unordered(v, w, d)},
    frozenset: lambda c, v, w, d: {"frozenset": c.unordered(v, w, d)},
    bytes: lambda c, v, w, d: {"bytes": _b64(v)},
    bytearray: lambda c, v, w, d: {"bytearray": _b64(bytes(v))},
    complex: lambda c, v, w, d: {"complex": struct.pack(">dd", v.real, v.imag).hex()},
    range: lambda c, v, w, d: {"range": c.items((v.start, v.stop, v.step), w, d)},
    np.ndarray: lambda c, v, w, d: c.array(v, w, d),
    torch.Size: lambda c, v, w, d: {"size": c.items(v, w, d)},
    torch.dtype: lambda c, v, w, d: {"dtype": NAMES.get(v) or str(v).removeprefix("torch.")},
    torch.device: lambda c, v, w, d: {"device": str(v)},
}


class Decoder:
    """Turns nodes back into objects. Everything it reads is taken as hostile. Local.

    Parameters
    ----------
    fetch : callable
        Returns the tensor of a key.
    is_new : callable
        Whether a fetched tensor was made for this tree, so that it is to become a parameter or require a gradient as
        the saved one did; live ones stay as they are.
    allow_pickle : bool
        Unpickle what was saved with ``allow_pickle=True``; that runs code of whoever wrote the file.
    """

    def __init__(
        self, fetch: Fetch, *, allow_pickle: bool = False, is_new: Callable[[torch.Tensor], bool] = lambda tensor: True
    ) -> None:
        self._fetch = fetch
        self._is_new = is_new
        self._allow_pickle = allow_pickle

    def decode(self, node: Any, where: Where = None) -> Any:
        """The object of `node`.

        Raises
        ------
        CorruptSnapshot
            The node is none that `Encoder` writes.
        StateError
            It is pickled and ``allow_pickle=True`` was not said, or an enum that is not imported here.
        """
        try:
            return self._decode(node, 0)
        except (CorruptSnapshot, StateError) as error:
            error.path = error.path or path_of(where)
            raise
        except Exception as error:  # any other exception is a node of the wrong form
            raise CorruptSnapshot(f"plain value of the wrong form: {error}", path=path_of(where)) from error

    def _decode(self, node: Any, depth: int) -> Any:
        kind = type(node)
        if node is None or kind in (bool, int, float, str):
            return node
        if depth > MAX_DEPTH:
            raise CorruptSnapshot(f"plain value nested deeper than {MAX_DEPTH} levels")
        if kind is list:
            return [self._decode(n, depth + 1) for n in node]
        if kind is not dict:
            raise CorruptSnapshot(f"plain value of the wrong form: {kind.__name__}")
        if "tensor" in node:
            return self._tensor(node)
        if len(node) != 1:
            raise CorruptSnapshot("plain value with more than one tag")
        [(tag, body)] = node.items()
        reader = _READERS.get(tag)
        if reader is None:
            raise CorruptSnapshot(f"plain value with an unknown tag {tag[:40]!r}")
        return reader(self, body, depth + 1)

    def items(self, body: Any, depth: int) -> list[Any]:
        if type(body) is not list:
            raise CorruptSnapshot("plain list of the wrong form")
        return [self._decode(n, depth) for n in body]

    def pairs(self, body: Any, depth: int) -> list[tuple[Any, Any]]:
        return [(self._decode(k, depth), self._decode(v, depth)) for k, v in body]

    def mapping(self, body: Any, depth: int) -> dict[str, Any]:
        return {k: self._decode(v, depth) for k, v in body.items()}

    def _tensor(self, node: dict[str, Any]) -> torch.Tensor:
        if not {*node} <= {"tensor", "grad", "parameter"} or type(node["tensor"]) is not str:
            raise CorruptSnapshot("tensor reference of the wrong form")
        found = self._fetch(node["tensor"])
        if not self._is_new(found):
            return found
        if node.get("parameter") is True and not isinstance(found, torch.nn.Parameter):
            found = torch.nn.Parameter(found, requires_grad=node.get("grad") is True)
        elif node.get("grad") is True and not found.requires_grad:
            found.requires_grad_(True)
        return found

    def array(self, body: Any, depth: int) -> np.ndarray[Any, Any]:
        name, shape, order, data = body
        dtype = _numpy_dtype(name)
        if order not in ("C", "F") or len(shape) > 32 or any(type(n) is not int or n < 0 for n in shape):
            raise CorruptSnapshot("NumPy array of the wrong form")
        if type(data) is dict:
            raw = self._tensor(data).numpy()  # shares memory with the tensor, which the load fills later
        else:
            raw = np.frombuffer(bytearray(_bytes(data)), np.uint8)
        if not raw.size:
            return np.zeros(shape, dtype, order)
        return np.ndarray(tuple(shape), dtype, buffer=raw.data, order=order)

    def scalar(self, body: Any, depth: int) -> Any:
        name, data = body
        return np.frombuffer(_bytes(data), _numpy_dtype(name), count=1)[0]

    def unpickle(self, body: Any, depth: int) -> Any:
        if not self._allow_pickle:
            raise StateError("saved with allow_pickle=True; restoring it runs code from the file, so say it here too")
        return pickle.loads(_bytes(body))


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise CorruptSnapshot("bytes of the wrong form") from error


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    if type(name) is not str or not _ARRAY_DTYPE.fullmatch(name):
        raise CorruptSnapshot("NumPy dtype of the wrong form")
    return np.dtype(name)


def _read_enum(module: Any, qualname: Any) -> type[enum.Enum]:
    found = _find_enum(module, qualname) if type(module) is type(qualname) is str else None
    if found is None:
        raise StateError(f"enum {module}.{qualname} is not imported here; import it before restoring")
    return found


def _read_member(body: Any) -> enum.Enum:
    module, qualname, name = body
    members = _read_enum(module, qualname).__members__
    if name not in members:
        raise StateError(f"enum {module}.{qualname} has no member {name!r} here")
    return members[name]


def _read_flag(body: Any) -> Any:
    kind = _read_enum(*body[:2])
    if not issubclass(kind, enum.Flag):
        raise CorruptSnapshot("flag of the wrong form")
    return kind(int(body[2], 16))


def _read_dtype(body: Any) -> torch.dtype:
    found = BY_NAME.get(body) or getattr(torch, body, None)
    if not isinstance(found, torch.dtype):
        raise StateError(f"this torch has no dtype {body!r}")
    return found


_READERS: dict[str, Callable[[Decoder, Any, int], Any]] = {
    "int": lambda c, b, d: int(b, 16),
    "float": lambda c, b, d: struct.unpack(">d", bytes.fromhex(b))[0],
    "str": lambda c, b, d: _bytes(b).decode("utf-8", "surrogatepass"),
    "map": lambda c, b, d: c.mapping(b, d),
    "dict": lambda c, b, d: dict(c.pairs(b, d)),
    "tuple": lambda c, b, d: tuple(c.items(b, d)),
    "ordereddict": lambda c, b, d: OrderedDict(c.pairs(b, d)),
    "counter": lambda c, b, d: Counter(dict(c.pairs(b, d))),
    "defaultdict": lambda c, b, d: defaultdict(_FACTORIES[b[0]], c.pairs(b[1], d)),
    "deque": lambda c, b, d: deque(c.items(b[1], d), maxlen=b[0]),
    "set": lambda c, b, d: set(c.items(b, d)),
    "frozenset": lambda c, b, d: frozenset(c.items(b, d)),
    "bytes": lambda c, b, d: _bytes(b),
    "bytearray": lambda c, b, d: bytearray(_bytes(b)),
    "complex": lambda c, b, d: complex(*struct.unpack(">dd", bytes.fromhex(b))),
    "range": lambda c, b, d: range(*c.items(b, d)),
    "array": lambda c, b, d: c.array(b, d),
    "scalar": lambda c, b, d: c.scalar(b, d),
    "enum": lambda c, b, d: _read_member(b),
    "flag": lambda c, b, d: _read_flag(b),
    "size": lambda c, b, d: torch.Size(c.items(b, d)),
    "dtype": lambda c, b, d: _read_dtype(b),
    "device": lambda c, b, d: torch.device(b),
    "pickle": lambda c, b, d: c.unpickle(b, d),
}
