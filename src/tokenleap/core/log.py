"""Log lines: through `logging`, under the name "tokenleap"; `TOKENLEAP_LOG` shows them.

Every module logs to `logging.getLogger(__name__)`. A program that sets up logging by itself gets
the lines through its own handlers, and leaves `TOKENLEAP_LOG` unset.
"""

from __future__ import annotations

import logging
import os

from tokenleap.errors import ConfigError

__all__ = ["VARIABLE", "show_log_lines"]

VARIABLE = "TOKENLEAP_LOG"
"""An environment variable: the least level of the lines that are written to standard error."""

_LEVELS = ("debug", "info", "warning", "error")


def show_log_lines() -> None:
    """Write log lines to standard error, from the level that `TOKENLEAP_LOG` names, if it is set."""
    name = os.environ.get(VARIABLE, "").lower()
    if not name:
        return
    if name not in _LEVELS:
        raise ConfigError(f"{VARIABLE}: must be one of {', '.join(_LEVELS)}, got '{name}'.")
    ours = logging.getLogger("tokenleap")
    ours.setLevel(name.upper())
    if not ours.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)
