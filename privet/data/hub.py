"""Tables that the hub of the datasets library holds: ``hub:owner/name@revision#config:split``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from privet.errors import ConfigError, DataError

if TYPE_CHECKING:
    from datasets import Dataset

HUB = "hub:"
_FORM = re.compile(
    r"hub:(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>[\w.-]+))?(?:#(?P<config>[\w.-]+))?:(?P<split>[\w.-]+)"
)


@dataclass(frozen=True)
class HubTable:
    """One split of a dataset on the hub.

    Attributes
    ----------
    name : str
        ``owner/name``.
    revision : str or None
        A commit, tag or branch; None: what the hub calls its main branch.
    config : str or None
        The part of a dataset that has several, for example ``sst2`` of ``nyu-mll/glue``.
    split : str
        ``train``, ``validation``, ...
    """

    name: str
    revision: str | None
    config: str | None
    split: str

    @classmethod
    def parse(cls, text: str) -> HubTable:
        """Read ``hub:owner/name@revision#config:split``; revision and config may be left out.

        Raises
        ------
        ConfigError
            If the text has another form.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"'{text}' is not allowed: write hub:owner/name#config:split, for example "
                "hub:nyu-mll/glue#sst2:train (@REVISION after the name pins it)"
            )
        return cls(**found.groupdict())

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        config = f"#{self.config}" if self.config else ""
        return f"{HUB}{self.name}{revision}{config}:{self.split}"

    def load(self) -> Dataset:
        """Return the split from the local cache, or download it first.

        Raises
        ------
        DataError
            One line when it is neither here nor to be had, or the dataset has no such part or split.
        """
        from datasets import disable_progress_bars, load_dataset
        from datasets.exceptions import DatasetNotFoundError

        disable_progress_bars()
        try:
            return load_dataset(self.name, self.config, split=self.split, revision=self.revision)
        except DatasetNotFoundError:
            raise DataError(
                f"'{self}': the hub has no such dataset, or not for this user (hf auth login)"
            ) from None
        except ConnectionError:
            raise DataError(
                f"'{self}' is not on this machine and the hub cannot be reached: fetch it once with a network, "
                "or name a local file as task.path and task.test_path"
            ) from None
        except (ValueError, RuntimeError, OSError) as err:
            reason = " ".join(str(err).split())[:200]
            raise DataError(f"'{self}' cannot be loaded: {reason}") from None
