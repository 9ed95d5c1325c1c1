"""Runs the code of a tutorial in order, and sets what it printed beneath each block.

Blocks marked ``python`` share one interpreter, those marked ``sh`` run in bash; all of a page work
in the same temporary folder. A block that fails fails the build. A block of another language, such
as ``csv`` or ``text``, is only shown. The option ``title="name.py"`` also writes a block to a file,
and does not run it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MOST_SECONDS = 600
MOST_LINES = 40
INTERPRETER = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    printed, error = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(json.loads(line), "<tutorial>", "exec"), names)
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps({"output": printed.getvalue(), "error": error}), flush=True)
"""


class TutorialError(Exception):
    """A block that failed, with its code and what it wrote."""


class Session:
    """One page's folder and interpreter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {
            **os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore", "PYTHONPATH": f"{folder}{os.pathsep}{_source()}",
        }  # fmt: skip
        self.python = subprocess.Popen(
            [sys.executable, "-c", INTERPRETER],
            cwd=folder, env=self.environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def close(self) -> None:
        self.python.kill()
        self.python.communicate()

    def run(self, language: str, code: str) -> str:
        return self.run_python(code) if language == "python" else self.run_shell(code)

    def run_python(self, code: str) -> str:
        assert self.python.stdin is not None  # noqa: S101
        assert self.python.stdout is not None  # noqa: S101
        self.python.stdin.write(json.dumps(code) + "\n")
        self.python.stdin.flush()
        line = self.python.stdout.readline()
        answer = json.loads(line) if line else {"error": "the interpreter ended"}
        if answer["error"]:
            raise TutorialError(f"{code}\n{answer['error']}")
        return str(answer["output"])

    def run_shell(self, code: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", code],  # noqa: S607
            cwd=self.folder, env=self.environment, text=True, timeout=MOST_SECONDS,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            raise TutorialError(f"{code}\nexit code {done.returncode}\n{done.stdout}")
        return done.stdout


def _source() -> str:
    return str(Path(__file__).parents[2] / "src")


def with_output(markdown: str, page: str) -> str:
    """The page with the output of each block beneath it."""
    with tempfile.TemporaryDirectory(prefix="tutorial-") as folder:
        session = Session(Path(folder))

        def executed(block: re.Match[str]) -> str:
            language, title, code = block.groups()
            if title:
                (session.folder / title).write_text(code, encoding="utf-8")
            if title or language not in ("python", "sh"):
                return block[0]
            try:
                output = _shown(session.run(language, code), folder)
            except TutorialError as error:
                raise TutorialError(f"{page}: a block failed:\n{error}") from None
            return f"{block[0]}\n\n```text\n{output}\n```" if output else block[0]

        try:
            return BLOCK.sub(executed, markdown)
        finally:
            session.close()


def _shown(output: str, folder: str) -> str:
    """Output without the temporary folder's name, and without the middle of what is very long."""
    lines = output.replace(f"{folder}/", "").replace(str(Path.home()), "~").rstrip().splitlines()
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], "…", *lines[-half:]]
    return "\n".join(line.rstrip() for line in lines)
