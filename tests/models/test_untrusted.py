import json

import pytest

from tether.errors import UserError
from tether.models.untrusted import refuse_untrusted


@pytest.mark.parametrize(
    "config",
    [
        {"attn_implementation": "somebody/kernel"},
        {"_attn_implementation_internal": "somebody/kernel@main:f"},
        {"text_config": {"_attn_implementation": "somebody/kernel"}},
        {"attn_implementation": {"": "sdpa", "text_config": "somebody/kernel"}},
        {"experts_implementation": "somebody/kernel"},
    ],
)
def test_a_kernel_of_the_hub_is_refused_by_name(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="somebody/kernel"):
        refuse_untrusted("it", tmp_path)


@pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", "a.bin", "b/a.safetensors"])
def test_weights_elsewhere_or_in_pickles_are_refused_by_name(tmp_path, name):
    index = {"weight_map": {"x": "model-00001.safetensors", "y": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=name):
        refuse_untrusted("it", tmp_path)


def test_an_ordinary_directory_is_taken(tmp_path):
    config = {"attn_implementation": "sdpa", "_name_or_path": "somebody/model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse_untrusted("it", tmp_path)


@pytest.mark.parametrize("content", [b"\x80\x04pickle", b"[1]", b'{"weight_map": 3}', b"[" * 10**5])
def test_a_file_that_is_no_index_is_left_to_the_loader(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    (tmp_path / "config.json").write_bytes(content)
    refuse_untrusted("it", tmp_path)
