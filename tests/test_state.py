"""The state is read without a trace and filled again bit for bit, or not at all (C03, C09, C11, C12, C18, C41)."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from memckpt.errors import CorruptSnapshot, LayoutMismatch, StateDamaged, StateError, UsageError
from memckpt.format.layout import Layout
from memckpt.state.restore import prepare
from memckpt.state.rng import RNG
from memckpt.state.state import State
from tests.snapshots import bits, put, scramble, take


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, *, clear: bool = True) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    if clear:
        optimizer.zero_grad()


def frozen(value: Any) -> Any:
    """A value with the bits of its tensors in their place."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), bits(value)
    return [frozen(v) for v in value] if isinstance(value, list) else value


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Every byte of both, with what is there and what is not."""
    parameters = list(model.parameters())
    state = [{k: frozen(v) for k, v in sorted(optimizer.state.get(p, {}).items())} for p in parameters]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    grads = [None if p.grad is None else bits(p.grad) for p in parameters]
    return {k: bits(v) for k, v in model.state_dict().items()}, state, repr(groups), grads, len(optimizer.state)


# Collecting


def test_collect_keeps_its_lists_until_a_tensor_is_replaced() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    state = State({"model": model, "optimizer": optimizer, "rng": RNG(), "d": {"n": 1}})
    first = state.collect()
    train(model, optimizer)
    second = state.collect()
    assert second.token is not first.token
    train(model, optimizer, 2)
    third = state.collect()
    assert third.token is second.token
    assert third.tensors is second.tensors
    assert third.keys is second.keys
    assert third.plain != second.plain
    model[0].weight = nn.Parameter(torch.zeros(7, 5))
    assert state.collect().token is not third.token


def drop_bias(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
    del state[prefix + "bias"]


CHANGES: dict[str, Any] = {
    "new buffer": lambda m, o: m.register_buffer("late", torch.ones(2)),
    "gone buffer": lambda m, o: delattr(m[1], "running_mean"),
    "no longer saved": lambda m, o: m[1]._non_persistent_buffers_set.add("running_mean"),
    "new module": lambda m, o: m.append(nn.Linear(1, 1)),
    "renamed": lambda m, o: m._modules.update({"9": m._modules.pop("3")}),
    "extra state": lambda m, o: m.append(WithExtra()),
    "state hook": lambda m, o: m[1].register_state_dict_post_hook(drop_bias),
    "optimizer state cleared": lambda m, o: o.state.clear(),
    "optimizer state of one": lambda m, o: o.state.pop(m[0].weight),
    "optimizer state renamed": lambda m, o: o.state[m[0].weight].update(x=o.state[m[0].weight].pop("exp_avg")),
    "param group": lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "optimizer tensor": lambda m, o: o.state[m[0].weight].update(exp_avg=torch.zeros(7, 5)),
}


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_collect_sees_every_change_of_structure(what: str) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = State({"model": model, "optimizer": optimizer})
    before = state.collect()
    assert state.collect().token is before.token
    CHANGES[what](model, optimizer)
    after = state.collect()
    fresh = State({"model": model, "optimizer": optimizer}).collect()
    assert after.token is not before.token
    assert after.keys == fresh.keys
    assert all(a is b for a, b in zip(after.tensors, fresh.tensors, strict=True))
    assert after.lazy == fresh.lazy
    assert after.plain == fresh.plain


def test_keys_are_those_of_state_dict() -> None:
    model = small_model()
    collected = State({"model": model}).collect()
    assert collected.keys == [f"model/{k}" for k in model.state_dict()]
    assert all(a is b for a, b in zip(collected.tensors, model.state_dict(keep_vars=True).values(), strict=True))


def test_plain_values_do_not_grow_with_the_number_of_tensors() -> None:
    def plain_nbytes(n: int) -> int:
        model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(n)])
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            p.grad = torch.ones(1)
        optimizer.step()
        tensors = {str(i): torch.zeros(1) for i in range(n)}
        return len(State({"m": model, "o": optimizer, "d": tensors, "l": list(tensors.values())}).collect().plain)

    assert plain_nbytes(1000) <= plain_nbytes(10) + 20


def test_what_may_be_copied_lazily() -> None:
    model = small_model()
    model.register_buffer("shift", torch.zeros(3))
    frozen = model[3].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p is not frozen]
    optimizer = torch.optim.AdamW([{"params": trained, "lr": torch.tensor(0.1), "foreach": False}])
    train(model, optimizer)
    collected = State({"model": model, "optimizer": optimizer, "ema": {"w": torch.zeros(3)}, "rng": RNG()}).collect()
    lazy = {k for k, owner in zip(collected.keys, collected.lazy, strict=True) if owner is optimizer}
    eager = {k for k, owner in zip(collected.keys, collected.lazy, strict=True) if owner is None}
    names = {n for n, p in model.named_parameters() if p is not frozen}
    assert lazy == {f"model/{n}" for n in names} | {k for k in collected.keys if k.startswith("optimizer/state/")}
    assert {"model/3.bias", "model/shift", "model/1.running_mean", "optimizer/param_groups/0/lr", "ema/w"} <= eager
    assert len(lazy) + len(eager) == len(collected.keys)


def test_what_others_may_change_is_eager() -> None:
    def lazy(*optimizers: torch.optim.Optimizer, **objects: Any) -> set[str]:
        named = {f"o{i}": o for i, o in enumerate(optimizers)}
        collected = State(objects | named).collect()
        layout = Layout.build(collected, run="r", shard=0, world=1)
        pieces = layout.pieces(collected)
        assert all(pieces.optimizers[i] in optimizers for i in pieces.owners[pieces.lazy])
        return {k for k, lazy in zip(pieces.keys, pieces.lazy, strict=True) if lazy}

    def two() -> tuple[nn.Parameter, nn.Parameter]:
        return nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    a, b = two()
    assert lazy(torch.optim.SGD([a]), torch.optim.SGD([b]), d={"a": a, "b": b}) == {"d/a", "d/b"}
    assert lazy(torch.optim.SGD([a]), torch.optim.SGD([a, b]), d={"a": a, "b": b}) == {"d/b"}  # two write to a
    assert lazy(torch.optim.SGD([a, b]), d={"a": a, "b": b, "view": a.detach()[:2]}) == {"d/b"}
    a._is_flat_param = True  # type: ignore[attr-defined]
    b.ds_id = 3  # type: ignore[attr-defined]
    assert lazy(torch.optim.SGD([a, b]), d={"a": a, "b": b}) == set()
    a, b = two()
    a.data.share_memory_()
    assert lazy(torch.optim.SGD([a, b]), d={"a": a, "b": b}) == {"d/b"}
    strided = nn.Parameter(torch.ones(4, 4)[:, ::2])
    assert lazy(torch.optim.SGD([strided]), d={"s": strided}) == set()


def test_tensors_made_anew_at_every_save_need_no_new_layout(tmp_path: Path) -> None:
    class Loader:
        def __init__(self) -> None:
            self.position = torch.zeros(3, dtype=torch.int64)

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position.clone(), "permutation": np.arange(2000) + int(self.position[0])}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]
            assert (state["permutation"] == np.arange(2000) + int(self.position[0])).all()

    loader = Loader()
    model = nn.Linear(2, 2)
    state = State({"loader": loader, "model": model})
    tokens = []
    for i in range(6):
        loader.position += 1
        collected = state.collect()
        tokens.append(collected.token)
        assert dict(zip(collected.keys, collected.tensors, strict=True))["loader/position"].tolist() == [i + 1] * 3
    assert len(set(map(id, tokens[3:]))) == 1
    snapshot = take(state, tmp_path / "s")
    loader.position += 5
    put(state, snapshot)
    assert loader.position.tolist() == [6] * 3
    loader.position = torch.zeros(4, dtype=torch.int64)
    assert state.collect().token is not tokens[-1]


def test_a_buffer_replaced_in_every_forward(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mean", torch.zeros(3))
    state = State({"model": model})
    tokens = []
    for i in range(5):
        model.mean = torch.full((3,), float(i))
        tokens.append(state.collect().token)
    assert tokens[3] is tokens[4]
    snapshot = take(state, tmp_path / "s")
    model.mean = torch.zeros(3)
    put(state, snapshot)
    assert model.mean.tolist() == [4.0] * 3


REFUSED: list[tuple[dict[Any, Any], str]] = [
    ({"n": 3}, "put it into a dictionary"), ({"t": (1, 2)}, "put it into a dictionary"), ({"": {}}, "name"),
    ({1: {}}, "name"), ({"__metadata__": {}}, "name"), ({"\ud800": {}}, "name"), ({"o": object()}, "load_state_dict"),
]  # fmt: skip


@pytest.mark.parametrize(("objects", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_refused_at_construction(objects: dict[Any, Any], message: str) -> None:
    with pytest.raises(StateError, match=message):
        State(objects)


def test_refused_values_are_named() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["foo"] = object()
    with pytest.raises(StateError) as caught:
        State({"optimizer": optimizer}).collect()
    assert caught.value.path == "optimizer.param_groups[0].foo"
    with pytest.raises(UsageError):
        State([model])  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"memckpt\.cuda|meta"):
        State({"m": nn.Linear(1, 1, device="meta")}).collect()


# Snapshot isolation at this level (C03)


def test_snapshots_do_not_follow_the_live_state(tmp_path: Path) -> None:
    tensors = [torch.zeros(50) for _ in range(20)]
    containers = {"list": [0], "nested": {"a": [0]}}
    state = State({"t": tensors, "c": containers})
    snapshots = []
    for step in range(20):
        for tensor in tensors:
            tensor.fill_(step)
        containers["list"][0] = containers["nested"]["a"][0] = step  # type: ignore[index]
        snapshots.append(take(state, tmp_path / str(step), step=step))
    for step, snapshot in enumerate(snapshots):
        put(state, snapshot)
        assert all((t == step).all() for t in tensors)
        assert containers == {"list": [step], "nested": {"a": [step]}}


# Optimizers (C09)

SITUATIONS = ["never stepped", "cleared", "grads present", "frozen", "unused"]
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=3, history_size=4),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


def situation(name: str, make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = small_model()
    model.extra = nn.Linear(2, 2) if name == "unused" else nn.Identity()
    model.forward = lambda x: nn.Sequential.forward(model[:4], x)  # type: ignore[method-assign,index]
    if name == "frozen":
        model[0].weight.requires_grad_(False)  # type: ignore[index]
    optimizer = make(list(model.parameters()))
    if name != "never stepped":
        advance(model, optimizer, 2, clear=name != "grads present")
    return model, optimizer


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, clear: bool = True) -> None:
    if not isinstance(optimizer, torch.optim.LBFGS):
        train(model, optimizer, steps, clear=clear)
        return
    for _ in range(steps):
        x = torch.randn(4, 5)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    if clear:
        optimizer.zero_grad()


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_optimizer_continues_bit_for_bit(kind: str, name: str, tmp_path: Path) -> None:
    model, optimizer = situation(name, OPTIMIZERS[kind])
    objects = {"model": model, "optimizer": optimizer, "rng": RNG()}
    before, rng = fingerprint(model, optimizer), torch.get_rng_state()
    snapshot = take(State(objects), tmp_path / "s")
    assert fingerprint(model, optimizer) == before  # saving leaves no trace
    assert torch.equal(torch.get_rng_state(), rng)
    advance(model, optimizer, 3)
    want = fingerprint(model, optimizer)

    torch.manual_seed(99)
    fresh, other = situation("frozen" if name == "frozen" else "never stepped", OPTIMIZERS[kind])
    if name == "unused":
        fresh.extra = nn.Linear(2, 2)
        other = OPTIMIZERS[kind](list(fresh.parameters()))
    put(State({"model": fresh, "optimizer": other, "rng": RNG()}), snapshot)
    assert fingerprint(fresh, other)[1:3] == before[1:3]
    assert list(map(len, other.state.values())) == list(
        map(len, OPTIMIZERS[kind](fresh.parameters()).state.values())
    ) or (name != "never stepped")
    advance(fresh, other, 3)
    assert fingerprint(fresh, other) == want

    put(State(objects), snapshot)  # and back in the same process, which is 3 steps further
    assert fingerprint(model, optimizer)[:3] == before[:3]
    advance(model, optimizer, 3)
    assert fingerprint(model, optimizer) == want


def test_fp32_moments_of_bf16_parameters_are_not_rounded(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.randn(10, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.randn(10)
    want = bits(optimizer.state[parameter]["momentum_buffer"])
    snapshot = take(State({"o": optimizer}), tmp_path / "s")
    other = torch.optim.SGD([nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))], lr=0.5)
    put(State({"o": other}), snapshot)
    [held] = other.state.values()
    assert held["momentum_buffer"].dtype == torch.float32
    assert bits(held["momentum_buffer"]) == want
    assert other.param_groups[0]["lr"] == 0.1


def test_live_optimizer_state_is_filled_in_place(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    train(model, optimizer)
    state = State({"optimizer": optimizer})
    tensors = state.collect().tensors
    snapshot = take(state, tmp_path / "s")
    want = [bits(t) for t in tensors]
    for tensor in tensors:
        scramble(tensor)
    put(state, snapshot)
    assert all(a is b for a, b in zip(tensors, state.collect().tensors, strict=True))
    assert [bits(t) for t in tensors] == want


def test_other_groups_are_a_mismatch(tmp_path: Path) -> None:
    model = small_model()
    snapshot = take(State({"o": torch.optim.SGD(model.parameters())}), tmp_path / "s")
    other = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias]}])
    with pytest.raises(LayoutMismatch) as caught:
        put(State({"o": other}), snapshot)
    assert caught.value.rows == [("o.param_groups", "groups of [6] parameters", "groups of [1, 1] parameters")]


def test_hyperparameters_of_many_groups(tmp_path: Path) -> None:
    def make(lr: float) -> torch.optim.Optimizer:
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr * i} for i in range(40)]
        groups[7]["note"] = {"a": (1, None)}
        return torch.optim.SGD(groups)

    saved, other = make(0.5), make(0.25)
    saved.param_groups[3]["weight_decay"] = 7
    del other.param_groups[7]["note"]
    other.param_groups[8]["note"] = 1
    put(State({"o": other}), take(State({"o": saved}), tmp_path / "s"))

    def plain(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]

    assert plain(other) == plain(saved)


@pytest.mark.parametrize(("saved", "live"), [("SGD", "AdamW"), ("AdamW", "SGD"), ("Adam", "AdamW"), ("AdamW", "Adam")])
def test_state_of_another_kind_of_optimizer_is_refused_before_anything_changes(
    saved: str, live: str, tmp_path: Path
) -> None:
    def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = small_model()
        options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)

    model, optimizer = make(saved)
    train(model, optimizer)
    snapshot = take(State({"m": model, "o": optimizer}), tmp_path / "s")
    model, optimizer = make(live)
    before = repr((optimizer.state_dict(), [bits(p) for p in model.parameters()]))
    with pytest.raises(LayoutMismatch) as caught:
        put(State({"m": model, "o": optimizer}), snapshot)
    assert caught.value.rows == [("o", f"state of {saved}", f"state of {live}")]
    assert repr((optimizer.state_dict(), [bits(p) for p in model.parameters()])) == before
    train(model, optimizer)


def test_optimizers_with_a_state_dict_of_their_own(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        calls = 0

        def state_dict(self) -> dict[str, Any]:
            return {"inner": super().state_dict(), "calls": self.calls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls = state["calls"]
            super().load_state_dict(state["inner"])

    def make() -> tuple[nn.Module, Own]:
        model = small_model()
        return model, Own(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = make()
    train(model, optimizer)
    optimizer.calls = 3
    snapshot = take(State({"o": optimizer}), tmp_path / "s")
    _, other = make()
    put(State({"o": other}), snapshot)
    assert other.calls == 3
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert bits(a["momentum_buffer"]) == bits(b["momentum_buffer"])


# Modules: ties (C11), mismatches (C12), wrappers (C13), extra state


class Tied(nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tie:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("tie", [True, False])
def test_tied_weights(tie: bool, tmp_path: Path) -> None:
    source = Tied(tie=True)
    optimizer = torch.optim.AdamW(source.parameters())
    snapshot = take(State({"model": source, "optimizer": optimizer}), tmp_path / "s")
    assert sum(e.nbytes for e in snapshot.layout.entries) == 11 * 6 * 4
    target = Tied(tie=tie)
    put(State({"model": target}), snapshot, strict=False)
    assert bits(target.embedding.weight) == bits(target.head.weight) == bits(source.head.weight)
    assert (target.embedding.weight is target.head.weight) is tie
    if tie:
        with torch.no_grad():
            target.embedding.weight[0, 0] = 42
        assert target.head.weight[0, 0] == 42


def test_untied_snapshot_into_a_tied_model_is_a_mismatch(tmp_path: Path) -> None:
    snapshot = take(State({"model": Tied(tie=False)}), tmp_path / "s")
    with pytest.raises(LayoutMismatch, match="sharing memory"):
        put(State({"model": Tied(tie=True)}), snapshot)


def test_every_mismatch_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    def module(**parameters: torch.Tensor) -> nn.Module:
        made = nn.Module()
        for name, value in parameters.items():
            made.register_parameter(name, nn.Parameter(value))
        return made

    saved = module(same=torch.ones(2), extra=torch.ones(1), shape=torch.ones(4, 4), dtype=torch.ones(3).bfloat16())
    live = module(same=torch.zeros(2), missing=torch.zeros(1), shape=torch.zeros(2, 8), dtype=torch.zeros(3))
    snapshot = take(State({"m": saved, "gone": {}, "kind": {}}), tmp_path / "s")
    before = {k: bits(v) for k, v in live.state_dict().items()}
    state = State({"m": live, "new": {}, "kind": torch.zeros(1)})
    with pytest.raises(LayoutMismatch) as caught:
        put(state, snapshot)
    assert sorted(caught.value.rows) == [
        ("gone", "container", "-"),
        ("kind", "container", "tensor"),
        ("m/dtype", "bfloat16[3]", "float32[3]"),
        ("m/extra", "float32[1]", "-"),
        ("m/missing", "-", "float32[1]"),
        ("m/shape", "float32[4, 4]", "float32[2, 8]"),
        ("new", "-", "container"),
    ]
    assert all(key in str(caught.value) for key, _, _ in caught.value.rows)
    assert {k: bits(v) for k, v in live.state_dict().items()} == before
    targets = put(state, snapshot, strict=False)
    assert sorted(targets.rows) == sorted(caught.value.rows)
    assert live.same.tolist() == [1, 1]  # type: ignore[union-attr,operator]
    assert {k: bits(v) for k, v in live.state_dict().items() if k != "same"} == {
        k: v for k, v in before.items() if k != "same"
    }


def forms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield "plain", copy.deepcopy(model)
    yield "compiled", torch.compile(copy.deepcopy(model), backend="eager")
    yield "ddp", nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    yield "ddp of compiled", nn.parallel.DistributedDataParallel(torch.compile(copy.deepcopy(model), backend="eager"))
    inner = copy.deepcopy(model)
    inner[3] = torch.compile(inner[3], backend="eager")  # type: ignore[operator,index]
    yield "inner compiled", inner


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("gloo")
@pytest.mark.filterwarnings("ignore")
def test_wrappers_leave_no_prefix(tmp_path: Path) -> None:
    model = small_model()
    want = {k: bits(v) for k, v in model.state_dict().items()}
    keys = State({"m": model}).collect().keys
    for name, form in forms(model):
        state = State({"m": form})
        assert state.collect().keys == keys, name
        snapshot = take(state, tmp_path / name)
        for other, target in forms(small_model()):
            put(State({"m": target}), snapshot)
            collected = State({"m": target}).collect()
            found = {k.removeprefix("m/"): bits(t) for k, t in zip(keys, collected.tensors, strict=True)}
            assert found == want, (name, other)


class WithExtra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale: Any = {"history": torch.zeros(3), "n": (1, None)}

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


def test_extra_state(tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(1, 1), WithExtra())
    source[1].scale = {"history": torch.arange(3.0), "n": (2, "x")}
    snapshot = take(State({"m": source}), tmp_path / "s")
    target = nn.Sequential(nn.Linear(1, 1), WithExtra())
    put(State({"m": target}), snapshot)
    assert target[1].scale["history"].tolist() == [0, 1, 2]
    assert target[1].scale["n"] == (2, "x")
    assert bits(target[0].weight) == bits(source[0].weight)
    with pytest.raises(LayoutMismatch, match="extra state"):
        put(State({"m": nn.Sequential(nn.Linear(1, 1), nn.Linear(2, 1, bias=False))}), snapshot)


def test_modules_whose_state_dict_gives_copies(tmp_path: Path) -> None:
    class Packed(nn.Module):
        """As quantised modules do: its state dict says something other than its parameters."""

        def __init__(self, value: float) -> None:
            super().__init__()
            self.codes = torch.full((4,), value)

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[prefix + "packed"] = self.codes * 2
            destination[prefix + "bits"] = 4

        def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
            self.codes = state[prefix + "packed"] / 2
            assert state[prefix + "bits"] == 4

    source = nn.Sequential(nn.Linear(2, 2), Packed(3))
    snapshot = take(State({"m": source}), tmp_path / "s")
    target = nn.Sequential(nn.Linear(2, 2), Packed(5))
    put(State({"m": target}), snapshot)
    assert target[1].codes.tolist() == [3] * 4
    assert bits(target[0].weight) == bits(source[0].weight)


# Containers (C18)


def nested() -> dict[Any, Any]:
    return {
        1: "int", "1": "str", (1, "a"): None, "a.b": 1, "a": {"b": 1}, "a/b": [True, 1, 1.0], "empty": [],
        "counter": collections.Counter("aab"), "ordered": collections.OrderedDict([("z", 1), ("a", torch.ones(2))]),
        "deque": collections.deque([1, 2], maxlen=5), "scalar": np.float32(1.5), "big": 2**200,
        "tensors": {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, "many": list(range(3)),
    }  # fmt: skip


def test_containers_are_filled_in_place(tmp_path: Path) -> None:
    saved = {"dict": nested(), "list": [1, {"t": torch.arange(3)}], "ordered": collections.OrderedDict(b=1, a=2),
             "counter": collections.Counter("xxy"), "deque": collections.deque([1, 2, 3], maxlen=3), "set": {1, 2},
             "bytes": bytearray(b"abc"), "array": np.arange(5000.0),
             "default": collections.defaultdict(list, {1: [2]})}  # fmt: skip
    live = {"dict": {"old": 1}, "list": [], "ordered": collections.OrderedDict(), "counter": collections.Counter(),
            "deque": collections.deque(maxlen=3), "set": {9}, "bytes": bytearray(), "array": np.zeros(5000),
            "default": collections.defaultdict(list)}  # fmt: skip
    objects = dict(live)
    put(State(live), take(State(saved), tmp_path / "s"))
    assert all(live[k] is v for k, v in objects.items())
    for name in ("ordered", "counter", "deque", "set", "bytes", "default"):
        assert live[name] == saved[name]
    assert list(live["ordered"].items()) == [("b", 1), ("a", 2)]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(live["array"], saved["array"])  # type: ignore[arg-type]
    assert live["list"][1]["t"].tolist() == [0, 1, 2]  # type: ignore[index]
    found, want = live["dict"], nested()
    assert [(type(k), k) for k in found] == [(type(k), k) for k in want]
    for key in want:
        if key not in ("ordered", "tensors"):
            assert (type(found[key]), found[key]) == (type(want[key]), want[key])  # type: ignore[index]
    assert [type(v) for v in found["a/b"]] == [bool, int, float]  # type: ignore[index]
    assert found["tensors"]["a.b"].tolist() == [0] and found["tensors"]["a"]["b"].tolist() == [1]  # type: ignore[index]


def test_live_tensors_in_containers_are_filled_in_place(tmp_path: Path) -> None:
    live = {"n": 1, "t": torch.zeros(3), "inner": [torch.zeros(2)]}
    tensor, inner = live["t"], live["inner"][0]  # type: ignore[index]
    snapshot = take(
        State({"d": {"n": 2, "t": torch.ones(3), "inner": [torch.ones(2)], "new": torch.ones(1)}}), tmp_path / "s"
    )
    put(State({"d": live}), snapshot)
    assert live["t"] is tensor
    assert live["inner"][0] is inner  # type: ignore[index]
    assert tensor.tolist() == [1] * 3  # type: ignore[union-attr,attr-defined]
    assert live["new"].tolist() == [1]  # type: ignore[attr-defined]
    with pytest.raises(LayoutMismatch) as caught:
        put(State({"d": {"n": 1, "t": torch.zeros(4)}}), snapshot)
    assert caught.value.rows == [("d/t", "float32[3]", "float32[4]")]


def test_a_dictionary_of_tensors_is_a_fixed_set(tmp_path: Path) -> None:
    mixed = {
        "small": torch.ones(1, dtype=torch.int8),
        "large": torch.ones(1, dtype=torch.float64),
        "a/b": torch.ones(2),
    }
    snapshot = take(State({"d": mixed, "l": [torch.ones(1), torch.ones(2, dtype=torch.float64)]}), tmp_path / "s")
    live: Any = {"d": {}, "l": []}
    put(State(live), snapshot)
    assert list(live["d"]) == list(mixed)
    assert [t.dtype for t in live["l"]] == [torch.float32, torch.float64]
    with pytest.raises(LayoutMismatch) as caught:
        put(State({"d": {"small": mixed["small"], "other": torch.ones(1)}, "l": [torch.ones(1)]}), snapshot)
    assert {row[0] for row in caught.value.rows} == {"d/large", "d/a~1b", "d/other", "l/1"}


# The state of a whole trainer (C41), random streams


def test_random_streams_continue(tmp_path: Path) -> None:
    def draw() -> list[Any]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()]  # noqa: NPY002

    draw()
    random.gauss(0, 1)
    snapshot = take(State({"rng": RNG()}), tmp_path / "s")
    want = [draw() for _ in range(100)]
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    put(State({"rng": RNG()}), snapshot)
    assert [draw() for _ in range(100)] == want


def test_random_streams_are_restored_last(tmp_path: Path) -> None:
    class Drawing:
        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(1)

    state = State({"rng": RNG(), "z": Drawing()})
    snapshot = take(state, tmp_path / "s")
    want = torch.get_rng_state()
    put(state, snapshot)
    assert torch.equal(torch.get_rng_state(), want)


def test_schedulers_and_scaler(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        torch.manual_seed(3)
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {
            "model": model, "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3]),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0),
        }  # fmt: skip

    def advance(objects: dict[str, Any]) -> None:
        for _ in range(4):
            objects["optimizer"].zero_grad()
            objects["scaler"].scale(objects["model"](torch.ones(4, 5)).square().sum()).backward()
            objects["scaler"].step(objects["optimizer"])
            objects["scaler"].update()
            objects["schedule"].step()
            objects["plateau"].step(1.0)

    saved, live = make(), make()
    saved["model"].eval()
    live["model"].eval()
    advance(saved)
    snapshot = take(State(saved), tmp_path / "s")
    put(State(live), snapshot)
    advance(saved)
    advance(live)
    assert fingerprint(live["model"], live["optimizer"]) == fingerprint(saved["model"], saved["optimizer"])
    for name in ("schedule", "plateau", "scaler"):
        assert live[name].state_dict() == saved[name].state_dict()


def test_objects_that_need_pickle_are_refused_at_save(tmp_path: Path) -> None:
    import argparse

    objects = {"d": {"args": argparse.Namespace(lr=0.1)}}
    with pytest.raises(StateError) as caught:
        State(objects).collect()
    assert caught.value.path == "d.args"
    snapshot = take(State(objects, allow_pickle=True), tmp_path / "s")
    with pytest.raises(StateError, match="allow_pickle"):
        put(State({"d": {}}), snapshot)
    live: Any = {"d": {}}
    put(State(live, allow_pickle=True), snapshot)
    assert live["d"] == objects["d"]


def test_a_failing_load_state_dict_damages_the_state(tmp_path: Path) -> None:
    class Failing:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise OSError("no")

    state = State({"f": Failing()})
    with pytest.raises(StateDamaged) as caught:
        put(state, take(state, tmp_path / "s"))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.path == "f"


# Tensor subclasses and chunks


class Scaled(torch.Tensor):
    """A wrapper subclass with an inner scale, as fp8 weights are."""

    codes: torch.Tensor
    scale: torch.Tensor
    block: int

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, block: int) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made.codes, made.scale, made.block = codes, scale, block
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"block": self.block}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].block)
        raise NotImplementedError(func)


def test_tensor_subclasses(tmp_path: Path) -> None:
    def module(block: int = 16) -> nn.Module:
        made = nn.Module()
        codes = torch.randint(0, 255, (4, 4), dtype=torch.uint8).view(torch.float8_e4m3fn)
        made.weight = nn.Parameter(Scaled(codes, torch.rand(2), block), requires_grad=False)
        return made

    source, target = module(), module()
    state = State({"m": source})
    first = state.collect()
    assert first.keys == ["m/weight/~tcodes", "m/weight/~tscale"]
    assert first.lazy == [None, None]
    assert state.collect().token is first.token
    snapshot = take(state, tmp_path / "s")
    put(State({"m": target}), snapshot)
    assert bits(target.weight.codes) == bits(source.weight.codes)  # type: ignore[union-attr,arg-type]
    assert bits(target.weight.scale) == bits(source.weight.scale)  # type: ignore[union-attr,arg-type]
    with pytest.raises(LayoutMismatch, match="block"):
        put(State({"m": module(32)}), snapshot)
    for _ in range(3):  # a forward gives it a new scale
        source.weight.scale = torch.rand(2)  # type: ignore[union-attr]
        last = state.collect()
    source.weight.scale = torch.rand(2)  # type: ignore[union-attr]
    assert state.collect().token is last.token
    assert bits(state.collect().tensors[1]) == bits(source.weight.scale)  # type: ignore[union-attr,arg-type]


@pytest.mark.usefixtures("gloo")
@pytest.mark.filterwarnings("ignore")
def test_chunks_of_dtensors(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = init_device_mesh("cpu", (1,))

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Module()
        model.w = nn.Parameter(DTensor.from_local(torch.randn(4, 3), mesh, [Shard(0)]))
        model.b = nn.Parameter(DTensor.from_local(torch.randn(()), mesh, [Replicate()]))
        return model, torch.optim.AdamW(model.parameters(), foreach=False)

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        (model.w.square().sum() + model.b).backward()
        optimizer.step()
        optimizer.zero_grad()

    def local(model: Any, optimizer: torch.optim.Optimizer) -> list[bytes]:
        state = [s[k] for s in optimizer.state.values() for k in sorted(s)]
        return [bits(t._local_tensor if isinstance(t, DTensor) else t) for t in [model.w, model.b, *state]]

    model, optimizer = make(1)
    step(model, optimizer)
    state = State({"model": model, "optimizer": optimizer})
    collected = state.collect()
    assert all(owner is optimizer for owner in collected.lazy)
    snapshot = take(state, tmp_path / "s")
    entry, _ = snapshot.layout.names["model/w"]
    assert (entry.global_shape, entry.offsets) == ((4, 3), (0, 0))
    other, fresh = make(2)
    put(State({"model": other, "optimizer": fresh}), snapshot)
    assert local(other, fresh) == local(model, optimizer)
    step(model, optimizer)
    step(other, fresh)
    assert local(other, fresh) == local(model, optimizer)
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(StateError, match="Partial"):
        State({"t": pending}).collect()


def test_damaged_plain_values(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    state = State(
        {"m": model, "o": optimizer, "d": {"a": 1, "t": torch.ones(1)}, "f": {"t": torch.ones(1)}, "rng": RNG()}
    )
    collected = state.collect()
    layout = Layout.build(collected, run="r", shard=0, world=1)
    rng = random.Random(7)
    tree = msgspec.json.decode(collected.plain)
    junk = [
        None,
        0,
        -1,
        [],
        {},
        "x",
        [[1, 2, 3]],
        {"map": {}},
        {"tensor": "nowhere"},
        {"tensor": "m/0.weight"},
        1 << 70,
    ]

    def paths(node: Any) -> Iterator[tuple[Any, Any]]:
        for key in node if isinstance(node, dict) else range(len(node) if isinstance(node, list) else 0):
            yield node, key
            yield from paths(node[key])

    for _ in range(300):
        broken = copy.deepcopy(tree)
        places = list(paths(broken))
        container, key = places[rng.randrange(len(places))]
        container[key] = rng.choice(junk)
        layout.plain = msgspec.json.encode(broken)
        try:
            prepare(state, layout)
        except (CorruptSnapshot, LayoutMismatch, StateError):
            pass
    layout.plain = b"[" * 10000
    with pytest.raises(CorruptSnapshot):
        prepare(state, layout)


def test_preparing_changes_nothing_live(tmp_path: Path) -> None:
    saved = {"w": torch.ones(2, requires_grad=True), "n": 1, "p": nn.Parameter(torch.ones(1))}
    snapshot = take(State({"d": saved}), tmp_path / "s")
    live: dict[str, Any] = {"w": torch.zeros(2), "n": 0}
    held = live["w"]
    targets = prepare(State({"d": live}), Layout.parse(snapshot.memory))
    assert targets.rows == []
    assert (list(live), live["n"], held.tolist(), held.requires_grad) == (["w", "n"], 0, [0, 0], False)
    put(State({"d": live}), snapshot)
    assert live["w"] is held
    assert not held.requires_grad  # flags of live tensors are theirs
    assert isinstance(live["p"], nn.Parameter)
    assert live["p"].tolist() == [1]


@pytest.mark.parametrize("mutable", [False, True])
def test_subclass_tensors_need_a_live_one(mutable: bool, tmp_path: Path) -> None:
    weight = Scaled(torch.zeros(2, dtype=torch.uint8).view(torch.float8_e5m2), torch.ones(1), 1)
    saved = {"w": weight, "n": 1} if mutable else {"w": weight}
    snapshot = take(State({"d": saved}), tmp_path / "s")
    with pytest.raises(LayoutMismatch, match="no live tensor"):
        put(State({"d": {}}), snapshot)
    put(State({"d": saved}), snapshot)
