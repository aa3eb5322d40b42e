"""Recipes: ``conf/experiment/NAME.yaml`` is a command line that has a name, for a table or a figure of a paper.

``experiment=NAME`` on a command line stands for the recipe's settings and for the values that it sweeps; what else
stands on the line goes before them. A run keeps these settings in full, so that it never depends on the recipe's file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from privet.config import CONF_DIR, quoted, unknown
from privet.errors import ConfigError

KEY = "experiment"
FOLDER = CONF_DIR / KEY
_NEEDS = "# Needs:"


@dataclass(frozen=True)
class Block:
    """Override texts of one product of values, and the keys that tell its runs apart."""

    overrides: list[str]
    named: frozenset[str]


@dataclass(frozen=True)
class Recipe:
    """A named command line.

    Attributes
    ----------
    name : str
        File name without suffix.
    title : str
        First line of the file.
    needs : str
        Machine and time to expect.
    settings : dict of str to str
        Overrides that all runs have, by key.
    sweep : tuple of dict of str to tuple of str
        Products of values whose union is run; none: a single run.
    command : str or None
        What measures it, where it is no training run.
    """

    name: str
    title: str
    needs: str
    settings: dict[str, str]
    sweep: tuple[dict[str, tuple[str, ...]], ...]
    command: str | None

    def blocks(self, given: Sequence[str]) -> list[Block]:
        """Return its products with the overrides of a command line, which go before its own.

        Of values that a product sweeps, those that are given are run, in the products that have them; values that no
        product has take the place of all. A choice such as ``method`` that is replaced takes its own settings,
        ``method.*``, with it.
        """
        asked = {text.partition("=")[0].lstrip("+~"): _values(text) for text in given}
        replaced = {key for key, own in self.settings.items() if asked.get(key, [own]) != [own]}
        fixed = [f"{k}={v}" for k, v in _without(self.settings, replaced).items() if k not in asked]
        found = []
        for product in self.sweep or ({},):
            swept: dict[str, tuple[str, ...]] = dict(product)
            for key in sorted(product.keys() & asked.keys()):  # a choice before its settings
                known = {value for other in self.sweep for value in other.get(key, ())}
                new = tuple(value for value in asked[key] if value not in known)
                if len(new) == len(asked[key]):
                    swept = {**_without(swept, {key}), key: new}
                else:
                    first = next(other for other in self.sweep if key in other)
                    swept[key] = tuple(v for v in product[key] if v in asked[key]) + new * (product is first)
            if all(swept.values()):
                own = [f"{key}={','.join(values)}" for key, values in swept.items()]
                more = [text for text in given if text.partition("=")[0] not in product]
                found.append(Block([*fixed, *own, *more], frozenset(product)))
        return found


def _without(settings: Mapping[str, Any], replaced: Collection[str]) -> dict[str, Any]:
    """Return the settings without the keys that are replaced, and without those below them."""
    return {k: v for k, v in settings.items() if not any(k == r or k.startswith(f"{r}.") for r in replaced)}


def _values(text: str) -> list[str]:
    """Return the values that an override has, of a list each."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
        if override.is_sweep_override():
            return [str(value) for value in override.sweep_string_iterator()]
    except HydraException:
        pass  # a text that Hydra's grammar does not know: it is told where the run is composed
    return [text.partition("=")[2]]


def unfold(overrides: Sequence[str]) -> tuple[Recipe | None, list[Block]]:
    """Return the recipe that a command line names, and all its products; without one, the line itself.

    Raises
    ------
    ConfigError
        For an unknown recipe, several of them, or one that is no training run.
    """
    named = [text for text in overrides if text.partition("=")[0] == KEY]
    rest = [text for text in overrides if text not in named]
    if not named:
        return None, [Block(list(overrides), frozenset())]
    if len(named) > 1:
        raise ConfigError(f"{KEY} is set twice: a command has one recipe")
    recipe = load(named[0].partition("=")[2])
    if recipe.command is not None:
        raise ConfigError(f"{KEY}={recipe.name} trains nothing, its command is: {recipe.command}")
    return recipe, recipe.blocks(rest)


def single(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the one run that a command line names.

    Raises
    ------
    ConfigError
        Where its recipe is a sweep.
    """
    recipe, blocks = unfold(overrides)
    if recipe is not None and recipe.sweep:
        raise ConfigError(f"{KEY}={recipe.name} is a sweep: privet run -m {KEY}={recipe.name}")
    return blocks[0].overrides


def names() -> list[str]:
    """Return the names of all recipes, in order."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def source(name: str) -> Path:
    """Return a recipe's file; raises ConfigError for an unknown name."""
    if name not in names():
        raise ConfigError(unknown(KEY, name, names()))
    return FOLDER / f"{name}.yaml"


def load(name: str) -> Recipe:
    """Read a recipe.

    Raises
    ------
    ConfigError
        For an unknown name, or a file that is no recipe.
    """
    text = source(name).read_text(encoding="utf-8")
    raw = yaml.safe_load(text) or {}
    wrong = set(raw) - {"settings", "sweep", "command"}
    if wrong:
        raise ConfigError(f"{KEY} {name}: {unknown('key', min(wrong), ['settings', 'sweep', 'command'])}")
    products = raw.get("sweep") or []
    lines = text.splitlines()
    return Recipe(
        name=name,
        title=lines[0].removeprefix("#").strip(),
        needs=next((line.removeprefix(_NEEDS).strip() for line in lines if line.startswith(_NEEDS)), ""),
        settings={key: _text(key, value) for key, value in (raw.get("settings") or {}).items()},
        sweep=tuple(
            {key: tuple(_text(key, value) for value in values) for key, values in product.items()}
            for product in ([products] if isinstance(products, Mapping) else products)
        ),
        command=raw.get("command"),
    )


def _text(key: str, value: Any) -> str:
    """Return a value in the syntax of a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(_text(key, v) for v in value) + "]"
    text = str(value)
    plain = not isinstance(value, str) or all(c.isalnum() or c in "_-./:@#" for c in text)
    return text if plain else quoted(key, text).partition("=")[2]
