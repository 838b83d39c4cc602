"""What a hub or a network refuses for a while is asked for again, with growing pauses, up to a limit."""

import logging
import sys
import time
from collections.abc import Iterator

from data.sources import first_line

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds
MINUTES = 60.0
ADDRESSES = 5  # signed ones that the storage refuses, one after another: it is not their age

# By name: requests, httpx, urllib3, aiohttp and datasets each have their own, and none need be installed. With their
# subclasses, among them time-outs of all kinds.
PASSING = {"ConnectionError", "TimeoutError", "TransportError", "Timeout", "TimeoutException", "ProtocolError"}
PASSING |= {"HTTPException", "ChunkedEncodingError", "ClientConnectionError", "ClientPayloadError", "URLError"}
LASTING = {"GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError", "DatasetNotFoundError"}
LASTING |= {"RemoteEntryNotFoundError"}


class WrongAnswer(ConnectionError):  # noqa: N818 (says what happened)
    """Not what was asked for: too short, or another part of the file."""


class OutOfPatience(Exception):  # noqa: N818 (says what happened)
    """The limit is reached; the message names it and the last cause, `__cause__` is that."""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def kinds(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def is_offline(error: BaseException) -> bool:
    """Whether HF_HUB_OFFLINE is why; `datasets` says so in the text alone."""
    return any("OfflineModeIsEnabled" in kinds(each) or "OfflineModeIsEnabled" in str(each) for each in chain(error))


def expired(error: BaseException) -> bool:
    """Whether the storage refuses, and not the hub, which has signed the address."""
    response = getattr(error, "response", None)
    return getattr(response, "status_code", None) == 403 and bool(getattr(response, "history", None))


def check_minutes(minutes: float) -> None:
    """ValueError: out of range."""
    if not minutes >= 0:
        raise ValueError(f"--retry_minutes={minutes:g}: give 0 or more")


def passing_cause(error: BaseException) -> str | None:
    """In words what is wrong, where it may pass by itself, else None."""
    if is_offline(error):
        return None
    for each in chain(error):
        response = getattr(each, "response", None)
        status = getattr(response, "status_code", None) or getattr(each, "code", None)
        if isinstance(status, int):
            if status in (408, 425, 429) or status >= 500:
                return f"the hub answers {status}"
            if expired(each):
                return "the storage answers 403, its signed address has expired"
            return None
        if kinds(each) & LASTING:
            return None
        if kinds(each) & PASSING:
            return f"{type(each).__name__}: {first_line(each)}"
    return None


class Patience:
    """Up to `minutes` of trying for each request. `what` is what the lines call that which cannot be had now."""

    def __init__(self, what: str, minutes: float | None = None):
        self.what, self.minutes = what, MINUTES if minutes is None else minutes
        check_minutes(self.minutes)
        # Their own lines on each attempt, where one of ours says it.
        for library in ("huggingface_hub", "datasets"):
            logging.getLogger(library).setLevel(logging.CRITICAL)

    def ask(self, action):
        """The action's result. OutOfPatience: it failed for too long; what lasts is raised at once, as it is."""
        attempt, began, pause, refused = 1, time.monotonic(), FIRST_PAUSE, 0
        while True:
            try:
                return action()
            except Exception as error:  # every library raises its own kinds; what does not pass goes on
                cause = passing_cause(error)
                refused = refused + 1 if any(map(expired, chain(error))) else 0
                if cause is None or refused == ADDRESSES:
                    raise
                left = began + 60 * self.minutes - time.monotonic()
                if left <= 0:
                    raise OutOfPatience(f"{cause}, for --retry_minutes={self.minutes:g} by now") from error
            from tqdm import tqdm  # which keeps lines and bars apart; what fails so has brought it

            pause = min(pause, left)
            tqdm.write(f"{self.what}: attempt {attempt} failed ({cause}), again in {pause:.3g} s", file=sys.stderr)
            sys.stderr.flush()
            time.sleep(pause)
            attempt, pause = attempt + 1, min(2 * pause, LONGEST_PAUSE)
