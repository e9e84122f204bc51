"""Names of dtypes: torch's own, and what the safetensors format calls them where it has a word for them."""

from __future__ import annotations

import torch

#: torch dtype name -> safetensors name, for every dtype that the format can say.
SAFETENSORS: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
#: safetensors name -> torch dtype name that an entry has when nothing else is said of it.
LOGICAL: dict[str, str] = {st: name for name, st in SAFETENSORS.items()}
#: Bytes per element of the safetensors dtypes.
ST_ITEMSIZE: dict[str, int] = {
    st: 8 if st == "C64" else 1 if st in ("BOOL", "U8", "I8") or st.startswith("F8") else int(st.lstrip("BFIU")) // 8
    for st in LOGICAL
}
#: Two values of four bits in each byte: the format counts the values, torch the bytes.
PACKED_F4 = "float4_e2m1fn_x2"

_REFUSED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")


def _torch_dtypes() -> dict[str, torch.dtype]:
    found = {}
    for value in vars(torch).values():
        if isinstance(value, torch.dtype):
            name = str(value).removeprefix("torch.")
            if name not in _REFUSED:
                found[name] = value
    return found


#: Every dtype of this torch that memckpt saves, by name; quantised ones, with scales outside the bytes, are refused.
BY_NAME: dict[str, torch.dtype] = _torch_dtypes()
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}

#: Bytes per element of every dtype that a file may name, also of those that this torch lacks.
ITEMSIZE: dict[str, int] = {name: ST_ITEMSIZE[st] for name, st in SAFETENSORS.items()} | {
    "complex32": 4,
    "complex128": 16,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    PACKED_F4: 1,
    **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)},
    **{name: dtype.itemsize for name, dtype in BY_NAME.items()},
}
