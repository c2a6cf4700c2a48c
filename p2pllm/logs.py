"""Where log lines go and how they look: for people on a terminal, or one JSON object a line."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

import structlog

from p2pllm.errors import UsageError

__all__ = ["configure_logs"]


def configure_logs(*, json: bool, debug: bool, file: Path | None = None) -> None:
    """Set up structlog for this process.

    Args:
        json: one JSON object a line instead of coloured text.
        debug: also events of level debug.
        file: append to this file instead of stderr (with a REPL the terminal belongs to the chat).
    """
    stream: TextIO = sys.stderr
    if file is not None:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stream = file.open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise UsageError(f"cannot write {file} ({error.strerror}): choose another --data-dir") from error
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if json
        else structlog.dev.ConsoleRenderer(colors=file is None and stream.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso" if json else "%H:%M:%S", utc=json),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if debug else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    # Libraries log through the standard module: their warnings belong in the same stream, their chatter does
    # not.
    logging.basicConfig(
        stream=stream, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True
    )
