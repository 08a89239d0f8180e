"""Progress of a training on the console: a live display on a terminal, one line every few seconds elsewhere."""

import atexit
import contextlib
import dataclasses
import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

_REDRAW_S = 0.25
_BROKEN_STREAM = (OSError, ValueError, AttributeError)  # closed, disconnected, replaced, or unable to encode
_CELL_WIDTH = 33  # of a metric's name and number on a wide terminal
_LINE_S = 5.0  # between two lines without a terminal
_MAX_CELLS = 18  # metrics per section
_LINE_CELLS = {"": 7, "evaluation": 1, "reward": 6, "curriculum": 3}  # metrics per line without a terminal
# Metrics shown first, with their display names; the other metrics of the section follow.
_NAMES = {
    "episode/mean_reward": "return",
    "episode/mean_length": "episode length",
    "rollout/mean_reward": "step reward",
    "train/policy_loss": "policy loss",
    "train/value_loss": "value loss",
    "train/kl": "kl",
    "train/approx_kl": "approx kl",
    "train/learning_rate": "learning rate",
    "policy/mean_noise_std": "action std",
    "eval/mean_reward": "return",
    "eval/mean_length": "episode length",
}
# Sections by the part of a metric's name that is not displayed. Environments log the terms of their reward as
# `Episode_Reward/<term>` (Isaac Lab, mjlab), `rew_<term>` (legged_gym), `reward_<term>` (Gymnasium's MuJoCo robots) or
# `reward_components`.
_SECTIONS = {
    "": re.compile(r"(train|policy|exploration)/|(episode|rollout)/(?=mean_)"),
    "evaluation": re.compile(r"eval/"),
    "reward": re.compile(r"reward_components/|extra/(\w+/)?(Episode_Reward/|reward_|rew_|Reward/)", re.IGNORECASE),
    "curriculum": re.compile(r"extra/\w+/(Curriculum/|(?=terrain_level|max_command|command_range))", re.IGNORECASE),
    "environment": re.compile(r"extra/(log/|episode/)?"),
}


@dataclasses.dataclass(eq=False)
class Console(contextlib.AbstractContextManager["Console"]):
    """Shows the progress of a training. A failing stream disables the display and does not stop the training."""

    total_iterations: int  # number of the last iteration
    title: str = "canter"
    enabled: bool = True
    iteration: int = 0  # iterations completed before this training, later: completed until now
    stream: TextIO | None = None  # None is standard output
    unit: str = "iteration"  # name of an iteration in the display
    path: Path | None = None  # the run directory

    def __post_init__(self) -> None:
        self.timesteps = 0
        self.metrics: dict[str, float] = {}
        self._stream = sys.stdout if self.stream is None else self.stream
        # Time, iteration, environment steps.
        self._marks = deque[tuple[float, int, int | None]]([(time.monotonic(), self.iteration, None)], maxlen=50)
        self._started_at, self._drawn_at = time.monotonic(), -math.inf
        self._evaluated_at = 0  # environment steps
        self._fresh: dict[str, float] = {}  # metrics since the last line
        self._live: Any = None  # the display, if it is redrawn in place
        with self._guard():
            if self.enabled and self._stream.isatty():
                from rich.console import Console as RichConsole
                from rich.live import Live

                console = RichConsole(file=self._stream)
                if console.is_terminal and not console.is_dumb_terminal:
                    self._live = Live(
                        self._picture(console.width), console=console, auto_refresh=False, vertical_overflow="crop"
                    )
                    atexit.register(self.close)  # shows the cursor again after an uncaught error
                    self._live.start()
        if self._live is None and self.path is not None:
            self.message(f"{self.title}  {self.path}")

    def update(self, iteration: int, timesteps: int, metrics: Mapping[str, float] | None = None) -> None:
        """Show the completed iterations and environment steps, with metrics that replace earlier ones."""
        self.iteration, self.timesteps, now = iteration, timesteps, time.monotonic()
        self._marks.append((now, iteration, timesteps))
        fresh = {name: float(value) for name, value in (metrics or {}).items()}
        self.metrics.update(fresh)
        self._fresh.update(fresh)
        if "eval/mean_reward" in fresh:
            self._evaluated_at = timesteps
        is_last = iteration >= self.total_iterations
        if self._live is not None:
            if now - self._drawn_at >= _REDRAW_S:
                self._redraw()
        elif self._fresh and (is_last or now - self._drawn_at >= _LINE_S):
            self._drawn_at = now
            self._print_line()

    def _print_line(self) -> None:
        parts = [f"[{self.iteration:>{len(str(self.total_iterations))}}/{self.total_iterations}]", *self._facts()]
        for section, cells in shown_metrics(self._fresh).items():
            shown = [f"{name} {format_number(value)}" for name, value in cells[: _LINE_CELLS.get(section, 0)]]
            parts += [f"{section} {shown[0]}", *shown[1:]] if section and shown else shown
        self._fresh.clear()
        self.message("  ".join(parts))

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
            self._live.update(self._picture(self._live.console.width), refresh=True)

    def _facts(self) -> list[str]:
        rates = [f"{_short(self.timesteps)} steps", f"{_short(self.rate())} steps/s"]
        elapsed = format_duration(time.monotonic() - self._started_at)
        return [*rates, f"{elapsed} elapsed", f"{format_duration(self.seconds_left())} left"]

    def _picture(self, width: int) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        done = min(self.iteration, self.total_iterations)
        bar = ProgressBar(total=max(1, self.total_iterations), completed=done, complete_style="cyan")
        head = _grid(1, None)
        title = Text(self._writable(self.title), style="bold")
        head.add_row(title, f"{self.unit} {self.iteration}/{self.total_iterations}")
        steps, rate, elapsed, left = self._facts()
        head.add_row(bar, f"{steps}   {rate}")
        head.add_row(Text(self._writable(str(self.path or "")), style="dim"), f"{elapsed}   {left}")
        rows: list[Any] = [head]
        metrics_in_row = max(3, width // _CELL_WIDTH)  # on a wide terminal a number stays near its name
        sections = shown_metrics(self.metrics)
        numbers = [format_number(value) for metrics in sections.values() for _, value in metrics]
        number_width = max(map(len, numbers), default=0)  # one for all sections, so that their columns are aligned
        for section, metrics in sections.items():
            cells = _grid(*(1, None) * metrics_in_row, number_width=number_width)
            row: list[Text] = []
            for name, value in metrics:
                row += [Text(self._writable(name), style="dim"), Text(format_number(value))]
            for start in range(0, len(row), 2 * metrics_in_row):
                cells.add_row(*row[start : start + 2 * metrics_in_row])
            at = f" at {_short(self._evaluated_at)} steps" if section == "evaluation" and self._evaluated_at else ""
            rows += [Text(section + at, style="bold cyan"), cells] if section else [cells]
        return Group(*rows)

    def _writable(self, text: str) -> str:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, errors="replace").decode(encoding)


def _grid(*ratios: int | None, number_width: int | None = None) -> Any:
    from rich.table import Table

    grid = Table.grid(expand=True, padding=(0, 2))
    for index, ratio in enumerate(ratios):
        # Names are cropped because an ellipsis is not ASCII. Numbers (no ratio) keep their width.
        width = number_width if ratio is None else None
        justify = "right" if index % 2 else "left"
        grid.add_column(no_wrap=True, overflow="crop", justify=justify, ratio=ratio, width=width)
    return grid


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, list[tuple[str, float]]]:
    """Return the metrics of the display by section, with their short names; the first section has no name."""
    found: dict[str, list[tuple[str, float]]] = {section: [] for section in _SECTIONS}
    if "train/kl" in metrics:  # that of an adaptive rate is exact, and its estimate beside it only confuses
        metrics = {tag: value for tag, value in metrics.items() if tag != "train/approx_kl"}
    for tag in (*(tag for tag in _NAMES if tag in metrics), *(tag for tag in metrics if tag not in _NAMES)):
        for section, prefix in _SECTIONS.items():
            if match := prefix.match(tag):
                name = _NAMES.get(tag) or tag[match.end() :].replace("_", " ")
                found[section].append((name, metrics[tag]))
                break
    return {section: cells[:_MAX_CELLS] for section, cells in found.items() if cells}


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


def format_duration(seconds: float) -> str:
    """Format seconds as hours:minutes:seconds."""
    if not math.isfinite(seconds):
        return "-:--:--"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _short(count: float) -> str:
    if not math.isfinite(count):
        return "-"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= unit:
            return f"{count / unit:.3g}{name}" if abs(count) < 999.5 * unit else f"{count / unit:.0f}{name}"
    return f"{count:.0f}"
