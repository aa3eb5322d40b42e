from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from privet.errors import Refusal
from privet.wire import (
    Description,
    Failed,
    Payload,
    Reply,
    Request,
    check_arrays,
    pack_description,
    pack_failure,
    pack_reply,
    pack_request,
    unpack_description,
    unpack_failure,
    unpack_reply,
    unpack_request,
)


def payload() -> Payload:
    return Payload(
        adapter={"a": torch.randn(3, 2), "scalar": torch.tensor(2.5)},
        head={"h": torch.randn(4).to(torch.bfloat16)},
        once={"slots": torch.arange(7).to(torch.uint16)},
    )


def request(**changes: object) -> Request:
    values: dict[str, object] = {
        "run": "r",
        "round": 2,
        "phase": "train",
        "node": "n",
        "config": "{}",
        "config_hash": "h",
        "code_hash": "c",
        "store": "",
        "sigma": 1.25,
        "planned_steps": 10,
        "payload": payload(),
    }
    return Request(**{**values, **changes})  # type: ignore[arg-type]


def reply() -> Reply:
    return Reply("n", "f", "h", "c", 100, 5, 0.1, 1.25, flags=("fresh-head",), payload=payload())


def test_request_survives_the_wire_exactly() -> None:
    sent = request()
    got = unpack_request(pack_request(sent))
    assert got.fingerprint == sent.fingerprint
    assert got.payload.adapter["scalar"].shape == ()
    for part in ("adapter", "head", "once"):
        for name, value in getattr(sent.payload, part).items():
            assert torch.equal(getattr(got.payload, part)[name], value.float() if part == "head" else value)


def test_bfloat16_and_zero_dimensional_arrays_keep_value_and_shape() -> None:
    values = torch.tensor([1.0, -2.5, 3.140625], dtype=torch.bfloat16)
    got = unpack_request(pack_request(request(payload=Payload(adapter={"x": values}))))
    assert torch.equal(got.payload.adapter["x"].to(torch.bfloat16), values)


def test_reply_survives_the_wire() -> None:
    sent = reply()
    got = unpack_reply(pack_reply(sent))
    assert (got.examples, got.steps, got.q, got.sigma, got.flags) == (100, 5, 0.1, 1.25, ("fresh-head",))
    assert math.isnan(got.train_loss)


def test_private_reply_has_a_whitelist_of_fields() -> None:
    content = pack_reply(reply())
    assert set(content) == {"reply", "metrics", "adapter", "head", "once"}
    assert set(content["reply"]) == {"node", "request", "config_hash", "code_hash", "flags"}
    assert set(content["metrics"]) == {"examples", "steps", "q", "sigma", "train_loss", "grad_norm"}


@pytest.mark.parametrize(
    "change",
    [
        {"round": 3},
        {"phase": "other"},
        {"node": "m"},
        {"run": "s"},
        {"sigma": 1.26},
        {"planned_steps": 11},
        {"config_hash": "x"},
        {"payload": Payload()},
    ],
)
def test_fingerprint_sees_every_change(change: dict[str, object]) -> None:
    base = request(payload=Payload(adapter={"a": torch.ones(2)}))
    assert request(payload=base.payload).fingerprint == base.fingerprint
    merged = {"payload": base.payload, **change}
    assert request(**merged).fingerprint != base.fingerprint


def test_counts_cover_arrays_by_part() -> None:
    assert payload().numbers() == {"adapter": 7, "head": 4, "once": 7}
    assert payload().bytes() == {"adapter": 28, "head": 16, "once": 14}


def broken(key: str, value: object | None) -> RecordDict:
    content = pack_reply(reply())
    if value is None:
        del content[key]
    else:
        content[key] = value  # type: ignore[assignment]
    return content


def reply_record(**changes: object) -> ConfigRecord:
    fields = {**dict(pack_reply(reply())["reply"]), **changes}
    return ConfigRecord({k: v for k, v in fields.items() if v is not None})  # type: ignore[misc]


@pytest.mark.parametrize(
    "content",
    [
        broken("reply", None),
        broken("metrics", None),
        broken("adapter", None),
        broken("metrics", MetricRecord({"examples": 1})),
        broken("reply", reply_record(node=None)),
        broken("reply", reply_record(node=7)),
        broken("reply", reply_record(extra="row text")),
        broken("adapter", ConfigRecord({"a": 1})),
        broken("adapter", ArrayRecord({"a": Array(np.zeros(3))})),  # float64
        broken("adapter", ArrayRecord({"a": Array("float32", (3,), "numpy.ndarray", b"not an array")})),
    ],
)
def test_malformed_replies_are_refused(content: RecordDict) -> None:
    with pytest.raises(Refusal) as caught:
        unpack_reply(content)
    assert caught.value.kind == "malformed"
    assert "\n" not in str(caught.value)


def test_pickled_arrays_are_never_loaded() -> None:
    import io

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("unpickled",))

    buffer = io.BytesIO()
    np.save(buffer, np.array([Evil()], dtype=object), allow_pickle=True)
    record = ArrayRecord({"a": Array("float32", (1,), "numpy.ndarray", buffer.getvalue())})
    with pytest.raises(Refusal):
        unpack_reply(broken("adapter", record))


def test_lying_shapes_are_refused() -> None:
    buffer = Array(np.zeros(3, dtype=np.float32))
    record = ArrayRecord({"a": Array("float32", (4,), "numpy.ndarray", buffer.data)})
    with pytest.raises(Refusal, match="declared type and shape"):
        unpack_reply(broken("adapter", record))


@pytest.mark.parametrize(
    ("arrays", "kind"),
    [
        ({"a": torch.zeros(2)}, None),
        ({"a": torch.zeros(3)}, "shape"),
        ({}, "shape"),
        ({"a": torch.zeros(2), "b": torch.zeros(1)}, "shape"),
        ({"a": torch.tensor([0.0, math.nan])}, "non-finite"),
        ({"a": torch.tensor([0.0, math.inf])}, "non-finite"),
    ],
)
def test_check_arrays(arrays: dict[str, torch.Tensor], kind: str | None) -> None:
    if kind is None:
        check_arrays(arrays, {"a": (2,)}, "adapter")
        return
    with pytest.raises(Refusal) as caught:
        check_arrays(arrays, {"a": (2,)}, "adapter")
    assert caught.value.kind == kind


def test_description_and_failure() -> None:
    sent = Description("north", 40, "c", {"torch": "2"}, "sha256:0")
    assert unpack_description(pack_description(sent)) == sent
    failed = Failed("north", "budget", "would exceed", uncharged=True)
    assert unpack_failure(pack_failure(failed)) == failed
    assert unpack_failure(pack_reply(reply())) is None
    with pytest.raises(Refusal):
        unpack_description(pack_reply(reply()))
