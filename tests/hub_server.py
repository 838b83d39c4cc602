"""A small Hugging Face hub in a thread, for huggingface_hub and datasets, with faults.

    with HubServer() as hub:
        hub.commit("org/name", {"README.md": b"...", "train/0.parquet": b"..."})
        hub.faults = [Fault("status", status=503, times=2)]
        ...  # start a process with HF_ENDPOINT=hub.url

As on the hub, requests of Parquet files and shards are redirected to another host.
"""

import hashlib
import json
import re
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath

LARGE = (".parquet", ".bin")


@dataclass
class Fault:
    """A fault in the answers to some requests."""

    # "status": answer with this status; "silent": answer late
    kind: str

    # a regular expression that is searched for in the path of a request
    path: str = ""

    status: int = 503

    # how many of these requests are answered correctly before the first fault
    skip: int = 0

    # after how many faults it ends
    times: int = sys.maxsize

    # requests of the path so far
    num_requests: int = 0

    def applies(self, path: str) -> bool:
        """Return whether the fault befalls a request, and count the request."""
        if not re.search(self.path, path):
            return False
        self.num_requests += 1
        return self.skip < self.num_requests <= self.skip + self.times


class HubServer(ThreadingHTTPServer):
    """The hub. Its `log` holds (path, kind of the fault or None) of each request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.faults: list[Fault] = []
        self.log: list[tuple] = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def commit(self, repository: str, files: dict[str, bytes]) -> str:
        """Make the files the newest commit, and return its name."""
        commits = self.commits.setdefault(repository, {})
        name = hashlib.sha1(f"{len(commits)} {repository} {sorted(files)}".encode()).hexdigest()
        commits[name] = files  # dicts keep their order: the last is the newest
        return name


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        self.arguments = urllib.parse.parse_qs(content.decode() or url.query)
        if "json" in self.headers.get("Content-Type", ""):
            self.arguments = json.loads(content)
        with self.server.lock:
            faults = (fault for fault in self.server.faults if fault.applies(self.path))
            fault = next(faults, None)
            self.kind = fault and fault.kind
            self.server.log.append((self.path, self.kind))
        if self.kind == "silent":
            time.sleep(10)
        if self.kind == "status":
            return self.answer(fault.status, {})
        for pattern, route in self.ROUTES:
            if match := re.fullmatch(pattern, urllib.parse.unquote(url.path)):
                return route(self, **match.groupdict())
        return self.refuse("EntryNotFound")

    do_HEAD = do_POST = do_GET  # noqa: N815

    # ---- routes ----

    def info(self, repository, revision="main"):
        if files := self.files(repository, revision):
            names = [{"rfilename": path} for path in files[1]]
            self.answer(200, {"id": repository, "sha": files[0], "siblings": names, "tags": []})

    def tree(self, repository, revision, path=""):
        if not (files := self.files(repository, revision)):
            return
        below = [PurePosixPath(file) for file in files[1] if file.startswith(path)]
        depth = len(PurePosixPath(path).parts) + 1
        recursive = str(self.arguments.get("recursive", ["false"])[0]).lower() == "true"
        parts_of_paths = [file.parts if recursive else file.parts[:depth] for file in below]
        paths = sorted({str(PurePosixPath(*parts)) for parts in parts_of_paths})
        self.answer(200, [self.entry(files[1], path) for path in paths])

    def entry(self, files, path) -> dict:
        if path not in files:
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}
        size = len(files[path])
        digest = hashlib.sha256(files[path]).hexdigest()
        entry = {"type": "file", "oid": digest[:40], "size": size, "path": path}
        if path.endswith(LARGE):
            entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
        return entry

    def resolve(self, repository, revision, path):
        if not (files := self.files(repository, revision)):
            return
        if path not in files[1]:
            return self.refuse("EntryNotFound")
        content = files[1][path]
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"X-Repo-Commit": files[0], "ETag": tag, "Accept-Ranges": "bytes"}
        if not path.endswith(LARGE):
            return self.send_content(content, headers)
        storage = self.server.url.replace("127.0.0.1", "localhost")
        storage_path = urllib.parse.quote(f"/cdn/{repository}/{files[0]}/{path}")
        headers["X-Linked-ETag"] = tag
        headers["X-Linked-Size"] = len(content)
        headers["Location"] = f"{storage}{storage_path}"
        self.answer(302, {}, headers)

    def cdn(self, repository, revision, path):
        content = self.server.commits[repository][revision][path]
        self.send_content(content, {"Accept-Ranges": "bytes"})

    REPOSITORY = r"(?P<repository>[^/]+/[^/]+)"
    ROUTES = (
        (f"/api/datasets/{REPOSITORY}", info),
        (f"/api/datasets/{REPOSITORY}/revision/(?P<revision>.+)", info),
        (f"/api/datasets/{REPOSITORY}/tree/(?P<revision>[^/]+)/?(?P<path>.*)", tree),
        (f"/datasets/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
        (f"/cdn/{REPOSITORY}/(?P<revision>[^/]+)/(?P<path>.+)", cdn),
    )

    def files(self, repository, revision) -> tuple[str, dict] | None:
        """Return a commit and its files; without one, answer that it does not exist."""
        commits = self.server.commits.get(repository)
        if commits is None:
            return self.refuse("RepoNotFound", status=401)  # as the hub answers strangers
        name = list(commits)[-1] if revision == "main" else revision
        return (name, commits[name]) if name in commits else self.refuse("RevisionNotFound")

    # ---- answers ----

    def refuse(self, code, status=404) -> None:
        self.answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def answer(self, status, value, headers=()) -> None:
        headers = {"Content-Type": "application/json", **dict(headers)}
        self.send(status, json.dumps(value).encode(), headers)

    def send(self, status, body: bytes, headers: dict) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_content(self, content: bytes, headers: dict) -> None:
        """Send a file or the range of it that was asked for."""
        headers = dict(headers)
        status = 200
        first = 0
        last = len(content) - 1
        if byte_range := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            status = 206
            first = int(byte_range[1])
            if byte_range[2]:
                last = min(int(byte_range[2]), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.send(status, content[first : last + 1], headers)
