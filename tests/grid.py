"""A Flower ``Grid`` that calls the real ClientApp in this process: no network, no Ray.

Nodes can be made to drop out, to answer with an error, or to have their replies changed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Tamper = Callable[[Message, Message], Message]


class Killed(BaseException):
    """The server's process ends here: no handler of the project's own may catch it."""


class InProcessGrid(Grid):
    """Runs every message to its end as soon as it is pushed.

    Parameters
    ----------
    app : ClientApp
        The app that answers.
    nodes : int
        Number of nodes; partition ids are 0 .. nodes - 1, Flower ids start at 1000.
    drop : function of a message
        Where true, the message is lost.
    crash : function of a message
        Where true, Flower reports that the ClientApp raised.
    tamper : function of (message, reply)
        Returns the reply that arrives.
    node_configs : sequence of mappings, optional
        Flower's node configuration for every node, in place of a simulation's.
    """

    def __init__(
        self,
        app: ClientApp,
        nodes: int,
        *,
        drop: Callable[[Message], bool] = lambda _: False,
        crash: Callable[[Message], bool] = lambda _: False,
        tamper: Tamper = lambda _, reply: reply,
        node_configs: Sequence[Mapping[str, Any]] | None = None,
        reverse: bool = False,
    ) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        self.app, self.drop, self.crash, self.tamper, self.reverse = app, drop, crash, tamper, reverse
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}
        self.contexts = {
            1000 + i: Context(
                run_id=1,
                node_id=1000 + i,
                node_config=dict(
                    node_configs[i] if node_configs else {"partition-id": i, "num-partitions": nodes}
                ),
                state=RecordDict(),
                run_config={},
            )
            for i in range(nodes)
        }

    def set_run(self, run: Run) -> None:
        """Not needed here."""

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self.sent.append(message)
            ids.append(message.metadata.message_id)
            if self.drop(message):
                continue
            if self.crash(message):
                reply = Message(Error(code=2, reason="Traceback: secret row text"), reply_to=message)
            else:
                reply = self.app(message, self.contexts[message.metadata.dst_node_id])
                reply = self.tamper(message, reply)
            self._replies[message.metadata.message_id] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        order = list(message_ids)
        if self.reverse:
            order.reverse()
        return [self._replies.pop(i) for i in order if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
