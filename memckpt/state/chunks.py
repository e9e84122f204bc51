"""Where the live state wants its chunks of global tensors, also those that an optimizer has not made yet. Local."""

from __future__ import annotations

from memckpt.state.leaves import Place, flatten
from memckpt.state.optimizers import OptimizerSource
from memckpt.state.sources import Source
from memckpt.state.state import State


class Wanted:
    """The chunks that a live state wants, as of when this is made."""

    def __init__(self, state: State) -> None:
        state.collect()
        self._sources: dict[str, Source] = {source.key: source for source in state.sources}
        self._live = {source.key: source.live for source in state.sources}

    def chunk(self, key: str, global_shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Shape and offsets of the chunk of a global tensor that belongs to this rank; None where it has no use for it.

        Parameters
        ----------
        key : str
            Name of the tensor, as in a snapshot.
        global_shape : tuple of int
            What was saved; a live tensor of another global shape wants nothing of it.
        """
        name = key.partition("/")[0]
        if name not in self._live:
            return None
        if key in self._live[name]:
            tensor, place = self._live[name][key]
            return _chunk(tuple(tensor.shape), place, global_shape)
        source = self._sources[name]
        if isinstance(source, OptimizerSource):
            # State that the next step would make lies as its parameter does.
            parts = key[len(name) + 1 :].split("/")
            if len(parts) == 3 and parts[0] == "state" and parts[1].isdecimal():
                index = int(parts[1])
                if index < len(source.parameters):
                    leaf = flatten(source.parameters[index], key, None, {})[0]
                    return _chunk(tuple(leaf.tensor.shape), leaf.place, global_shape)
        return None


def _chunk(
    shape: tuple[int, ...], place: Place | None, global_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    return (shape, place.offsets) if place is not None and place.global_shape == global_shape else None
