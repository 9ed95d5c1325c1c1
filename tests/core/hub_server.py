"""A hub on this machine that speaks the protocol of `huggingface_hub`: download, create, push.

Large files go through the Git LFS endpoints, as on the real hub; all others inside the commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

LICENSES = ("apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-nc-4.0", "other")
"""Some of the licenses that a card may state; the real hub knows more, all in lower case."""


@dataclass
class Hub:
    """Models by name: their commits, the latest last, each with its files."""

    url: str = ""
    models: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    may_write: bool = True
    outage: int = 0
    """Status of all answers, if not 0."""
    outage_of: str = ""
    """Pattern of the requests that an outage concerns."""
    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next answers with a file break off."""

    def commit(self, name: str, changes: dict[str, bytes]) -> str:
        commits = self.models.setdefault(name, [])
        files = {**(commits[-1][1] if commits else {}), **changes}
        sha = hashlib.sha1(repr((len(commits), sorted(files))).encode()).hexdigest()  # noqa: S324
        commits.append((sha, files))
        return sha

    def find(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        commits = self.models.get(name) or []
        if revision == "main" and commits:
            return commits[-1]
        return next((one for one in commits if one[0] == revision), None)

    def downloaded(self) -> list[str]:
        """Names of files that were fetched."""
        return [one.rpartition("/")[2] for one in self.requests if re.match("GET .*/resolve/", one)]


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._route("HEAD")

        def do_GET(self) -> None:
            self._route("GET")

        def do_POST(self) -> None:
            self._route("POST")

        def do_PUT(self) -> None:
            self._route("PUT")

        def _route(self, method: str) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{method} {path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if hub.outage and re.search(hub.outage_of, f"{method} {path}"):
                self._json({"error": "try again later"}, hub.outage)
                return
            for pattern, action in ROUTES.items():
                if parts := re.fullmatch(pattern, f"{method} {path}"):
                    action(self, body, *parts.groups())
                    return
            self._json({"error": "no such endpoint"}, 404)

        def _info(self, body: bytes, name: str, revision: str | None = None) -> None:
            result = hub.find(name, revision or "main")
            if result is None:
                code = "RevisionNotFound" if name in hub.models else "RepoNotFound"
                self._json({"error": code}, 404, {"X-Error-Code": code})
                return
            sha, files = result
            siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
            self._json({"id": name, "modelId": name, "sha": sha, "siblings": siblings})

        def _resolve(self, body: bytes, method: str, name: str, revision: str, file: str) -> None:
            sha, files = hub.find(name, revision) or ("", {})
            if file not in files:
                self._json({"error": "missing"}, 404, {"X-Error-Code": "EntryNotFound"})
                return
            data = files[file]
            command = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
            start = int(command[1]) if command else 0
            self.send_response(206 if command else 200)
            if command:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("X-Repo-Commit", sha)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if method == "GET":
                self.wfile.write(data[start:][: hub.cuts.pop(0) if hub.cuts else None])
            self.close_connection = True

        def _create(self, body: bytes) -> None:
            command = json.loads(body)
            if not hub.may_write:
                self._json({"error": "You are not allowed to write there"}, 403)
                return
            owner = command.get("organization")
            name = f"{owner}/{command['name']}" if owner else command["name"]
            code = 409 if name in hub.models else 200
            hub.models.setdefault(name, [])
            self._json({"url": f"{hub.url}/{name}", "name": name}, code)

        def _validate(self, body: bytes) -> None:
            front = re.match("---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
            tags = (yaml.safe_load(front[1]) if front else None) or {}
            errors = []
            if tags.get("license", "mit") not in LICENSES:
                errors.append({"message": f'"license" must be one of {", ".join(LICENSES)}'})
            if tags.get("license") == "other" and not tags.get("license_name"):
                errors.append({"message": '"license_name" is required'})
            self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

        def _preupload(self, body: bytes, name: str) -> None:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            self._json({"files": modes})

        def _batch(self, body: bytes, name: str) -> None:
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})

        def _put(self, body: bytes, oid: str) -> None:
            assert hashlib.sha256(body).hexdigest() == oid
            hub.objects[oid] = body
            self._json({})

        def _commit(self, body: bytes, name: str) -> None:
            changes = {}
            for line in body.decode().splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "file":
                    changes[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    changes[value["path"]] = hub.objects[value["oid"]]
            sha = hub.commit(name, changes)
            url = f"{hub.url}/{name}/commit/{sha}"
            self._json({"success": True, "commitOid": sha, "commitUrl": url})

        def _json(self, value: object, code: int = 200, headers: dict | None = None) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            for key, text in (headers or {}).items():
                self.send_header(key, text)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    name = r"([\w.-]+/[\w.-]+)"
    ROUTES = {
        rf"GET /api/models/{name}": Handler._info,
        rf"GET /api/models/{name}/revision/(.+)": Handler._info,
        rf"(HEAD|GET) /{name}/resolve/([^/]+)/(.+)": Handler._resolve,
        r"POST /api/repos/create": Handler._create,
        r"POST /api/validate-yaml": Handler._validate,
        rf"POST /api/models/{name}/preupload/main": Handler._preupload,
        rf"POST /{name}\.git/info/lfs/objects/batch": Handler._batch,
        r"PUT /lfs/(\w+)": Handler._put,
        rf"POST /api/models/{name}/commit/main": Handler._commit,
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
