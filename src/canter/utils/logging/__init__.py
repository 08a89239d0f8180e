"""Where training numbers go: one logger, several backends, always a `metrics.jsonl` in the run directory."""

from canter.utils.logging.backend import Backend, redact, sanitize_tag
from canter.utils.logging.jsonl import JsonlBackend
from canter.utils.logging.logger import Logger

__all__ = ["Backend", "JsonlBackend", "Logger", "redact", "sanitize_tag"]
