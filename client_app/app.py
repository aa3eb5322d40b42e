"""The Flower ClientApp: one thin handler for every message type.

Nothing but Flower is imported here. What can fail is imported inside the handlers, so that every exception,
import errors included, ends as a kind of error and one line of our own; its text may hold data and stays here.
"""

import contextlib
import gc
import logging
import sys
from collections.abc import Callable, Iterator

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

_HINTS = {
    "OutOfMemoryError": "; fewer clients share a GPU with a larger federation.gpus_per_client, and a smaller "
    "train.micro_batch takes less"
}


@app.train()
def train(message: Message, context: Context) -> Message:
    """Run one phase of one round."""

    def handle() -> RecordDict:
        with _no_collector():
            from client_app.node import answer_train

        return answer_train(message.content, context.node_config)

    return _guarded("train", handle, message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the server's model, and the node's own where it has one."""

    def handle() -> RecordDict:
        with _no_collector():
            from client_app.node import answer_evaluate

        return answer_evaluate(message.content, context.node_config)

    return _guarded("evaluate", handle, message, context)


@app.query("describe")
def describe(message: Message, context: Context) -> Message:
    """Say who this node is."""

    def handle() -> RecordDict:
        with _no_collector():
            from client_app.node import answer_describe

        return answer_describe(message.content, context.node_config)

    return _guarded("describe", handle, message, context)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Import without Python's garbage collector: it finds nothing there, and takes a quarter of the time."""
    if "client_app.node" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()  # nor need it look at modules later
    finally:
        gc.enable()


def _guarded(kind: str, handle: Callable[[], RecordDict], message: Message, context: Context) -> Message:
    """Answer by the node's worker where it has one, else here."""
    try:
        answered = _by_worker(kind, message, context)
        content = handle() if answered is None else answered
    except Exception as error:
        # The traceback is for this node's own log. Only the kind crosses the wire.
        logging.getLogger("privet").exception("this node could not answer")
        content = RecordDict({"failed": failure(error)})
    return Message(content, reply_to=message)


def failure(error: Exception) -> ConfigRecord:
    """Return what crosses the wire of an error that is no refusal."""
    kind = type(error).__name__
    reason = f"{kind}; the node's own log has more{_HINTS.get(kind, '')}"
    return ConfigRecord({"node": "", "kind": "error", "reason": reason, "uncharged": False})


def _by_worker(kind: str, message: Message, context: Context) -> RecordDict | None:
    if "worker" not in context.node_config:
        return None
    from client_app.courier import carry

    return carry(kind, message.content, context.node_config)
