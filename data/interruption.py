"""Ctrl+C at any moment, from the first import on, ends a script in one line and with exit code 130.

What is half-written then is what a kill leaves: the next run removes it and goes on. Scripts that train or evaluate
have something to clean up instead, in Python and in order, for which configurator has a handler of its own.
"""

import os
import signal
import sys
import threading

_advice = []  # what to say, a function: of the work that goes on


def end_in_one_line() -> None:
    """From now on. To be called before the imports that take long.

    A thread listens, because Python runs a handler in its main thread alone, and only when what that has called in
    another language is back: a read of Arrow's that waits for the hub, or the training of a tokenizer.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        return  # a job in the background of a script, which Ctrl+C is not meant for
    listen, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(listen,), daemon=True).start()


def advise(how_to_go_on) -> None:
    """The line shall be `how_to_go_on()`."""
    _advice[:] = [how_to_go_on]


def _wait(listen: int) -> None:
    while os.read(listen, 1) != bytes([signal.SIGINT]):
        pass
    said = _advice[0]() if _advice else "interrupted"
    before = "\n" if sys.stderr.isatty() else ""  # after the progress bar and the terminal's ^C
    os.write(2, f"{before}{os.path.basename(sys.argv[0])}: {said}\n".encode())
    os._exit(130)
