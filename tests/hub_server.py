"""A small Hugging Face hub in a thread: what huggingface_hub and datasets ask for to read data
sets, and faults.

    with HubServer() as hub:
        hub.commit("org/name", {"README.md": b"...", "train/0.parquet": b"..."})
        hub.faults = [Fault("status", status=503, seconds=2)]
        ...  a process with HF_ENDPOINT=hub.url

As on the hub, Parquet files and shards are answered by a redirect to an address on another host.
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
    """What spoils the answers to paths that `path` is found in, from the `skip`-th on, `times` or
    for some `seconds`.

    Kinds: status; cut (half of the body, then the connection ends); short (half of the body with a
    length that says so); flip (one bit).
    """

    kind: str
    path: str = ""
    status: int = 503
    skip: int = 0
    times: int = sys.maxsize
    seconds: float = sys.maxsize
    seen: int = 0
    first: float | None = None

    def applies(self, path: str) -> bool:
        if not re.search(self.path, path):
            return False
        self.seen += 1
        if not self.skip < self.seen <= self.skip + self.times:
            return False
        self.first = self.first or time.monotonic()
        return time.monotonic() - self.first <= self.seconds


class HubServer(ThreadingHTTPServer):
    """`log` holds (path, kind of fault or None)."""

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
        """Make the files the newest commit; returns its name."""
        before = self.commits.setdefault(repository, {})
        name = hashlib.sha1(f"{len(before)} {repository} {sorted(files)}".encode()).hexdigest()
        before[name] = files  # dicts keep their order: the last is the newest
        return name


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        self.asked = urllib.parse.parse_qs(content.decode() or url.query)
        if "json" in self.headers.get("Content-Type", ""):
            self.asked = json.loads(content)
        with self.server.lock:
            faults = (fault for fault in self.server.faults if fault.applies(self.path))
            fault = next(faults, None)
            self.kind = fault and fault.kind
            self.server.log.append((self.path, self.kind))
        if self.kind == "status":
            return self.answer(fault.status, {})
        for pattern, route in self.ROUTES:
            if asked := re.fullmatch(pattern, urllib.parse.unquote(url.path)):
                return route(self, **asked.groupdict())
        return self.refuse("EntryNotFound")

    do_HEAD = do_POST = do_GET  # noqa: N815

    # What can be asked

    def info(self, repository, revision="main"):
        if files := self.files(repository, revision):
            names = [{"rfilename": path} for path in files[1]]
            self.answer(200, {"id": repository, "sha": files[0], "siblings": names, "tags": []})

    def tree(self, repository, revision, path=""):
        if not (files := self.files(repository, revision)):
            return
        below = [PurePosixPath(file) for file in files[1] if file.startswith(path)]
        depth = len(PurePosixPath(path).parts) + 1
        recursive = str(self.asked.get("recursive", ["false"])[0]).lower() == "true"
        cuts = [file.parts if recursive else file.parts[:depth] for file in below]
        there = sorted({str(PurePosixPath(*parts)) for parts in cuts})
        self.answer(200, [self.entry(files[1], each) for each in there])

    def entry(self, files, path) -> dict:
        if path not in files:
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}
        size, digest = len(files[path]), hashlib.sha256(files[path]).hexdigest()
        entry = {"type": "file", "oid": digest[:40], "size": size, "path": path}
        large = {"lfs": {"oid": digest, "size": size, "pointerSize": 134}}
        return entry | (large if path.endswith(LARGE) else {})

    def resolve(self, repository, revision, path):
        if not (files := self.files(repository, revision)):
            return
        if path not in files[1]:
            return self.refuse("EntryNotFound")
        content = files[1][path]
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        about = {"X-Repo-Commit": files[0], "ETag": tag, "Accept-Ranges": "bytes"}
        if not path.endswith(LARGE):
            return self.send_content(content, about)
        place = urllib.parse.quote(f"/cdn/{repository}/{files[0]}/{path}")
        storage = self.server.url.replace("127.0.0.1", "localhost")
        about |= {"X-Linked-ETag": tag, "X-Linked-Size": len(content)}
        self.answer(302, {}, {**about, "Location": f"{storage}{place}"})

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
        """(commit, its files); where there is none, that is answered."""
        commits = self.server.commits.get(repository)
        if commits is None:
            return self.refuse("RepoNotFound", status=401)  # as the hub answers strangers
        name = list(commits)[-1] if revision == "main" else revision
        return (name, commits[name]) if name in commits else self.refuse("RevisionNotFound")

    # Answers

    def refuse(self, code, status=404) -> None:
        self.answer(status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code})

    def answer(self, status, value, extra=()) -> None:
        self.send(
            status, json.dumps(value).encode(), {"Content-Type": "application/json", **dict(extra)}
        )

    def send(self, status, body: bytes, extra: dict) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **extra}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_content(self, content: bytes, extra: dict) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last, status = 0, len(content) - 1, 200
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
            status, extra = 206, extra | {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        body = bytearray(content[first : last + 1])
        if self.kind == "flip":
            body[len(body) // 2] ^= 1
        if self.kind == "cut":
            extra |= {"Content-Length": len(body)}
            self.close_connection = True
        self.send(status, body[: len(body) // 2] if self.kind in ("cut", "short") else body, extra)
