"""What the terminal shows of a proof: a line a method and batch size, then what explains each first divergence."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from lasd.evaluation.report import number, percent, say, table
from lasd.evaluation.rounding import ROUNDING


def print_proof(result: Mapping[str, Any], out: Console) -> None:
    """Prints a proof: a line a method and batch size, then each difference."""
    settings = result["settings"]
    dtype = settings["environment"]["dtype"]
    say(
        out,
        f"{settings['model']}, {dtype}, {settings['num_prompts']} prompts of {settings['prompts']}, "
        f"{settings['max_new_tokens']} new tokens: against transformers' generate, one prompt at a time",
    )
    out.print(_greedy_table(result["greedy"]))
    for proof in result["greedy"]:
        for line in _greedy_lines(proof):
            say(out, line)
    if result["sampling"]:
        out.print(_sampling_table(result["sampling"]))
    for proof in result["sampling"]:
        for line in _sampling_lines(proof):
            say(out, line)
    if result["mode"] == "report" and result["passed"]:
        say(out, f"all differences are rounding in {dtype}; only fp32 proves that answers are equal: --dtype fp32")


def _greedy_table(proofs: Iterable[Mapping[str, Any]]) -> Table:
    columns = ("prompts", "equal", "tokens", "drafted", "accepted", "rejected")
    drawn = table("greedy", "method", "batch size", *columns, "tokens/step", "verdict")
    for proof in proofs:
        counts = [str(proof[key]) for key in ("batch_size", *columns)]
        drawn.add_row(proof["method"], *counts, number(proof["tokens_per_step"], 2), proof["verdict"])
    return drawn


def _greedy_lines(proof: Mapping[str, Any]) -> Iterable[str]:
    name = f"{proof['method']}, batch {proof['batch_size']}"
    for item in proof["divergences"]:
        yield (
            f"{name}: prompt {item['prompt']} differs at token {item['position']}: generate has "
            f"{_token(item['reference_token'])}, {proof['method']} has {_token(item['token'])}; "
            f"top-two gap {item['top_two_gap']:.3g}; {_reason(item)}"
        )
    if proof["verdict"] == "nothing proven":
        yield (
            f"{name}: all equal, but {proof['drafted']} tokens were drafted, {proof['accepted']} accepted and "
            f"{proof['rejected']} rejected: this proves nothing about "
            "drafting; take more prompts or tokens, or another drafter"
        )


def _token(token: int | None) -> str:
    return "no token" if token is None else str(token)


def _reason(item: Mapping[str, Any]) -> str:
    """What was found out about a first divergence."""
    if item["token_gap"] is None:
        return f"{item['verdict']}: one answer ends there"
    shape = f"{item['sequences']} x {item['rows']} rows"
    plain = "differs too" if item["same_shape_differs"] else "agrees with generate"
    measured = (
        f"the two tokens are {item['token_gap']:.3g} apart, {shape} move logits by up to {item['noise']:.3g}, "
        f"plain decoding at {shape} {plain}"
    )
    if item["verdict"] == ROUNDING:
        return f"rounding: {measured}"
    return f"unexplained: {measured}, other drafted tokens move the root's logits by {item['leak']:.3g}"


def _sampling_table(proofs: Iterable[Mapping[str, Any]]) -> Table:
    columns = ("samples", "drafted", "accepted")
    drawn = table(
        "sampling against the exact law (chi-square)", "method", *columns, "p by token", "p", "as plain", "verdict"
    )
    for proof in proofs:
        each = " ".join(f"{p:.3f}" for p in proof["p_values"].values())
        counts = [str(proof[key]) for key in columns]
        same = percent(proof["identical_to_plain"])
        drawn.add_row(proof["method"], *counts, each, f"{proof['p_value']:.3f}", same, proof["verdict"])
    return drawn


def _sampling_lines(proof: Mapping[str, Any]) -> Iterable[str]:
    if proof["verdict"] == "another law":
        yield (
            f"{proof['method']}: samples do not follow the model's law (p {proof['p_value']:.2g}, "
            f"under {proof['alpha']:g}; {proof['impossible']} tokens of no probability): {proof['counts']}"
        )
    elif proof["verdict"] == "other tokens":
        yield (
            f"{proof['method']}: the same seed gave another token than plain sampling, {proof['border']:.2g} of "
            f"probability from the draw (rounding explains {proof['border_allowed']:.2g})"
        )
    elif proof["verdict"] == "nothing proven":
        yield (
            f"{proof['method']}: {proof['drafted']} tokens were drafted and {proof['accepted']} accepted: this proves "
            "nothing about drafting; take more samples or another drafter"
        )
