"""How much a client may ask for; everything that grows with a request has a limit here."""

from __future__ import annotations

from dataclasses import dataclass

TEXT_LETTERS = 600
"""Of a sentence. A caption has a dozen words; encoding time grows with them."""

TEXT_WORDS = 120
TEXTS = 64
"""Sentences, and images, of one scoring request."""

RESULTS = 100
PAGE = 100
"""Images or findings listed at once."""

ID_LETTERS = 1000


@dataclass(frozen=True)
class Limits:
    """Sizes, numbers and seconds that the service holds itself and its clients to.

    ``uploads`` pictures are kept, the oldest go first. At most ``in_flight`` requests are worked
    on and ``waiting`` pieces of work queued at a time; more are told to come back. ``batch`` is how
    many pieces of work go through the model together.

    At most ``connections`` are open, ``address_connections`` of them from one address (0: any
    number), and ``spare_connections`` beyond, for health checks; see `Connections`.

    Each time-out is for all of something, not for its parts: ``header_timeout`` for the headers of
    a request, ``body_timeout`` for its body, ``timeout`` for the work, ``send_timeout`` for reading
    the answer, ``keep_alive`` between two requests, ``drain`` for work under way at shutdown.
    """

    upload_bytes: int = 10 * 2**20
    json_bytes: int = 2**18
    pixels: int = 40_000_000
    shown_side: int = 1280
    uploads: int = 64
    in_flight: int = 128
    waiting: int = 256
    batch: int = 32
    connections: int = 512
    address_connections: int = 128
    spare_connections: int = 16
    timeout: float = 20.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    send_timeout: float = 30.0
    keep_alive: float = 15.0
    drain: float = 5.0
