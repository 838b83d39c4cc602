"""A small Hugging Face hub in a thread: what huggingface_hub and datasets ask for to read data
sets, and faults.

    with HubServer() as hub:
        hub.commit("org/name", {"README.md": b"...", "train/0.parquet": b"..."})
        hub.faults = [Fault("status", status=503, seconds=2)]
        ...  a process with HF_ENDPOINT=hub.url

As on the hub, Parquet files and shards are answered by a redirect to a signed address on another
host.
"""

import contextlib
import hashlib
import json
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath

LARGE = (".parquet", ".bin")


@dataclass
class Fault:
    """What spoils the answers to paths that `path` is found in, from the `skip`-th on, `times` or
    for some `seconds`.

    Kinds: status; cut and reset (half of the body, then the connection ends); short (half of the
    body with a length that says so); slow (`delay` seconds before); whole (Range is ignored); flip
    (one bit); call (`action`).
    """

    kind: str
    path: str = ""
    status: int = 503
    skip: int = 0
    times: int = sys.maxsize
    seconds: float = sys.maxsize
    delay: float = 0
    action: Callable[[], None] = lambda: None
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
    """`log` holds (method, path, kind of fault or None, bytes of the body sent)."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        self.faults: list[Fault] = []
        self.log: list[tuple] = []
        self.lock = threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def sent(self) -> int:
        return sum(size for *_, size in self.log)

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
        place = urllib.parse.unquote(url.path)
        self.asked = urllib.parse.parse_qs(content.decode() or url.query)
        if "json" in self.headers.get("Content-Type", ""):
            self.asked = json.loads(content)
        with self.server.lock:
            self.fault = next(
                (fault for fault in self.server.faults if fault.applies(self.path)), None
            )
            self.number = len(self.server.log)
            self.server.log.append((self.command, self.path, self.fault and self.fault.kind, 0))
        kind = self.fault and self.fault.kind
        if kind == "call":
            self.fault.action()
        if kind == "slow":
            time.sleep(self.fault.delay)
        if kind == "status":
            return self.answer(self.fault.status, {})
        for pattern, route in self.ROUTES:
            if found := re.fullmatch(pattern, place):
                return route(self, **found.groupdict())
        return self.refuse("EntryNotFound")

    do_HEAD = do_POST = do_GET  # noqa: N815

    # What can be asked

    def info(self, repository, revision="main"):
        if files := self.files(repository, revision):
            siblings = [{"rfilename": path} for path in files[1]]
            self.answer(
                200,
                {
                    "id": repository,
                    "sha": files[0],
                    "siblings": siblings,
                    "tags": [],
                    "private": False,
                },
            )

    def tree(self, repository, revision, path=""):
        if files := self.files(repository, revision):
            below = [
                PurePosixPath(file) for file in files[1] if not path or file.startswith(f"{path}/")
            ]
            if path and not below:
                return self.refuse("EntryNotFound")
            depth = len(PurePosixPath(path).parts) + 1
            recursive = str(self.asked.get("recursive", ["false"])[0]).lower() == "true"
            found = {str(file) for file in below if recursive or len(file.parts) == depth}
            found |= {
                str(PurePosixPath(*file.parts[:depth])) for file in below if len(file.parts) > depth
            }
            self.answer(200, [self.entry(files[1], each) for each in sorted(found)])

    def paths_info(self, repository, revision):
        if files := self.files(repository, revision):
            known = {
                str(parent) for file in files[1] for parent in PurePosixPath(file).parents
            } | files[1].keys()
            self.answer(
                200, [self.entry(files[1], path) for path in self.asked["paths"] if path in known]
            )

    def entry(self, files, path) -> dict:
        if path not in files:
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": path}
        size, digest = len(files[path]), hashlib.sha256(files[path]).hexdigest()
        entry = {"type": "file", "oid": digest[:40], "size": size, "path": path}
        return entry | (
            {"lfs": {"oid": digest, "size": size, "pointerSize": 134}}
            if path.endswith(LARGE)
            else {}
        )

    def resolve(self, repository, revision, path):
        if not (files := self.files(repository, revision)):
            return None
        if path not in files[1]:
            return self.refuse("EntryNotFound", {"X-Repo-Commit": files[0]})
        content = files[1][path]
        tag = f'"{hashlib.sha256(content).hexdigest()}"'
        about = {"X-Repo-Commit": files[0], "ETag": tag, "Accept-Ranges": "bytes"}
        if not path.endswith(LARGE):
            return self.send_content(content, about)
        about |= {"X-Linked-ETag": tag, "X-Linked-Size": len(content)}
        storage = self.server.url.replace("127.0.0.1", "localhost")
        place = urllib.parse.quote(f"/cdn/{repository}/{files[0]}/{path}")
        return self.answer(
            302, {}, about | {"Location": f"{storage}{place}?Expires={time.time() + 60}"}
        )

    def cdn(self, repository, revision, path):
        self.send_content(
            self.server.commits[repository][revision][path], {"Accept-Ranges": "bytes"}
        )

    def nothing(self):
        self.answer(200, {})

    REPOSITORY = r"(?P<repository>[^/]+/[^/]+)"
    ROUTES = (
        ("/", nothing),
        (f"/api/datasets/{REPOSITORY}", info),
        (f"/api/datasets/{REPOSITORY}/revision/(?P<revision>.+)", info),
        (f"/api/datasets/{REPOSITORY}/tree/(?P<revision>[^/]+)/?(?P<path>.*)", tree),
        (f"/api/datasets/{REPOSITORY}/paths-info/(?P<revision>[^/]+)", paths_info),
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

    def refuse(self, code, extra=(), status=404) -> None:
        self.answer(
            status, {"error": code}, {"X-Error-Code": code, "X-Error-Message": code, **dict(extra)}
        )

    def answer(self, status, value, extra=()) -> None:
        body = json.dumps(value).encode()
        self.head(status, len(body), {"Content-Type": "application/json", **dict(extra)})
        self.body(body)

    def head(self, status, size, extra) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": size, **extra}.items():
            self.send_header(key, str(value))
        self.end_headers()

    def body(self, body: bytes) -> None:
        if self.command != "HEAD":
            self.wfile.write(body)
            self.server.log[self.number] = (*self.server.log[self.number][:3], len(body))

    def send_content(self, content: bytes, extra: dict) -> None:
        kind = self.fault and self.fault.kind
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last, status = 0, len(content) - 1, 200
        if asked and kind != "whole":
            first, last = int(asked[1]), min(int(asked[2] or last), last)
            status, extra = 206, extra | {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        body = content[first : last + 1]
        if kind == "flip":
            body = (
                body[: len(body) // 2]
                + bytes([body[len(body) // 2] ^ 1])
                + body[len(body) // 2 + 1 :]
            )
        if kind == "short":
            body = body[: len(body) // 2]
        self.head(status, len(body), extra)
        if kind in ("cut", "reset"):
            self.body(body[: len(body) // 2])
            self.end_connection(kind == "reset")
        else:
            self.body(body)

    def end_connection(self, reset: bool) -> None:
        self.wfile.flush()
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
