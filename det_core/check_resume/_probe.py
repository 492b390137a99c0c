"""Probe of a training that is checked: stops it at an exact moment, and notes what it saves, loads and trains on.

``core.init()`` imports this module in the processes of a check and nowhere else. What is noted goes as lines of JSON
into one file for each rank, so that a process that is killed leaves all of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from det_core._env import Environment
from det_core._standalone.processes import start_time
from det_core.check_resume._fingerprint import MAX_SAMPLED, digest, digests_of_random_states, take_snapshot

if TYPE_CHECKING:
    from det_core.core import Context

PLAN = "plan.json"
POLL_INTERVAL = 0.01


def attach(context: Context) -> None:
    """Observe the context that ``core.init()`` is about to return."""
    folder = Environment.read().probe_dir
    if folder is None:
        return
    if context.managed:  # an experiment's variables stay the same; a trial's first run has the number 1
        folder = folder / start_folder(context._run.restart - 1)
        folder.mkdir(exist_ok=True)
    Probe(context, folder).install()


def start_folder(number: int) -> str:
    """Return the name of the folder of a start, the first of which is number 0."""
    return f"start-{number}"


class Probe:
    """Observer of one rank.

    Args:
        context: the rank's context.
        folder: the folder with the plan, where what is noted goes.
    """

    def __init__(self, context: Context, folder: Path) -> None:
        plan = json.loads((folder / PLAN).read_text()) if (folder / PLAN).exists() else {}
        self._context = context
        self._journal = context._run.journal
        self._is_chief = context.distributed.rank == 0
        # Line buffered: a note is in the file when the process is killed right after it.
        self._file = open(folder / f"rank-{context.distributed.rank}.jsonl", "a", buffering=1)  # noqa: SIM115
        self._kill_at: int | None = plan.get("kill_at")
        self._stop_at: int | None = plan.get("stop_at")
        self._calls_until_stop: int = plan.get("stop_after_calls", 0)
        self._snapshots: dict[str, list[str]] = plan.get("snapshots", {})
        self._batches_to_note: int = plan.get("batches", 0)
        self._snapshots_at_calls: dict[str, list[str]] = plan.get("snapshots_at_calls", {})
        self._is_resumed: bool = plan.get("resumed", False)
        self._is_stopped = False
        self._has_torch = False
        self._calls = 0
        self._forwards = 0
        self._updates = 0
        self._forwards_at_update = 0
        self._root: Any = None

    def install(self) -> None:
        """Replace the methods to observe, in this context and in torch as far as it is loaded."""
        context = self._context
        self._note("start", pid=os.getpid(), began=start_time(os.getpid()), random=digests_of_random_states())
        self._wrap(context.preempt, "should_preempt", self._around_should_preempt)
        self._wrap(context.checkpoint, "_stage", self._around_stage)
        self._wrap(context.checkpoint, "resume", self._around_resume)
        self._wrap(self._journal, "metrics", self._around_report)
        self._wrap(self._journal, "record", self._around_record)
        self._watch(random, "setstate", "random")
        self._observe_torch()

    # The context.

    def _around_should_preempt(self, call: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        self._observe_torch()  # the script may import it after init()
        self._calls += 1
        names = self._snapshots_at_calls.get(str(self._calls), [])
        if self._is_resumed and self._calls == 1:
            names = ["resumed"]
        for name in names:
            self._note("snapshot_at_call", name=name, **take_snapshot(self._root).as_json())
        if self._is_chief and self._stop_at is not None and self._journal.newest_step >= self._stop_at:
            self._calls_until_stop -= 1
            # At the first call the handler is not installed yet, and the signal would end the process.
            if self._calls_until_stop < 0 and self._calls > 1:
                self._stop_at = None
                self._request_stop()
        stops = call(*args, **kwargs)
        if stops and not self._is_stopped:
            self._is_stopped = True
            self._note("stop", **self._clock(), since_update=self._forwards - self._forwards_at_update)
        return stops

    def _request_stop(self) -> None:
        """Request a preemption, which the next call of should_preempt() sees."""
        if not self._context.managed:
            signal.raise_signal(signal.SIGUSR1)
            return
        self._note("pause")
        while not self._context.preempt.requested:  # until the check has paused the experiment
            time.sleep(POLL_INTERVAL)

    def _around_stage(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        staging = call(*args, **kwargs)
        self._note("save", storage_id=staging.storage_id, **self._clock())
        return staging

    def _around_resume(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._observe_torch()
        self._note("resume")
        return call(*args, **kwargs)

    def _around_report(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if self._is_chief and self._kill_at is not None and self._journal.newest_step >= self._kill_at:
            self._note("kill", **self._clock())
            while True:  # until the check kills all processes at once
                time.sleep(3600)
        return result

    def _around_record(self, call: Callable[..., Any], kind: str, body: Mapping[str, Any]) -> Any:
        if kind == "restore":
            self._note("restore", storage_id=body["storage_id"])
        return call(kind, body)

    def _clock(self) -> dict[str, int]:
        """Return how far this rank is."""
        return {
            "calls": self._calls,
            "forwards": self._forwards,
            "updates": self._updates,
            "step": self._journal.newest_step,
        }

    # torch.

    def _observe_torch(self) -> None:
        if self._has_torch or (torch := sys.modules.get("torch")) is None or not hasattr(torch, "optim"):
            return
        self._has_torch = True
        from torch.optim.optimizer import register_optimizer_step_post_hook
        from torch.utils.data import DataLoader

        self._watch(torch.nn.Module, "load_state_dict", "model")
        self._watch(torch.optim.Optimizer, "load_state_dict", "optimizer")
        for kind in vars(torch.optim.lr_scheduler).values():
            if isinstance(kind, type) and "load_state_dict" in vars(kind):
                self._watch(kind, "load_state_dict", "scheduler")
        self._watch(torch.amp.GradScaler, "load_state_dict", "scaler")
        self._watch(torch, "set_rng_state", "random")
        self._watch(torch.random, "set_rng_state", "random")
        if (numpy := sys.modules.get("numpy")) is not None:
            self._watch(numpy.random, "set_state", "random")
        self._wrap(torch, "load", self._around_load)
        self._wrap(DataLoader, "__iter__", self._around_pass)
        register_optimizer_step_post_hook(self._on_update)
        self._wrap(torch.nn.Module, "__call__", self._around_forward)

    def _around_load(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = call(*args, **kwargs)
        where = args[0] if args else kwargs.get("f")
        is_checkpoint = isinstance(where, str | os.PathLike) and os.fspath(where).startswith(
            f"{self._context._run.path}/"
        )
        if is_checkpoint and type(state) is dict:  # a subclass may have methods that the copy lacks
            return ReadKeys(state, lambda key: self._note("read", key=str(key)))
        return state

    def _around_pass(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._note("pass", **self._clock())
        return call(*args, **kwargs)

    def _watch(self, owner: Any, name: str, kind: str) -> None:
        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._note("load", kind=kind)
            if self._is_resumed and self._calls == 0 and self._journal.newest_step < 0:
                self._forwards = 0  # a forward before was not training: parts of the state were still to be loaded
            return call(*args, **kwargs)

        self._wrap(owner, name, around)

    def _on_update(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._updates += 1
        self._forwards_at_update = self._forwards

    def _around_forward(self, call: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        # Not a hook of the module: it would be copied and pickled with it.
        if module is self._root or self._root is None:
            self._on_forward(module, args, kwargs)
        return call(module, *args, **kwargs)

    def _on_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        import torch

        if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self._root is None:
            if not any(parameter.requires_grad for parameter in module.parameters()):
                return  # a transform of the data, or a loss
            self._root = module  # the outermost module is the first to be called
        done = self._forwards
        names = self._snapshots.get(str(done), [])
        if self._is_resumed and done == 0:
            names = ["resumed"]
        for name in names:
            self._note("snapshot", name=name, **take_snapshot(self._root).as_json())
        if done < self._batches_to_note:
            self._note("batch", number=done, digest=digest((args, kwargs), MAX_SAMPLED))
        self._forwards = done + 1

    # Notes.

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have ``around(call, …)`` called in place of a function or method."""
        call = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(call, *args, **kwargs)

        setattr(owner, name, wrapped)

    def _note(self, event: str, **facts: Any) -> None:
        self._file.write(json.dumps({"event": event, **facts}) + "\n")


class ReadKeys(dict[Any, Any]):
    """A loaded state that tells which of its keys are read.

    Args:
        state: the state.
        on_read: called with a key that is read.
    """

    def __init__(self, state: Mapping[Any, Any], on_read: Callable[[Any], None]) -> None:
        super().__init__(state)
        self._on_read = on_read

    def __getitem__(self, key: Any) -> Any:
        self._on_read(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a value, and tell of its key."""
        self._on_read(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove and return a value, and tell of its key."""
        self._on_read(key)
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self._on_read(key)
            yield key

    def keys(self) -> Any:
        """Return the keys; whoever asks for all of them may read all."""
        self._read_all()
        return super().keys()

    def values(self) -> Any:
        """Return the values, which are all read then."""
        self._read_all()
        return super().values()

    def items(self) -> Any:
        """Return the items, which are all read then."""
        self._read_all()
        return super().items()

    def _read_all(self) -> None:
        for key in super().__iter__():
            self._on_read(key)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        # As a class that torch.load(weights_only=True) reads: the script may save what it has loaded.
        from collections import OrderedDict

        return (OrderedDict, (), None, None, iter(dict.items(self)))
