"""A real browser, driven over its DevTools protocol: just what the tests of the page need."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "ArrowRight": (39, ""),
    "ArrowLeft": (37, ""),
    "ArrowDown": (40, ""),
    "ArrowUp": (38, ""),
    "/": (191, "/"),
}
PATIENCE = 60.0


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a headless Chromium."""

    def __init__(self, program: str, profile: Path) -> None:
        # One renderer: another process for every page, and a spare one, took half of the time.
        switches = [
            "--disable-features=SpareRendererForSitePerProcess,BackForwardCache",
            "--disable-site-isolation-trials", "--renderer-process-limit=1",
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0",
            "--disable-background-networking", f"--user-data-dir={profile}",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [program, *switches, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        self._open = ExitStack()
        self._socket: ClientConnection = self._open.enter_context(
            connect(
                self._address(), max_size=None, compression=None, proxy=None, ping_interval=None
            )
        )
        pages = self._send("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def _address(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if b"DevTools listening on " in line:
                return line.decode().split("listening on ")[1].strip()
        raise RuntimeError("the browser did not start")

    def close(self) -> None:
        self._open.close()
        self.process.terminate()
        self.process.wait(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def call(self, method: str, **params: Any) -> Any:
        return self._send(method, self._session, **params)

    def _send(self, method: str, session: str | None = None, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE))
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what the page complains of."""
        if event["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded":
            entry = event["params"]["entry"]
            if entry["level"] == "error":
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")

    def js(self, expression: str) -> Any:
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression as soon as it is true."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if value := self.js(expression):
                return value
            time.sleep(0.03)
        raise AssertionError(f"never came true: {expression}")

    def go(self, address: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait("document.querySelector('#main > .view[data-ready], main.docs h1') !== null")

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def count(self, selector: str) -> int:
        return int(self.js(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def middle(self, selector: str) -> tuple[float, float]:
        self.wait(f"document.querySelector({json.dumps(selector)}) !== null")
        found = self.js(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return found[0], found[1]

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def hover(self, selector: str) -> None:
        self.mouse("mouseMoved", *self.middle(selector))

    def click(self, selector: str) -> None:
        x, y = self.middle(selector)
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        code, text = KEYS.get(key) or (ord(key.upper()), key)
        shared = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def write(self, text: str) -> None:
        """Type into what has the focus, letter by letter."""
        for letter in text:
            self.call("Input.insertText", text=letter)

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def drop_file(self, path: Path) -> None:
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=300, y=300, data=data)

    def size(self, width: int, height: int, phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip

    def colors(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """A screenshot of what is in view."""
        self.js("new Promise((done) => setTimeout(done, 250))")
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
