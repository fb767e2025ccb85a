"""Search in this process: BM25 over a corpus, in any language that has words or characters."""

import re
import unicodedata
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from tether.errors import UserError
from tether.rollout.tools.corpus import Corpus

# Scripts without spaces between words: han, kana, bopomofo.
UNSPACED = (
    r"\u2e80-\u2fdf\u3040-\u30ff\u3105-\u312f\u31a0-\u31bf\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
UNSPACED += r"\U00020000-\U0003ffff"
WORDS = re.compile(rf"([{UNSPACED}]+)|((?:(?![{UNSPACED}])[^\W_])+)")


def terms(text: str) -> list[str]:
    """What is looked up: words but for their case, and in Chinese or Japanese each character and
    each pair of neighbours, as nothing says where a word ends."""
    found: list[str] = []
    for run, word in WORDS.findall(unicodedata.normalize("NFKC", text).casefold()):
        if word:
            found.append(word)
        else:
            found += run
            found += map("".join, pairwise(run))
    return found


class Bm25:
    """The documents that share the rarest terms with a query. Ties go to the earlier one, so that
    the same query always finds the same."""

    def __init__(self, corpus: Corpus) -> None:
        import bm25s  # only those who search need it

        self.corpus = corpus
        self.index = bm25s.BM25()
        found = [terms(document["contents"]) for document in corpus.documents]
        if not any(found):
            raise UserError(f"No document of {corpus.path} holds a word; there is nothing to find.")
        self.index.index(found, show_progress=False)

    def search(self, query: str, topk: int) -> list[tuple[dict, float]]:
        """At most `topk` documents and their scores, best first; one without a term of the query
        is none."""
        known = self._known(terms(query))
        if not known:
            return []
        scores = self.index.get_scores(known)
        topk = min(topk, len(scores))
        threshold = max(np.partition(scores, -topk)[-topk], np.finfo(scores.dtype).tiny)
        (candidates,) = np.nonzero(scores >= threshold)
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:topk]
        return [(self.corpus.documents[i], float(scores[i])) for i in best]

    def _known(self, words: Iterable[str]) -> list[str]:
        return [word for word in words if word in self.index.vocab_dict]
