"""Experiment trackers: a run's numbers in TensorBoard, Weights & Biases or MLflow (``tracking=``).

A tracker is told what the run directory records, and nothing more: what a node may not release is not in a round's
record, so no tracker sees it. The packages are optional and imported late. A missing one is refused before the run
starts; a tracker that fails afterwards is noted and switched off, and never costs the run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from privet.config import Config
from privet.errors import ConfigError

Settings = dict[str, bool | int | float | str]


class Tracker(Protocol):
    """Where a run's numbers go; made once, when the run begins.

    Attributes
    ----------
    package : str
        What must be installed; the extra of Privet that brings it has the tracker's name.
    """

    package: ClassVar[str]

    def __init__(self, directory: Path, name: str, settings: Settings) -> None: ...

    def round(self, number: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a finished round."""
        ...

    def end(self, status: str, values: Mapping[str, float]) -> None:
        """Log the final numbers and close; `status` is ``completed`` or ``failed``."""
        ...


class TensorBoard:
    """Event files in ``RUN/tensorboard/``; look at them with ``tensorboard --logdir runs``."""

    package: ClassVar[str] = "tensorboard"

    def __init__(self, directory: Path, name: str, settings: Settings) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._settings = settings
        self._writer = SummaryWriter(str(directory / "tensorboard"))

    def round(self, number: int, values: Mapping[str, float]) -> None:
        """Add a point to every curve, and flush: a killed run leaves its curves."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, number)
        self._writer.flush()

    def end(self, status: str, values: Mapping[str, float]) -> None:
        """Add the settings and final numbers, for TensorBoard's table of runs."""
        settings = {**self._settings, "status": status}
        final = {f"final/{key}": value for key, value in values.items()}
        # The name "." keeps them in the run's own folder.
        self._writer.add_hparams(settings, final, run_name=".")
        self._writer.close()


class WandB:
    """Weights & Biases; ``WANDB_MODE=offline`` keeps everything below ``RUN/wandb/``.

    The project is ``privet`` unless ``WANDB_PROJECT`` names another.
    """

    package: ClassVar[str] = "wandb"

    def __init__(self, directory: Path, name: str, settings: Settings) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "privet")
        self._run = wandb.init(project=project, name=name, dir=str(directory), config=settings)

    def round(self, number: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        self._run.log(dict(values), step=number)

    def end(self, status: str, values: Mapping[str, float]) -> None:
        """Fill the summary and finish."""
        self._run.summary.update({"status": status, **{f"final/{k}": v for k, v in values.items()}})
        self._run.finish(exit_code=int(status != "completed"))


class MLflow:
    """MLflow; the file ``mlflow.db`` beside the run directory unless ``MLFLOW_TRACKING_URI`` names a store.

    Look at it with ``mlflow ui --backend-store-uri sqlite:///runs/mlflow.db``.

    The experiment is ``privet`` unless ``MLFLOW_EXPERIMENT_NAME`` names another.
    """

    package: ClassVar[str] = "mlflow"

    def __init__(self, directory: Path, name: str, settings: Settings) -> None:
        from mlflow import MlflowClient

        store = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{directory.parent / 'mlflow.db'}"
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "privet")
        self._client = MlflowClient(tracking_uri=store)
        found = self._client.get_experiment_by_name(experiment)
        identifier = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = self._client.create_run(identifier, run_name=name).info.run_id
        for key, value in settings.items():
            self._client.log_param(self._id, key, value)

    def round(self, number: int, values: Mapping[str, float]) -> None:
        """Log one step."""
        for key, value in values.items():
            self._client.log_metric(self._id, key, value, step=number)

    def end(self, status: str, values: Mapping[str, float]) -> None:
        """Log the final numbers and the status."""
        for key, value in values.items():
            self._client.log_metric(self._id, f"final/{key}", value)
        self._client.set_terminated(self._id, "FINISHED" if status == "completed" else "FAILED")


TRACKERS: Mapping[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


class Tracking:
    """A run's tracker, or none, behind a guard: what fails here is noted and the run goes on.

    Parameters
    ----------
    note : function of a text
        Leaves a remark in the run's record.
    """

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self._name = "none"
        self._tracker: Tracker | None = None

    def begin(self, config: Config, directory: Path, run_id: str) -> None:
        """Start the tracker that the configuration names.

        Raises
        ------
        ConfigError
            If its package is not installed.
        """
        check_tracking(config)
        kind = TRACKERS.get(config.tracking)
        if kind is None:
            return
        self._name = config.tracking
        name = f"{directory.name} ({run_id})"

        def start() -> None:
            self._tracker = kind(directory, name, flat_settings(config))

        self._guarded("start", start)

    def round(self, record: Mapping[str, Any], totals: Mapping[str, int]) -> None:
        """Pass a finished round on; `totals` are the bytes of all rounds so far by way."""
        if self._tracker is not None:
            tracker = self._tracker
            values = round_values(record) | {f"bytes_so_far/{way}": float(n) for way, n in totals.items()}
            self._guarded(f"round {record['round']}", lambda: tracker.round(int(record["round"]), values))

    def end(self, summary: Mapping[str, Any]) -> None:
        """Pass the summary on and close the tracker."""
        if self._tracker is not None:
            tracker = self._tracker
            self._guarded("end", lambda: tracker.end(str(summary["status"]), summary_values(summary)))
            self._tracker = None

    def _guarded(self, where: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._tracker = None
            text = " ".join(str(error).split())[:200]
            self._note(
                f"tracking={self._name} failed at {where} and is off now: {type(error).__name__}: {text}"
            )


def check_tracking(config: Config) -> None:
    """Raise ConfigError where the chosen tracker's package is not installed."""
    kind = TRACKERS.get(config.tracking)
    if kind is not None and find_spec(kind.package) is None:
        raise ConfigError(
            f"tracking = {config.tracking} needs a package that is not installed: "
            f"pip install 'privet[{config.tracking}]'"
        )


def round_values(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a round's numbers by name; what is null, a released loss under DP above all, is left out."""
    values = {
        "train/loss": record.get("train_loss"),
        "privacy/epsilon_max": record.get("epsilon_max"),
        "bytes/upload": record.get("upload_bytes"),
        "bytes/download": record.get("download_bytes"),
        "round/seconds": record.get("seconds"),
        "round/void": int(bool(record.get("void"))),
        **{f"eval/{key}": value for key, value in (record.get("eval") or {}).items()},
        **_client_values(record.get("eval_clients")),
        **{f"method/{key}": value for key, value in (record.get("method") or {}).items()},
    }
    return dict(_numbers(values))


def summary_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the final numbers of a run by name."""
    keys = ("epsilon", "upload_numbers", "download_numbers", "seconds", "rounds")
    values = {
        **{key: summary.get(key) for key in keys},
        "void_rounds": len(summary.get("void_rounds") or ()),
        "failures": len(summary.get("failures") or ()),
        **{f"eval/{key}": value for key, value in (summary.get("metrics") or {}).items()},
        **_client_values(summary.get("client_metrics")),
    }
    return dict(_numbers(values))


def flat_settings(config: Config) -> Settings:
    """Return every setting by its dotted key, with the configuration's hash."""
    return {**dict(_leaves(config.to_dict(), "")), "config_hash": config.hash}


def _client_values(scores: Any) -> dict[str, Any]:
    """Mean scores over the clients: of the global model and of the personal ones."""
    groups = {kind: (scores or {}).get(kind) or {} for kind in ("global", "personal")}
    return {f"eval_clients/{kind}/{key}": v for kind, by_name in groups.items() for key, v in by_name.items()}


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, (int, float)) and math.isfinite(value):
            yield key, float(value)


def _leaves(node: Any, path: str) -> Iterator[tuple[str, bool | int | float | str]]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, node if isinstance(node, (bool, int, float, str)) else str(node)
