"""A prompt as the model expects to read it."""

from transformers import PreTrainedTokenizerBase

from tether.data.chat_templates import TemplateFailed, render_chat
from tether.data.shapes import Message, Prompt
from tether.errors import UserError


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, system_prompt: str | None = None
) -> list[int]:
    """Ids of the prompt up to where the response begins: by the chat template if there is one.

    A system turn of the prompt's own comes before `system_prompt`.
    """
    if tokenizer.chat_template is None:
        return tokenizer(_as_it_is(prompt, system_prompt)).input_ids
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    # The template writes its own special tokens; the tokenizer must not add them again.
    return tokenizer(_by_template(tokenizer, messages), add_special_tokens=False).input_ids


def _as_it_is(prompt: Prompt, system_prompt: str | None) -> str:
    if system_prompt is not None:
        raise UserError("data.system_prompt needs a model with a chat template; leave it out.")
    if not isinstance(prompt, str):
        raise UserError(
            "the prompt is a list of messages, but the model has no chat template; write it as "
            "text, or use a model that has one."
        )
    return prompt


def _by_template(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> str:
    try:
        text = render_chat(tokenizer, messages, add_generation_prompt=True)
    except TemplateFailed as error:
        raise UserError(f"The model's chat template does not render: {error}.") from None
    last = messages[-1]["content"]
    if _letters(last) not in _letters(text):
        raise UserError(
            f"The model's chat template drops the last turn ({last[:60]!r}), so the model would "
            f"not see it; repair the template in the model's directory or use another model."
        )
    return text


def _letters(text: str) -> str:
    """Without white space, which templates trim."""
    return "".join(text.split())
