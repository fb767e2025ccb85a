"""`tether serve-retriever`: search over HTTP."""

from typing import Annotated, Literal

import typer

PORT = 8000


def serve_retriever(
    corpus: Annotated[
        str, typer.Argument(metavar="CORPUS", help='JSON lines of {"id", "contents"}.')
    ],
    port: Annotated[int, typer.Option(help="Port to listen on.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    topk: Annotated[
        int, typer.Option(min=1, max=100, help="Documents a query gets, if it does not say.")
    ] = 3,
    on_bad_row: Annotated[
        Literal["refuse", "skip"], typer.Option(help="What a broken line of the corpus does.")
    ] = "refuse",
) -> None:
    """Search a corpus over HTTP, in the protocol of Search-R1: POST /retrieve."""
    from tether.cli.text import complain
    from tether.rollout.tools.bm25 import Bm25
    from tether.rollout.tools.corpus import read_corpus
    from tether.rollout.tools.server import make_app, serve
    from tether.view.guard import allowed_hosts, is_loopback
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
            complain("Other machines can reach this server, and it asks nobody for a password.")
        serve(make_app(index, topk, hosts), listener)
