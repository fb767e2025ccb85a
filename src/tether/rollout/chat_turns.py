"""What a chat template writes between two turns of the policy.

Sampled tokens are never rendered again: a template is asked once, with stand-ins for what was said,
and what it writes between them is put around every observation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.data.chat_templates import TemplateFailed, render_chat
from tether.errors import UserError
from tether.models.vocabulary import decode

ASKED, SAID, SEEN = "Qask0", "Qsaid1", "Qseen2"  # stand-ins; letters that no template changes


def chat_reply(
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: frozenset[int],
    role: str = "user",
    said: Mapping[str, Any] | None = None,
) -> str:
    """Return the text around an observation, {} in its place: from after the EOS of the turn before
    to where the next turn begins.

    `said` are further fields of the assistant's message, such as its tool calls.
    """
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": SAID, **(said or {})},
        {"role": role, "content": SEEN},
    ]
    try:
        text = render_chat(tokenizer, messages, add_generation_prompt=True)
    except TemplateFailed as error:
        raise UserError(
            f"The model's chat template cannot render a dialogue of several turns: {error}; name "
            f"texts that end a turn by `stops`."
        ) from None
    if text.count(SAID) != 1 or text.count(SEEN) != 1 or text.find(SAID) > text.find(SEEN):
        raise UserError(
            f"The model's chat template does not show the turns of user, assistant and {role} in "
            f"their order, once each; name texts that end a turn by `stops`."
        )
    between, _, after = text.partition(SAID)[2].partition(SEEN)
    before = _after_eos(between, [decode(tokenizer, [i]) for i in sorted(eos_ids)])
    if "{}" in before + after:
        raise UserError("The model's chat template writes {} between turns, which stands for text.")
    return before + "{}" + after


def _after_eos(text: str, spelt: Sequence[str]) -> str:
    """Return what follows the first EOS, which the policy itself has sampled."""
    found = [(text.find(eos), eos) for eos in spelt if eos in text]
    if not found:
        return text
    at, eos = min(found)
    return text[at + len(eos) :]
