"""A node's scores of the server's model and of its own: on held-out rows, under DP on public rows only."""

from __future__ import annotations

import torch

from client_app.memory import KeptArrays, run_name
from client_app.node_config import NodeConfig
from client_app.store import NodeStore
from privet.adapters import adapter_spec, load_model, load_tokenizer
from privet.config import Config
from privet.data.collate import padding_id
from privet.data.holdout import split_holdout
from privet.data.tasks import Examples, load_node_file, load_test
from privet.devices import pick_device, pick_dtype
from privet.errors import Refusal
from privet.kinds.catalogue import kind_of
from privet.wire import Arrays, Request, Scores, check_arrays
from strategies.base import load_method

_BATCH = 32


def score_models(node: NodeConfig, request: Request, config: Config, store: NodeStore) -> Scores:
    """Score the received model as ``global.*`` and the node's own, where it has one, as ``personal.*``.

    Raises
    ------
    Refusal
        Where a received array is not the model's, or there are no rows that may be used.
    """
    spec = adapter_spec(config)
    received = request.payload
    for part, arrays, known in (
        ("adapter", received.adapter, {**spec.lora, **spec.deltas}),
        ("head", received.head, spec.head),
        ("once", received.once, {}),
    ):
        check_arrays(arrays, {n: known[n] for n in arrays if n in known}, part)
    examples = scored_rows(node, config)
    if not len(examples):
        raise Refusal("zero-rows", "this node has no rows to score on")

    train = config.train
    device = pick_device(train.device)
    torch.set_num_threads(train.threads)
    model = load_model(config, device=device, dtype=pick_dtype(train.dtype, device))
    tokenizer = load_tokenizer(config.model)
    kind = kind_of(config)
    rows = kind.tokenise(tokenizer, examples, config.model.max_length)
    pad_id = padding_id(tokenizer)

    kept = KeptArrays(store, request.run, request.round, request.fingerprint[:16])
    models: dict[str, Arrays | None] = {
        "global": None if config.task.head == "local" else {**received.adapter, **received.head},
        "personal": load_method(config, spec).personal(received, kept),
    }
    values: dict[str, float] = {}
    for name, changed in models.items():
        if changed is not None:
            model.load(changed)
            values |= {f"{name}.{key}": v for key, v in kind.score(model, rows, pad_id, _BATCH).items()}
    return Scores(
        node=node.name,
        request=request.fingerprint,
        config_hash=request.config_hash,
        code_hash=request.code_hash,
        examples=len(rows),
        values=values,
    )


def scored_rows(node: NodeConfig, config: Config) -> Examples:
    """Return the rows to score on.

    Without DP they are the held-out share of the node's own. A score on private rows is a release of its own, so
    under DP only public rows will do: a simulation's public test set, on a real node the file that its owner
    calls public. A path that the server names would let it call any file of the node public.
    """
    if not config.privacy.private:
        return split_holdout(config, node.examples(config))[1]
    return public_rows(node, config, "under DP this node scores on public rows only")


def public_rows(node: NodeConfig, config: Config, why: str) -> Examples:
    """Return a simulation's public test set, or the file that a real node's owner calls public."""
    if node.simulated:
        return load_test(config.task)
    if node.public_path is None:
        raise Refusal("no-public-rows", f"{why}: it needs public-path")
    return load_node_file(config.task, node.public_path, node.own)


def refuse_foreign_run(store: NodeStore, request: Request) -> None:
    """Refuse to score what was kept under another configuration or other code of the same run."""
    frozen = store.load_json(run_name(request.run))
    if frozen is None:
        return
    if frozen["config"] != request.config_hash or frozen["code"] != request.code_hash:
        raise Refusal("changed", "the configuration or the code changed during the run")
