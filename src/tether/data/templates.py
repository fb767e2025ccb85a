"""A prompt as the model expects to read it."""

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from tether.errors import UserError


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str, system_prompt: str | None = None
) -> list[int]:
    """Ids of the prompt up to where the response begins: by the chat template if there is one."""
    if tokenizer.chat_template is None:
        if system_prompt is not None:
            raise UserError("data.system_prompt needs a model with a chat template; leave it out.")
        return tokenizer(prompt).input_ids
    messages = [{"role": "user", "content": prompt}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    # The template writes its own special tokens; the tokenizer must not add them again.
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise UserError(f"The model's chat template does not render: {error}.") from None
    return tokenizer(text, add_special_tokens=False).input_ids
