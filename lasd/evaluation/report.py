"""What the terminal shows of a bench or a proof: progress bars on stderr, tables on stdout."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from lasd.evaluation.metrics import PLAIN, REFERENCE

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
    """Prints a bench result: speed, where the time went, speed by category, and how exact the answers were."""
    methods, settings = result["methods"], result["settings"]
    environment = settings["environment"]
    _say(
        out,
        f"{settings['model']}: {result['num_prompts']} prompts of {settings['prompts']}, "
        f"up to {settings['max_new_tokens']} new tokens, greedy, {environment['dtype']}, "
        f"batch size {settings['batch_size']}; {environment['device']}",
    )
    out.print(_speed_table(methods, result["exact_expected"]))
    out.print(_work_table(methods))
    if len(methods[REFERENCE]["categories"]) > 1:
        out.print(_category_table(methods, result["exact_expected"]))
    for line in _exactness_lines(result):
        _say(out, line)


def _speed_table(methods: Mapping[str, Any], exact_expected: bool) -> Table:
    table = _table(
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
        ranged = ("speedup_vs_generate", "speedup_e2e")
        points = ("speedup_decode", "speedup_specbench")
        table.add_row(
            name,
            _number(values["tokens_per_s"], 1),
            _ranged(values, "tokens_per_step"),
            *(_speedup(values, ratio, exact_expected) for ratio in ranged),
            *(_speedup(values, ratio, exact_expected, interval=False) for ratio in points),
            _percent(values["share_identical"]),
        )
    return table


def _work_table(methods: Mapping[str, Any]) -> Table:
    table = _table(
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
        shares = [_percent(values["time"][f"{part}_share"]) for part in ("prefill", "draft", "verify", "overhead")]
        at_pos = " ".join(f"{share:.3f}" for share in values["accept_at_pos"]) or "-"
        table.add_row(name, at_pos, _percent(values["draft_acceptance"]), _number(values["nodes_per_step"], 1), *shares)
    return table


def _category_table(methods: Mapping[str, Any], exact_expected: bool) -> Table:
    names = [name for name in methods if name not in (REFERENCE, PLAIN)] or [PLAIN]
    headings = [
        heading for name in names for heading in (f"{name} tokens/step", f"{name} vs generate", f"{name} identical")
    ]
    table = _table("by category", "category", "prompts", *headings)
    for category, values in methods[REFERENCE]["categories"].items():
        cells = []
        for name in names:
            part = methods[name]["categories"][category]
            cells += [
                _number(part["tokens_per_step"], 2),
                _speedup(part, "speedup_vs_generate", exact_expected),
                _percent(part["share_identical"]),
            ]
        table.add_row(escape(category), str(values["prompts"]), *cells)
    return table


def _exactness_lines(result: Mapping[str, Any]) -> Iterable[str]:
    """For each method that differs: which share, and position and top-two gap of each first difference."""
    for name, values in result["methods"].items():
        found = values["first_divergences"]
        if not found:
            continue
        if result["exact_expected"]:
            reason = "in fp32 they must be equal: this method is not exact here, so no speed-up is printed"
        else:
            reason = "rounding depends on the number of rows; `lasd prove` compares in fp32"
        largest = max(item["top_two_gap"] for item in found)
        share = f"{len(found)} of {values['prompts']}"
        yield f"{name}: {share} answers differ from generate's ({reason}); largest gap {largest:.3g}"
        places = (f"{item['prompt']} at {item['position']}: {item['top_two_gap']:.3g}" for item in found)
        yield "  first difference (prompt at token: gap of the top two logits): " + ", ".join(places)


def print_proof(result: Mapping[str, Any], out: Console) -> None:
    """Prints a proof: a line a method, then each difference."""
    settings = result["settings"]
    _say(
        out,
        f"{settings['model']}, {settings['environment']['dtype']}, prompts of {settings['prompts']}, "
        f"{settings['max_new_tokens']} new tokens, batch size {settings['batch_size']}: against transformers' generate",
    )
    table = _table(
        "exactness", "method", "prompts", "equal", "tokens", "drafted", "accepted", "rejected", "tokens/step", "verdict"
    )
    for name, proof in result["methods"].items():
        counts = [str(proof[key]) for key in ("prompts", "equal", "tokens", "drafted", "accepted", "rejected")]
        table.add_row(name, *counts, _number(proof["tokens_per_step"], 2), proof["verdict"])
    out.print(table)
    for name, proof in result["methods"].items():
        for item in proof["first_divergences"]:
            _say(
                out,
                f"{name}: prompt {item['prompt']} differs at token {item['position']}: generate has "
                f"{item['reference_token']}, {name} has {item['token']}; top-two gap {item['top_two_gap']:.3g}",
            )
        if proof["verdict"] == "nothing proven":
            _say(
                out,
                f"{name}: all equal, but {proof['drafted']} tokens were drafted and {proof['accepted']} accepted: this "
                "proves nothing about drafting; take more prompts or tokens, or a better drafter",
            )


def _say(out: Console, line: str) -> None:
    """Prints a line as it is: no markup, no colours for numbers."""
    out.print(line, markup=False, highlight=False)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(escape(heading), justify="right")
    return table


def _speedup(values: Mapping[str, Any], ratio: str, exact_expected: bool, interval: bool = True) -> str:
    """A speed-up, kept back where answers must be equal and are not."""
    if exact_expected and values["share_identical"] != 1:
        return "not exact"
    return _ranged(values, ratio, unit="x") if interval else _number(values[ratio], 2, "x")


def _ranged(values: Mapping[str, Any], name: str, unit: str = "") -> str:
    interval = values["interval95"].get(name)
    point = _number(values[name], 2, unit)
    if interval is None or interval[0] == interval[1]:
        return point
    return f"{point} ({interval[0]:.2f}-{interval[1]:.2f})"


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
