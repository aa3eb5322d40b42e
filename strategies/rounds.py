"""The round loop that every method shares, as a Flower ``Strategy``.

One round: for each phase, a request to every node of the round, replies taken one at a time as they come,
refused by name where they are not right, merged, and the state moved on - or the round declared void. Flower's
own loop sends one message a round and cannot resume; everything else here is Flower's.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from privet.adapters import Shapes
from privet.config import Config
from privet.errors import Refusal
from privet.plan import NodePlan
from privet.privacy.accounting import Step
from privet.privacy.spending import Spending
from privet.quantise import Decoded, decode
from privet.schedule import Round, Schedule, is_scored
from privet.wire import (
    Arrays,
    Failed,
    Payload,
    Reply,
    Request,
    Scores,
    check_arrays,
    code_hash,
    error_of,
    unpack_reply,
    unpack_scores,
)
from strategies.checkpoint import Checkpoint
from strategies.exchange import Exchange, Mailbox, Traffic
from strategies.merging import KeptMean, Merger

NEEDS_ONCE = "needs-once"
"""Kind of refusal by which a node asks for one-off material again; it comes before any charge."""

_LARGEST = 1e9  # no loss or norm that means anything is larger

EVALUATE = "evaluate"
"""Phase name of the requests that ask nodes for scores."""

Dropout = Literal["accept", "requery", "void"]
Answer = TypeVar("Answer", Reply, Scores)


class Recorder(Protocol):
    """Where the loop leaves what happened."""

    def event(self, kind: str, **fields: Any) -> None:
        """Append one live event."""
        ...

    def round(self, record: dict[str, Any], traffic: Mapping[str, Mapping[str, Any]]) -> None:
        """Append a finished round and its traffic by node."""
        ...

    def has_round(self, number: int) -> bool:
        """Whether a round's record is there already."""
        ...

    def upload(self, number: int, phase: str, node: str, payload: Payload) -> None:
        """Keep what one valid reply carried, for an audit."""
        ...

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the run's checkpoint, atomically."""
        ...


@dataclass
class Run:
    """One run: its name, who takes part when, and where its record goes.

    Attributes
    ----------
    addresses : mapping of node name to Flower node id
        Those that are connected; new in every launch, so everything that lasts is keyed by name.
    store : str
        Folder for the nodes' stores in a simulation; empty in deployment.
    resumed : Checkpoint or None
        Where to go on; None from the beginning.
    """

    id: str
    schedule: Schedule
    nodes: Mapping[str, NodePlan]
    addresses: Mapping[str, int]
    store: str
    recorder: Recorder
    spending: Spending
    resumed: Checkpoint | None = None


class RoundStrategy(Strategy):
    """The loop. Subclasses say what is sent, what is accepted and how it is merged.

    Attributes
    ----------
    round_number : int
        The round that runs, from 1.
    """

    phases: tuple[str, ...] = ("train",)
    warmup_phases: tuple[str, ...] = ("warmup",)
    releases: ClassVar[Mapping[str, str]] = {}
    dropout: Dropout = "accept"
    raw_phases: Collection[str] = ()
    public_phases: Collection[str] = ()

    def __init__(self, config: Config) -> None:
        self.config = config
        self.round_number = 0
        self._run: Run | None = None
        self._met: set[str] = set()
        self._informed: set[tuple[str, str]] = set()
        self._acknowledged: dict[str, int] = {}
        self._figures: dict[str, float] = {}

    # --- hooks -----------------------------------------------------------------------------------

    @abstractmethod
    def download(self, phase: str, state: Arrays, once: bool) -> Payload:
        """Return what a node is sent; with `once`, one-off material too."""

    @abstractmethod
    def check_upload(self, phase: str, payload: Payload) -> None:
        """Raise Refusal unless a reply carries what it should."""

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

    @abstractmethod
    def is_head(self, name: str) -> bool:
        """Whether an array belongs to the head."""

    def accepted_loss(self, phase: str, state: Arrays, earlier: KeptMean, left: Sequence[str]) -> str:
        """Return a line on what is lost where ``dropout`` is accept and nodes fell out before `phase`."""
        return ""

    def figure(self, **numbers: float) -> None:
        """Put a method's own numbers on the record of the running round; a later one of a name replaces it.

        They are public by nature: a method on the server has nothing but what it was sent.
        """
        self._figures |= {name: float(value) for name, value in numbers.items()}

    # --- the loop --------------------------------------------------------------------------------

    def bind(self, run: Run) -> None:
        """Give the strategy its run; needed once, before :meth:`start`."""
        self._run = run
        resumed = run.resumed
        self._met = set(resumed.met) if resumed else set()  # nodes that have answered
        # (phase, node) that have had the phase's one-off material
        self._informed = set(resumed.informed) if resumed else set()
        # the last round whose reply of a node is in the state
        self._acknowledged = dict(resumed.acknowledged) if resumed else {}

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

        A run that is resumed goes on after its checkpoint.

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
        result = Result(arrays=initial_arrays)
        state, first = from_record(initial_arrays), 0
        resumed, recorder = self.run.resumed, self.run.recorder
        rounds = self.run.schedule.rounds

        def conclude(plan: Round, record: dict[str, Any], traffic: Traffic, started: float) -> None:
            """Score the round where that is due, then record it."""
            if self._is_scored(plan):
                if evaluate_fn is not None:
                    metrics = self._score(evaluate_fn, plan.number, state)
                    if metrics is not None:
                        result.evaluate_metrics_serverapp[plan.number] = metrics
                        record["eval"] = {k: _finite(v) for k, v in metrics.items()}
                if self.config.scores_on_clients:
                    record["eval_clients"] = self._ask_scores(grid, plan, state, traffic, timeout)
            record["seconds"] = round(record["seconds"] + time.monotonic() - started, 3)
            recorder.round(record, traffic.nodes)

        if resumed is not None:
            state, first = resumed.state, resumed.round
            if not recorder.has_round(first):
                self.round_number = first
                traffic = Traffic(resumed.traffic)
                conclude(rounds[first - 1], dict(resumed.record), traffic, time.monotonic())
        for plan in rounds[first:]:
            if self.run.schedule.warmup_rounds and plan.number == self.run.schedule.warmup_rounds + 1:
                state = self.finish_warmup(state)
            self.round_number = plan.number
            started = time.monotonic()
            next_state, exchanges, traffic = self._round(grid, plan, state, timeout)
            void = next_state is None
            if next_state is not None:
                state = next_state
                self._acknowledged |= dict.fromkeys(exchanges[-1].replied, plan.number)
            record = self._record(plan, exchanges, traffic, void, time.monotonic() - started)
            recorder.checkpoint(
                Checkpoint(
                    round=plan.number,
                    state=state,
                    met=sorted(self._met),
                    informed=sorted(self._informed),
                    acknowledged=dict(sorted(self._acknowledged.items())),
                    spent=self.run.spending.to_json(),
                    record=record,
                    traffic=traffic.nodes,
                )
            )
            conclude(plan, record, traffic, time.monotonic())
        result.arrays = to_record(state)
        return result

    def _is_scored(self, plan: Round) -> bool:
        """Whether a round is followed by a score."""
        return is_scored(self.config, self.run.schedule.warmup_rounds, plan.number)

    def _round(
        self, grid: Grid, plan: Round, state: Arrays, timeout: float
    ) -> tuple[Arrays | None, list[Exchange], Traffic]:
        """Run all phases of a round; the state is None where the round is void."""
        self._figures = {}
        nodes: Sequence[str] = plan.nodes
        exchanges: list[Exchange] = []
        traffic = Traffic()
        earlier: tuple[str, Arrays, Merger] | None = None
        enough = self.config.federation.min_replies
        for phase in plan.phases:
            exchange, merger = self._exchange(grid, plan, phase, nodes, state, traffic, timeout)
            exchanges.append(exchange)
            left = sorted(exchange.replied)
            if len(left) < enough:
                return None, exchanges, traffic
            if earlier is not None and len(left) < len(nodes):
                # What this phase was sent was made with the replies of nodes that are gone by now.
                if self.dropout == "void":
                    return None, exchanges, traffic
                name, before, kept = earlier
                assert isinstance(kept, KeptMean), "a method with several phases keeps the earlier replies"
                if self.dropout == "accept":
                    self._note(self.accepted_loss(phase, state, kept, left), plan)
                else:
                    state = self.update(name, before, kept.only(left).mean())
                    again = self._exchange(grid, plan, phase, left, state, traffic, timeout, "requery")
                    exchange, merger = again
                    exchanges.append(exchange)
                    if len(exchange.replied) < len(left):
                        return None, exchanges, traffic
            earlier = phase, state, merger
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
        traffic: Traffic,
        timeout: float,
        way: str = "",
    ) -> tuple[Exchange, Merger]:
        """Send one phase to `nodes` and merge the valid replies as they come.

        With `way`, all traffic counts as that and not as download and upload.
        """
        recorder = self.run.recorder
        merger = self.merger(phase, state)
        exchange = Exchange(phase, len(nodes))
        recorder.event(
            "phase", round=plan.number, of=len(self.run.schedule.rounds), phase=phase, sent=len(nodes)
        )
        started = time.monotonic()
        resent: set[str] = set()

        def request(node: str, once: bool, way: str) -> Request:
            made = self._request(plan, phase, node, self.download(phase, state, once))
            traffic.add(node, way, made.payload)
            return made

        box = Mailbox(grid, self.run.addresses, timeout, MessageType.TRAIN)
        box.send(request(n, (phase, n) not in self._informed, way or "download") for n in nodes)
        for asked, answer in box.answers():
            outcome = answer if isinstance(answer, Failed) else self._judge(asked, answer)
            if isinstance(outcome, Failed) and outcome.kind == NEEDS_ONCE and asked.node not in resent:
                resent.add(asked.node)
                box.send([request(asked.node, True, "requery")])
                continue
            self._charge(plan, phase, asked, outcome)
            if isinstance(outcome, Failed):
                exchange.failed.append(Failed(asked.node, outcome.kind, outcome.reason))
            else:
                self._take(exchange, merger, asked, outcome)
                traffic.add(asked.node, way or "upload", outcome.payload)
            recorder.event(
                "reply",
                round=plan.number,
                phase=phase,
                node=asked.node,
                done=len(exchange.replied) + len(exchange.failed),
                sent=exchange.sent,
                ok=isinstance(outcome, Reply),
                reason=outcome.reason if isinstance(outcome, Failed) else None,
            )
        exchange.seconds = time.monotonic() - started
        return exchange, merger

    def _take(self, exchange: Exchange, merger: Merger, asked: Request, reply: Reply) -> None:
        """Merge a valid reply."""
        exchange.replied.append(asked.node)
        if isinstance(reply.payload, Decoded):
            exchange.rounding.append(reply.payload.error)
        exchange.shown.append((reply.train_loss, reply.grad_norm, reply.examples))
        if reply.flags:
            exchange.flags[asked.node] = sorted(reply.flags)
        if "store-lost" in reply.flags:
            self.run.recorder.event("note", text=f"{asked.node} lost its store and starts afresh")
        self._met.add(asked.node)
        self._informed.add((asked.phase, asked.node))
        merger.add(asked.node, reply.payload, self.weight(reply))
        if self.config.keep_uploads:
            self.run.recorder.upload(asked.round, asked.phase, asked.node, reply.payload)

    def _request(self, plan: Round, phase: str, node: str, payload: Payload) -> Request:
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
            acknowledged=self._acknowledged.get(node, 0),
            payload=payload,
        )

    # --- judging ---------------------------------------------------------------------------------

    def _judge(self, request: Request, message: Message) -> Reply | Failed:
        """Return the reply, or why it is refused (design section 3)."""
        return _judged(request, message, self._unpack, self._check_reply)

    def _unpack(self, content: RecordDict) -> Reply:
        """Read a reply, and its arrays where they came in 8 bits."""
        reply = unpack_reply(content)
        if self.config.federation.upload == "int8":
            reply = dataclasses.replace(reply, payload=decode(reply.payload))
        return reply

    def _check_reply(self, request: Request, reply: Reply) -> None:
        """Raise Refusal unless the reply is what the plan and the method expect."""
        plan = self.run.nodes[request.node]
        if reply.examples < 1:
            raise Refusal("zero-rows", "the node trained on no rows")
        steps = plan.steps_per_round if self.releases.get(request.phase) == "dp-sgd" else 0
        private = self.config.privacy.private
        self._check_shown(reply)
        if reply.examples != plan.examples or reply.steps != steps:
            raise Refusal("plan", "the node's rows or steps are not the planned ones")
        if private and (reply.q != plan.q or reply.sigma != request.sigma):
            raise Refusal("plan", "the node's q or sigma is not the planned one")
        self.check_upload(request.phase, reply.payload)

    def _check_shown(self, reply: Reply) -> None:
        """Refuse diagnostics that must not leave a node (design rule 7), or that no training can have."""
        privacy = self.config.privacy
        shown = [v for v in (reply.train_loss, reply.grad_norm) if not math.isnan(v)]
        if shown and privacy.private and not privacy.diagnostics:
            raise Refusal("whitelist", "the reply shows a loss or a norm, which stays on the node under DP")
        if any(abs(v) > _LARGEST for v in shown):
            raise Refusal("malformed", "the reply shows a loss or a norm that cannot be")

    def weight(self, reply: Reply) -> float:
        """p_k before normalisation: 1, or the declared rows (design rule 13)."""
        weighting = self.config.federation.weighting
        if weighting == "auto":
            weighting = "uniform" if self.config.privacy.private else "samples"
        return float(reply.examples) if weighting == "samples" else 1.0

    def _charge(self, plan: Round, phase: str, request: Request, outcome: Reply | Failed) -> None:
        """Count what the phase cost; a failure counts in full unless the node says that it charged nothing."""
        if (
            not self.config.privacy.private
            or self.releases.get(phase) != "dp-sgd"
            or phase in (*self.raw_phases, *self.public_phases)
        ):
            return
        # A node that was asked before the run was stopped may have been charged for that try.
        again = self.run.resumed is not None and plan.number == self.run.resumed.round + 1
        if isinstance(outcome, Failed) and outcome.uncharged and not again:
            return
        node_plan = self.run.nodes[request.node]
        # The planned numbers: a reply with others is refused, and its node cannot make its own spending look less.
        step = Step(node_plan.q, request.sigma, node_plan.steps_per_round)
        self.run.spending.add(request.node, plan.number, phase, step)

    # --- scores ----------------------------------------------------------------------------------

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

    def scored_payload(self, values: Arrays) -> Payload:
        """Return the server's model as nodes are sent it to score."""
        return Payload(
            adapter={n: v for n, v in values.items() if not self.is_head(n)},
            head={n: v for n, v in values.items() if self.is_head(n)},
        )

    def _ask_scores(
        self, grid: Grid, plan: Round, state: Arrays, traffic: Traffic, timeout: float
    ) -> dict[str, Any]:
        """Ask every node to score the model, and its own where it has one; return means and spread.

        A node that cannot is named and costs the run nothing else.
        """
        payload = self.scored_payload(self.model_values(state))
        box = Mailbox(grid, self.run.addresses, timeout, MessageType.EVALUATE)
        for node in self.run.nodes:
            traffic.add(node, EVALUATE, payload)
        box.send(self._request(plan, EVALUATE, node, payload) for node in sorted(self.run.nodes))
        scores: dict[str, dict[str, float]] = {}
        failed: list[dict[str, str]] = []
        for asked, answer in box.answers():
            outcome = answer if isinstance(answer, Failed) else _judged(asked, answer, unpack_scores)
            if isinstance(outcome, Failed):
                failed.append({"node": asked.node, "reason": f"{outcome.kind}: {outcome.reason}"})
            else:
                scores[asked.node] = outcome.values
        return {
            "rows": "public" if self.config.privacy.private else "held-out",
            **{model: spread(scores, model) for model in ("global", "personal")},
            "nodes": dict(sorted(scores.items())),
            "failed": sorted(failed, key=lambda f: f["node"]),
        }

    # --- records ---------------------------------------------------------------------------------

    def _record(
        self, plan: Round, exchanges: list[Exchange], traffic: Traffic, void: bool, seconds: float
    ) -> dict[str, Any]:
        """Return the round's line, still without a score."""
        trained = [e for e in exchanges if self.releases.get(e.phase) == "dp-sgd"]
        shown = trained[-1].shown if trained else []
        rounding = [error for e in exchanges for error in e.rounding]
        return {
            "round": plan.number,
            "phases": [e.summary() for e in exchanges],
            "train_loss": _mean([(loss, n) for loss, _, n in shown]),
            "grad_norm": _mean([(norm, n) for _, norm, n in shown]),
            "eval": None,
            "eval_clients": None,
            "upload_error_bound": _finite(statistics.fmean(rounding)) if rounding else None,
            "method": {name: _finite(value) for name, value in sorted(self._figures.items())},
            **{
                f"{way}_{what}": traffic.total(way, what)
                for way in ("upload", "download")
                for what in ("numbers", "bytes")
            },
            "epsilon_max": self.run.spending.largest(),
            "seconds": round(seconds, 3),
            "void": void,
        }

    def _note(self, text: str, plan: Round) -> None:
        if text:
            self.run.recorder.event("note", text=f"round {plan.number}: {text}")

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
        """Not called: :meth:`start` asks the nodes for scores itself."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        return None

    def summary(self) -> None:
        """Nothing to log: the plan is printed before the run."""


def spread(scores: Mapping[str, Mapping[str, float]], model: str) -> dict[str, float] | None:
    """Return mean and standard deviation over nodes of every metric of one model; None without any.

    Nodes count alike, as the papers' mean over clients' models does; the deviation is the sample's.
    """
    out: dict[str, float] = {}
    names = sorted({n for values in scores.values() for n in values if n.startswith(f"{model}.")})
    for name in names:
        each = [values[name] for values in scores.values() if name in values]
        short = name.removeprefix(f"{model}.")
        out[short] = statistics.fmean(each)
        out[f"{short}_std"] = statistics.stdev(each) if len(each) > 1 else 0.0
    if not names:
        return None
    return {**out, "nodes": sum(any(n.startswith(f"{model}.") for n in v) for v in scores.values())}


def to_record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as a Flower record (float32)."""
    return ArrayRecord({n: Array(v.detach().cpu().contiguous().numpy()) for n, v in arrays.items()})


def from_record(record: ArrayRecord) -> Arrays:
    """Undo :func:`to_record`."""
    return {n: torch.from_numpy(a.numpy().copy()) for n, a in record.items()}


def check_payload(payload: Payload, adapter: Shapes, head: Shapes) -> None:
    """Refuse a payload that is not exactly these arrays, without one-off material."""
    check_arrays(payload.adapter, adapter, "adapter")
    check_arrays(payload.head, head, "head")
    check_arrays(payload.once, {}, "once")


def _judged(
    request: Request,
    message: Message,
    unpack: Callable[[RecordDict], Answer],
    check: Callable[[Request, Answer], None] = lambda request, answer: None,
) -> Answer | Failed:
    """Return what a node answered, or why its answer is refused."""
    failed = error_of(message)
    if failed is not None:
        return failed
    try:
        answer = unpack(message.content)
        _check_origin(request, answer)
        check(request, answer)
    except Refusal as refusal:
        return Failed(request.node, refusal.kind, str(refusal))
    except Exception as error:  # whatever an answer can provoke is its node's failure, not the run's
        return Failed(request.node, "malformed", f"the reply cannot be read ({type(error).__name__})")
    return answer


def _check_origin(request: Request, answer: Reply | Scores) -> None:
    """Refuse an answer to something else, or by other code or another configuration."""
    if answer.node != request.node or answer.request != request.fingerprint:
        raise Refusal("mismatch", "the reply answers another request")
    if answer.config_hash != request.config_hash:
        raise Refusal("config-hash", "the node has another configuration")
    if answer.code_hash != request.code_hash:
        raise Refusal("code-hash", "the node runs other code")


def _finite(value: Any) -> Any:
    """JSON has no infinities; a diverged loss is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mean(values: Sequence[tuple[float, int]]) -> float | None:
    """Weighted mean of the values that were released; None under DP, where none is."""
    known = [(v, n) for v, n in values if math.isfinite(v)]
    total = sum(n for _, n in known)
    return sum(v * n for v, n in known) / total if total else None
