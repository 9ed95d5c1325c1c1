"""The JSON API: routes, and the service that they use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, BinaryIO, TypeVar, cast
from urllib.parse import quote

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, File, Query, Request, UploadFile
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from counterfoil.app import schemas as s
from counterfoil.app.access import Access
from counterfoil.app.connections import ID_LETTERS, PAGE, Limits, too_long
from counterfoil.app.content import Audit, Content, Section, ServedModel
from counterfoil.app.engine import Correct, Encode, Engine, Explain, Score, Search
from counterfoil.app.guard import Meters
from counterfoil.app.images import MEDIA_TYPE, SIDES, Library, PictureCache, decode_upload
from counterfoil.app.problems import RETRY_HEADERS, Problem, documented
from counterfoil.app.queue import BatchQueue
from counterfoil.app.review import State
from counterfoil.app.turns import Turns
from counterfoil.core.errors import DataError
from counterfoil.data.text.tokenizers import require_known
from counterfoil.models.model import Model

DECODERS = 2
"""Pictures decoded at once; each may take some hundred megabytes."""

FILE_TYPE = "application/octet-stream"
"""Type of corrected copies: browsers save them and never show them as a page."""

CHUNK_BYTES = 64 * 2**10
"""Bytes of a download that are read at once."""

READERS = 4
"""Threads that read runs, findings and captions from disk; the page's files have their own."""


class Service:
    """The served content and everything the routes share."""

    def __init__(self, content: Content, limits: Limits, access: Access) -> None:
        self.content, self.limits, self.access = content, limits, access
        self.meters, self.turns = Meters(), Turns()
        audited = content.audit.images if content.audit is not None else None
        self.library = Library(content.index, limits, audited)
        self.engine = Engine([one.model for one in content.models], self.library)
        self.queue = BatchQueue(self.engine.run, limits, self.meters, self.turns)
        self.pictures = PictureCache()
        self.decoders = CapacityLimiter(DECODERS)
        self.readers = CapacityLimiter(READERS)
        self.exporting = asyncio.Lock()
        self.meters.gauge("waiting", "Jobs in the queue.", lambda: len(self.queue))
        self.meters.gauge("uploads", "Uploads in memory.", lambda: self.library.uploads)

    @property
    def can_upload(self) -> bool:
        return any(one.model.fragments_from is not None for one in self.content.models)

    def find_model(self, name: str | None) -> ServedModel:
        """A served model by its name, by default the first; a `Problem` if there is none."""
        models = self.content.models
        if name is None:
            return models[0]
        chosen = next((one for one in models if one.name == name), None)
        if chosen is None:
            raise Problem(404, f"no such model; served are {', '.join(m.name for m in models)}")
        return chosen

    def open_awaited_audit(self) -> None:
        """Serve an awaited audit if it is complete by now."""
        awaited = self.content.awaited_audit
        if awaited is None:
            return
        try:
            audit = awaited.try_open()
        except DataError as error:
            awaited.problem = str(error)
            return
        if audit is not None:
            self.library.show_audited(audit.images)
            self.content = replace(self.content, audit=audit, awaited_audit=None)

    def close(self) -> None:
        self.queue.close()
        self.content.close()


async def the_service(request: Request) -> Service:
    # async: FastAPI would run a plain function on a thread, and /healthz would wait for a free one
    return cast(Service, request.app.state.service)


T = TypeVar("T")
router = APIRouter()
TheService = Annotated[Service, Depends(the_service)]
Offset = Annotated[int, Query(ge=0, le=10**9)]
Limit = Annotated[int, Query(ge=1, le=PAGE)]
Name = Annotated[str, Query(min_length=1, max_length=ID_LETTERS)]


@router.get("/api/about", tags=["service"], responses=documented())
async def about(service: TheService) -> s.About:
    """The served model, index, audit and runs, and the limits on uploads."""
    from counterfoil import __version__

    await _read(service, service.open_awaited_audit)
    awaited = service.content.awaited_audit
    content, limits, index = service.content, service.limits, service.content.index
    names = {one.model: one.name for one in content.models}
    return s.About(
        version=__version__,
        models=[_described(service, one) for one in content.models],
        missing=list(content.missing),
        search_model=names.get(index.model, index.model.spec.name) if index is not None else None,
        images=len(index.items["images"]) if index is not None else 0,
        captions=len(index.items["captions"]) if index is not None else 0,
        can_upload=service.can_upload,
        examples=service.library.examples,
        audit=content.audit is not None,
        audit_awaited=awaited is not None and not awaited.problem,
        audit_problem=awaited.problem if awaited is not None else "",
        runs=await _read(service, lambda: len(content.runs)),
        limits={"upload_bytes": limits.upload_bytes, "pixels": limits.pixels},
    )


def _described(service: Service, one: ServedModel) -> s.ModelInfo:
    scale = service.engine.scales[one.model]
    return s.ModelInfo(
        name=one.name,
        kind=one.model.spec.name,
        summary=one.summary,
        corrector=one.corrector.spec.name if one.corrector is not None else None,
        can_upload=one.model.fragments_from is not None,
        scale=s.Scale.model_validate(scale) if scale else None,
    )


@router.get("/api/images", tags=["images"], responses=documented(422))
async def images(service: TheService, offset: Offset = 0, limit: Limit = 24) -> s.Images:
    """Images of the index with their captions."""
    listed = await _read(service, service.library.listed, offset, limit)
    return s.Images(
        total=len(service.library.ids),
        offset=offset,
        images=[s.ImageInfo(**info) for info in listed],
    )


@router.get("/api/image", tags=["images"], responses=documented(404, 422))
async def image(service: TheService, image: Name) -> s.ImageInfo:
    """One image with its captions."""
    return s.ImageInfo(**await _read(service, service.library.about, image))


@router.post(
    "/api/images", tags=["images"], status_code=201, responses=documented(408, 409, 415, 422)
)
async def upload(service: TheService, file: Annotated[UploadFile, File()]) -> s.Uploaded:
    """Send an image; the response gives its id. The latest uploads are kept, in memory only."""
    if not service.can_upload:
        raise Problem(409, "this model was trained on precomputed features; it cannot read pixels")
    data = await file.read()
    if len(data) > service.limits.upload_bytes:
        raise too_long(service.limits.upload_bytes)
    picture = await to_thread.run_sync(
        decode_upload, data, service.limits, limiter=service.decoders
    )
    encoded = await service.queue.submit(Encode(picture))
    name = await to_thread.run_sync(service.library.add, picture, encoded, limiter=service.decoders)
    return s.Uploaded(id=name, width=picture.width, height=picture.height)


@router.get(
    "/api/picture",
    tags=["images"],
    response_class=Response,
    responses={**documented(404, 422), 200: {"content": {MEDIA_TYPE: {}}}},
)
async def picture(
    service: TheService, image: Name, side: Annotated[int, Query(ge=1, le=SIDES[-1])] = 320
) -> Response:
    """The pixels of an image; the longer side is rounded up to one of a few sizes."""
    service.library.check(image)
    size = next(size for size in SIDES if size >= side)
    data = await to_thread.run_sync(
        service.pictures.get,
        image,
        size,
        lambda: service.library.picture(image),
        limiter=service.decoders,
    )
    return Response(data, 200, {"Cache-Control": "private, max-age=3600"}, MEDIA_TYPE)


@router.post("/api/score", tags=["matching"], responses=documented(404, 422))
async def score(service: TheService, body: s.ScoreRequest) -> s.ScoreResponse:
    """Scores of every image with every text."""
    for name in body.images:
        service.library.check(name)
    model = service.find_model(body.model).model
    unknown = []
    for text in body.texts:
        unknown.append(_unknown(model, text))
        await service.turns.take()  # many long texts would block the event loop
    scores = await service.queue.submit(Score(model, tuple(body.images), tuple(body.texts)))
    return s.ScoreResponse(scores=scores, unknown=unknown)


@router.post("/api/search", tags=["matching"], responses=documented(404, 409, 422))
async def search(service: TheService, body: s.SearchRequest) -> s.SearchResponse:
    """The best images for a text, or captions for an image."""
    if service.content.index is None:
        raise Problem(409, "no library is served; start the service on an index or a run")
    if body.image is not None:
        service.library.check(body.image)
    model = service.content.index.model
    unknown = _unknown(model, body.text) if body.text is not None else []
    job = Search(body.text, body.image, body.k, body.target)
    results: dict[str, Any] = await service.queue.submit(job)
    return s.SearchResponse(**results, unknown=unknown)


@router.post("/api/explain", tags=["matching"], responses=documented(404, 422))
async def explain(service: TheService, body: s.ExplainRequest) -> s.ExplainResponse:
    """The effect of every word of a sentence on its score with an image."""
    service.library.check(body.image)
    model = service.find_model(body.model).model
    _unknown(model, body.text)
    return s.ExplainResponse(**await service.queue.submit(Explain(model, body.image, body.text)))


@router.post("/api/correct", tags=["matching"], responses=documented(404, 409, 422))
async def correct(service: TheService, body: s.CorrectRequest) -> s.CorrectResponse:
    """Which words of a sentence are wrong for an image, and corrections for them."""
    service.library.check(body.image)
    chosen = service.find_model(body.model)
    _unknown(chosen.model, body.text)
    if chosen.corrector is None:
        raise Problem(409, "the chosen model has no corrector; serve it with --corrector RUN")
    _unknown(chosen.corrector, body.text)
    job = Correct(chosen.model, chosen.corrector, body.image, body.text, body.threshold)
    return s.CorrectResponse(**await service.queue.submit(job))


@router.get("/api/audit", tags=["audit"], responses=documented(404, 422))
async def audit(
    service: TheService,
    offset: Offset = 0,
    limit: Limit = 20,
    reason: Annotated[str | None, Query(max_length=ID_LETTERS)] = None,
    section: Section = "suspicious",
    state: State = "all",
    after: Annotated[str | None, Query(max_length=ID_LETTERS)] = None,
) -> s.Findings:
    """Findings of the served audit: suspicious captions, or near-duplicates.

    With `after`, the key of a finding, only those behind it; `offset` counts from there.
    """
    await _read(service, service.open_awaited_audit)
    page = _served_audit(service).page
    return s.Findings(**await _read(service, page, offset, limit, reason, section, state, after))


@router.post("/api/audit/decisions", tags=["audit"], responses=documented(404, 409, 422, 507))
async def decide(service: TheService, body: s.DecisionRequest) -> s.DecisionResponse:
    """Keep, fix or discard a caption, or undo one's last decision on it.

    Decisions are stored in the report's folder before the response is sent.
    """
    review = _served_audit(service).review
    arguments = (body.key, body.action, body.correction, body.reviewer)
    return s.DecisionResponse(**await _read(service, review.decide, *arguments))


@router.post("/api/audit/export", tags=["audit"], responses=documented(404, 422, 507))
async def export_audit(service: TheService) -> s.ExportResponse:
    """Write the data with all decisions applied into the report's folder, and a diff beside it."""
    review = _served_audit(service).review
    try:  # waiting here, not on a thread of `readers`, which others need meanwhile
        await asyncio.wait_for(service.exporting.acquire(), service.limits.timeout)
    except asyncio.TimeoutError:
        raise Problem(503, "another export is still running; try again", RETRY_HEADERS) from None
    try:
        return s.ExportResponse(**await _read(service, review.export))
    finally:
        service.exporting.release()


class Download(StreamingResponse):
    """An open file as a download.

    Unlike ``FileResponse``, which opens the file by its name after it has measured it, this sends
    the file that was opened, even if an export replaces it meanwhile. Ranges are not served: two of
    them could be parts of different exports.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        quoted = quote(name)
        named = f'filename="{name}"' if quoted == name else f"filename*=utf-8''{quoted}"
        headers = {
            "Content-Length": str(os.fstat(file.fileno()).st_size),
            "Content-Disposition": f"attachment; {named}",
        }
        super().__init__(iter(partial(file.read, CHUNK_BYTES), b""), 200, headers, FILE_TYPE)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


@router.get(
    "/api/audit/corrected",
    tags=["audit"],
    response_class=StreamingResponse,
    responses={**documented(404, 422), 200: {"content": {FILE_TYPE: {}}}},
)
async def corrected(service: TheService, file: Name) -> Download:
    """Download a file of the last export."""
    return Download(await _read(service, _served_audit(service).review.open_corrected, file), file)


def _served_audit(service: Service) -> Audit:
    if service.content.audit is None:
        raise Problem(404, "no audit is served; start the service with --audit DIR")
    return service.content.audit


@router.get("/api/runs", tags=["runs"], responses=documented())
async def runs(service: TheService) -> s.RunList:
    """The served runs."""
    summaries = await _read(service, service.content.runs.listed)
    return s.RunList(runs=[s.RunSummary(**summary) for summary in summaries])


@router.get("/api/run", tags=["runs"], responses=documented(404, 422))
async def run(service: TheService, name: Name) -> s.RunDetail:
    """A run with its current results and curves."""
    return s.RunDetail(**await _read(service, service.content.runs.read, name))


@router.post("/api/session", tags=["service"], status_code=204, responses=documented(401, 422))
async def session(
    service: TheService, request: Request, response: Response, body: s.SessionRequest
) -> None:
    """Exchange the token for a cookie, which browsers also send with requests for images."""
    access = service.access
    if not access.opens(body.token):
        raise Problem(401, "wrong token; use the one that the service printed when it started")
    if access.locked:
        response.set_cookie(
            access.cookie_name,
            access.cookie,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )


@router.get("/healthz", tags=["service"], responses=documented())
async def healthz(service: TheService) -> s.Health:
    """Whether the service can answer requests."""
    if not service.queue.alive:
        raise Problem(503, "the worker thread of the models has stopped; restart the service")
    return s.Health(status="ok", waiting=len(service.queue))


@router.get("/metrics", tags=["service"], response_class=PlainTextResponse, responses=documented())
async def metrics(service: TheService) -> PlainTextResponse:
    """Metrics in the format of Prometheus."""
    return PlainTextResponse(service.meters.text(), media_type="text/plain; version=0.0.4")


async def _read(service: Service, read: Callable[..., T], *args: Any) -> T:
    """Call a function that reads from disk, on one of a few threads."""
    result = await to_thread.run_sync(read, *args, limiter=service.readers)
    await service.turns.take()
    return result


def _unknown(model: Model, text: str) -> list[str]:
    """Words outside a model's vocabulary; an error if all are."""
    try:
        return require_known(model.text, text).unknown_words
    except DataError as error:
        raise Problem(422, str(error)) from None
