"""Digests of images: what the file of an image contains, whatever its name and place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from counterfoil.data.images import FileImage, ImageRef, MemberImage, RowImage
from counterfoil.data.pairs import Split
from counterfoil.errors import DataError
from counterfoil.features.cache import DIGESTS, FOLDER
from counterfoil.files import write_atomically
from counterfoil.parallel import usable_cores
from counterfoil.progress import Progress
from counterfoil.reading import GIB, read_bytes

_SIZE = 32
_UNREADABLE = bytes(_SIZE)
# So many images of a split are read in full before each run; of the others, size and dates must do.
_READ = 32
# A bar is worth its line for more images than this.
_MANY = 1000


def digest_of(ref: ImageRef) -> bytes:
    """SHA-256 of an image's encoded bytes (of its pixels if they are not encoded); or `DataError`.

    It is always read in full.
    """
    try:
        if isinstance(ref, RowImage):  # a PNG made of it would depend on the version of Pillow
            pixels = ref.array.row(ref.row)
            head = f"pixels {pixels.dtype.str} {pixels.shape}\n".encode()
            return hashlib.sha256(head + pixels.tobytes()).digest()
        return hashlib.sha256(ref.read()).digest()
    except OSError as error:
        raise DataError(f"{ref.name}: cannot be read ({error.strerror})") from None


@dataclass(frozen=True)
class CheckedImage:
    """An image that must still have the content that its digest was made of."""

    ref: ImageRef
    digest: bytes

    @property
    def name(self) -> str:
        return self.ref.name

    def read(self) -> bytes:
        if isinstance(self.ref, RowImage):
            return self.ref.read()
        data = self.ref.read()
        if hashlib.sha256(data).digest() != self.digest:
            raise DataError(f"{self.name}: was changed while features were extracted; run it again")
        return data


def digests_of(split: Split, cache_dir: Path | None, progress: Progress) -> list[bytes | str]:
    """The digest of each image of a split; a message for one that cannot be read.

    With a cache folder, they are written there. The next time, a split whose files have the same
    names, sizes and dates needs not be read again.
    """
    pixels = split.pixels or ()
    path = None if cache_dir is None else cache_dir / FOLDER / DIGESTS / _fingerprint_of(split)
    cached = None if path is None else _try_read(path, len(pixels))
    if cached is not None:
        return [
            _try_digest(ref) if digest == _UNREADABLE else digest
            for ref, digest in zip(pixels, cached, strict=True)
        ]
    with ThreadPoolExecutor(usable_cores()) as pool:
        made = pool.map(_try_digest, pixels)
        title = f"reading images ({split.name})"
        tracked = progress.track(made, title, len(pixels)) if len(pixels) > _MANY else made
        digests = list(tracked)
    if path is not None:
        data = b"".join(d if isinstance(d, bytes) else _UNREADABLE for d in digests)
        with suppress(OSError):  # only time is lost
            write_atomically(path, data + hashlib.sha256(data).digest())
    return digests


def _try_digest(ref: ImageRef) -> bytes | str:
    try:
        return digest_of(ref)
    except DataError as error:
        return str(error)


def _try_read(path: Path, count: int) -> list[bytes] | None:
    """Digests that were written before; None if there are none, or not all of them are intact."""
    try:
        data = read_bytes(path, GIB)
    except OSError:
        return None
    body, checksum = data[:-_SIZE], data[-_SIZE:]
    if len(body) != count * _SIZE or hashlib.sha256(body).digest() != checksum:
        return None
    return [body[start : start + _SIZE] for start in range(0, len(body), _SIZE)]


def _fingerprint_of(split: Split) -> str:
    """Changes when images are added, removed, reordered or replaced."""
    digest = hashlib.sha256()
    pixels = split.pixels or ()
    for stamp in _stamps(pixels):
        digest.update(f"{stamp}\n".encode(errors="surrogatepass"))
    for index in range(0, len(pixels), max(1, len(pixels) // _READ)):
        made = _try_digest(pixels[index])
        digest.update(made if isinstance(made, bytes) else b"unreadable")
    return digest.hexdigest()


def _stamps(pixels: Sequence[ImageRef]) -> Iterator[str]:
    dated = lru_cache(maxsize=1024)(_dated)  # many images share an archive or an array
    for ref in pixels:
        if isinstance(ref, FileImage):
            yield f"{ref.path} {_dated(ref.path)}"
        elif isinstance(ref, MemberImage):
            yield f"{ref.archive} {dated(ref.archive)} {ref.name} {ref.offset} {ref.size}"
        elif isinstance(ref, RowImage):
            yield f"{ref.array.path} {dated(ref.array.path)} {ref.array.shape} {ref.row}"
        else:
            yield ref.name


def _dated(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "missing"
    # The time of the last change of its inode shows also a file whose date was set back.
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
