"""``privet eval RUN --harness gsm8k,mmlu``: EleutherAI's lm-evaluation-harness on a finished run's final model.

Tasks are the harness's own, by its names, or definitions in a folder of yours. Every answer of the model is kept in the
run directory as soon as it is there, so a command that was broken off goes on where it stopped.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from privet.adapters import load_model, load_tokenizer
from privet.answers import Answers
from privet.atomic import write_atomic
from privet.config import unknown
from privet.devices import all_cores, pick_device, pick_dtype
from privet.errors import ConfigError, PrivetError
from server_app.rescore import FOLDER
from server_app.saved import final_model

_AT_ONCE = 16  # batches between two writes of answers


@dataclass(frozen=True)
class Settings:
    """What the harness is asked.

    Attributes
    ----------
    tasks : tuple of str
        Names of tasks or groups of tasks.
    folder : Path or None
        Where further task definitions lie.
    shots : int or None
        Worked examples before every question; None: the task's own number.
    limit : int or None
        First questions of every task only; the score is then no benchmark's.
    batch : int
        Questions computed at once.
    chat : bool
        Whether questions are written with the tokenizer's chat template.
    run_code : bool
        Whether programs that the model writes may run on this machine, as HumanEval does.
    """

    tasks: tuple[str, ...]
    folder: Path | None = None
    shots: int | None = None
    limit: int | None = None
    batch: int = 8
    chat: bool = False
    run_code: bool = False

    def __post_init__(self) -> None:
        if not self.tasks or not all(self.tasks):
            raise PrivetError("--harness needs names of tasks: --harness gsm8k,mmlu")
        for option, number, least in (
            ("shots", self.shots, 0),
            ("limit", self.limit, 1),
            ("batch", self.batch, 1),
        ):
            if number is not None and number < least:
                raise PrivetError(f"--{option} {number} is not allowed: at least {least}")
        if self.folder is not None and not self.folder.is_dir():
            raise PrivetError(f"--harness-tasks {self.folder} is no folder")


@dataclass(frozen=True)
class Benchmarked:
    """Scores of a task and of its parts, by their names, and the file that has them."""

    task: str
    scores: dict[str, dict[str, float]]
    file: Path


def benchmark(run_dir: Path, settings: Settings) -> Iterator[Benchmarked]:
    """Score a completed run's final model task by task, and write ``eval/harness-TASK.json`` for each.

    Parameters
    ----------
    run_dir : Path
        A completed run of a language model.
    settings : Settings
        Tasks, and how they are asked.

    Raises
    ------
    ConfigError
        If the harness is not installed, or a task is not known.
    PrivetError
        If the run is not complete, its model writes no text, or a task's data cannot be loaded.
    """
    config, _, values = final_model(run_dir)
    if not config.task.generates or config.task.sees:
        raise PrivetError(f"{run_dir} trained a {config.task.kind} model: the harness asks language models")
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("--harness needs the package lm-eval: pip install 'privet[eval]'")
    _quiet()
    from lm_eval import simple_evaluate

    manager = _definitions(settings)
    device = pick_device(config.train.device)
    model = load_model(config, device=device, dtype=pick_dtype(config.train.dtype, device))
    model.load(values)
    answering = _answering(
        model.module.backbone, load_tokenizer(config.model), settings.batch, run_dir / FOLDER
    )
    for name in settings.tasks:
        with _refusals(name, settings), all_cores():
            found: dict[str, Any] = simple_evaluate(
                model=answering(name),
                tasks=[name],
                num_fewshot=settings.shots,
                limit=settings.limit,
                task_manager=manager,
                apply_chat_template=settings.chat,
                confirm_run_unsafe_code=settings.run_code,
                log_samples=False,
            )
        yield _saved(run_dir, name, settings, found)


def _definitions(settings: Settings) -> Any:
    """Return the harness's task manager; its own thousands of tasks are read where the folder alone will not do."""
    from lm_eval.tasks import TaskManager

    folder = None if settings.folder is None else str(settings.folder.absolute())
    for alone in (True, False) if folder else (False,):
        manager = TaskManager(include_path=folder, include_defaults=not alone)
        if set(settings.tasks) <= set(manager.all_tasks):
            return manager
    name = next(name for name in settings.tasks if name not in manager.all_tasks)
    raise ConfigError(unknown("task of the harness", name, manager.all_tasks))


def _saved(run_dir: Path, name: str, settings: Settings, found: dict[str, Any]) -> Benchmarked:
    scores = {
        part: {_plain(key): float(v) for key, v in values.items() if isinstance(v, (int, float))}
        for part, values in {**found["results"], **found.get("groups", {})}.items()
    }
    asked = {key: value for key, value in asdict(settings).items() if key not in ("tasks", "folder", "batch")}
    record = {
        "task": name,
        "scores": scores,
        "questions": {part: n["effective"] for part, n in found["n-samples"].items()},
        "shots": found["n-shot"],
        "versions": found["versions"],
        **{key: value for key, value in asked.items() if key != "shots"},
        "lm_eval": importlib.metadata.version("lm_eval"),
    }
    file = run_dir / FOLDER / f"harness-{name}.json"
    file.parent.mkdir(exist_ok=True)
    write_atomic(file, (json.dumps(record, indent=2) + "\n").encode())
    return Benchmarked(name, scores, file)


def _plain(key: str) -> str:
    """Return the harness's ``measure,filter`` without the filter that changes nothing."""
    return key.removesuffix(",none")


@contextmanager
def _refusals(name: str, settings: Settings) -> Iterator[None]:
    """Turn what the harness raises into one line."""
    try:
        with _code_allowed(settings.run_code):
            yield
    except PrivetError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        if "unsafe" in text.lower() and not settings.run_code:
            raise PrivetError(
                f"{name} runs programs that the model writes: --run-code allows that, in a machine that nobody misses"
            ) from None
        raise PrivetError(f"{name} could not be scored: {type(error).__name__}: {text}") from None


@contextmanager
def _code_allowed(yes: bool) -> Iterator[None]:
    """Tell the measure that runs code, which asks for a word of its own."""
    key = "HF_ALLOW_CODE_EVAL"
    before = os.environ.get(key)
    if yes:
        os.environ[key] = "1"
    try:
        yield
    finally:
        if yes and before is None:
            del os.environ[key]


def _quiet() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lm_eval", "lm-eval", "datasets", "evaluate", "httpx"):
        logging.getLogger(name).setLevel(logging.ERROR)


# --- the harness's model -----------------------------------------------------------------------------


def _answering(backbone: Any, tokenizer: Any, batch: int, folder: Path) -> Callable[[str], Any]:
    """Return what makes the harness's model of this one, with the answers of the task that is named."""
    from lm_eval.models.huggingface import HFLM

    class KeptHFLM(HFLM):
        """The harness's own model, which never answers twice."""

        def __init__(self, answers: Answers) -> None:
            super().__init__(pretrained=backbone, tokenizer=tokenizer, batch_size=batch)
            self._answers = answers

        def _kept(self, kind: str, requests: list[Any]) -> list[Any]:
            own = getattr(super(), kind)
            return self._answers.ask(
                [[kind, *request.args] for request in requests],
                lambda places: list(own([requests[i] for i in places], disable_tqdm=True)),
                at_once=batch * _AT_ONCE,
                what=kind.replace("_", " "),
            )

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return self._kept("generate_until", requests)

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            found = self._kept("loglikelihood", requests)
            return [(float(value), bool(greedy)) for value, greedy in found]

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return self._kept("loglikelihood_rolling", requests)

    return lambda name: KeptHFLM(Answers(folder / f"harness-{name}.answers.jsonl"))
