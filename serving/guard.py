"""Refuse requests that other websites make, and requests with a large body."""

import ipaddress
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from utils.units import format_bytes

MAX_BODY_BYTES = 2**19
# Addresses by which a server listens on all interfaces of the machine.
WILDCARD_ADDRESSES = ("0.0.0.0", "::")
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Refusal(NamedTuple):
    """The answer to a request that is refused."""

    status: int
    message: str


def is_own_host(header: str, bound_host: str) -> bool:
    """Return whether a Host header names this server.

    Any website can let its own name point at this machine (DNS rebinding), and so reach the server
    from the browser of a visitor. The header then has the name of the website. This cannot happen
    with a numeric address.

    Args:
        bound_host: what the server listens on
    """
    try:
        name = urlsplit(f"//{header}").hostname
        if name in ("localhost", "127.0.0.1", "::1", bound_host.lower()):
            return True
        return bound_host in WILDCARD_ADDRESSES and bool(ipaddress.ip_address(name or ""))
    except ValueError:  # not a valid name, or not a numeric address
        return False


class Guard:
    """ASGI middleware that refuses requests, and adds security headers to every answer.

    Args:
        host: what the server listens on
    """

    def __init__(self, app: ASGIApp, host: str):
        self.app = app
        self.host = host

    def find_refusal(self, method: str, headers: Headers) -> Refusal | None:
        """Return the refusal of a request; None if it is allowed."""
        host = headers.get("host", "")
        if not is_own_host(host, self.host):
            advice = "open the address that it has printed"
            if self.host in WILDCARD_ADDRESSES:
                advice = "open it by the numeric address of its machine, such as 192.0.2.1"
            return Refusal(403, f"this server does not answer to the name {host!r}; {advice}")
        # browsers send this header with every request of a script on another website
        if "origin" in headers and headers["origin"].partition("//")[2] != host:
            return Refusal(403, "this server does not answer requests from other websites")
        length = headers.get("content-length", "")
        # without a length, the body could be of any size
        if method not in ("GET", "HEAD") and not length.isdecimal():
            return Refusal(411, "the request has no Content-Length header")
        if length and int(length) > MAX_BODY_BYTES:
            return Refusal(
                413,
                f"the request has {format_bytes(int(length))}: send at most "
                f"{format_bytes(MAX_BODY_BYTES)}",
            )
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # such as the messages at startup and shutdown
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        app = self.app
        refusal = self.find_refusal(scope["method"], Headers(scope=scope))
        if refusal is not None:
            app = JSONResponse({"message": refusal.message}, status_code=refusal.status)
        await app(scope, receive, send_with_headers)
