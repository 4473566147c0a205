"""What the terminal shows of a bench: progress bars on stderr, tables on stdout."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lasd.evaluation.metrics import PLAIN, REFERENCE
from lasd.evaluation.quality import ENDED

Item = TypeVar("Item")
MIN_WIDTH = 132


def console() -> Console:
    """stdout; in a pipe or a file wide enough for the tables."""
    out = Console()
    return out if out.is_terminal else Console(width=max(out.width, MIN_WIDTH))


def progress(items: Sequence[Item], title: str) -> Iterable[Item]:
    """Yields the items while a bar with the time left is drawn on stderr."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield from bar.track(items, description=title)


def print_bench(result: Mapping[str, Any], out: Console) -> None:
    """Prints a bench result: speed, where time went, speed by category, task quality, and how exact it was."""
    methods, settings = result["methods"], result["settings"]
    environment, temperature = settings["environment"], settings["temperature"]
    how = f"sampled at temperature {temperature:g}" if temperature else "greedy"
    say(
        out,
        f"{settings['model']}: {result['num_prompts']} prompts of {settings['prompts']}, "
        f"up to {settings['max_new_tokens']} new tokens, {how}, {environment['dtype']}, "
        f"batch size {settings['batch_size']}; {environment['device']}",
    )
    out.print(_speed_table(methods, result["exact_expected"]))
    out.print(_work_table(methods))
    if len(methods[REFERENCE]["categories"]) > 1:
        out.print(_category_table(methods, result["exact_expected"]))
    if result.get("quality"):
        out.print(_quality_table(methods, result))
    for line in _exactness_lines(result):
        say(out, line)


def _speed_table(methods: Mapping[str, Any], exact_expected: bool) -> Table:
    drawn = table(
        "speed (95% interval)",
        "method",
        "tokens/s",
        "tokens/step",
        "vs generate",
        "vs plain",
        "decode only",
        "Spec-Bench",
        "identical",
    )
    for name, values in methods.items():
        ranges = ("speedup_vs_generate", "speedup_e2e")
        points = ("speedup_decode", "speedup_specbench")
        drawn.add_row(
            name,
            number(values["tokens_per_s"], 1),
            ranged(values, "tokens_per_step"),
            *(_speedup(values, ratio, exact_expected) for ratio in ranges),
            *(_speedup(values, ratio, exact_expected, interval=False) for ratio in points),
            percent(values["share_identical"]),
        )
    return drawn


def _work_table(methods: Mapping[str, Any]) -> Table:
    drawn = table(
        "work and time",
        "method",
        "accepted at position 1, 2, ...",
        "accepted/drafted",
        "nodes/step",
        "prefill",
        "draft",
        "verify",
        "overhead",
    )
    for name, values in methods.items():
        if name == REFERENCE:
            continue
        shares = [percent(values["time"][f"{part}_share"]) for part in ("prefill", "draft", "verify", "overhead")]
        at_pos = " ".join(f"{share:.3f}" for share in values["accept_at_pos"]) or "-"
        drawn.add_row(name, at_pos, percent(values["draft_acceptance"]), number(values["nodes_per_step"], 1), *shares)
    return drawn


def _category_table(methods: Mapping[str, Any], exact_expected: bool) -> Table:
    names = [name for name in methods if name not in (REFERENCE, PLAIN)] or [PLAIN]
    headings = [
        heading for name in names for heading in (f"{name} tokens/step", f"{name} vs generate", f"{name} identical")
    ]
    drawn = table("by category", "category", "prompts", *headings)
    for category, values in methods[REFERENCE]["categories"].items():
        cells = []
        for name in names:
            part = methods[name]["categories"][category]
            cells += [
                number(part["tokens_per_step"], 2),
                _speedup(part, "speedup_vs_generate", exact_expected),
                percent(part["share_identical"]),
            ]
        drawn.add_row(escape(category), str(values["prompts"]), *cells)
    return drawn


def _quality_table(methods: Mapping[str, Any], result: Mapping[str, Any]) -> Table:
    """Task quality beside speed: each metric, and its difference from plain decoding's with the interval."""
    metrics = [name for name in methods[REFERENCE]["quality"] if name != ENDED]
    headings = [heading for name in metrics for heading in (name, "against plain")]
    title = f"quality: {result['quality']}, mean of {result['num_prompts']} answers (95% interval)"
    drawn = table(title, "method", "vs generate", *headings, "ended")
    for name, values in methods.items():
        cells = [_speedup(values, "speedup_vs_generate", result["exact_expected"], interval=False)]
        for metric in metrics:
            found = values["quality"][metric]
            low, high = found["vs_plain_interval95"]
            difference = f"{found['vs_plain']:+.3f} ({low:+.3f} to {high:+.3f})"
            cells += [number(found["mean"], 3), "-" if name == PLAIN else difference]
        drawn.add_row(name, *cells, percent(values["quality"][ENDED]["mean"]))
    return drawn


def _exactness_lines(result: Mapping[str, Any]) -> Iterable[str]:
    """For each method that differs: which share, and position and top-two gap of each first difference."""
    reference = f"{PLAIN}'s of the same seed" if result["settings"]["temperature"] else "generate's"
    for name, values in result["methods"].items():
        found = values["first_divergences"]
        if not found:
            continue
        share = f"{len(found)} of {values['prompts']}"
        if values["lossy"]:
            yield f"{name}: {share} answers differ from {reference} (LOSSY: it does not keep the model's distribution)"
            continue
        if result["exact_expected"]:
            reason = "in fp32 they must be equal: this method is not exact here, so no speed-up is printed"
        else:
            reason = "rounding depends on the number of rows; `lasd prove` tells rounding from a bug"
        largest = max(item["top_two_gap"] for item in found)
        yield f"{name}: {share} answers differ from {reference} ({reason}); largest gap {largest:.3g}"
        places = (f"{item['prompt']} at {item['position']}: {item['top_two_gap']:.3g}" for item in found)
        yield "  first difference (prompt at token: gap of the top two logits): " + ", ".join(places)


def say(out: Console, line: str) -> None:
    """Prints a line as it is: no markup, no colours for numbers, not broken."""
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def table(title: str, first: str, *others: str) -> Table:
    """An empty table: the first column left, the others right."""
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    drawn.add_column(first, no_wrap=True)
    for heading in others:
        drawn.add_column(escape(heading), justify="right")
    return drawn


def _speedup(values: Mapping[str, Any], ratio: str, exact_expected: bool, interval: bool = True) -> str:
    """A speed-up, kept back where answers must be equal and are not."""
    if exact_expected and not values["lossy"] and values["share_identical"] not in (None, 1):
        return "not exact"
    return ranged(values, ratio, unit="x") if interval else number(values[ratio], 2, "x")


def ranged(values: Mapping[str, Any], name: str, unit: str = "") -> str:
    """A metric with its 95% interval, where there is one."""
    interval = values["interval95"].get(name)
    point = number(values[name], 2, unit)
    if interval is None or interval[0] == interval[1]:
        return point
    return f"{point} ({interval[0]:.2f}-{interval[1]:.2f})"


def number(value: float | None, digits: int, unit: str = "") -> str:
    """A number with so many digits behind the point; a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None) -> str:
    """A share as a percentage; a dash for none."""
    return "-" if value is None else f"{value:.1%}"
