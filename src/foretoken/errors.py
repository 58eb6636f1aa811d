"""Every error a user can cause, as one small tree.

    ForetokenError
    ├── ConfigError         a parameter is unknown, out of range or contradicts another
    ├── CompatibilityError  two parts that cannot work together (model, drafter, rule)
    ├── PromptError         a prompt that cannot be served (empty, too long, bad ids)
    └── ModelError          a model cannot be found, fetched, read or converted

All are `ValueError`s: the caller passed something that has to change. Our own mistakes are
`AssertionError`s and are never caught. The message is one line: what is wrong, and what to do.
"""

from __future__ import annotations

__all__ = ["CompatibilityError", "ConfigError", "ForetokenError", "ModelError", "PromptError"]


class ForetokenError(ValueError):
    """Base of all errors a user can cause and mend."""


class ConfigError(ForetokenError):
    """A parameter is unknown, out of range, or contradicts another one."""


class CompatibilityError(ForetokenError):
    """Parts that cannot work together: refused at construction, before any work is done."""


class PromptError(ForetokenError):
    """A prompt that cannot be served: empty, longer than the context, ids out of range."""


class ModelError(ForetokenError):
    """A model that cannot be found, fetched, read or converted."""
