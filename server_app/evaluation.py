"""Scoring the global model on the task's public test set, on the server."""

from __future__ import annotations

from flwr.app import ArrayRecord, MetricRecord

from privet.adapters import load_model, load_tokenizer
from privet.answers import Answers
from privet.config import Config
from privet.data.collate import padding_id
from privet.data.tasks import load_test
from privet.devices import all_cores, pick_device, pick_dtype
from privet.kinds.catalogue import kind_of
from privet.wire import Arrays
from strategies.rounds import from_record


class Evaluator:
    """Scores model values on the public test rows.

    Parameters
    ----------
    config : Config
        The run's configuration.

    Raises
    ------
    PrivetError
        If the test set, the model or the tokenizer cannot be loaded.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        device = pick_device(config.train.device)
        self.model = load_model(config, device=device, dtype=pick_dtype(config.train.dtype, device))
        tokenizer = load_tokenizer(config.model)
        self._pad_id = padding_id(tokenizer)
        self._tokenizer = tokenizer
        self._kind = kind_of(config)
        self._kind.check()
        self._examples = load_test(config.task)
        self.rows = self._kind.tokenise(tokenizer, self._examples, config.model.max_length)

    def __call__(self, round_number: int, arrays: ArrayRecord) -> MetricRecord:
        """Return the scores of a model given by its changed values; an ``evaluate_fn``."""
        last = round_number == self._config.federation.rounds
        return MetricRecord({**self.scores(from_record(arrays), Answers() if last else None)})

    def scores(self, values: Arrays, answers: Answers | None) -> dict[str, int | float]:
        """Return the scores of a model given by its changed values.

        Parameters
        ----------
        values : dict of str to torch.Tensor
            What differs from the base model's initial values.
        answers : Answers or None
            What this very model has written before, for scores that take longer; None: without those.
        """
        self.model.load(values)
        with all_cores():  # clients are idle while the server scores
            scores = self._kind.score(self.model, self.rows, self._pad_id, 32)
            if answers is not None:
                most = self._config.model.max_length
                scores |= self._kind.judge(self.model, self._tokenizer, self._examples, most, answers)
        return {**scores, "examples": len(self.rows)}
