"""The Hugging Face Hub, from which lm-evaluation-harness loads the data of its tasks."""

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType

from utils import errors


def import_hub(module: str = "") -> ModuleType:
    """Import huggingface_hub, or a module of it; raise ValueError if it is not installed."""
    name = f"huggingface_hub.{module}" if module else "huggingface_hub"
    return errors.import_optional(name, "reading from the Hugging Face Hub")


@functools.cache
def find_connection_problem() -> str | None:
    """Return a message if the Hub cannot be reached, None if it responds or must not be asked.

    The answer holds for the whole process. If packets are lost, huggingface_hub itself needs minutes
    to find out, and again for every file.
    """
    if import_hub().is_offline_mode():
        return None
    utils = import_hub("utils")
    endpoint = import_hub("constants").ENDPOINT
    try:
        # connecting is tried for each of the host's addresses
        utils.get_session().head(endpoint, timeout=utils.httpx.Timeout(10, connect=5))
    except Exception as error:  # other errors than of the connection are left to the real requests
        if isinstance(error, (utils.httpx.TransportError, ConnectionError, TimeoutError)):
            reason = str(error).strip().partition("\n")[0][:200]
            return f"{endpoint} cannot be reached ({type(error).__name__}: {reason})"
    return None


@contextlib.contextmanager
def without_requests() -> Iterator[None]:
    """Let huggingface_hub refuse all requests meanwhile, as with HF_HUB_OFFLINE=1."""
    constants = import_hub("constants")
    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
