"""A disk that is full while a tokenizer is written is an OSError, as for every other file."""

import errno
from pathlib import Path

import pytest

from tether.models.saving import save_tokenizer


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full: Linux only")
def test_a_full_disk_is_an_os_error_for_tokenizers_too(byte_tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as refused:
        save_tokenizer(byte_tokenizer, tmp_path)
    assert refused.value.errno == errno.ENOSPC


def test_what_the_system_did_not_refuse_stays_what_it_is(tmp_path):
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise ValueError("no vocabulary (os error 28)")

    with pytest.raises(ValueError, match="no vocabulary"):
        save_tokenizer(Broken(), tmp_path)
