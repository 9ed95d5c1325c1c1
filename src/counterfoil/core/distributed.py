"""Distributed training: process groups under torchrun, and collectives with gradients.

Every backward pass here sums over processes, which gives the exact gradient of the sum of all
processes' losses. Each process computes the same global loss, so the mean that
DistributedDataParallel takes equals the gradient in a single process.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from counterfoil.core.errors import CounterfoilError, LostLoaderError
from counterfoil.core.parallel import end_with_parent

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""Seconds that a process has to finish its writes after torchrun was killed."""

FAILURE_GRACE_SECONDS = 10.0
"""Seconds that a process has to end normally after another one of its run has failed."""

WATCH_SECONDS = 1.0
"""Interval at which a process checks the others."""


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


class _SumOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def sum_over_processes(value: Tensor) -> Tensor:
    return value if world_size() == 1 else _SumOverProcesses.apply(value)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        shape = (max(counts), *value.shape[1:])
        mine = value.new_zeros(shape)
        mine[: value.shape[0]] = value
        parts = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(parts, mine)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        start = sum(ctx.counts[: dist.get_rank()])
        return total[start : start + ctx.counts[dist.get_rank()]], None


def gather_rows(value: Tensor) -> Tensor:
    """Rows of all processes, in rank order; their numbers may differ."""
    if world_size() == 1:
        return value
    counts = gather_counts(value.shape[0], value.device)
    if value.dtype == torch.bool:
        return gather_rows(value.to(torch.uint8)).bool()
    return _GatherRows.apply(value, counts)


def gather_counts(count: int, device: torch.device) -> list[int]:
    """The ``count`` of each process, in rank order."""
    if world_size() == 1:
        return [count]
    mine = torch.tensor([count], device=device)
    parts = [torch.empty_like(mine) for _ in range(world_size())]
    dist.all_gather(parts, mine)
    return [int(part) for part in parts]


def own_slice(count: int, device: torch.device) -> slice:
    """The ``count`` rows of this process among the rows of all processes."""
    if world_size() == 1:
        return slice(0, count)
    first = sum(gather_counts(count, device)[: rank()])
    return slice(first, first + count)


def any_process(flag: bool, device: torch.device) -> bool:
    """True if the flag is set in any process, so that all of them stop at the same step."""
    if world_size() == 1:
        return flag
    votes = torch.tensor([int(flag)], device=device)
    dist.all_reduce(votes)
    return bool(votes.item())


def gather_unique(texts: list[str]) -> list[str]:
    """The texts of all processes, each once."""
    if world_size() == 1:
        return texts
    parts: list[list[str]] = [[] for _ in range(world_size())]
    dist.all_gather_object(parts, texts)
    return list(dict.fromkeys(text for part in parts for text in part))


def wait_for_all() -> None:
    """Return when every process has come here."""
    if world_size() > 1:
        dist.barrier()


@contextmanager
def processes(
    environment: Mapping[str, str], report: Callable[[str], None] = lambda message: None
) -> Iterator[bool]:
    """Join the process group that torchrun describes in the environment, if any.

    Yields whether this is the first process. The backend is NCCL with GPUs, gloo without. If one
    process fails or is killed, the others end, too, with its message; ``report`` is called with it
    if a process must be ended at once (`PeerWatch`).
    """
    if int(environment.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environment.get("LOCAL_RANK", "0")))
    if dist.is_torchelastic_launched():  # a killed torchrun does not end its processes
        end_with_parent(GRACE_SECONDS)
    # the first process may prepare data for hours while the others wait
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=12))
    watch = PeerWatch(dist.distributed_c10d._get_default_store(), dist.get_rank(), report)
    try:
        yield dist.get_rank() == 0
        dist.barrier()
    except Exception as error:
        raise watch.cause(error) from error
    except BaseException as error:
        watch.tell(f"ended by {type(error).__name__}", 1)
        raise
    finally:
        watch.close()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Peer:
    """A process of the run: its place, and why it failed, if it did."""

    rank: int
    pid: int
    host: str
    namespace: str

    @classmethod
    def current(cls, rank: int) -> Peer:
        return cls(rank, os.getpid(), platform.node(), _pid_namespace())

    def is_gone(self) -> bool:
        """Whether it was a process of this machine that has ended."""
        if self.host != platform.node() or self.namespace != _pid_namespace():
            return False
        try:
            os.kill(self.pid, 0)
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except ProcessLookupError:
            return True
        except OSError:  # another user's process, or no /proc
            return False
        return state in "ZX"  # ended, but torchrun has not asked for its exit code yet


def _pid_namespace() -> str:
    """Containers have their own process ids; empty if there are none to tell apart."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class PeerError(CounterfoilError):
    """Another process of the run failed, so this one cannot continue."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PeerWatch:
    """Ends this process when another one of the run has failed or was killed.

    A process that waits for one that has ended may wait for hours: NCCL does not notice, and the
    first process may be validating. So every process stores its error for the others, and a thread
    looks for errors and for processes of this machine that are gone. The main thread has
    `FAILURE_GRACE_SECONDS` to end normally; then the thread ends the process.
    """

    FAILURE = "counterfoil/failure"

    def __init__(self, store: Any, rank: int, report: Callable[[str], None]) -> None:
        self.rank, self.report, self.closed = rank, report, threading.Event()
        self.failure: PeerError | None = None
        # a copy: the main thread may wait with the other, which blocks all others that use it
        self.store = store.clone() if hasattr(store, "clone") else store
        self.store.set(f"counterfoil/{rank}", json.dumps(asdict(Peer.current(rank))))
        others = [other for other in range(dist.get_world_size()) if other != rank]
        self.peers = [
            Peer(**json.loads(self.store.get(f"counterfoil/{other}"))) for other in others
        ]
        threading.Thread(target=self._watch, name="watch processes", daemon=True).start()

    def tell(self, message: str, exit_code: int) -> None:
        """Store the error of this process for the others; the first error of a run counts."""
        text = json.dumps({"rank": self.rank, "message": message, "exit_code": exit_code})
        with suppress(RuntimeError):  # the first process, which holds the store, may have ended
            self.store.compare_set(self.FAILURE, "", text)
            time.sleep(2 * WATCH_SECONDS)  # until all have read it: the store may end with this one

    def find_failure(self) -> PeerError | None:
        """The error of another process, if one failed."""
        if self.failure is not None:
            return self.failure
        with suppress(RuntimeError):  # the store may be gone with the first process
            if self.store.check([self.FAILURE]):
                report = json.loads(self.store.get(self.FAILURE))
                if report["rank"] != self.rank:
                    text = f"process {report['rank']} of this run failed: {report['message']}"
                    self.failure = PeerError(text, report["exit_code"])
                    return self.failure
        for peer in self.peers:
            if peer.is_gone():
                return PeerError(
                    f"process {peer.rank} of this run (pid {peer.pid} on {peer.host}) ended "
                    "without a message: killed, or out of memory? The last checkpoint is intact: "
                    "continue with --resume, with any number of processes",
                    1,
                )
        return None

    def cause(self, error: Exception) -> Exception:
        """An error of this process, or that of another one which led to it; told to the others."""
        if isinstance(error, LostLoaderError) or not isinstance(error, CounterfoilError):
            end = time.monotonic() + 2 * WATCH_SECONDS  # the other may be about to tell
            while time.monotonic() < end:
                if (failure := self.find_failure()) is not None:
                    return failure
                time.sleep(WATCH_SECONDS / 10)
        self.tell(str(error) or type(error).__name__, getattr(error, "exit_code", 1))
        return error

    def close(self) -> None:
        self.closed.set()

    def _watch(self) -> None:
        failure: PeerError | None = None
        while failure is None:
            if self.closed.wait(WATCH_SECONDS):
                return
            failure = self.find_failure()
        if not self.closed.wait(FAILURE_GRACE_SECONDS):
            self.report(str(failure))
            os._exit(failure.exit_code)


class FirstProcessError(CounterfoilError):
    """An error of the first process, raised in all others."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def read_in_turn(read: Callable[[], T]) -> T:
    """Call ``read`` in the first process, then in the others, which find what it has cached."""
    result = on_first_process(read)
    return read() if result is None else result


def on_first_process(action: Callable[[], T]) -> T | None:
    """Run ``action`` in the first process while the others wait; None in the others.

    If it fails, every process raises, so that none waits for a process that has ended.
    """
    if world_size() == 1:
        return action()
    error: Exception | None = None
    result: T | None = None
    if rank() == 0:
        try:
            result = action()
        except Exception as raised:
            error = raised
    failure: list[tuple[str, int] | None] = [None]
    if error is not None:
        failure = [(str(error) or type(error).__name__, getattr(error, "exit_code", 1))]
    dist.broadcast_object_list(failure)
    dist.barrier()  # the first process must not end before all have received it
    if error is not None:
        raise error
    if failure[0] is not None:
        raise FirstProcessError(*failure[0])
    return result
