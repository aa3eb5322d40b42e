"""Whether all nodes start from the same base weights; a mean of changes to different models is no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from privet.config import Config
from privet.errors import ConfigError, Refusal
from privet.weights import base_weights
from privet.wire import Description


def check_base_weights(config: Config, nodes: Mapping[str, Description]) -> None:
    """Refuse to start with nodes whose base weights are not the server's, or where it has none, the majority's.

    Raises
    ------
    Refusal
        Kind ``"base-weights"``, with the names of these nodes.
    """
    try:
        own = base_weights(config, fetch=False)
    except ConfigError:
        own = None  # a server that does not score needs no weights
    right, whose = own, "the server"
    if right is None:
        counts = Counter(d.weights for d in nodes.values()).most_common(2)
        if len(counts) == 2 and counts[0][1] == counts[1][1]:
            told = ", ".join(f"{name} has {d.weights[:23]}" for name, d in sorted(nodes.items()))
            raise Refusal("base-weights", f"the nodes have different base weights: {told}")
        right, whose = (counts[0][0] if counts else ""), "most nodes"
    others = sorted(name for name, d in nodes.items() if d.weights != right)
    if others:
        verb = "has" if len(others) == 1 else "have"
        raise Refusal(
            "base-weights",
            f"{', '.join(others)} {verb} other base weights than {whose} ({right[:23]}...): "
            "give every node the same files, by model.revision or as a folder of its own (model-path)",
        )
