"""The fixtures of helpers.py, and what is left out for want of packages."""

from helpers import (  # noqa: F401
    _precision,
    _seed,
    _signals,
    client,
    collect_ignore,
    corpus,
    example_streams,
    pytest_report_header,
    server,
)
