"""Models that are spread over several devices, as far as one CPU can show it.

Accelerate's hooks (what ``device_map`` sets up) run for real. Two devices are played by tensors that say where they
are and refuse to be combined with tensors from elsewhere, as on a machine with two GPUs; the numbers are real.
tests/privacy/test_cuda.py has the same on GPUs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from privet.errors import ConfigError
from privet.privacy.engine import GradientEngine
from privet.privacy.low_rank import WeightProduct
from privet.privacy.parts import THETA, ProjectedParameters
from tests.privacy import families
from tests.privacy.families import (
    Known,
    assert_equal,
    batches_of_one,
    clipped_products,
    clipped_sum,
    engine_sum,
    freeze_a,
    loss_of,
    make_base,
    make_batch,
    make_model,
    norms_of,
    on_merged_weights,
    products_of,
)

# --- Accelerate's hooks ---------------------------------------------------------------------------


def spread(model: nn.Module, layers: str) -> nn.Module:
    """Hooks on every module, as for two devices, on one."""
    parts, above = {layers: "cpu"}, ""
    for step in layers.split("."):
        siblings = model.get_submodule(above.rstrip(".")).named_children()
        parts |= {f"{above}{name}": "cpu" for name, _ in siblings if name != step}
        above += f"{step}."
    return dispatch_model(model, parts, force_hooks=True)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2-conv1d"])
def test_layers_behind_accelerates_hooks(family: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks wrap every layer's forward, adapters included where they were there first."""
    inner = {"bert": "bert.encoder", "llama": "model.layers", "gpt2-conv1d": "transformer.h"}[family]
    plain = make_model(family)
    if when == "before":
        monkeypatch.setattr(families, "make_base", lambda f: spread(make_base(f), inner))
        model = make_model(family)
    else:
        model = spread(make_model(family), f"base_model.model.{inner}")
    hooked = [m for m in model.modules() if isinstance(m, nn.Linear) and hasattr(m, "_hf_hook")]
    assert hooked
    batch, loss = make_batch(family=family), loss_of(family)
    samples = batches_of_one(plain, batch, loss)
    clip = float(norms_of(samples)[:3].median())
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    _, got = engine_sum(model, batch, clip, loss)
    assert_equal(got, clipped_sum(samples, clip), 1e-9)
    assert all(before[n].keys() == m.__dict__.keys() for n, m in model.named_modules())
    loss(model, batch).sum().backward()  # an ordinary model again
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.zero_grad()

    freeze_a(plain), freeze_a(model)
    whole = on_merged_weights(plain, batch, loss)
    _, got = engine_sum(model, batch, clip, loss, products=products_of(model))
    assert_equal(got, clipped_products(plain, whole, clip), 1e-9)


def test_a_copy_of_a_hooked_model_is_a_plain_one() -> None:
    model = spread(make_model("bert"), "base_model.model.bert.encoder")
    engine, batch, loss = GradientEngine(model, clip=1.0), make_batch(), loss_of("bert")
    with engine.attached():
        twin = copy.deepcopy(model)
        loss(twin, batch).sum().backward()
        assert all(p.grad is not None for p in twin.parameters() if p.requires_grad)
        assert all(part.rows is None for part in engine._parts)


def test_two_engines_and_offloaded_weights_behind_hooks_are_refused() -> None:
    layer = nn.Linear(2, 2)
    add_hook_to_module(layer, AlignDevicesHook("cpu"))
    first, second = (GradientEngine(nn.Sequential(layer), clip=1.0) for _ in range(2))
    with first.attached(), pytest.raises(ConfigError, match="another engine"):
        second.attach()
    offloaded = nn.Linear(2, 2)
    add_hook_to_module(offloaded, AlignDevicesHook("cpu", offload=True))
    offloaded.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"0\.weight trains, but is offloaded"):
        GradientEngine(nn.Sequential(offloaded), clip=1.0)


# --- tensors that say where they are ----------------------------------------------------------------

HERE, THERE = torch.device("cpu", 0), torch.device("cpu", 1)
_aten = torch.ops.aten


class Placed(Tensor):
    """A tensor with its numbers on the CPU that says it is on another device, and takes no part in mixing them."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> Placed:
        made = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=device,
            requires_grad=held.requires_grad,
        )  # fmt: skip
        made.held = held.detach()
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Placed({self.held}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, _ = tree_flatten((args, kwargs))
        tensors = [t for t in flat if isinstance(t, Tensor)]
        if any(not isinstance(t, Placed) and t.dim() > 0 for t in tensors):
            raise RuntimeError(f"{func} mixes a device and the host")
        devices = {t.device for t in tensors if isinstance(t, Placed)}
        if len(devices) > 1 and func is not _aten.copy_.default:
            raise RuntimeError(f"{func} mixes the devices {devices}")
        device = next(iter(devices))
        wanted = kwargs.pop("device", None)
        device = device if wanted is None else torch.device(wanted)
        args, kwargs = tree_map(lambda t: t.held if isinstance(t, Placed) else t, (args, kwargs))
        out = func(*args, **kwargs)
        if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
            return flat[0]
        return tree_map(lambda t: Placed(t, device) if isinstance(t, Tensor) else t, out)


class Move(torch.autograd.Function):
    """``x.to(device)``, back again in the backward pass; autograd knows both as one CPU."""

    @staticmethod
    def forward(ctx: Any, x: Placed, device: torch.device) -> Placed:
        ctx.back = x.device
        return Placed(x.held.clone(), device)

    @staticmethod
    def backward(ctx: Any, g: Placed) -> tuple[Placed, None]:
        return Placed(g.held.clone(), ctx.back), None


class Adapted(nn.Module):
    """A frozen layer with a LoRA pair, and a head; here and there."""

    def __init__(self, place: Callable[[Tensor, torch.device], Tensor], move: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.move = move
        self.a, self.b = nn.Linear(5, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.c, self.d = nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 3)
        self.double()
        for name, module in self.named_children():
            for key, parameter in list(module.named_parameters()):
                placed = place(parameter.detach(), HERE if name in "ab" else THERE)
                setattr(module, key, nn.Parameter(placed))

    def forward(self, x: Tensor) -> Tensor:
        h = self.move(torch.tanh(self.b(self.a(x)) * 2.0), THERE)
        h = torch.tanh(self.d(self.c(h)) * 2.0)
        out: Tensor = self.head(h.sum(1)).square().sum(1)
        return out


class Everywhere(Known):
    """Normals on the device that is asked for; remembers which."""

    def __init__(self) -> None:
        super().__init__(seed=3)
        self.devices: list[torch.device] = []

    def normal(self, shape: Sequence[int], *, device: Any, dtype: torch.dtype) -> Tensor:
        self.devices.append(device)
        return Placed(super().normal(shape, device=device, dtype=dtype), device)


def geometry(kind: str) -> dict[str, Any]:
    order = ("b.weight", "c.weight", "a.weight", "d.weight")
    slots = torch.randint(0, 11, (5 * 2 + 2 * 6 + 6 * 2 + 2 * 4,), generator=torch.Generator().manual_seed(0))
    pairs = (WeightProduct("a.weight", "b.weight", 2.0), WeightProduct("c.weight", "d.weight", 2.0))
    return {
        "A and B": {},
        "theta": {"projection": ProjectedParameters(slots, torch.linspace(-1, 1, len(slots)), 11, order)},
        "W": {"products": pairs},
    }[kind]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a part asks of a plain tensor, it gets for a placed one: ``.to(device)`` moves it."""
    plain = Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        device = next((a for a in (*args, kwargs.get("device")) if isinstance(a, torch.device)), None)
        types = [a for a in (*args, kwargs.get("dtype")) if isinstance(a, torch.dtype)]
        if "cpu" in args and isinstance(self, Placed):
            return plain(self.held, *args, **kwargs)
        if device in (HERE, THERE):
            held = self.held if isinstance(self, Placed) else self
            return Placed(plain(held, *types), device)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", to)


def place(x: Tensor, device: torch.device) -> Tensor:
    return Placed(x.clone(), device)


def run(
    model: nn.Module, x: Tensor, kind: str, randomness: Any, sigma: float
) -> tuple[Tensor, dict[str, Tensor]]:
    if kind == "W":
        model.a.requires_grad_(False)
        model.c.requires_grad_(False)
    engine = GradientEngine(model, clip=1.5, **geometry(kind))
    with engine.attached():
        for rows in (slice(0, 3), slice(3, 4)):
            values = model(x[rows])
            values.sum().backward()
            clipped = engine.accumulate(len(values))
        return clipped.norms, engine.private_sum(randomness, sigma, 4)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "infinite"])
@pytest.mark.parametrize("kind", ["A and B", "theta", "W"])
def test_parts_on_two_devices_share_one_clip(kind: str, bad: bool, moves: None) -> None:
    """Norms gathered, factors handed back, sums and noise where the parameters are; the numbers of one device."""
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if bad:
        x[1, 0] = torch.inf
    one = Adapted(lambda t, _: t.clone(), lambda t, _: t)
    norms, want = run(one, x, kind, Known(seed=3), 0.7)
    assert float(norms) > 1.5 * 0.1
    source, model = Everywhere(), Adapted(place, Move.apply)
    got_norms, got = run(model, place(x, HERE), kind, source, 0.7)
    torch.testing.assert_close(got_norms.held, norms, rtol=1e-12, atol=0)
    assert_equal({n: g.held for n, g in got.items()}, want, 1e-12)
    homes = {n: p.device for n, p in model.named_parameters()} | {THETA: HERE}
    assert {n: g.device for n, g in got.items()} == {n: homes[n] for n in got}
    assert set(source.devices) == {HERE, THERE}


def test_the_play_refuses_what_two_devices_refuse(moves: None) -> None:
    here, there = place(torch.ones(2), HERE), place(torch.ones(2), THERE)
    assert (here + here).device == HERE
    assert (here.to(THERE) + there).device == THERE
    with pytest.raises(RuntimeError, match="mixes the devices"):
        here + there
    with pytest.raises(RuntimeError, match="mixes a device and the host"):
        here + torch.ones(2)
    with pytest.raises(RuntimeError, match="mixes"):
        torch.stack([here, there])
    assert (here * torch.tensor(2.0)).device == HERE
