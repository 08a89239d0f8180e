"""Progress of a training on the console: a live display on a terminal, one line per log entry elsewhere."""

import atexit
import contextlib
import dataclasses
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

_REDRAW_S = 0.25
_BROKEN_STREAM = (OSError, ValueError, AttributeError)  # closed, disconnected, replaced, or unable to encode
_MAX_CELLS = 18
_LINE_CELLS = 7  # metrics per line without a terminal
# Metrics shown first, with their display names; the other metrics of `_GROUPS` follow.
_NAMES = {
    "episode/mean_reward": "return",
    "episode/mean_length": "episode length",
    "eval/mean_reward": "eval return",
    "rollout/mean_reward": "step reward",
    "train/policy_loss": "policy loss",
    "train/value_loss": "value loss",
    "train/approx_kl": "kl",
    "train/learning_rate": "learning rate",
    "policy/mean_noise_std": "action std",
}
_GROUPS = ("train/", "policy/", "exploration/", "eval/", "Episode_Reward/")


@dataclasses.dataclass(eq=False)
class Console(contextlib.AbstractContextManager["Console"]):
    """Shows the progress of a training. A failing stream disables the display and does not stop the training."""

    total_iterations: int  # number of the last iteration
    title: str = "canter"
    enabled: bool = True
    iteration: int = 0  # iterations completed before this training, later: completed until now
    stream: TextIO | None = None  # None is standard output
    unit: str = "iteration"  # name of an iteration in the display

    def __post_init__(self) -> None:
        self.timesteps = 0
        self.metrics: dict[str, float] = {}
        self._stream = sys.stdout if self.stream is None else self.stream
        # Time, iteration, environment steps.
        self._marks = deque[tuple[float, int, int | None]]([(time.monotonic(), self.iteration, None)], maxlen=50)
        self._drawn_at = -math.inf
        self._live: Any = None  # the display, if it is redrawn in place
        with self._guard():
            if self.enabled and self._stream.isatty():
                from rich.console import Console as RichConsole
                from rich.live import Live

                console = RichConsole(file=self._stream)
                if console.is_terminal and not console.is_dumb_terminal:
                    self._live = Live(self._picture(), console=console, auto_refresh=False, vertical_overflow="crop")
                    atexit.register(self.close)  # shows the cursor again after an uncaught error
                    self._live.start()

    def update(self, iteration: int, timesteps: int, metrics: Mapping[str, float] | None = None) -> None:
        """Show the completed iterations and environment steps; without a terminal print a line if there are metrics."""
        self.iteration, self.timesteps = iteration, timesteps
        self._marks.append((time.monotonic(), iteration, timesteps))
        fresh = {name: float(value) for name, value in (metrics or {}).items()}
        self.metrics.update(fresh)
        if self._live is not None:
            if time.monotonic() - self._drawn_at >= _REDRAW_S:
                self._redraw()
        elif fresh:
            done = f"[{iteration:>{len(str(self.total_iterations))}}/{self.total_iterations}]"
            cells = [f"{name} {format_number(value)}" for name, value in shown_metrics(fresh)[:_LINE_CELLS]]
            self.message("  ".join([done, *self._facts(), *cells]))

    def message(self, text: str) -> None:
        """Show a line of text above the live display."""
        if self.enabled:
            with self._guard():
                if self._live is not None:
                    self._live.console.print(self._writable(text), markup=False, highlight=False)
                else:
                    self._stream.write(self._writable(text) + "\n")
                    self._stream.flush()

    def close(self) -> None:
        """Draw the last state and restore the terminal; may be called twice."""
        atexit.unregister(self.close)
        if self._live is not None:
            self._redraw()
        with self._guard():
            if self._live is not None:
                self._live.stop()
        self._live, self.enabled = None, False

    def __exit__(self, *exc: object) -> None:
        self.close()

    def rate(self) -> float:
        """Return environment steps per second over the last updates; NaN before the second update."""
        (start, _, before), (end, _, after) = self._marks[0], self._marks[-1]
        if before is None and len(self._marks) > 2:
            start, _, before = self._marks[1]
        if before is None or after is None or end <= start:
            return self.metrics.get("time/fps", math.nan)
        return (after - before) / (end - start)

    def seconds_left(self) -> float:
        """Return the estimated seconds until the last iteration; NaN before the first one is complete."""
        (start, before, _), (end, after, _) = self._marks[0], self._marks[-1]
        if after <= before or end <= start:
            return math.nan
        return max(0, self.total_iterations - after) * (end - start) / (after - before)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except _BROKEN_STREAM:
            live, self._live, self.enabled = self._live, None, False
            if live is not None:
                with contextlib.suppress(*_BROKEN_STREAM):
                    live.stop()
                # Live has replaced sys.stdout, which must be restored even if the last frame cannot be drawn.
                live._disable_redirect_io()

    def _redraw(self) -> None:
        self._drawn_at = time.monotonic()
        with self._guard():
            self._live.update(self._picture(), refresh=True)

    def _facts(self) -> list[str]:
        seconds, left = self.seconds_left(), "-:--:--"
        if math.isfinite(seconds):
            minutes, rest = divmod(round(seconds), 60)
            left = f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
        return [f"{_short(self.timesteps)} steps", f"{_short(self.rate())} steps/s", f"{left} left"]

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        done = min(self.iteration, self.total_iterations)
        bar = ProgressBar(total=max(1, self.total_iterations), completed=done, complete_style="cyan")
        head, cells = _grid(1, None), _grid(1, None, 1, None, 1, None)
        title = Text(self._writable(self.title), style="bold")
        head.add_row(title, f"{self.unit} {self.iteration}/{self.total_iterations}")
        head.add_row(bar, "   ".join(self._facts()))
        row: list[Text] = []
        for name, value in shown_metrics(self.metrics):
            row += [Text(self._writable(name), style="dim"), Text(format_number(value))]
        for start in range(0, len(row), 6):
            cells.add_row(*row[start : start + 6])
        return Group(head, cells)

    def _writable(self, text: str) -> str:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, errors="replace").decode(encoding)


def _grid(*ratios: int | None) -> Any:
    from rich.table import Table

    grid = Table.grid(expand=True, padding=(0, 2))
    for index, ratio in enumerate(ratios):
        # Names are cropped because an ellipsis is not ASCII. Numbers (no ratio) keep their width.
        grid.add_column(no_wrap=True, overflow="crop", justify="right" if index % 2 else "left", ratio=ratio)
    return grid


def shown_metrics(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the metrics of the display with their short names, in a fixed order."""
    first = [(_NAMES[tag], metrics[tag]) for tag in _NAMES if tag in metrics]
    others = [tag for group in _GROUPS for tag in metrics if tag.startswith(group) and tag not in _NAMES]
    return (first + [(tag.split("/", 1)[1].replace("_", " "), metrics[tag]) for tag in others])[:_MAX_CELLS]


def table(metrics: Mapping[str, float], width: int = 80, pad: int = 35) -> str:
    """Format all metrics as a table: names right-aligned in `pad` columns, rules of `width` above and below."""
    title = f"Iteration {format_number(metrics['iteration'])}" if "iteration" in metrics else "Training"
    rows = [f"{name + ':':>{pad}} {format_number(value)}" for name, value in metrics.items() if name != "iteration"]
    return "\n".join(line[:width] for line in ["#" * width, title.center(width).rstrip(), "", *rows, "-" * width])


def format_number(value: float) -> str:
    """Format a number with four significant digits, thousands separators, and an exponent if tiny or huge."""
    size = abs(value := float(value))
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and size < 1e7:
        return f"{int(value):,}"
    if size >= 1e7 or size < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.1f}" if size >= 1000 else f"{value:.4g}"


def _short(count: float) -> str:
    if not math.isfinite(count):
        return "-"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= unit:
            return f"{count / unit:.3g}{name}" if abs(count) < 999.5 * unit else f"{count / unit:.0f}{name}"
    return f"{count:.0f}"
