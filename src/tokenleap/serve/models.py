"""`Models`: several models in one server, of which those that requests need are in memory.

A model is loaded for the first request that names it, in a thread, one model at a time. The memory
that it takes is measured. If there is too little for the next one, models without requests make
way, the one that was used longest ago first. If all have requests, that one takes no more of them
until those that run have ended, and is then unloaded. Clients have `write_timeout` to read
what has ended.

Clients choose among the names that the server was started with; no text of a request is a path.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from prometheus_client import Counter, Gauge
from starlette.requests import Request

from tokenleap.async_llm import AsyncLLM, Pool
from tokenleap.core.config import return_freed
from tokenleap.errors import told
from tokenleap.models.support import default_device
from tokenleap.runtime.cores import memory_limit
from tokenleap.serve.body import APIError, invalid, unknown_response
from tokenleap.serve.metrics import Registry
from tokenleap.serve.running import Run, ServerState, card, check_model, shut_down, while_connected
from tokenleap.serve.settings import Settings

_log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""After a model could not be loaded, its requests are refused for so long without another try."""
SHARE = 0.8
"""Of the memory that is free when the server starts, models may take so much by default."""
_LOOK_SECONDS = 0.05
"""How often a model that has to go is asked whether its requests have ended."""
_GIB = 2**30


class _Loaded:
    """A model in memory.

    Attributes:
        users: requests that are about to begin.
    """

    def __init__(self, state: ServerState, own_bytes: int) -> None:
        self.state, self.users = state, 0
        self._own_bytes = own_bytes

    @property
    def ready(self) -> bool:
        """Whether it takes requests: its engine has not failed."""
        return self.state.alive

    @property
    def busy(self) -> bool:
        return bool(self.users or self.state.runs)

    @property
    def num_bytes(self) -> int:
        """What loading it took, and its caches as they are now."""
        return self._own_bytes + self.cache_bytes

    @property
    def cache_bytes(self) -> int:
        return self.state.llm.llm.engine.cache_bytes


class _Model:
    """A name that requests may give, whether it is loaded or not.

    Attributes:
        loaded: takes requests, unless its engine has failed; None if it has to be loaded first.
        bringing: loads it.
        waiting: requests that wait for that.
        refusal: why it cannot be loaded, until `refused_until`.
        times_too_large: how often more memory was measured than there is for models.
        num_bytes: what it took when it was last loaded; None if it never was.
    """

    def __init__(self, path: str, settings: Settings) -> None:
        self.path, self.settings = path, settings
        self.loaded: _Loaded | None = None
        self.bringing: asyncio.Task[None] | None = None
        self.waiting = 0
        self.refusal, self.refused_until = "", 0.0
        self.times_too_large = 0
        self.num_bytes: int | None = None
        self.about: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        return self.settings.model


class Models:
    """Loads models for requests, and unloads them; see the file's beginning.

    Args:
        paths: of the models, by their names.
        load: makes the engine of a path; called in a thread, by one load at a time.
        settings: of the server; its names are those of the models.
        device: where models run, as `LLM` takes it.
    """

    def __init__(
        self,
        paths: Mapping[str, str],
        load: Callable[[str], AsyncLLM],
        settings: Settings,
        device: str = "auto",
    ) -> None:
        self.settings, self.metrics = settings, Registry()
        self._load = load
        self._models = {
            name: _Model(path, settings.model_copy(update={"served_model_names": (name,)}))
            for name, path in paths.items()
        }
        self._budget = settings.models_memory or int(SHARE * free_bytes(device))
        self._in_memory: list[_Loaded] = []  # also those that are being unloaded
        self._turn = asyncio.Lock()  # of those that load and unload, in order
        self._pool = Pool(1, "tokenleap-load")
        self._idle = threading.Event()  # the pool's thread does nothing
        self._idle.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = self._closed = False
        self.created = int(time.time())
        labels = ["model_name", "engine"]
        self._bytes = self.metrics.made(
            Gauge, "tokenleap:model_memory_bytes", "Memory of a model, 0 if unloaded.", labels
        )
        self._loads = self.metrics.made(
            Counter, "tokenleap:model_loads", "Times that a model was loaded.", labels
        )

    # See `Server` and `Serves`

    @property
    def alive(self) -> bool:
        return not self._closed

    @property
    def stopping(self) -> bool:
        return self._stopping

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._stopping = value
        for loaded in list(self._in_memory):
            loaded.state.stopping = value

    def cut_off(self) -> None:
        """Tell the clients of all requests that the server shuts down before their end."""
        for loaded in list(self._in_memory):
            loaded.state.cut_off()
        for task in list(self._tasks):
            task.cancel()

    def stop(self, response_id: str) -> None:
        for loaded in self._in_memory:
            if any(run.response_id == response_id for run in loaded.state.runs):
                loaded.state.stop(response_id)
                return
        raise unknown_response(response_id)

    def cards(self) -> list[dict[str, Any]]:
        return [self._card(model) for model in self._models.values()]

    def _card(self, model: _Model) -> dict[str, Any]:
        status = "loaded" if model.loaded else "loading" if model.bringing else "unloaded"
        return card(model.settings, model.name, self.created, status, model.about)

    @asynccontextmanager
    async def using(self, request: Request, name: str | None) -> AsyncIterator[ServerState]:
        """The state of a model, which is loaded first if it has to be."""
        check_model(self.settings, name)
        if name is None and len(self._models) > 1:
            raise invalid("model", f"model: choose one of {', '.join(self._models)}.")
        model = self._models[name or self.settings.model]
        while (loaded := model.loaded) is None or not loaded.ready:
            await self._wait_for(model, request)
        loaded.users += 1
        try:
            yield loaded.state
        finally:
            loaded.users -= 1

    # Loading

    async def _wait_for(self, model: _Model, request: Request) -> None:
        """Have a model loaded, and wait until that has succeeded or failed."""
        if time.monotonic() < model.refused_until:
            raise APIError(503, model.refusal, headers={"Retry-After": str(int(RETRY_SECONDS))})
        if self.stopping:
            raise shut_down()
        if model.waiting > self.settings.max_waiting:
            raise APIError(
                429,
                f"{model.waiting} requests wait for the model to be loaded: try again later.",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        if model.bringing is None:
            model.bringing = self._begin(self._bring(model))
        model.waiting += 1
        try:
            if await while_connected(request, asyncio.wait({model.bringing})) is None:
                raise APIError(400, "the client went away.")
        finally:
            model.waiting -= 1

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _bring(self, model: _Model) -> None:
        """Load a model when its turn has come. If that fails, `refusal` says so."""
        began = time.monotonic()
        try:
            async with self._turn:
                if not model.waiting:  # all have gone meanwhile
                    return
                if model.loaded is not None:  # its engine has failed
                    await self._unloaded(model)
                files = partial(_file_bytes, model.path)
                await self._make_room(model.num_bytes or await self._in_thread(files), model)
                model.loaded = await self._in_thread(partial(self._made, model))
                if self._taken_in(model, time.monotonic() - began):
                    self._begin(self._trimmed(model))
                else:
                    await self._unloaded(model)
        except Exception as error:  # of this model alone
            _log.error("the model %s could not be loaded: %s", model.name, told(error))
            self._refuse(model, "could not be loaded; the server's log says why.", RETRY_SECONDS)
        finally:
            model.bringing = None

    def _made(self, model: _Model) -> _Loaded:
        """Load a model and measure its memory; in the pool's thread."""
        before = self._other_bytes()
        llm = self._load(model.path)
        try:
            llm.measure_costs()
            after = self._other_bytes()
            place = _place(llm)
            own = max(0, after[place] - before[place] - llm.llm.engine.cache_bytes)
            state = ServerState(llm, model.settings, registry=self.metrics)
            if self._closed:
                raise shut_down()
        except BaseException:
            llm.close()
            raise
        return _Loaded(state, own)

    def _other_bytes(self) -> dict[str, int]:
        """Memory of this process on each kind of device, without caches, which come and go."""
        _collect()
        found = used_bytes()
        for loaded in list(self._in_memory):
            found[_place(loaded.state.llm)] -= loaded.cache_bytes
        return found

    def _taken_in(self, model: _Model, seconds: float) -> bool:
        """Count a model that was loaded now; False if it is too large, and refused.

        Args:
            seconds: how long its first request has waited.
        """
        assert model.loaded is not None
        state, size = model.loaded.state, model.loaded.num_bytes
        self._in_memory.append(model.loaded)
        state.stopping = self.stopping
        model.num_bytes, model.about = size, state.about
        self._loads.labels(model_name=model.name, engine="0").inc()
        self._bytes.labels(model_name=model.name, engine="0").set_function(
            lambda: model.loaded.num_bytes if model.loaded else 0
        )
        takes = f"takes {size / _GIB:.2f} GiB"
        if size > self._budget:
            budget = f"{self._budget / _GIB:.2f} GiB"
            _log.error("the model %s %s, and --models-memory is %s", model.name, takes, budget)
            # What requests took meanwhile may be in it, so it is tried again, ever more seldom.
            seconds = RETRY_SECONDS * 2**model.times_too_large
            model.times_too_large += 1
            self._refuse(model, f"{takes}, and this server has less for models.", seconds)
            return False
        _log.info("the model %s %s; it was ready after %.1f s", model.name, takes, seconds)
        return True

    def _refuse(self, model: _Model, why: str, seconds: float) -> None:
        model.refusal = f"the model '{model.name}' {why}"
        model.refused_until = time.monotonic() + seconds

    # Unloading

    async def _make_room(self, num_bytes: int, wanted: _Model) -> None:
        """Unload models until so much is free, or no other is left."""
        while sum(each.num_bytes for each in self._in_memory) + num_bytes > self._budget:
            others = [each for each in self._models.values() if each.loaded and each is not wanted]
            if not others:
                return
            await self._unloaded(min(others, key=_order))

    async def _trimmed(self, model: _Model) -> None:
        """Unload others if a new model has turned out to be larger than its files."""
        async with self._turn:
            await self._make_room(0, model)

    async def _unloaded(self, model: _Model) -> None:
        """Unload a model when its requests have ended; later ones have it loaded again."""
        loaded, model.loaded = model.loaded, None
        assert loaded is not None
        ends: dict[Run, float] = {}  # of those that only their clients' reading holds up
        while loaded.busy:
            now = time.monotonic()
            for run in list(loaded.state.runs):
                if run.ended and now >= ends.setdefault(run, now + model.settings.write_timeout):
                    run.cut_off(APIError(503, "the answer was read too slowly."))
            await asyncio.sleep(_LOOK_SECONDS)
        loaded.state.metrics.close()
        try:
            await self._in_thread(loaded.state.llm.close)
        except Exception as error:  # of this model alone
            _log.error("the model %s did not end properly: %s", model.name, told(error))
        self._in_memory.remove(loaded)
        del loaded
        await self._in_thread(_collect)
        _log.info("the model %s was unloaded", model.name)

    # The thread, and the end

    async def _in_thread(self, act: Callable[[], Any]) -> Any:
        def run() -> Any:
            self._idle.clear()
            try:
                return act()
            finally:
                self._idle.set()

        return await asyncio.wrap_future(self._pool.submit(run))

    def close(self, timeout: float | None = None) -> bool:
        """End all requests and threads; returns whether they have ended (see `AsyncLLM.close`)."""
        self._closed = True
        self._pool.close()
        ended = [loaded.state.llm.close(timeout) for loaded in self._in_memory]
        return self._idle.wait(timeout) and all(ended)


def _order(model: _Model) -> tuple[bool, float]:
    """Which model is unloaded first: one without requests, then the one used longest ago."""
    assert model.loaded is not None
    return model.loaded.busy or model.waiting > 0, model.loaded.state.used_at


def _collect() -> None:
    """Give memory that nothing refers to any more back to the system."""
    gc.collect()
    return_freed()
    torch.cuda.empty_cache()  # nothing happens without a GPU


# Memory: of this process and of the GPU, if there is one.


def used_bytes() -> dict[str, int]:
    """Memory that this process uses, by the type of the device."""
    return {"cpu": psutil.Process().memory_info().rss, "cuda": torch.cuda.memory_allocated()}


def free_bytes(device: str) -> int:
    """Memory that models may take now on a device."""
    if default_device(device).type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return min(int(psutil.virtual_memory().available), memory_limit())


def _place(llm: AsyncLLM) -> str:
    return "cuda" if llm.llm.device.type == "cuda" else "cpu"


def _file_bytes(path: str) -> int:
    """Size of a model's files, about what it will take; 0 if they are not where `path` says."""
    place = Path(path).expanduser()
    files = [place] if place.is_file() else place.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
