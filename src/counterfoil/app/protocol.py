"""HTTP/1.1 protocol for uvicorn with a time-out for every stage of a connection.

uvicorn waits as long as bytes keep coming, however slowly, and calls the application only once the
headers are complete. So slow clients are handled here, per connection. A connection is always in
one stage, and each stage has one timer, which further bytes do not extend.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from enum import Enum
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from counterfoil.app.connections import Connection, Connections, Limits
from counterfoil.app.guard import SPARE_KEY
from counterfoil.app.problems import problem_response

GRACE_SECONDS = 2.0
"""Seconds by which time-outs here exceed those of the application, which can send an error."""

EARLY_BYTES = 2**20
"""Most bytes buffered for a connection before it is open; asyncio reads 256 KiB at a time."""


class Stage(Enum):
    """What a connection is doing."""

    HANDSHAKE = "negotiating TLS"
    HEADERS = "sending the headers of a request"
    BODY = "sending the body of a request"
    ANSWER = "waiting for its answer"
    READING = "not reading its answer as fast as it is written"
    IDLE = "between two requests"
    CLOSING = "being closed"


ANSWER_STAGES = (Stage.ANSWER, Stage.READING)


def protocol_class(
    connections: Connections, limits: Limits, tls: ssl.SSLContext | None = None
) -> type[asyncio.Protocol]:
    """The class of which uvicorn creates one instance per connection."""
    own = {"open_connections": connections, "limits": limits, "tls": tls}
    return type("ServiceProtocol", (TimedProtocol,), own)


class TimedProtocol(H11Protocol):
    """A connection with time-outs; `Connections` limits their number."""

    open_connections: ClassVar[Connections]
    limits: ClassVar[Limits]
    tls: ClassVar[ssl.SSLContext | None] = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connection: Connection | None = None
        self._stage: Stage | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timed: object = None
        self._receiving, self._silent = True, True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if isinstance(peer, tuple) else ""
        self._connection = self.open_connections.try_admit(address, transport.abort)
        if self._connection is None:
            transport.abort()
            return
        self.app_state = {**self.app_state, SPARE_KEY: self._connection.spare}
        if self.tls is None:
            self._open(transport)
        else:
            # here and not in uvicorn, which creates no protocol before the handshake is complete
            self._enter(Stage.HANDSHAKE)
            self._handshake = self.loop.create_task(self._start_tls(transport, self.tls))

    async def _start_tls(self, transport: asyncio.Transport, tls: ssl.SSLContext) -> None:
        early = EarlyData(transport.abort)
        try:
            secure = await self.loop.start_tls(
                transport,
                early,
                tls,
                server_side=True,
                ssl_handshake_timeout=self.limits.header_timeout,
            )
        except (OSError, asyncio.TimeoutError):  # no TLS, too slow, or disconnected
            transport.abort()
            self._leave()
        else:
            if secure is None or transport.is_closing():  # closed during the handshake
                self._leave()
                return
            secure.set_protocol(self)
            self._open(secure)
            if early.data:
                self.data_received(bytes(early.data))

    def _open(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._update()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        if self.transport is not None:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._receiving, self._silent = True, False
        super().data_received(data)
        self._update()

    def on_response_complete(self) -> None:
        self._receiving = False
        super().on_response_complete()
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update()

    def _update(self) -> None:
        if self._stage is not Stage.CLOSING:
            self._enter(self._current_stage())

    def _current_stage(self) -> Stage:
        cycle = self.cycle
        if cycle is not None and self.flow.write_paused:
            return Stage.READING
        if cycle is None or cycle.response_complete:
            return Stage.HEADERS if self._receiving else Stage.IDLE
        return Stage.BODY if cycle.more_body else Stage.ANSWER

    def _enter(self, stage: Stage) -> None:
        """Set the stage, and start its timer if it is a new one."""
        if self._connection is None:
            return
        if stage is not self._stage:
            if stage is Stage.ANSWER:
                self.open_connections.work(self._connection)
            else:
                self.open_connections.wait(self._connection)
        timed = ("answer" if stage in ANSWER_STAGES else stage, self.cycle)
        self._stage = stage
        if timed != self._timed:
            self._timed = timed
            self._start_timer(self._seconds(stage))

    def _seconds(self, stage: Stage) -> float:
        limits = self.limits
        if stage in ANSWER_STAGES:
            return limits.timeout + limits.send_timeout
        return {
            Stage.HANDSHAKE: limits.header_timeout + GRACE_SECONDS,
            Stage.HEADERS: limits.header_timeout,
            Stage.BODY: limits.body_timeout + GRACE_SECONDS,
            Stage.IDLE: limits.keep_alive,
            Stage.CLOSING: GRACE_SECONDS,
        }[stage]

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """Close the connection; if it is still open a little later, abort it."""
        stage = self._stage
        polite = stage in (Stage.HEADERS, Stage.IDLE) and not self.transport.is_closing()
        if not polite:
            self._abort()
            return
        self._enter(Stage.CLOSING)
        if stage is Stage.HEADERS and not self._silent and self._can_answer():
            self.transport.write(TOO_SLOW_RESPONSE)
        self.transport.close()

    def _can_answer(self) -> bool:
        """Whether the next bytes belong to a new request, not to the body of an answered one."""
        return self.cycle is None or not self.cycle.more_body

    def _abort(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _leave(self) -> None:
        self._stop_timer()
        if self._connection is not None:
            self.open_connections.release(self._connection)
            self._connection = None


class EarlyData(asyncio.Protocol):
    """Buffers data that a client sends directly after its handshake.

    asyncio delivers such data before `start_tls` returns, and it can be processed only then.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self.data = bytearray()
        self._abort = abort

    def data_received(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > EARLY_BYTES:
            self.data.clear()
            self._abort()


def _too_slow() -> bytes:
    """The bytes of a response with status 408."""
    detail = "the headers of the request did not arrive in time"
    answer = problem_response(408, detail, headers={"Connection": "close"})
    lines = [name + b": " + value for name, value in answer.raw_headers]
    return b"\r\n".join([b"HTTP/1.1 408 Request Timeout", *lines, b"", bytes(answer.body)])


TOO_SLOW_RESPONSE = _too_slow()
