"""Logging of metrics: one logger, several backends, always a `metrics.jsonl` in the run directory."""

from canter.utils.logging.backends import METRICS_NAME, Backend, read_rows, register_logger
from canter.utils.logging.logger import Logger, loaded_settings, redact, sanitize_tag

__all__ = [
    "METRICS_NAME",
    "Backend",
    "Logger",
    "loaded_settings",
    "read_rows",
    "redact",
    "register_logger",
    "sanitize_tag",
]
