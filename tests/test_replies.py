"""Replies that are replayed, cut or altered on the way: refused by name, and the round is the others' alone.

TLS keeps the wire; this is about what a node, or whatever stands between its process and Flower, may send.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from flwr.app import Array, Message, RecordDict

from tests.conftest import Outcome, state_of

Run = Callable[..., Outcome]
Tamper = Callable[[Message, Message], Message]


def first_array(content: RecordDict) -> tuple[str, Array]:
    return next(iter(content["adapter"].items()))


def cut_bytes(content: RecordDict) -> None:
    name, array = first_array(content)
    content["adapter"][name] = Array(array.dtype, array.shape, array.stype, array.data[:-7])


def no_bytes(content: RecordDict) -> None:
    name, array = first_array(content)
    content["adapter"][name] = Array(array.dtype, array.shape, array.stype, b"")


def half_the_records(content: RecordDict) -> None:
    for key in list(content)[::2]:
        content.pop(key)


def another_type(content: RecordDict) -> None:
    name, array = first_array(content)
    content["adapter"][name] = Array(array.numpy().astype("float64"))


def set_exponent(content: RecordDict) -> None:
    """Altered bits that make a number which cannot be: all exponent bits of one."""
    name, array = first_array(content)
    values = array.numpy().copy()
    values.view("uint32").flat[0] |= 0x7F800000
    content["adapter"][name] = Array(values)


def pickled(content: RecordDict) -> None:
    import io

    import numpy as np

    name, array = first_array(content)
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"rows": array.shape}], dtype=object), allow_pickle=True)
    content["adapter"][name] = Array(array.dtype, array.shape, array.stype, buffer.getvalue())


def altering(change: Callable[[RecordDict], None]) -> Tamper:
    def tamper(message: Message, reply: Message) -> Message:
        request = message.content["request"]
        if (request["round"], request["node"]) == (2, "client-1"):
            change(reply.content)
        return reply

    return tamper


def replaying(phase: str) -> Tamper:
    """Answer with what the node had answered in the round before, word for word."""
    earlier: dict[str, RecordDict] = {}

    def tamper(message: Message, reply: Message) -> Message:
        request = message.content["request"]
        if (request["node"], request["phase"]) != ("client-1", phase):
            return reply
        if request["round"] == 2:
            return Message(earlier[phase], reply_to=message)
        earlier[phase] = copy.deepcopy(reply.content)
        return reply

    return tamper


def swapped(message: Message, reply: Message) -> Message:
    """Answer as another node has: its record word for word."""
    request = message.content["request"]
    if request["phase"] == "train" and request["round"] == 2:
        if request["node"] == "client-1":
            return Message(swapped.kept, reply_to=message)  # type: ignore[attr-defined]
        swapped.kept = copy.deepcopy(reply.content)  # type: ignore[attr-defined]
    return reply


def check_refused(outcome: Outcome, kind: str) -> None:
    assert outcome.error is None
    first, second = outcome.rounds
    assert [p["failed"] for p in first["phases"]] == [[]] * len(first["phases"])
    (failed,) = [f for p in second["phases"] for f in p["failed"]]
    assert failed["node"] == "client-1"
    assert failed["reason"].startswith(kind)
    assert not second["void"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (cut_bytes, "malformed"),
        (no_bytes, "malformed"),
        (half_the_records, "malformed"),
        (another_type, "malformed"),
        (set_exponent, "non-finite"),
        (pickled, "malformed"),
    ],
)
def test_a_cut_or_altered_reply_is_refused(run: Run, change: Callable[[RecordDict], None], kind: str) -> None:
    altered = run("method=ffa_lora", "privacy=none", tamper=altering(change))
    check_refused(altered, kind)


@pytest.mark.parametrize(
    ("method", "phase"), [("ffa_lora", "train"), ("fedask", "sketch"), ("fedask", "project")]
)
@pytest.mark.parametrize("privacy", ["dp", "none"])
def test_a_replayed_reply_is_refused_and_its_cost_stays(
    run: Run, method: str, phase: str, privacy: str
) -> None:
    outcome = run(f"method={method}", f"privacy={privacy}", tamper=replaying(phase))
    check_refused(outcome, "mismatch")
    if privacy == "dp":
        assert {n["steps"] for n in outcome.json("privacy.json")["nodes"]} == {4}


def test_another_nodes_reply_is_refused(run: Run) -> None:
    check_refused(run("method=ffa_lora", "privacy=none", tamper=swapped), "mismatch")


def test_a_replayed_reply_leaves_the_model_as_if_the_node_were_gone(run: Run) -> None:
    def gone(message: Message) -> bool:
        request = message.content["request"]
        return (request["round"], request["node"]) == (2, "client-1")

    replayed = run("method=ffa_lora", "privacy=none", tamper=replaying("train"))
    without = run("method=ffa_lora", "privacy=none", crash=gone)
    one, other = state_of(replayed), state_of(without)
    assert all(torch.equal(one[n], other[n]) for n in one)
