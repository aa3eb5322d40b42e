"""Every method with its messages, what it leaves on a node, and its paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from privet.adapters import adapter_spec
from privet.config import compose, options
from privet.errors import ConfigError
from server_app.plan import round_numbers
from strategies.base import load_method


@dataclass(frozen=True)
class Entry:
    """One method.

    Attributes
    ----------
    messages : tuple of str
        Message exchanges of a training round; those of a warm-up round come first, in brackets.
    upload, download : int
        Adapter numbers of one client and round, the head apart.
    trained : int
        Numbers in the vector that is clipped and noised, head included.
    stays : str
        What of the training stays on a node from round to round.
    paper : str
        Where the method is from.
    refused : str
        Why the method cannot run with these settings; empty where it can.
    """

    name: str
    messages: tuple[str, ...] = ()
    upload: int = 0
    download: int = 0
    trained: int = 0
    stays: str = ""
    paper: str = ""
    refused: str = ""


def entry(name: str, overrides: Sequence[str]) -> Entry:
    """Return one method; raises ConfigError where it cannot run with these settings."""
    config = compose([*overrides, f"method={name}"])
    method = load_method(config, adapter_spec(config))
    upload, download = round_numbers(method)
    warmup = tuple(f"({p})" for p in method.warmup_phases) if method.warmup_rounds else ()
    messages = (*warmup, *method.phases)
    return Entry(name, messages, upload, download, method.trained_numbers, method.stays, method.paper)


def catalogue(overrides: Sequence[str]) -> list[Entry]:
    """Return all methods, with numbers for the model and the settings given.

    Raises
    ------
    ConfigError
        If the settings can work with no method.
    """
    entries = []
    for name in options("method"):
        try:
            entries.append(entry(name, overrides))
        except ConfigError as error:
            entries.append(Entry(name, refused=str(error)))
    if all(e.refused for e in entries):
        raise ConfigError(entries[0].refused)
    return entries
