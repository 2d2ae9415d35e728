"""What reading a config.json leaves open: keys that meshserve does not know, and keys that the file lacks."""

import logging
from typing import NamedTuple

from ..api.errors import UnsupportedModelError

_log = logging.getLogger(__name__)


class ConfigNotes(NamedTuple):
    """Keys of a config.json that were ignored or assumed, as transformers ignores or assumes them.

    `--strict-config` refuses both.
    """

    unknown: tuple[str, ...] = ()  # neither known to change nothing nor to change the results
    assumed: tuple[str, ...] = ()  # absent keys with the defaults of transformers' class, such as "head_dim = 128"

    def log(self) -> None:
        """Logs them, in a line each. Call it once for a model."""
        if self.unknown:
            _log.warning("config.json: keys that meshserve does not know are ignored: %s", ", ".join(self.unknown))
        if self.assumed:
            _log.info("config.json lacks keys; transformers' defaults are used: %s", ", ".join(self.assumed))

    def check_empty(self) -> None:
        """
        Raises:
          UnsupportedModelError: There are any (`--strict-config`).
        """
        if self.unknown:
            raise UnsupportedModelError(
                f"config.json has options that meshserve does not know: {', '.join(self.unknown)}. They might change "
                "the model's results. Remove them, or omit --strict-config to ignore them."
            )
        if self.assumed:
            raise UnsupportedModelError(
                f"config.json lacks options: {', '.join(self.assumed)} would be assumed. Add the values that the model "
                "was trained with, or omit --strict-config to use these."
            )
