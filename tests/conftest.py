"""The fixtures and hooks of helpers.py, and the test files that are skipped because packages are missing."""

from helpers import (  # noqa: F401
    _seed,
    _signals,
    client,
    collect_ignore,
    corpus,
    example_streams,
    pytest_collection_finish,
    pytest_report_header,
    server,
)
from recorded_graphs import recordings  # noqa: F401
