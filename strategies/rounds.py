"""The round loop that every method shares, as a Flower ``Strategy``.

One round: for each phase, a request to every node of the round, replies taken one at a time as they come,
refused by name where they are not right, merged, and the state moved on - or the round declared void. Flower's
own loop sends one message a round and cannot resume; everything else here is Flower's.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from privet.adapters import Shapes
from privet.config import Config
from privet.errors import Refusal
from privet.plan import NodePlan
from privet.privacy.accounting import Step
from privet.privacy.spending import Spending
from privet.schedule import Round, Schedule
from privet.wire import (
    Arrays,
    Failed,
    Payload,
    Reply,
    Request,
    check_arrays,
    code_hash,
    error_of,
    pack_request,
    unpack_reply,
)
from strategies.merging import Merger

NEEDS_ONCE = "needs-once"
"""Kind of refusal by which a node asks for one-off material again; it comes before any charge."""


class Recorder(Protocol):
    """Where the loop leaves what happened."""

    def event(self, kind: str, **fields: Any) -> None:
        """Append one live event."""
        ...

    def round(self, record: dict[str, Any], traffic: Mapping[str, Mapping[str, Any]]) -> None:
        """Append a finished round and its traffic by node."""
        ...

    def checkpoint(self, number: int, state: Arrays) -> None:
        """Write the state after a round, atomically."""
        ...


@dataclass
class Run:
    """One run: its name, who takes part when, and where its record goes.

    Attributes
    ----------
    addresses : mapping of node name to Flower node id
        New in every run; everything that lasts is keyed by name.
    store : str
        Folder for the nodes' stores in a simulation; empty in deployment.
    """

    id: str
    schedule: Schedule
    nodes: Mapping[str, NodePlan]
    addresses: Mapping[str, int]
    store: str
    recorder: Recorder
    spending: Spending


@dataclass
class Exchange:
    """Running record of one phase."""

    phase: str
    sent: int
    replied: list[str] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    seconds: float = 0.0
    shown: list[tuple[float, float, int]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the entry for ``rounds.jsonl``."""
        return {
            "name": self.phase,
            "seconds": round(self.seconds, 3),
            "sent": self.sent,
            "replied": len(self.replied),
            "failed": [{"node": f.node, "reason": f"{f.kind}: {f.reason}"} for f in self.failed],
        }


class RoundStrategy(Strategy):
    """The loop. Subclasses say what is sent, what is accepted and how it is merged."""

    phases: ClassVar[tuple[str, ...]] = ("train",)
    warmup_phases: ClassVar[tuple[str, ...]] = ("warmup",)
    releases: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: Config) -> None:
        self.config = config
        self._run: Run | None = None
        self._met: set[str] = set()
        self._informed: set[tuple[str, str]] = set()

    # --- hooks -----------------------------------------------------------------------------------

    @abstractmethod
    def download(self, phase: str, state: Arrays, once: bool) -> Payload:
        """Return what a node is sent; with `once`, one-off material too."""

    @abstractmethod
    def upload_shapes(self, phase: str) -> tuple[Shapes, Shapes]:
        """Return the adapter and head arrays that a valid reply carries."""

    @abstractmethod
    def merger(self, phase: str, state: Arrays) -> Merger:
        """Return a fresh merger for the replies of a phase."""

    @abstractmethod
    def update(self, phase: str, state: Arrays, merged: Payload) -> Arrays:
        """Return the next state; `state` itself stays as it is."""

    @abstractmethod
    def finish_warmup(self, state: Arrays) -> Arrays:
        """Return the state with which training starts, after the last warm-up round."""

    @abstractmethod
    def model_values(self, state: Arrays) -> Arrays:
        """Return the factors and head that a state stands for."""

    # --- the loop --------------------------------------------------------------------------------

    def bind(self, run: Run) -> None:
        """Give the strategy its run; needed once, before :meth:`start`."""
        self._run = run
        self._met = set()  # nodes that have answered
        self._informed = set()  # (phase, node) that have had the phase's one-off material

    @property
    def run(self) -> Run:
        """The bound run."""
        if self._run is None:
            raise Refusal("start", "bind a run to the strategy before it starts")
        return self._run

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 0,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the bound schedule and return Flower's result; its arrays are the final state.

        Parameters
        ----------
        grid : Grid
            Flower's way to the nodes.
        initial_arrays : ArrayRecord
            The first state, from :func:`to_record`.
        num_rounds : int
            Ignored: the schedule of the bound run says how many.
        timeout : float
            Seconds that a phase may take.
        train_config, evaluate_config : ConfigRecord, optional
            Ignored: the configuration travels in every request.
        evaluate_fn : callable, optional
            Scores ``model_values`` after every training round: (round, arrays) -> metrics.
        """
        state = from_record(initial_arrays)
        result = Result(arrays=initial_arrays)
        for plan in self.run.schedule.rounds:
            if self.run.schedule.warmup_rounds and plan.number == self.run.schedule.warmup_rounds + 1:
                state = self.finish_warmup(state)
            started = time.monotonic()
            next_state, exchanges, traffic = self._round(grid, plan, state, timeout)
            void = next_state is None
            state = state if next_state is None else next_state
            self.run.recorder.checkpoint(plan.number, state)
            metrics = None
            if evaluate_fn is not None and self._is_scored(plan):
                metrics = self._score(evaluate_fn, plan.number, state)
            if metrics is not None:
                result.evaluate_metrics_serverapp[plan.number] = metrics
            self._record(plan, exchanges, traffic, metrics, void, time.monotonic() - started)
        result.arrays = to_record(state)
        return result

    def _score(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None], number: int, state: Arrays
    ) -> MetricRecord | None:
        """Score a state; a score that fails is noted and costs the run nothing else."""
        try:
            return evaluate_fn(number, to_record(self.model_values(state)))
        except Exception as error:
            text = f"round {number} has no score: {type(error).__name__}"
            self.run.recorder.event("note", text=text)
            return None

    def _is_scored(self, plan: Round) -> bool:
        """Whether a round is followed by a score: every few training rounds, and the last one."""
        trained = plan.number - self.run.schedule.warmup_rounds
        last = plan.number == len(self.run.schedule.rounds)
        return trained > 0 and (trained % self.config.evaluate_every == 0 or last)

    def _round(
        self, grid: Grid, plan: Round, state: Arrays, timeout: float
    ) -> tuple[Arrays | None, list[Exchange], dict[str, dict[str, Any]]]:
        """Run all phases of a round; the state is None where the round is void."""
        nodes: Sequence[str] = plan.nodes
        exchanges: list[Exchange] = []
        traffic: dict[str, dict[str, Any]] = {}
        for phase in plan.phases:
            exchange, merger = self._exchange(grid, plan, phase, nodes, state, traffic, timeout)
            exchanges.append(exchange)
            if len(exchange.replied) < self.config.federation.min_replies:
                return None, exchanges, traffic
            state = self.update(phase, state, merger.mean())
            nodes = sorted(exchange.replied)
        return state, exchanges, traffic

    def _exchange(
        self,
        grid: Grid,
        plan: Round,
        phase: str,
        nodes: Sequence[str],
        state: Arrays,
        traffic: dict[str, dict[str, Any]],
        timeout: float,
    ) -> tuple[Exchange, Merger]:
        """Send one phase to `nodes` and merge the valid replies as they come."""
        recorder = self.run.recorder
        merger = self.merger(phase, state)
        exchange = Exchange(phase, len(nodes))
        recorder.event(
            "phase", round=plan.number, of=len(self.run.schedule.rounds), phase=phase, sent=len(nodes)
        )
        started = time.monotonic()
        pending: dict[str, Request] = {}
        resent: set[str] = set()

        def send(requests: Iterable[Request], way: str = "download") -> None:
            batch = list(requests)
            messages = [self._message(r, timeout) for r in batch]
            for request, identifier in zip(batch, grid.push_messages(messages), strict=True):
                _count(traffic, request.node, way, request.payload)
                if identifier:
                    pending[identifier] = request
                else:
                    settle(request, Failed(request.node, "undelivered", "Flower could not queue the message"))

        def settle(request: Request, outcome: Reply | Failed) -> None:
            if isinstance(outcome, Failed):
                exchange.failed.append(Failed(request.node, outcome.kind, outcome.reason))
            else:
                exchange.replied.append(request.node)
                self._met.add(request.node)
                if "store-lost" in outcome.flags:
                    recorder.event("note", text=f"{request.node} lost its store and starts afresh")
                self._informed.add((phase, request.node))
                merger.add(request.node, outcome.payload, self.weight(outcome))
                _count(traffic, request.node, "upload", outcome.payload)
                exchange.shown.append((outcome.train_loss, outcome.grad_norm, outcome.examples))
            self._charge(plan, phase, request, outcome)
            recorder.event(
                "reply",
                round=plan.number,
                phase=phase,
                node=request.node,
                done=len(exchange.replied) + len(exchange.failed),
                sent=exchange.sent,
                ok=isinstance(outcome, Reply),
                reason=outcome.reason if isinstance(outcome, Failed) else None,
            )

        send(self._request(plan, phase, n, state, (phase, n) not in self._informed) for n in nodes)
        late = False
        while pending and not late:
            late = time.monotonic() - started >= timeout  # replies that are there by then still count
            answers = list(grid.pull_messages(list(pending)))
            for message in answers:
                request = pending.pop(message.metadata.reply_to_message_id, None)
                if request is None:
                    continue
                outcome = self._judge(request, message)
                if isinstance(outcome, Failed) and outcome.kind == NEEDS_ONCE and request.node not in resent:
                    resent.add(request.node)
                    send([self._request(plan, phase, request.node, state, True)], "requery")
                else:
                    settle(request, outcome)
            if pending and not answers and not late:
                time.sleep(0.1)
        for request in pending.values():
            settle(request, Failed(request.node, "timeout", f"no reply within {timeout:g} s"))
        exchange.seconds = time.monotonic() - started
        return exchange, merger

    def _request(self, plan: Round, phase: str, node: str, state: Arrays, once: bool) -> Request:
        node_plan = self.run.nodes[node]
        return Request(
            run=self.run.id,
            round=plan.number,
            phase=phase,
            node=node,
            config=self.config.to_json(),
            config_hash=self.config.hash,
            code_hash=code_hash(),
            store=self.run.store,
            sigma=node_plan.sigma,
            planned_steps=node_plan.planned_steps,
            met=node in self._met,
            payload=self.download(phase, state, once),
        )

    def _message(self, request: Request, timeout: float) -> Message:
        return Message(
            content=pack_request(request),
            message_type=MessageType.TRAIN,
            dst_node_id=self.run.addresses[request.node],
            group_id=f"{request.round}-{request.phase}",
            ttl=timeout + 60,
        )

    def _judge(self, request: Request, message: Message) -> Reply | Failed:
        """Return the reply, or why it is refused (design section 3)."""
        failed = error_of(message)
        if failed is not None:
            return failed
        try:
            reply = unpack_reply(message.content)
            if reply.node != request.node or reply.request != request.fingerprint:
                raise Refusal("mismatch", "the reply answers another request")
            if reply.config_hash != request.config_hash:
                raise Refusal("config-hash", "the node has another configuration")
            if reply.code_hash != request.code_hash:
                raise Refusal("code-hash", "the node runs other code")
            plan = self.run.nodes[request.node]
            if reply.examples < 1:
                raise Refusal("zero-rows", "the node trained on no rows")
            steps = plan.steps_per_round if self.releases.get(request.phase) == "dp-sgd" else 0
            private = self.config.privacy.private
            if reply.examples != plan.examples or reply.steps != steps:
                raise Refusal("plan", "the node's rows or steps are not the planned ones")
            if private and (reply.q != plan.q or reply.sigma != request.sigma):
                raise Refusal("plan", "the node's q or sigma is not the planned one")
            adapter, head = self.upload_shapes(request.phase)
            check_arrays(reply.payload.adapter, adapter, "adapter")
            check_arrays(reply.payload.head, head, "head")
            check_arrays(reply.payload.once, {}, "once")
        except Refusal as refusal:
            return Failed(request.node, refusal.kind, str(refusal))
        except Exception as error:  # whatever a reply can provoke is its node's failure, not the run's
            return Failed(request.node, "malformed", f"the reply cannot be read ({type(error).__name__})")
        return reply

    def weight(self, reply: Reply) -> float:
        """p_k before normalisation: 1, or the declared rows (design rule 13)."""
        weighting = self.config.federation.weighting
        if weighting == "auto":
            weighting = "uniform" if self.config.privacy.private else "samples"
        return float(reply.examples) if weighting == "samples" else 1.0

    def _charge(self, plan: Round, phase: str, request: Request, outcome: Reply | Failed) -> None:
        """Count what the phase cost; a failure counts in full unless the node says that it charged nothing."""
        if not self.config.privacy.private or self.releases.get(phase) != "dp-sgd":
            return
        if isinstance(outcome, Failed) and outcome.uncharged:
            return
        node_plan = self.run.nodes[request.node]
        # The planned numbers: a reply with others is refused, and its node cannot make its own spending look less.
        step = Step(node_plan.q, request.sigma, node_plan.steps_per_round)
        self.run.spending.add(request.node, plan.number, phase, step)

    def _record(
        self,
        plan: Round,
        exchanges: list[Exchange],
        traffic: dict[str, dict[str, Any]],
        metrics: MetricRecord | None,
        void: bool,
        seconds: float,
    ) -> None:
        """Write the round's line and tell who watches."""
        scores = None if metrics is None else {k: _finite(v) for k, v in metrics.items()}
        record = {
            "round": plan.number,
            "phases": [e.summary() for e in exchanges],
            "train_loss": _mean([(loss, n) for loss, _, n in exchanges[-1].shown]),
            "grad_norm": _mean([(norm, n) for _, norm, n in exchanges[-1].shown]),
            "eval": scores,
            **{
                f"{way}_{what}": sum(t[way][what]["adapter"] for t in traffic.values() if way in t)
                for way in ("upload", "download")
                for what in ("numbers", "bytes")
            },
            "epsilon_max": self.run.spending.largest(),
            "seconds": round(seconds, 3),
            "void": void,
        }
        self.run.recorder.round(record, traffic)

    # --- Flower's own loop, which start() replaces ------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not called: a round has phases, and :meth:`start` makes the requests of each."""
        raise NotImplementedError("a Privet method runs by start()")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Not called: :meth:`start` checks and merges replies one at a time."""
        raise NotImplementedError("a Privet method runs by start()")

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask no node: the server scores the global model on the public test set."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        return None

    def summary(self) -> None:
        """Nothing to log: the plan is printed before the run."""


def to_record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as a Flower record (float32)."""
    return ArrayRecord({n: Array(v.detach().cpu().contiguous().numpy()) for n, v in arrays.items()})


def from_record(record: ArrayRecord) -> Arrays:
    """Undo :func:`to_record`."""
    import torch

    return {n: torch.from_numpy(a.numpy().copy()) for n, a in record.items()}


def _finite(value: Any) -> Any:
    """JSON has no infinities; a diverged loss is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(values: Sequence[tuple[float, int]]) -> float | None:
    """Weighted mean of the values that were released; None under DP, where none is."""
    known = [(v, n) for v, n in values if math.isfinite(v)]
    total = sum(n for _, n in known)
    return sum(v * n for v, n in known) / total if total else None


def _count(traffic: dict[str, dict[str, Any]], node: str, way: str, payload: Payload) -> None:
    """Add a payload to the node's traffic of this round."""
    entry = traffic.setdefault(node, {}).setdefault(way, {"numbers": {}, "bytes": {}})
    for what, counts in (("numbers", payload.numbers()), ("bytes", payload.bytes())):
        for part, amount in counts.items():
            entry[what][part] = entry[what].get(part, 0) + amount
