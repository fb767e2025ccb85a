"""Write a model's files so that a full disk is an OSError, whichever library met it."""

import os
import re
from pathlib import Path

from transformers import PreTrainedTokenizerBase

SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)$")  # how Rust ends what the system refused


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files into a folder.

    tokenizers raises a bare Exception for what the system refuses, such as a full disk; here it is
    the OSError that it was.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        found = SYSTEM_ERROR.search(str(error))
        if type(error) is not Exception or found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number)) from error
