"""The clock of the engine: what steps, drafts and passes take is measured with it.

Controllers decide by these times what is drafted. Callers write `clock.now()`, so that a test can
replace the clock of all of them at once.
"""

from __future__ import annotations

from time import perf_counter as now

__all__ = ["now"]
