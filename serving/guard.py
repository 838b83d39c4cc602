"""What is refused before the page's own code sees it: other names for this machine, other sites,
large bodies.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from utils.units import format_bytes

LARGEST_BODY = 2**19  # bytes
EVERY_ADDRESS = ("0.0.0.0", "::")
OWN_ALONE = (
    "default-src 'self'",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
)
HEADERS = {
    "content-security-policy": "; ".join(OWN_ALONE),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def host_fits(header: str, bound: str) -> bool:
    """Whether a Host header names this server, which listens on `bound`.

    Any website can let its own name point at this machine (DNS rebinding) and so reach the page
    from a visitor's browser, but with that name in the header. Numeric addresses cannot be taken
    over so.
    """
    try:
        name = urlsplit(f"//{header}").hostname
        if name in ("localhost", "127.0.0.1", "::1", bound.lower()):
            return True
        return bound in EVERY_ADDRESS and bool(ipaddress.ip_address(name or ""))
    except ValueError:  # not even a name, or one that is no numeric address
        return False


class Guard:
    """ASGI middleware: answers what must not pass with one line, and adds the security headers to
    every answer.
    """

    def __init__(self, app, host: str):
        self.app, self.host = app, host

    def refusal(self, method: str, headers: Headers) -> tuple[int, str] | None:
        host, length = headers.get("host", ""), headers.get("content-length", "")
        if not host_fits(host, self.host):
            fix = "open it under the address it printed"
            return 403, f"this page does not answer to the name {host!r}: {fix}"
        if "origin" in headers and headers["origin"].partition("//")[2] != host:
            return 403, "this page answers no other site"
        if method not in ("GET", "HEAD") and not length.isdecimal():
            return 411, "a request needs a Content-Length"
        if length and int(length) > LARGEST_BODY:
            return (
                413,
                f"a request of {format_bytes(int(length))}: give at most {format_bytes(LARGEST_BODY)}",
            )
        return None

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def send_with_headers(message):
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        app = self.app
        if refused := self.refusal(scope["method"], Headers(scope=scope)):
            app = JSONResponse({"message": refused[1]}, status_code=refused[0])
        await app(scope, receive, send_with_headers)
