"""Errors that a person or a peer is meant to read: always one clear line."""

from __future__ import annotations


class PrivetError(Exception):
    """Base of every error that Privet raises on purpose.

    Its text is one line, names the wrong value and says what is allowed. It never contains
    anything read from a data row, so it may be shown and logged anywhere.
    """


class ConfigError(PrivetError):
    """A setting is missing, misspelt, of the wrong type or out of range."""


class DataError(PrivetError):
    """A data file is missing, empty or does not have the shape that the task declares."""


class Refusal(PrivetError):  # noqa: N818 - a refusal is an answer, not an error
    """A node or the server declines a request; only `kind` and this text cross the wire.

    Parameters
    ----------
    kind : str
        Short machine-readable reason, for example ``"budget"`` or ``"config-hash"``.
    message : str
        One line without any content of the data.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StoreError(PrivetError):
    """A node's store is damaged, torn, locked by another process or from another node."""
