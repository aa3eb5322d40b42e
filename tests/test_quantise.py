"""Uploads in 8 bits: how far numbers are off, what is refused, and whole runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message

from privet.config import compose
from privet.errors import Refusal
from privet.quantise import Decoded, coded_bytes, decode, encode
from privet.wire import Payload
from server_app.plan import make_plan
from tests.conftest import Outcome

Run = Callable[..., Outcome]
INT8 = "federation.upload=int8"
SHAPES = {
    "wide": (4, 96),
    "tall": (96, 4),
    "vector": (50,),
    "number": (),
    "square": (8, 8),
    "cube": (3, 4, 5),
}


def lines_of(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Each number's largest neighbour, by the rule: along the longer side of a matrix, over a whole vector."""
    if x.ndim < 2:
        return np.full_like(x, np.abs(x).max())
    axis: Any = 0 if x.ndim == 2 and x.shape[0] > x.shape[1] else tuple(range(1, x.ndim))
    return np.broadcast_to(np.abs(x).max(axis=axis, keepdims=True), x.shape)


def draw(seed: int = 0) -> Payload:
    generator = torch.Generator().manual_seed(seed)
    made = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    made["wide"] *= torch.tensor([1e-6, 1.0, 30.0, 1e6])[:, None]  # lines of very unequal size
    made["tall"] *= torch.tensor([1e-6, 1.0, 30.0, 1e6])
    return Payload(
        {n: made[n] for n in ("wide", "tall", "cube")}, {n: made[n] for n in SHAPES if n not in made}
    )


@pytest.mark.parametrize("seed", range(3))
def test_every_number_is_within_half_a_step_of_its_line(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shape in SHAPES.values():
        x = torch.randn(shape, generator=generator) * (10 ** torch.randn(shape, generator=generator))
        coded = encode(Payload({"x": x}))
        assert {v.dtype for v in coded.adapter.values()} == {torch.uint8, torch.float32}
        assert coded.bytes()["adapter"] == coded_bytes({"x": shape})
        got = decode(coded)
        assert got.adapter["x"].shape == x.shape
        error = np.abs(got.adapter["x"].double().numpy() - x.double().numpy())
        largest = lines_of(x.double().numpy())
        assert (error <= largest / 254 * (1 + 1e-5)).all()
        # To the nearest: on average a quarter of a step, not half a one.
        if x.numel() > 40:
            assert (error / (largest / 127)).mean() < 0.3


def test_scales_do_not_mix_the_components_of_a_factor() -> None:
    payload = draw()
    got = decode(encode(payload))
    for name in ("wide", "tall"):
        x, y = payload.adapter[name], got.adapter[name]
        by_line = (1 if name == "wide" else 0,)
        assert ((y - x).norm(dim=by_line) / x.norm(dim=by_line)).max() < 0.02  # the line of 1e-6 too


def test_the_bound_holds_and_is_not_far_off() -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
        got = decode(encode(Payload({n: x[n] for n in ("wide", "tall")}, {"vector": x["vector"]})))
        both = {**got.adapter, **got.head}
        flat = [torch.cat([v[n].double().flatten() for n in both]) for v in (x, both)]
        actual = float((flat[0] - flat[1]).norm() / flat[1].norm())
        assert actual <= got.error < 3 * actual  # uniform errors: sqrt 3
        assert got.error < 0.02


def test_zeros_and_the_smallest_numbers_come_back() -> None:
    x = {
        "zero": torch.zeros(3, 5),
        "mixed": torch.tensor([[0.0, 0, 0], [1, -1, 0.5]]),
        "tiny": torch.full((4,), 1e-44),
    }
    got = decode(encode(Payload(x)))
    assert not got.adapter["zero"].any()
    torch.testing.assert_close(got.adapter["mixed"], x["mixed"], atol=1 / 254, rtol=0)
    assert not got.adapter["mixed"][0].any()
    assert float(got.adapter["tiny"].abs().max()) < 1e-43
    assert all(bool(v.isfinite().all()) for v in got.adapter.values())
    assert decode(encode(Payload({"zero": torch.zeros(3)}))).error == 0


def test_coding_is_a_fixed_point_and_leaves_one_off_material() -> None:
    """A repeated reply is the same bytes, and what was decoded codes to itself."""
    payload = Payload({"x": torch.randn(6, 9)}, once={"rule": torch.arange(3, dtype=torch.int32)})
    first, again = encode(payload), encode(payload)
    assert all(torch.equal(first.adapter[n], again.adapter[n]) for n in first.adapter)
    decoded = decode(first)
    assert isinstance(decoded, Decoded)
    torch.testing.assert_close(decode(encode(decoded)).adapter["x"], decoded.adapter["x"])
    assert torch.equal(decoded.once["rule"], payload.once["rule"])
    assert decoded.numbers() == {"adapter": 54, "head": 0, "once": 3}
    assert decoded.bytes()["adapter"] == 54 + 4 * 6


def test_what_is_no_code_is_refused() -> None:
    good = encode(Payload({"x": torch.randn(4, 6)})).adapter
    for wrong in (
        {"x": torch.randn(4, 6)},
        {"x": good["x"]},
        {**good, "more": torch.randn(2)},
        {**good, "y:scale": good["x:scale"]},
        {**good, "x:scale": good["x:scale"][:3]},
        {**good, "x:scale": good["x:scale"].double()},
        {**good, "x:scale": -good["x:scale"]},
        {**good, "x": torch.full((4, 6), 255, dtype=torch.uint8)},
        {**good, "x": good["x"].to(torch.int16)},
    ):
        with pytest.raises(Refusal) as caught:
            decode(Payload(wrong))
        assert caught.value.kind == "malformed"


# --- whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedask", "fedrand", "fedhsip", "probe"])
def test_every_upload_travels_in_8_bits(run: Run, settings: list[str], method: str) -> None:
    sent: list[dict[str, Array]] = []

    def look(message: Message, reply: Message) -> Message:
        if "adapter" in reply.content:
            sent.append({**reply.content["adapter"], **reply.content["head"]})
        return reply

    rounds = "federation.rounds=1" if method != "fedhsip" else "method.warmup_rounds=1"
    overrides = [f"method={method}", INT8, rounds, "evaluation=none"]
    outcome = run(*overrides, tamper=look)
    if outcome.error:
        raise outcome.error
    assert sent
    for arrays in sent:
        assert all(a.dtype == ("float32" if n.endswith(":scale") else "uint8") for n, a in arrays.items())
    plan = make_plan(compose([*settings, *overrides])).to_dict()["per_round"]
    for record in outcome.rounds:
        assert all(p["failed"] == [] for p in record["phases"])
        assert 0 < record["upload_error_bound"] < 0.02
    last = outcome.rounds[-1]
    assert last["upload_bytes"] == 3 * plan["upload_bytes"]
    assert last["upload_numbers"] == 3 * plan["upload_numbers"]
    assert last["download_bytes"] == 4 * last["download_numbers"]
    real = sum(a.numpy().nbytes for arrays in sent for a in arrays.values())
    totals = outcome.json("communication.json")["totals"]
    assert totals["upload_bytes_adapter"] + totals["upload_bytes_head"] == real


def test_the_paper_models_upload_takes_about_a_quarter(settings: list[str]) -> None:
    plan = make_plan(compose([*settings, "method=fedavg", "model=roberta_base_random", INT8])).to_dict()
    assert plan["per_round"]["upload_numbers"] == 294_912
    assert plan["per_round"]["upload_bytes"] == 294_912 + 24 * 2 * 8 * 4


def test_the_state_is_the_mean_of_what_was_read(run: Run) -> None:
    """And not far from the run without: the batches are the same, the rounding small."""
    plain = ["method=ffa_lora", "privacy=none", "federation.rounds=1", "evaluation=none"]
    coarse, fine = run(*plain, INT8), run(*plain)
    assert coarse.error is None
    one, other = (torch.cat([v.flatten() for v in state(o).values()]).double() for o in (coarse, fine))
    assert fine.rounds[0]["upload_error_bound"] is None
    assert 0 < float((one - other).norm() / other.norm()) < coarse.rounds[0]["upload_error_bound"] * 2


def state(outcome: Outcome) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (file,) = (outcome.path / "checkpoints").glob("*.safetensors")
    return load_file(file)


def test_a_reply_in_other_coding_is_refused_by_name(run: Run) -> None:
    def swap(message: Message, reply: Message) -> Message:
        if "request" in message.content and message.content["request"]["node"] == "client-1":
            for part in ("adapter", "head"):
                arrays = {
                    n: Array(a.numpy().astype(np.float32))
                    for n, a in reply.content[part].items()
                    if not n.endswith(":scale")
                }
                reply.content[part] = ArrayRecord(arrays)
        return reply

    small = ["method=probe", "privacy=none", "federation.rounds=1", "evaluation=none"]
    outcome = run(*small, INT8, tamper=swap)
    assert outcome.error is None
    (failed,) = outcome.rounds[0]["phases"][0]["failed"]
    assert failed["node"] == "client-1"
    assert failed["reason"].startswith("malformed: the upload is not made of 8-bit arrays")
    other = run(*small, tamper=to_codes)
    (failed,) = other.rounds[0]["phases"][0]["failed"]
    assert failed["reason"].startswith("shape")


def to_codes(message: Message, reply: Message) -> Message:
    if "request" in message.content and message.content["request"]["node"] == "client-1":
        for part in ("adapter", "head"):
            arrays = encode(
                Payload({n: torch.from_numpy(a.numpy().copy()) for n, a in reply.content[part].items()})
            )
            reply.content[part] = ArrayRecord({n: Array(v.numpy()) for n, v in arrays.adapter.items()})
    return reply
