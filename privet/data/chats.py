"""Columns of whole chats: lists of ``{role, content}`` messages, cut into what is asked and the last answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from privet.data.hub import HubTable
from privet.errors import DataError

if TYPE_CHECKING:
    import pandas as pd  # a second to load, and most messages to a node read no table

ROLES = ("system", "user", "assistant")
Messages = list[dict[str, str]]


def split_chats(
    frame: pd.DataFrame, column: str, path: Path | HubTable, *, strict: bool
) -> tuple[pd.DataFrame, str]:
    """Return the table with every chat as JSON up to its last answer, and the name of a new column of these answers.

    What follows the last answer is left out. A chat without an answer, or with another role, has no text left in
    either column.

    Raises
    ------
    DataError
        Where `strict`, if a cell is no list of messages.
    """
    chats = [_messages(cell) for cell in frame[column]]
    if strict and (wrong := chats.count(None)):
        raise DataError(
            f"'{path}': column '{column}' holds no list of {{role, content}} messages in {wrong} rows"
        )
    parts = [_cut(chat or []) for chat in chats]
    name = f"answer of {column}"
    asked = [write_chat(before) if before else "" for before, _ in parts]
    return frame.assign(**{column: asked, name: [answer for _, answer in parts]}), name


def write_chat(messages: Messages) -> str:
    """Return messages as the text that :func:`read_chat` reads."""
    return json.dumps(messages, ensure_ascii=False)


def read_chat(text: str) -> Messages:
    """Undo :func:`write_chat`."""
    return list(json.loads(text))


def _messages(cell: Any) -> Messages | None:
    """Return a cell's messages; None where it is no list of messages, an empty list where a role is unknown."""
    if not isinstance(cell, (list, tuple, np.ndarray)):
        return None
    out = []
    for message in cell:
        if not isinstance(message, dict):
            return None
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        out.append({"role": role, "content": content})
    return out if all(message["role"] in ROLES for message in out) else []


def _cut(chat: Messages) -> tuple[Messages, str]:
    last = max((i for i, message in enumerate(chat) if message["role"] == "assistant"), default=0)
    return (chat[:last], chat[last]["content"]) if last else ([], "")
