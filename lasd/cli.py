"""The command line, `lasd`: thin. Each command reads its options, calls one function of the package and prints.

Nothing heavy is imported before a command runs, so that `lasd --help` answers at once.
"""

import json
import logging
from pathlib import Path
from typing import Annotated

import typer

from lasd.errors import LasdError, entry

app = typer.Typer(
    name="lasd",
    help="Decode a language model several tokens a step, without changing what it says.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Option("--model", help="Short name, folder or Hub id; `demo` is a small one.")]
ArtifactDir = Annotated[
    Path | None, typer.Option("--artifact", help="Folder of the artifact that drafts, such as Medusa heads.")
]
Methods = Annotated[
    list[str] | None, typer.Option("--method", help="Method; may be given several times. Default: the artifact's.")
]
PromptsFile = Annotated[
    Path, typer.Option("--prompts", help="json, jsonl or text file; of each record the first user turn.")
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Take the first N prompts only.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bf16, fp16, fp32, or auto: the checkpoint's own.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Prompts that are answered at once.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
Typical = Annotated[
    str | None,
    typer.Option(
        "--typical",
        metavar="EPS,DELTA",
        help="LOSSY: accept what is not unlikely, such as 0.09,0.3; needs --temperature.",
    ),
]
Revision = Annotated[str | None, typer.Option("--revision", help="Revision of the model on the Hub.")]
Quantization = Annotated[str | None, typer.Option("--quantization", help="nf4 or int8.")]


def main() -> None:
    """The entry point: a user's mistake is one line on stderr and exit code 2."""
    entry(app)


@app.callback()
def _set_up_logging() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")


@app.command()
def generate(
    model: Model,
    artifact: ArtifactDir = None,
    method: Annotated[str | None, typer.Option("--method", help="Method; default: the artifact's, or plain.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The user's text.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A file of prompts instead; each is answered in turn.")
    ] = None,
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    typical: Typical = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    revision: Revision = None,
    quantization: Quantization = None,
    raw: Annotated[bool, typer.Option("--raw", help="Feed the text as it is, without the chat template.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print tokens, text and statistics as a line of JSON a prompt.")
    ] = False,
) -> None:
    """Answer a prompt, or a file of prompts."""
    if (prompt is None) == (prompts is None):
        came = "neither --prompt nor --prompts" if prompt is None else "both --prompt and --prompts"
        raise LasdError(f"{came} given: expected exactly one of --prompt TEXT and --prompts FILE")
    from lasd.answering import GenerateConfig, run_generate
    from lasd.decoding.sampling import SamplingParams
    from lasd.evaluation.setup import ModelChoice, parse_typical

    choice = ModelChoice(model, artifact, dtype, device, revision, quantization)
    params = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed, typical=parse_typical(typical))
    run_generate(GenerateConfig(choice, method, prompt, prompts, limit, raw), params, as_json=as_json)


@app.command()
def chat(
    model: Model,
    artifact: ArtifactDir = None,
    method: Annotated[str | None, typer.Option("--method", help="Method; default: the artifact's, or plain.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Of each answer.")] = 512,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="0 is off.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the first answer; each next one adds 1.")] = 0,
    typical: Typical = None,
    drop_oldest: Annotated[
        bool,
        typer.Option("--drop-oldest", help="Forget the oldest turns when the context is full, instead of refusing."),
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    revision: Revision = None,
    quantization: Quantization = None,
) -> None:
    """Talk with a model, or answer the lines of a pipe; /help lists the commands."""
    from lasd.chat_loop import ChatConfig, run_chat
    from lasd.decoding.sampling import SamplingParams
    from lasd.evaluation.setup import ModelChoice, parse_typical

    choice = ModelChoice(model, artifact, dtype, device, revision, quantization)
    params = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed, typical=parse_typical(typical))
    run_chat(ChatConfig(choice, method, system, drop_oldest), params)


@app.command()
def bench(
    model: Model,
    prompts: PromptsFile,
    output: Annotated[
        Path, typer.Option("--output", help="FILE.json; FILE.rows.jsonl beside it resumes a killed bench.")
    ],
    artifact: ArtifactDir = None,
    method: Methods = None,
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    dtype: Dtype = "auto",
    device: Device = "auto",
    batch_size: BatchSize = 1,
    temperature: Temperature = 0.0,
    typical: Typical = None,
    quality: Annotated[
        str | None,
        typer.Option("--quality", help="Score answers too, against each record's reference: math or summaries."),
    ] = None,
    category: Annotated[
        list[str] | None,
        typer.Option("--category", help="Take records of this category only; may be given several times."),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Of the bootstrap intervals and, with --temperature, of answers.")
    ] = 0,
    revision: Revision = None,
    quantization: Quantization = None,
    record: Annotated[
        bool, typer.Option("--record", help="Also write the results into the artifact and its card.")
    ] = False,
) -> None:
    """Measure transformers' generate, plain decoding and each method on the same prompts, interleaved."""
    from lasd.evaluation.bench import BenchConfig, record_in_artifact, run_bench
    from lasd.evaluation.report import console, print_bench
    from lasd.evaluation.setup import ModelChoice, parse_typical

    choice = ModelChoice(model, artifact, dtype, device, revision, quantization)
    choice.check_record(record)
    methods, lossy, categories = tuple(method or ()), parse_typical(typical), tuple(category or ())
    config = BenchConfig(
        choice,
        prompts,
        output,
        methods,
        limit,
        max_new_tokens,
        batch_size,
        seed,
        temperature,
        lossy,
        quality,
        categories,
    )
    result = run_bench(config)
    print_bench(result, console())
    if record:
        record_in_artifact(config, result)


@app.command()
def prove(
    model: Model,
    prompts: PromptsFile,
    artifact: ArtifactDir = None,
    method: Methods = None,
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 64,
    dtype: Annotated[str, typer.Option("--dtype", help="fp32 proves; bf16, fp16 and auto report rounding.")] = "fp32",
    device: Device = "auto",
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", min=1, help="May be given several times. Default: 1.")
    ] = None,
    sampling: Annotated[
        bool, typer.Option("--sampling", help="Also test samples against the model's exact law.")
    ] = False,
    samples: Annotated[int, typer.Option("--samples", help="Sampled answers.")] = 500,
    temperature: Annotated[float, typer.Option("--temperature", help="Of the samples.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Of the samples; 0 is off.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Of the samples; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the samples.")] = 0,
    revision: Revision = None,
    quantization: Quantization = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the proof as JSON instead of a table.")] = False,
    output: Annotated[Path | None, typer.Option("--output", help="Also write the proof to this file.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Also write the proof into the artifact and its card.")
    ] = False,
) -> None:
    """Prove in fp32 that the answers equal transformers' generate, token for token; in bf16 tell rounding from a bug.

    Exit code 0 only if all are equal (in bf16 and fp16: if rounding explains each difference), and only if drafts were
    accepted and rejected.
    """
    from lasd.evaluation.journal import write_text_atomic
    from lasd.evaluation.proof_report import print_proof
    from lasd.evaluation.prove import ProveConfig, record_in_artifact, run_prove
    from lasd.evaluation.report import console
    from lasd.evaluation.sampling_proof import SamplingSettings
    from lasd.evaluation.setup import ModelChoice

    choice = ModelChoice(model, artifact, dtype, device, revision, quantization)
    choice.check_record(record)
    draws = SamplingSettings(samples, temperature, top_k, top_p, seed) if sampling else None
    sizes = tuple(batch_size or (1,))
    config = ProveConfig(choice, prompts, tuple(method or ()), limit, max_new_tokens, sizes, draws)
    result = run_prove(config)
    text = json.dumps(result, indent=1)
    if output is not None:
        write_text_atomic(output, text + "\n")
    if record:
        record_in_artifact(config, result)
    if as_json:
        typer.echo(text)
    else:
        print_proof(result, console())
    if not result["passed"]:
        raise typer.Exit(1)


@app.command()
def show(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an artifact.")]) -> None:
    """Tell what an artifact is, for which model, with which measured results."""
    from lasd.artifacts import describe, load_artifact
    from lasd.evaluation.report import console

    console().print(describe(load_artifact(folder)))


if __name__ == "__main__":
    main()
