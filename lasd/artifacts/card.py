"""What a person reads about an artifact: the README.md card in its folder, and the same in the terminal (`lasd show`).

Every number on the card stands in `lasd.json`.
"""

import json
import shlex
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from lasd.artifacts.manifest import KINDS, Manifest
from lasd.artifacts.tabulate import Table, tables

if TYPE_CHECKING:
    from lasd.artifacts.store import Artifact

HUB_TAGS = ("lasd", "speculative-decoding")
PROMPT = "Why is the sky blue?"
PROFILE_FIELDS = ("device", "dtype", "quantization", "tree", "predicted", "measured")


def render_card(manifest: Manifest) -> str:
    """Returns the README.md of an artifact: Hub front matter, what it is, how to use it, results and provenance."""
    title, base = KINDS[manifest.kind].title, manifest.base_model
    revision = f" at revision `{base.revision}`" if base.revision else ""
    parts = [
        _front_matter(manifest),
        f"# {title} for {_name(manifest)}\n",
        f"{title} that let lasd decode `{base.id}`{revision} several tokens a step. The model itself checks every "
        "token, so the text stays its own: greedy decoding in fp32 gives the same tokens as without them, and sampling "
        "keeps the model's distribution.\n",
        "## Use\n",
        "```bash\n" + "\n".join(_commands(manifest, "DIR")) + "\n```\n",
        "`DIR` is this folder. What was sized for one machine (device, dtype, quantisation) lies in its `profiles/`.\n",
    ]
    parts += _section(
        "Measured", tables(manifest.measured, "results"), "Nothing has been measured with this artifact yet."
    )
    parts += _section("Settings", tables(manifest.settings, "settings"), "None.")
    parts += _section("Base model", tables(base.to_dict(), "base model"), "")
    parts += _section("Provenance", tables(_readable(manifest.provenance), "provenance"), "Not recorded.")
    return "\n".join(parts)


def describe(artifact: "Artifact") -> RenderableType:
    """Returns what `lasd show DIR` prints on a rich console: what it is, for which model, its results and its use."""
    manifest, base = artifact.manifest, artifact.manifest.base_model
    title = KINDS[manifest.kind].title
    weights = artifact.weights_path
    what: dict[str, Any] = {
        "kind": manifest.kind,
        "folder": str(artifact.path),
        "base model": base.id + (f" at {base.revision}" if base.revision else ""),
        "architecture": f"{base.architecture}, {base.num_layers} layers of {base.hidden_size}",
        "weights": f"{weights.name}, {weights.stat().st_size / 2**20:.1f} MiB" if weights else None,
        "made": " ".join(filter(None, (manifest.provenance.get("date"), _command(manifest.provenance)))) or None,
        "sized for": ", ".join(artifact.profiles) or "no machine yet",
    }
    parts: list[RenderableType] = [Text(f"{title} for {_name(manifest)}\n", style="bold"), *_rich(tables(what))]
    summary = {name: value for name, value in manifest.measured.items() if not isinstance(value, list)}  # no curves
    measured = tables(summary, "results")
    parts += _rich(measured) if measured else [Text("nothing measured yet\n", style="yellow")]
    parts += _rich(tables(manifest.settings, "settings"))
    for key, profile in artifact.profiles.items():
        parts += _rich(tables({name: profile[name] for name in PROFILE_FIELDS if name in profile}, f"profile {key}"))
    usage = "\n".join(_commands(manifest, str(artifact.path)))
    parts += [Text("how to use it", style="bold"), Padding(Text(usage, no_wrap=True, overflow="ignore"), (0, 2))]
    return Group(*parts)


def _name(manifest: Manifest) -> str:
    """The base model's name, and its Hub id where that is another one."""
    from lasd.zoo import hub_id

    name = manifest.base_model.id
    hub = hub_id(name)
    return name if hub in (None, name) else f"{name} ({hub})"


def _front_matter(manifest: Manifest) -> str:
    """The YAML block that the Hub reads; JSON strings are valid YAML scalars."""
    from lasd.zoo import hub_id

    base, lines = hub_id(manifest.base_model.id), ["---"]
    if base:
        lines.append(f"base_model: {json.dumps(base)}")
    lines += ["library_name: lasd", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {tag}" for tag in (*HUB_TAGS, manifest.kind)]
    if manifest.provenance.get("license"):
        lines.append(f"license: {json.dumps(manifest.provenance['license'])}")
    return "\n".join([*lines, "---\n"])


def _commands(manifest: Manifest, folder: str) -> list[str]:
    model, where = shlex.quote(manifest.base_model.id), shlex.quote(folder)
    return [
        f"lasd generate --model {model} --artifact {where} --prompt {shlex.quote(PROMPT)}",
        f"lasd bench --model {model} --artifact {where} --prompts FILE --output bench.json",
        f"lasd prove --model {model} --artifact {where} --prompts FILE",
    ]


def _command(provenance: dict[str, Any]) -> str | None:
    words = provenance.get("command")
    return shlex.join(map(str, words)) if isinstance(words, list) and words else None


def _readable(provenance: dict[str, Any]) -> dict[str, Any]:
    return {**provenance, "command": _command(provenance)} if provenance.get("command") else provenance


def _section(title: str, found: list[Table], otherwise: str) -> list[str]:
    body = [_markdown(table, skip_title=index == 0 and ":" not in table.title) for index, table in enumerate(found)]
    return [f"## {title}\n", *(body or [otherwise + "\n"])]


def _markdown(table: Table, skip_title: bool) -> str:
    lines = [] if skip_title else [f"**{table.title}**\n"]
    for row in (table.header, ("---",) * len(table.header), *table.rows):
        lines.append("| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in row) + " |")
    return "\n".join(lines) + "\n"


def _rich(found: list[Table]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for table in found:
        drawn = RichTable(box=None, show_header=table.header != ("", "value"), padding=(0, 2, 0, 0))
        for index, name in enumerate(table.header):
            drawn.add_column(escape(name), style="cyan" if index == 0 else None, overflow="fold")
        for row in table.rows:
            drawn.add_row(*(escape(text) for text in row))
        parts += [Text(table.title, style="bold")] * bool(table.title) + [drawn, Text()]
    return parts
