"""Y6: search engines of no use, called and read as the real one is; `corpus.jsonl` lies beside."""

import json
import zlib
from pathlib import Path


class Search:
    name = "search"
    pattern = "<search>{}</search>"
    reply = "<information>{}</information>"


class Shuffled(Search):
    """Find a document that has nothing to do with the query, always the same one for it."""

    def __init__(self) -> None:
        lines = Path(__file__).with_name("corpus.jsonl").read_text(encoding="utf-8").splitlines()
        self.documents = [json.loads(line)["contents"] for line in lines]

    def __call__(self, query: str) -> str:
        return self.documents[zlib.crc32(query.encode()) % len(self.documents)]


class Empty(Search):
    """Find nothing."""

    def __call__(self, query: str) -> str:
        return ""


shuffled, empty = Shuffled(), Empty()
