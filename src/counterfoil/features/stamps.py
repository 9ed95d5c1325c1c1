"""Fingerprints of images, cheap enough to take before every run."""

from __future__ import annotations

import hashlib

from counterfoil.data.images import FileImage, ImageRef, MemberImage, RowImage
from counterfoil.data.pairs import Split
from counterfoil.errors import DataError

# So many images of a split are read in full; of the others, size and date must do.
_READ = 32


def fingerprint_of(split: Split) -> str:
    """Changes when images are added, removed, reordered or replaced."""
    digest = hashlib.sha256(split.name.encode())
    pixels = split.pixels or ()
    for key, ref in zip(split.ids, pixels, strict=False):
        digest.update(f"{key}\n{_stamp(ref)}\n".encode())
    for index in range(0, len(pixels), max(1, len(pixels) // _READ)):
        try:
            digest.update(hashlib.sha256(pixels[index].read()).digest())
        except (DataError, OSError):
            digest.update(b"unreadable")
    return digest.hexdigest()


def _stamp(ref: ImageRef) -> str:
    if isinstance(ref, FileImage):
        try:
            status = ref.path.stat()
        except OSError:
            return f"{ref.name} missing"
        return f"{ref.name} {status.st_size} {status.st_mtime_ns}"
    if isinstance(ref, MemberImage):
        return f"{ref.name} {ref.offset} {ref.size}"
    if isinstance(ref, RowImage):
        return f"{ref.array.path.name} {ref.array.shape} {ref.row}"
    return ref.name
