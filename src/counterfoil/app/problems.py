"""HTTP errors as `application/problem+json` (RFC 9457), without internal details."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from counterfoil.core.errors import BusyError, CounterfoilError

if TYPE_CHECKING:  # `counterfoil serve --help` works without the extra
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException
    from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"
ANY_REQUEST = (400, 401, 403, 408, 413, 421, 429, 503)
"""Statuses with which `Guard` may refuse any request."""

log = logging.getLogger("counterfoil.app")

RETRY_HEADERS = {"Retry-After": "1"}


class ProblemBody(BaseModel):
    """What went wrong and what to do about it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[dict[str, str]] = []


class Problem(Exception):
    """An HTTP error, raised anywhere below a route."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, dict(headers or {})


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors of a route for the OpenAPI document."""
    schema = {"$ref": "#/components/schemas/ProblemBody"}
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "model": ProblemBody,
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in sorted({*statuses, *ANY_REQUEST})
    }


def problem_response(
    status: int,
    detail: str,
    errors: list[dict[str, str]] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    from starlette.responses import Response

    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status}
    # ASCII: a quoted input may contain lone surrogates, which UTF-8 cannot encode
    text = json.dumps({**body, "detail": detail, "errors": errors or []}, ensure_ascii=True)
    return Response(text, status, dict(headers or {}), MEDIA_TYPE)


def _explain(error: Mapping[str, Any]) -> dict[str, str]:
    """Where an error of pydantic is, and what; without pydantic's own words."""
    if error["type"] == "json_invalid":
        _, position = error["loc"]
        return {"where": "body", "what": f"not JSON (at character {position})"}
    where = ".".join(map(str, error["loc"]))
    what = str(error["msg"]).removeprefix("Value error, ")
    if what.startswith("Expected UploadFile"):  # as FastAPI says it; the form had a text instead
        field = error["loc"][-1]
        what = f"expected a file, got text (with curl: -F {field}=@photo.jpg)"
    return {"where": where, "what": what}


def _explain_unread(error: BaseException | None) -> str | None:
    """Why a JSON body cannot be read, beyond bad syntax; None if it is not for one of these."""
    if isinstance(error, RecursionError):
        return "JSON that is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not JSON in UTF-8 (at byte {error.start})"
    if isinstance(error, ValueError):  # Python refuses to convert thousands of digits
        return "JSON with a number that is too long"
    return None


def install(app: FastAPI) -> None:
    """Convert every exception of a route to a problem response."""
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    @app.exception_handler(Problem)
    async def _problem(_: Request, error: Problem) -> Response:
        return problem_response(error.status, error.detail, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        errors = [_explain(each) for each in error.errors()[:10]]
        first = f"{errors[0]['where']}: {errors[0]['what']}" if errors else "invalid request"
        return problem_response(422, first, errors)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if "json" in request.headers.get("content-type", ""):
            what = _explain_unread(error.__cause__)  # FastAPI names only errors of syntax
            if what is not None:
                return problem_response(422, f"body: {what}", [{"where": "body", "what": what}])
        return problem_response(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(BusyError)
    async def _busy(_: Request, error: BusyError) -> Response:
        return problem_response(503, str(error), headers=RETRY_HEADERS)

    @app.exception_handler(CounterfoilError)
    async def _ours(_: Request, error: CounterfoilError) -> Response:
        return problem_response(422, str(error))

    @app.exception_handler(Exception)
    async def _unforeseen(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem_response(500, "internal error; see the server log")
