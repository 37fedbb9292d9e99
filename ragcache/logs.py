"""The log of a process: lines for people, or JSON for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

Format = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """One object on a line: time, level, logger, message, and the record's `fields` if it has any.

    A logger gives these with `extra={"fields": {...}}`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str | int, form: Format, rank: int | None = None) -> None:
    """Send all logs from `level` on to standard error; `rank` is told where there are several."""
    whose = "" if rank is None else f"rank {rank} "
    text = logging.Formatter(f"%(asctime)s %(levelname)-7s {whose}%(name)s: %(message)s")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(text if form == "text" else JsonFormatter())
    logging.basicConfig(
        level=level.upper() if isinstance(level, str) else level, handlers=[handler]
    )
    logging.captureWarnings(True)
