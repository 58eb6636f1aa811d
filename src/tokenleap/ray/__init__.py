"""Beyond one process: replicas of a model on a Ray cluster (the extra `ray`).

`tokenleap serve --replicas N` is the server's app on Ray Serve. `Front` listens and hands each
request to a `Replica`, which runs the endpoints on an engine of its own; `router.py` chooses the
replica by the prompt's beginning and by load. `generate` is a stage of Ray Data for many prompts:

    import ray
    import tokenleap.ray

    rows = ray.data.read_json("prompts.jsonl")
    done = tokenleap.ray.generate(rows, "smollm2-135m", {"max_tokens": 64}, replicas=4)
    done.write_json("results")

Ray is imported only when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenleap.ray.offline import generate as generate

__all__ = ["generate"]


def __getattr__(name: str) -> Any:
    if name != "generate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tokenleap.ray.offline import generate

    return generate
