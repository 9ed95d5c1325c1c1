"""Several processes started by torchrun as one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def processes(environment: Mapping[str, str]) -> Iterator[bool]:
    """Join the group that torchrun describes in the environment, if any; yields 'am I the first'.

    NCCL where every process has a GPU, gloo elsewhere.
    """
    if int(environment.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(environment.get("LOCAL_RANK", "0")))
    # the first process may draw or extract for hours while the others wait for it
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=12))
    try:
        yield dist.get_rank() == 0
        dist.barrier()
    finally:
        dist.destroy_process_group()
