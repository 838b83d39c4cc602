"""Ctrl+C at any moment, from the first import on, ends a script in one line and with exit code 130.

What is half-written then is what a kill leaves: the next run removes it and goes on.
"""

import os
import signal
import sys

_advice = []  # what to say, a function: of the work that goes on


def end_in_one_line() -> None:
    """From now on. To be called before the imports that take long."""
    signal.signal(signal.SIGINT, _stop)


def advise(how_to_go_on) -> None:
    """The line shall be `how_to_go_on()`."""
    _advice[:] = [how_to_go_on]


def _stop(*_) -> None:
    said = _advice[0]() if _advice else "stopped"
    os.write(2, f"{os.path.basename(sys.argv[0])}: {said}\n".encode())
    os._exit(130)
