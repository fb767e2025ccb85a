"""The tokenizer of episodes: finds end marks in sampled tokens, encodes observations."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from tether.errors import UserError
from tether.models.vocabulary import decode

CUT = " …"  # marks where an observation was cut
LONGEST_TOKEN = 100  # characters; text that cannot fit is not encoded at all


class TurnTokenizer:
    """Encodes and decodes turns; one is shared by all rows of a run."""

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
        """Return the text of ids, special tokens included."""
        return decode(self.tokenizer, ids)

    def may_end(self, token: int) -> bool:
        """Tell whether an end mark may end with this token; only then a turn must be decoded.

        A mark may be split over tokens in any way, but its last character is in the last of them.
        """
        if token not in self._may_end:
            self._may_end[token] = any(char in self.text([token]) for char in self._last)
        return self._may_end[token]

    def observation(self, text: str, reply: str, limit: int) -> tuple[list[int], str, bool]:
        """Encode `reply` with the text in place of its {}, in at most `limit` ids.

        Return the ids, the text as far as it was encoded, and whether it was cut. A mark in the
        ids shows where.
        """
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
        """Refuse, before training, a limit that leaves no token for the observation itself."""
        marks = sum(len(self.mark_ids(part)) for part in (*reply.split("{}"), CUT))
        if marks >= limit:
            raise UserError(
                f"rollout.max_observation_tokens = {limit} does not hold even {reply!r} and the "
                f"mark of a cut, which are {marks} tokens; write more than {marks}."
            )

    def mark_ids(self, text: str) -> list[int]:
        """Encode text of ours, which may hold special tokens of the vocabulary."""
        if text not in self._mark_ids:
            self._mark_ids[text] = self._encode(text, split_special_tokens=False)
        return self._mark_ids[text]

    def _plain_ids(self, text: str) -> list[int]:
        """Encode text of others: an EOS spelt out in a document is characters, not the token."""
        return self._encode(text, split_special_tokens=True)

    def _encode(self, text: str, split_special_tokens: bool) -> list[int]:
        encoded = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=split_special_tokens
        )
        return list(encoded["input_ids"])
