"""`tether eval`, `generate`, `export`, `serve-retriever`: what is done with a model."""

import io
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tether.cli.field_options import TrustRun, one_word, parse_words
from tether.cli.terminal import printable, probe_table, score_text, sets_table, table
from tether.errors import UserError

if TYPE_CHECKING:
    from tether.ppo.evaluate import Evaluation


def evaluate(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL [--section.field VALUE]...", hidden=True)
    ] = None,
    recipe: Annotated[
        str, typer.Option(help="Whose data and reward to use; a run brings its own.")
    ] = "arithmetic",
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Evaluate the model behind this OpenAI-compatible URL; MODEL then only provides "
            "the tokenizer."
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option(help="What that server calls its model.")
    ] = None,
    endpoint_key: Annotated[
        str | None, typer.Option(help="The environment variable that holds the server's API key.")
    ] = None,
    trust_run: TrustRun = False,
) -> None:
    """Score a model on held-out prompts.

    MODEL is a run, a model directory or tether:starter.
    """
    from tether import api
    from tether.support.http import key_from_environment

    plain, overrides = parse_words(words or [])
    if endpoint is None:
        if endpoint_model or endpoint_key:
            raise UserError("--endpoint-model and --endpoint-key go with --endpoint URL.")
        model = one_word(plain, "tether:starter", "model")
        return _show(api.evaluate(model, recipe, overrides, trust_run=trust_run))
    if endpoint_model is None:
        raise UserError("--endpoint needs --endpoint-model NAME: what the server calls its model.")
    model = one_word(plain, "", "model") or None
    key = None if endpoint_key is None else key_from_environment(endpoint_key, "--endpoint-key")
    _show(api.evaluate_endpoint(endpoint, endpoint_model, model, recipe, overrides, key=key))


def _show(evaluation: "Evaluation") -> None:
    rows = [["held-out", "mean score", "95% interval", "prompts"]]
    parts = {"greedy": evaluation.greedy, "sampled": evaluation.sampled, **evaluation.at_k}
    for name, part in parts.items():
        mean, low, high = (score_text(x, part.binary) for x in (part.mean, part.low, part.high))
        rows.append([name, mean, f"{low} – {high}", str(part.count)])
    print(table(rows))
    if evaluation.kl is not None:
        print(f"  KL to the reference: {evaluation.kl:.4f} nats per sampled response")
    if evaluation.price is not None:
        print(f"  {evaluation.price}")
    if evaluation.sets:
        print(f"\n{sets_table(evaluation)}")


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="What to say; without it, one prompt per line is read.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A run, a model directory or tether:starter; default: the newest run."),
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, help="Responses per prompt, sampled if above 1.")
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 takes the likeliest token; default 0, or 1 with --samples."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest response, in tokens; default 64, or as its tools need."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, other samples.")] = 0,
    trust_run: TrustRun = False,
) -> None:
    """Talk to a model.

    Prints its response to PROMPT: the likeliest, or sampled with --samples or --temperature.
    """
    from tether import api

    if temperature is not None and not math.isfinite(temperature):
        raise UserError("--temperature must be a finite number.")
    if temperature is None:
        temperature = 1.0 if samples > 1 else 0.0
    picked = api.pick_model(model)
    if model is None:
        print(f"model: {picked}", file=sys.stderr)
    talker = api.Talker(picked, max_tokens, trust_run=trust_run)
    for line in [prompt] if prompt is not None else _lines():
        for response, finished in talker.respond(line, samples, temperature, seed):
            print(printable(response) + ("" if finished else " … (cut at --max-tokens)"))


def _lines() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def probe(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL [MODEL]", help="A run or a model; two are compared."),
    ],
    folder: Annotated[
        str, typer.Option("--probe", help="Folder with facts.jsonl, text.jsonl, questions.jsonl.")
    ] = "tether:probe",
    trust_run: TrustRun = False,
) -> None:
    """Measure what a model knows beside its task.

    Facts by the likelihood of their choices, perplexity of plain text, greedy answers. With two
    models, how far the second is from the first.
    """
    from tether import api
    from tether.data.probe import read_probe

    if len(models) > 2:
        raise UserError(f"tether probe takes one model or two, not {len(models)}.")
    questions = read_probe(folder).questions
    found = [api.probe(model, folder, trust_run) for model in models]
    names = ["value"] if len(models) == 1 else ["before", "after"]
    print(probe_table(dict(zip(names, found, strict=True))))
    for number, question in enumerate(questions):
        print(f"\n  {printable(question)}")
        for name, result in zip(names, found, strict=True):
            label = f"{name}: " if len(models) > 1 else ""
            print(f"    {label}{printable(result.answers[number])}")


def export(
    run: Annotated[Path, typer.Argument(help="The run whose newest checkpoint is written.")],
    directory: Annotated[Path, typer.Argument(help="Where to; it must not exist yet.")],
    trust_run: TrustRun = False,
) -> None:
    """Write RUN's model as a plain Hugging Face directory.

    DIRECTORY gets safetensors, tokenizer, generation settings and a model card; an adapter is
    merged into its base.
    """
    from tether import api

    place = api.export(run, directory, trust_run)
    print(f"  → {printable(str(place))}")


PORT = 8000


def serve_retriever(
    corpus: Annotated[
        str, typer.Argument(metavar="CORPUS", help='JSON lines of {"id", "contents"}.')
    ],
    port: Annotated[int, typer.Option(help="Port to listen on.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    topk: Annotated[
        int,
        typer.Option(
            min=1, max=100, help="Documents returned per query that does not say how many."
        ),
    ] = 3,
    on_bad_row: Annotated[
        Literal["refuse", "skip"], typer.Option(help="What a broken line of the corpus does.")
    ] = "refuse",
) -> None:
    """Search a corpus over HTTP, in the protocol of Search-R1: POST /retrieve."""
    from tether.cli.terminal import complain
    from tether.rollout.tools.search import Bm25, read_corpus
    from tether.rollout.tools.search_server import make_app, serve
    from tether.view.security import allowed_hosts, is_loopback
    from tether.view.server import bind, shown_address

    documents = read_corpus(corpus, on_bad_row)
    for problem in documents.broken:
        complain(f"left out: {problem}")
    index = Bm25(documents)
    with bind(host, port) as listener:
        port = listener.getsockname()[1]
        address = f"{shown_address(host, port)}/retrieve"
        print(f"{len(documents)} documents at {address} (Ctrl-C ends it)", flush=True)
        hosts = allowed_hosts(host, port) if is_loopback(listener) else None
        if hosts is None:
            complain("Other machines can reach this server, and it asks for no password.")
        serve(make_app(index, topk, hosts), listener)
