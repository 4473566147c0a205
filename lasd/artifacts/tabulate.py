"""Nested JSON records as flat tables, for the card (Markdown) and the terminal (rich) alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN_ROWS = 12
SHOWN_ITEMS = 10
DASH = "–"
DOTS = "…"


@dataclass(frozen=True)
class Table:
    """A titled table of text cells; the first column names the row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def cell(value: Any) -> str:
    """Returns a value as text: four significant digits, lists joined by slashes and cut in the middle when long."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {cell(item)}" for key, item in value.items()) or DASH
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = [cell(item) for item in _thinned(value, SHOWN_ITEMS)]
        if len(value) > SHOWN_ITEMS:
            shown.insert(-1, DOTS)
        nested = any(isinstance(item, Sequence) and not isinstance(item, str) for item in value)
        return ("; " if nested else " / ").join(shown) or DASH
    return str(value) or DASH


def tables(record: Mapping[str, Any], title: str = "") -> list[Table]:
    """Turns a nested record into tables: its plain values, then what is nested in it; lists of records come last.

    Records that stand side by side and have names in common share one table, a row each.
    """
    plain = {key: value for key, value in record.items() if not _is_nested(value)}
    found = [Table(title, ("", "value"), tuple((key, cell(value)) for key, value in plain.items()))] if plain else []
    records = {key: value for key, value in record.items() if isinstance(value, Mapping) and value}
    if len(records) > 1 and set.intersection(*(set(value) for value in records.values())):
        found += _grid(records, title)
    else:
        for key, value in records.items():
            found += tables(value, _titled(title, key))
    for key, value in record.items():
        if _is_nested(value) and not isinstance(value, Mapping):
            rows = {cell(row.get("step")): row for row in _thinned(value, SHOWN_ROWS)}
            found += _grid(rows, _titled(title, key), first="step")
    return found


def _titled(title: str, key: str) -> str:
    return f"{title}: {key}" if title else key


def _grid(rows: Mapping[str, Mapping[str, Any]], title: str, first: str = "") -> list[Table]:
    """One table with a row for each record; what is nested inside a record follows in tables of its own."""
    keys = dict.fromkeys(key for row in rows.values() for key, value in row.items() if not _is_nested(value))
    columns = [key for key in keys if key != first]
    body = tuple((name, *(cell(row.get(column)) for column in columns)) for name, row in rows.items())
    found = [Table(title, (first, *columns), body)] if columns else []
    for name, row in rows.items():
        found += tables({key: value for key, value in row.items() if _is_nested(value)}, _titled(title, name))
    return found


def _is_nested(value: Any) -> bool:
    """True for a non-empty mapping and for a list of mappings: what becomes a table of its own."""
    if isinstance(value, Mapping):
        return bool(value)
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(v, Mapping) for v in value)
    )


def _thinned(values: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` values, evenly spaced, first and last kept."""
    if len(values) <= limit:
        return list(values)
    return [values[index * (len(values) - 1) // (limit - 1)] for index in range(limit)]
