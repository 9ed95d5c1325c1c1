"""The service: its parts, put together as one ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

from anyio import CapacityLimiter
from fastapi import FastAPI, Request

from counterfoil.app.access import LOOPBACK, Access
from counterfoil.app.audits import Audit
from counterfoil.app.batching import BatchQueue
from counterfoil.app.engine import Engine
from counterfoil.app.guard import App, Guard
from counterfoil.app.library import Library
from counterfoil.app.limits import Limits
from counterfoil.app.meters import Meters
from counterfoil.app.pictures import PictureCache
from counterfoil.app.problems import install
from counterfoil.app.runs import Runs
from counterfoil.models.model import Model
from counterfoil.search import SearchIndex

DECODERS = 2
"""Pictures decoded at once; each may take some hundred megabytes."""

READERS = 4
"""Threads that read runs, findings and captions from disk; the page's files have their own."""


@dataclass(frozen=True)
class Content:
    """What is served; ``close`` gives back what was made for it."""

    index: SearchIndex
    corrector: Model | None = None
    audit: Audit | None = None
    runs: Runs = field(default_factory=lambda: Runs([]))
    close: Callable[[], None] = lambda: None


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
        self.meters.gauges |= {
            "counterfoil_waiting": ("Work before the models.", lambda: len(self.queue)),
            "counterfoil_uploads": ("Uploads kept.", lambda: self.library.uploads),
        }

    def close(self) -> None:
        self.queue.close()
        self.content.close()


async def the_service(request: Request) -> Service:
    # async, or FastAPI would need a thread for it, and /healthz would wait while all are busy
    return cast(Service, request.app.state.service)


def create_app(
    content: Content, limits: Limits | None = None, access: Access | None = None
) -> Guard:
    """The application to be run by an ASGI server; without ``access`` for this machine alone."""
    from counterfoil import __version__
    from counterfoil.app.pages import add_pages
    from counterfoil.app.routes import router

    service = Service(content, limits or Limits(), access or Access(LOOPBACK))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="Counterfoil",
        version=__version__,
        description="Match images with texts: scores, search, explanations, corrections.",
        docs_url=None,  # FastAPI's own would be fetched from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        separate_input_output_schemas=False,
    )
    app.state.service = service
    app.include_router(router)
    add_pages(app)
    install(app)
    return Guard(cast(App, app), service.limits, service.meters, service.access)
