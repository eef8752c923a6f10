"""Environments whose calls block: plain functions, in threads or in child processes, beside the event loop that runs the episodes.

    event loop                thread                           child process (main thread)
      start(task) ──────────► begin(task)          or ───────► begin(task)
      step(reply) ──────────► act(reply)           or ───────► act(reply)
      close() ──────────────► end()                or ───────► end()

Threads suit environments that wait, for example for a server. There are many, and an episode takes one only while a call runs.

Processes suit environments that compute, crash, leak memory, or use what a process has only once: Python's global random generator, the
working directory, signals. The episodes of an environment worker are dealt out to `num_processes` children. Each child makes one call
at a time, in its main thread.

A call whose episode is over, because its deadline has passed or nobody wants it any more, is left behind. A thread that is left behind
is replaced by another one. A child has `PATIENCE_S` to come back; then it is killed and replaced. The other episodes in a child that is
killed or dies fail with `WorkerLost`, and are tried again; so do those in a child whose memory is full (`process_memory_mib`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import resource
import threading
import traceback
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

from pydantic import PositiveInt

from drumroll.child import Child, ChildDied
from drumroll.config.models import EnvConfig
from drumroll.envs.base import Env, Step
from drumroll.errors import PluginError, PolicyFault, WorkerError, WorkerLost
from drumroll.luggage import Luggage
from drumroll.registry import REGISTRY
from drumroll.types import Task

MAX_THREADS = 512
"""Calls that run in threads at a time, in one environment worker. Those that were left behind do not count."""
PATIENCE_S = 10.0
"""How long a child process may go on with a call that was left behind."""

Method = Literal["begin", "act", "end"]


class BlockingConfig(EnvConfig):
    """Base of the options of environments whose calls block."""

    runs_in: Literal["thread", "process"] = "thread"
    """`process`: in child processes of each environment worker, for environments that compute, crash, leak memory or use global state."""
    num_processes: PositiveInt = 2
    """Child processes of each environment worker, with `runs_in: process`. Each makes one call at a time."""
    episodes_per_process: PositiveInt | None = None
    """A child process that has had this many takes no more, ends when they are over, and is replaced: for environments that leak memory."""
    process_memory_mib: PositiveInt | None = None
    """Memory that a child process may have, in MiB. The call that asks for more fails, and the child is replaced."""


class BlockingEnv(Env):
    """Base of environments that are written as plain functions.

    @register.env("count_down")
    class CountDown(BlockingEnv):
        def begin(self, task: Task) -> Step:
            self.left = 3
            return Step(prompt="3")

        def act(self, reply: str) -> Step:
            self.left -= 1
            return Step(prompt=str(self.left), done=self.left == 0, success=True)
    """

    class Config(BlockingConfig):
        """Options of an environment that has none of its own."""

    _place: _Place | None = None

    @abstractmethod
    def begin(self, task: Task) -> Step:
        """What `start` is to other environments."""

    @abstractmethod
    def act(self, reply: str) -> Step:
        """What `step` is to other environments."""

    def end(self) -> None:
        """Give back what the episode held. Also called after a `begin` or `act` that raised."""

    async def start(self, task: Task) -> Step:
        self._place = _InThread(self) if self.config.runs_in == "thread" else _InProcess(self)
        return await self._place.call("begin", task)

    async def step(self, reply: str) -> Step:
        assert self._place is not None, "step comes after start"
        return await self._place.call("act", reply)

    async def close(self) -> None:
        if self._place is not None:
            await self._place.close()


async def end_processes() -> None:
    """End all child processes that this event loop has started, with the episodes in them."""
    for homes in _HOMES.pop(asyncio.get_running_loop(), {}).values():
        await homes.end()


class _Place(Protocol):
    """Where the calls of one episode are made."""

    async def call(self, method: Method, argument: Any) -> Step: ...

    async def close(self) -> None: ...


def _step_of(env: BlockingEnv, method: Method, argument: Any) -> Step:
    """Make the call, here and now."""
    step = getattr(env, method)(argument)
    if not isinstance(step, Step):
        raise TypeError(f"{type(env).__name__}.{method} returned {type(step).__name__}; a Step was expected")
    return step


@dataclass
class _Call:
    """A function that a thread is to call."""

    function: Callable[[], Any]
    future: asyncio.Future[Any]
    running: bool = False
    begun: bool = False
    """It runs, or has run."""
    left: bool = False
    """Nobody waits for it any more."""
    then: Callable[[], None] | None = None
    """What its thread does after it, where it was left behind."""


class _Threads:
    """Daemon threads that make calls; those that hang do not take places from the others, and do not keep the process from ending."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._num_threads = 0
        self._num_idle = 0
        self._waiting: deque[_Call] = deque()
        self._news = threading.Condition()

    def submit(self, function: Callable[[], Any]) -> _Call:
        """Have a function called; its future belongs to the running event loop."""
        call = _Call(function, asyncio.get_running_loop().create_future())
        with self._news:
            self._waiting.append(call)
            self._see_to_it()
        return call

    def leave(self, call: _Call) -> None:
        """Nobody waits for it any more. If it is running, another thread takes the place of its own."""
        with self._news:
            call.left = True
            if call.running:
                self._num_threads -= 1
                self._see_to_it()

    def after(self, call: _Call, function: Callable[[], None]) -> bool:
        """Have the thread of a call that was left behind do something when it comes back; False where no thread is in it."""
        with self._news:
            if call.running:
                call.then = function
            return call.running

    def _see_to_it(self) -> None:
        if self._num_idle >= len(self._waiting):
            self._news.notify(len(self._waiting))
        elif self._num_threads < self._size:
            self._num_threads += 1
            threading.Thread(target=self._work, name="blocking-env", daemon=True).start()

    def _work(self) -> None:
        while True:
            call = self._next()
            result, error = _outcome(call.function)
            with self._news:
                call.running = False
                left, then = call.left, call.then
            if left:
                if then is not None:
                    _outcome(then)
                return  # its place has been given away
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                call.future.get_loop().call_soon_threadsafe(_settle, call.future, result, error)

    def _next(self) -> _Call:
        """The next call that somebody waits for."""
        with self._news:
            while True:
                while not self._waiting:
                    self._num_idle += 1
                    self._news.wait()
                    self._num_idle -= 1
                call = self._waiting.popleft()
                if not call.left:
                    call.running = call.begun = True
                    return call


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a function returns or raises. `sys.exit` and the like are failures of the environment, and end nothing here."""
    try:
        return function(), None
    except (StopIteration, KeyboardInterrupt, SystemExit, GeneratorExit) as error:
        return None, RuntimeError(f"the environment raised {type(error).__name__}: {error}{_place_text(error)}")
    except Exception as error:
        return None, error


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


_THREADS = _Threads(MAX_THREADS)


class _InThread:
    """An episode whose calls are made in threads of this process."""

    def __init__(self, env: BlockingEnv) -> None:
        self._env = env
        self._calls: list[_Call] = []
        """The first and the latest one."""

    async def call(self, method: Method, argument: Any) -> Step:
        call = _THREADS.submit(lambda: _step_of(self._env, method, argument))
        self._calls = [*self._calls[:1], call]
        try:
            step: Step = await call.future
        except asyncio.CancelledError:
            _THREADS.leave(call)
            raise
        return step

    async def close(self) -> None:
        """A call that was left behind keeps the environment busy: its own thread then ends it."""
        if self._calls[0].begun and not _THREADS.after(self._calls[-1], self._env.end):
            await _THREADS.submit(self._env.end).future


_NUMBERS = itertools.count()
"""Names of episodes in child processes."""


class _InProcess:
    """An episode whose environment lives in a child process."""

    def __init__(self, env: BlockingEnv) -> None:
        config: BlockingConfig = env.config
        entry = REGISTRY.lookup("env", config.kind)
        if entry.target is not type(env):
            raise PluginError(
                f"env {type(env).__name__} is to run in a process, which finds it by its name, but `kind: {config.kind}` is "
                f"{entry.target.__qualname__}. Set `kind` to the name that {type(env).__name__} is registered by, or to its import path."
            )
        self._number = next(_NUMBERS)
        self._homes = _homes(config)
        self._home = self._homes.take()

    async def call(self, method: Method, argument: Any) -> Step:
        step = await self._home.ask((method, self._number, argument))
        assert isinstance(step, Step)
        return step

    async def close(self) -> None:
        try:
            if not self._home.lost:
                with contextlib.suppress(WorkerLost):  # gone meanwhile, and the episode with it
                    await self._home.ask(("end", self._number, None))
        finally:
            await self._homes.leave(self._home)


@dataclass(eq=False)
class _Home:
    """A child process and the episodes that live in it."""

    kind: str
    options: dict[str, Any]
    num_episodes: int = 0
    """That live in it now."""
    num_taken: int = 0
    """That it has ever had."""
    lost: str = ""
    """Why the child is gone, once it is."""
    _child: Child | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _running: asyncio.Task[Any] | None = None
    """Whose turn it is."""
    _guards: set[asyncio.Task[None]] = field(default_factory=set)

    async def ask(self, question: tuple[Method, int, Any]) -> Step | None:
        """The answer, when its turn has come. Cancelled before that, the child never hears of the question."""
        call = asyncio.create_task(self._ask(question))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if self._running is call:
                guard = asyncio.create_task(self._outlast(call))
                self._guards.add(guard)
                guard.add_done_callback(self._guards.discard)
            else:
                call.cancel()
            raise

    async def end(self) -> None:
        self.lost = self.lost or "it was ended"
        if self._child is not None:
            await self._child.end()

    async def _ask(self, question: tuple[Method, int, Any]) -> Step | None:
        async with self._turn:
            self._running = asyncio.current_task()
            try:
                if self.lost:
                    raise ChildDied(self.lost)
                if self._child is None:
                    hello = (Luggage.pack(), self.kind, self.options)
                    self._child = await Child.start("drumroll.envs.blocking:open_environments", hello)
                answer = await self._child.ask(question)
                if answer[0] == "full":
                    self.lost = str(answer[1])
                    await self._child.end()
                    raise ChildDied(self.lost)
            except ChildDied as died:
                self.lost = self.lost or str(died)
                raise WorkerLost(f"env '{self.kind}': the process that the episode lived in is gone: {self.lost}.") from None
            finally:
                self._running = None
        return _read_answer(answer)

    async def _outlast(self, call: asyncio.Task[Any]) -> None:
        """See to it that a call that was left behind ends."""
        await asyncio.wait({call}, timeout=PATIENCE_S)
        if not call.done():
            self.lost = f"it was killed, because it still was in a call {PATIENCE_S:g} s after the episode of that call had ended"
            if self._child is None:
                call.cancel()
            else:
                await self._child.end()
            await asyncio.wait({call})
        if not call.cancelled():
            call.exception()  # nobody else asks for it


class _Homes:
    """The child processes for the episodes of one environment's config."""

    def __init__(self, config: BlockingConfig) -> None:
        self._config = config
        self._options = config.model_dump(mode="json")
        self._homes: list[_Home] = []

    def take(self) -> _Home:
        """A place for an episode, in the child with the fewest."""
        self._homes = [home for home in self._homes if not home.lost]
        free = [home for home in self._homes if not self._is_full(home)]
        if len(free) < self._config.num_processes and all(home.num_episodes for home in free):
            free.append(_Home(self._config.kind, self._options))
            self._homes.append(free[-1])
        home = min(free, key=lambda home: home.num_episodes)
        home.num_episodes += 1
        home.num_taken += 1
        return home

    async def leave(self, home: _Home) -> None:
        """An episode is over."""
        home.num_episodes -= 1
        if home.num_episodes == 0 and self._is_full(home):
            await home.end()

    async def end(self) -> None:
        for home in self._homes:
            await home.end()

    def _is_full(self, home: _Home) -> bool:
        most = self._config.episodes_per_process
        return most is not None and home.num_taken >= most


_HOMES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Homes]] = WeakKeyDictionary()


def _homes(config: BlockingConfig) -> _Homes:
    """One set of children for each config and event loop."""
    known = _HOMES.setdefault(asyncio.get_running_loop(), {})
    key = config.model_dump_json()
    if key not in known:
        known[key] = _Homes(config)
    return known[key]


Answer = tuple[Literal["step", "fault", "error", "full"], Any]


def open_environments(hello: tuple[Luggage, str, dict[str, Any]]) -> Callable[[tuple[Method, int, Any]], Answer]:
    """The child's side: the environments by the numbers of their episodes; the function that makes the calls."""
    luggage, kind, options = hello
    luggage.unpack()
    entry = REGISTRY.lookup("env", kind)
    config = entry.schema(EnvConfig).model_validate(options)
    limit = getattr(config, "process_memory_mib", None)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit << 20, limit << 20))
    episodes: dict[int, BlockingEnv] = {}

    def call(method: Method, number: int, argument: Any) -> bytes:
        if method == "begin":
            episodes[number] = entry.target(config)
        if method != "end":
            return pickle.dumps(_step_of(episodes[number], method, argument))
        if number in episodes:  # it may never have begun
            episodes.pop(number).end()
        return pickle.dumps(None)

    def answer(question: tuple[Method, int, Any]) -> Answer:
        try:
            return "step", call(*question)
        except PolicyFault as fault:
            return "fault", (fault.reward, fault.reason)
        except MemoryError as error:
            episodes.clear()
            allowed = "" if limit is None else f" (`env.process_memory_mib` is {limit})"
            return "full", f"its memory was full{allowed}{_place_text(error)}"
        except BaseException as error:  # `sys.exit` in one episode is no reason to end the others
            return "error", f"{type(error).__name__}: {error}{_place_text(error)}"

    return answer


def _read_answer(answer: Answer) -> Step | None:
    """The parent's side: what a child answered, or what was raised there."""
    what, content = answer
    if what == "fault":
        raise PolicyFault(*content)
    if what == "error":
        raise WorkerError(content)
    step: Step | None = pickle.loads(content)  # from our own child
    return step


def _place_text(error: BaseException) -> str:
    """The last lines of the traceback."""
    return "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
