"""The tokenizer as episodes use it: end marks found in sampled tokens, observations as ids."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tether.errors import UserError

CUT = " …"  # stands where an observation was cut
LONGEST_TOKEN = 100  # characters; no more of an observation is looked at than could fit


class TurnTokenizer:
    """Shared by all rows of a run."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: frozenset[int],
        end_marks: Sequence[str],
    ) -> None:
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        # A token that holds part of a character alone reads as U+FFFD, and may complete one.
        self._last = {mark[-1] for mark in end_marks} | {"\ufffd"}
        self._may_end: dict[int, bool] = {}
        self._mark_ids: dict[str, list[int]] = {}

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def may_end(self, token: int) -> bool:
        """Whether a mark may end with this token; only then is a turn worth decoding. A mark may
        be split over tokens in any way, but its last character stands in the last of them."""
        if token not in self._may_end:
            self._may_end[token] = any(char in self.text([token]) for char in self._last)
        return self._may_end[token]

    def observation(self, text: str, reply: str, limit: int) -> tuple[list[int], str, bool]:
        """At most `limit` ids of `reply` with the text in its {}; the text as far as it was
        looked at; and whether it was cut, which a mark shows where it happened."""
        before, _, after = reply.partition("{}")
        opening, closing, cut = self.mark_ids(before), self.mark_ids(after), self.mark_ids(CUT)
        room = limit - len(opening) - len(closing)
        text = text.encode(errors="replace").decode()  # a lone surrogate is in no vocabulary
        read = text[: limit * LONGEST_TOKEN]
        body = self._plain_ids(read)
        is_cut = len(body) > room or read != text
        if is_cut:
            body = body[: room - len(cut)] + cut
        return opening + body + closing, read, is_cut

    def check_room(self, reply: str, limit: int) -> None:
        """Refuse, before training, a limit that leaves an observation no token of its own."""
        marks = sum(len(self.mark_ids(part)) for part in (*reply.split("{}"), CUT))
        if marks >= limit:
            raise UserError(
                f"rollout.max_observation_tokens = {limit} does not hold even {reply!r} and the "
                f"mark of a cut, which are {marks} tokens; write more than {marks}."
            )

    def mark_ids(self, text: str) -> list[int]:
        """Of our own marks, which may be special tokens of the vocabulary."""
        if text not in self._mark_ids:
            self._mark_ids[text] = self._encode(text, split_special_tokens=False)
        return self._mark_ids[text]

    def _plain_ids(self, text: str) -> list[int]:
        """Text stays text: an EOS spelt out in a document is characters, not the token."""
        return self._encode(text, split_special_tokens=True)

    def _encode(self, text: str, split_special_tokens: bool) -> list[int]:
        return self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        ).input_ids
