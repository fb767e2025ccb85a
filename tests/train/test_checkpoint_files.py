"""Tensors of a checkpoint in one file or in parts; a part that is missing is noticed."""

import pytest
import torch
from safetensors.torch import save_file

from tether.train.checkpoint_files import own_tensors, read_tensors, write_tensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1)}


def test_one_process_writes_one_file(tmp_path):
    write_tensors(tmp_path / "critic.safetensors", own_tensors(TENSORS))
    assert [path.name for path in tmp_path.iterdir()] == ["critic.safetensors"]
    found = read_tensors(tmp_path / "critic.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def in_parts(folder, *numbers: int) -> None:
    for number in numbers:
        tensors = {f"x{number}": torch.full((2,), float(number))}
        save_file(tensors, folder / f"critic-{number:05d}-of-00003.safetensors")


def test_parts_are_read_as_one(tmp_path):
    in_parts(tmp_path, 1, 2, 3)
    save_file({"y": torch.zeros(1)}, tmp_path / "critic_optimizer-00001-of-00001.safetensors")
    found = read_tensors(tmp_path / "critic.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "x1": [1, 1],
        "x2": [2, 2],
        "x3": [3, 3],
    }


@pytest.mark.parametrize("there", [(), (1, 3)])
def test_a_missing_part_is_noticed(tmp_path, there):
    in_parts(tmp_path, *there)
    with pytest.raises(OSError, match="is missing or not complete"):
        read_tensors(tmp_path / "critic.safetensors")
