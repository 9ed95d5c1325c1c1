"""Code run by a user who may read a folder but not write it, also if the tests run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DROP = """
import os
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
"""


@contextmanager
def open_folder() -> Iterator[Path]:
    """An empty folder that everybody can reach, unlike those of pytest."""
    folder = Path(tempfile.mkdtemp(prefix="counterfoil-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def run_without_write_permission(imports: str, body: str, folder: Path) -> str:
    """What a program prints; it finds the folder as ``folder``."""
    folder.chmod(0o555)
    program = f"import sys\nfrom pathlib import Path\n{imports}\n{DROP}\n"
    program += f"folder = Path(sys.argv[1])\n{body}\n"
    result = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
