"""What is served, and the parts that routes use."""

from __future__ import annotations

from typing import cast

from anyio import CapacityLimiter
from fastapi import Request

from counterfoil.app.access import Access
from counterfoil.app.connections import Limits
from counterfoil.app.content import Content
from counterfoil.app.engine import Engine
from counterfoil.app.images import Library, PictureCache
from counterfoil.app.metrics import Meters
from counterfoil.app.queue import BatchQueue

DECODERS = 2
"""Pictures decoded at once; each may take some hundred megabytes."""

READERS = 4
"""Threads that read runs, findings and captions from disk; the page's files have their own."""


class Service:
    """The parts that routes use."""

    def __init__(self, content: Content, limits: Limits, access: Access) -> None:
        self.content, self.limits, self.access = content, limits, access
        self.meters = Meters()
        self.model = content.index.model
        audited = content.audit.images if content.audit is not None else None
        self.library = Library(content.index, limits, audited)
        self.engine = Engine(self.model, self.library, content.corrector)
        self.queue = BatchQueue(self.engine.run, limits, self.meters)
        self.pictures = PictureCache()
        self.decoders = CapacityLimiter(DECODERS)
        self.readers = CapacityLimiter(READERS)
        self.meters.gauge("waiting", "Work before the models.", lambda: len(self.queue))
        self.meters.gauge("uploads", "Uploads kept.", lambda: self.library.uploads)

    def close(self) -> None:
        self.queue.close()
        self.content.close()


async def the_service(request: Request) -> Service:
    # async, or FastAPI would need a thread for it, and /healthz would wait while all are busy
    return cast(Service, request.app.state.service)
