"""Each process reads its shards from the files, and has what it would have of a whole model."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dist.processes import run_processes
from tether.config import LoraSection
from tether.dist.dtensor import local_shard, own_slices, shard_like
from tether.dist.fsdp import shard, unsharded_model
from tether.dist.world import entered
from tether.errors import UserError
from tether.models.critic import Critic
from tether.models.forward import trunk
from tether.models.frozen_layers import upper_copy
from tether.models.loading import load_causal_lm, load_trunk
from tether.models.lora import add_adapter
from tether.models.stored import is_unread, read_own_parts, weights_by_name
from tether.models.weights import load_weights
from tether.ppo.optimizer import Optimizer
from tether.train.checkpoint_files import read_tensors

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 37,  # divided by nothing
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 37, "n_positions": 64}
FAMILIES = {
    "llama": lambda tied: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)),
    "qwen2": lambda tied: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied)),
    "qwen3": lambda tied: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, head_dim=6, tie_word_embeddings=tied)
    ),
    "gpt2": lambda tied: GPT2LMHeadModel(GPT2Config(**GPT2, tie_word_embeddings=tied)),
}


def save(family: str, tied: bool, folder: Path, **settings) -> str:
    torch.manual_seed(3)
    model = FAMILIES[family](tied)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape)  # no zeros and ones that hide a mistake
    model.save_pretrained(folder, **settings)
    return str(folder)


def give_shards(model: PreTrainedModel) -> PreTrainedModel:
    fill = partial(read_own_parts, device=CPU)
    shard(model, trunk(model), trunk(model), keep_whole=True, fill=fill)
    return model


def same_bits(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Weights, which of them are one, buffers."""
    pairs = [dict(x.named_parameters(remove_duplicate=False)) for x in (one, other)]
    ties = [{n: [m for m in named if named[m] is named[n]] for n in named} for named in pairs]
    buffers = [dict(x.named_buffers()) for x in (one, other)]
    return (
        pairs[0].keys() == pairs[1].keys()
        and ties[0] == ties[1]
        and all(torch.equal(local_shard(pairs[0][n]), local_shard(pairs[1][n])) for n in pairs[0])
        and all(pairs[0][n].dtype == pairs[1][n].dtype for n in pairs[0])
        and buffers[0].keys() == buffers[1].keys()
        and all(torch.equal(buffers[0][n], buffers[1][n]) for n in buffers[0])
    )


def read(directory: str, dtype: str, moments: str) -> dict[str, bool]:
    """What of the actor, a critic, a reference, Adam's moments and a resume is bit for bit the
    same, read in parts and whole."""
    models, moved, plain = [], [], []
    for in_parts in (True, False):
        actor = load_causal_lm(directory, dtype, CPU, False, "float32", in_parts)
        others = [upper_copy(trunk(actor), 0), upper_copy(actor, 0)]
        others.append(load_trunk(directory, dtype, CPU, False, "float32", in_parts))
        models.append([actor, *others])
        assert [is_unread(model) for model in models[-1]] == [in_parts] * 4
        for model in models[-1]:
            give_shards(model)
        assert not any(is_unread(model) for model in models[-1])
        optimizer = Optimizer(actor.parameters(), 0.1, 1.0)
        file = Path(moments)
        optimizer.load_state(read_tensors(file) if in_parts else load_file(file))
        moved.append(optimizer.state())
        plain.append(unsharded_model(actor).state_dict())
    actor = models[0][0]
    before = {name: local_shard(w).clone() for name, w in actor.named_parameters()}
    for weight in actor.parameters():
        local_shard(weight).zero_()
    again = load_causal_lm(directory, dtype, CPU, in_parts=True)
    load_weights(actor, weights_by_name(again))
    resumed = all(torch.equal(before[n], local_shard(w)) for n, w in actor.named_parameters())
    names = ("actor", "critic", "reference", "trunk")
    found = {n: same_bits(*pair) for n, *pair in zip(names, *models, strict=True)}
    ids = torch.arange(6)[None]
    states = [trunk(m)(input_ids=ids, use_cache=False).last_hidden_state for m, *_ in models]
    return found | {
        "states": torch.equal(*states),
        "moments": all(
            torch.equal(local_shard(moved[0][k]), local_shard(moved[1][k])) for k in moved[1]
        ),
        "sampler's": all(torch.equal(plain[0][k], plain[1][k]) for k in plain[1]),
        "resumed": resumed,
    }


def read_all(cases: list[tuple[str, str, str]], tensor_parallel: int) -> list[dict[str, bool]]:
    with entered("cpu", tensor_parallel, 300.0):
        return [read(*case) for case in cases]


def case(family: str, tied: bool, dtype: str, folder: Path, **settings) -> tuple[str, str, str]:
    name = f"{family}-{tied}-{dtype}"
    directory = save(family, tied, folder / name, **settings)
    weights = list(FAMILIES[family](tied).parameters())
    moments = {
        f"{i}.{kind}": torch.randn(weight.shape, dtype=getattr(torch, dtype))
        for i, weight in enumerate(weights)
        for kind in ("exp_avg", "exp_avg_sq")
    }
    moments |= {f"{i}.step": torch.tensor(3.0) for i in range(len(weights))}
    save_file(moments, folder / f"{name}.safetensors")
    return directory, dtype, str(folder / f"{name}.safetensors")


def assert_all_same(cases: list[tuple[str, str, str]], tensor_parallel: int) -> None:
    for process in run_processes(2, read_all, cases, tensor_parallel):
        for (directory, *_), found in zip(cases, process, strict=True):
            wrong = [name for name, same in found.items() if not same]
            assert not wrong, (directory, wrong)


def test_shards_read_from_files_are_those_of_whole_models(tmp_path):
    """Tied or not, from one file or several, in another format than the files'."""
    settings = {"max_shard_size": "3KB"}
    cases = [
        case("llama", True, "float64", tmp_path),
        case("qwen2", False, "float32", tmp_path, **settings),
        case("qwen3", True, "bfloat16", tmp_path, **settings),
        case("gpt2", True, "float32", tmp_path),
        case("gpt2", False, "float32", tmp_path),
    ]
    assert_all_same(cases, 1)


def test_shards_of_shared_layers_are_those_of_whole_models(tmp_path):
    cases = [
        case("llama", False, "float32", tmp_path),
        case("qwen2", True, "float32", tmp_path),
        case("qwen3", False, "float64", tmp_path),
    ]
    assert_all_same(cases, 2)


def cut(tensor_parallel: int) -> list[bool]:
    """Whether slices say where the shard lies that torch cuts out."""
    with entered("cpu", tensor_parallel, 60.0):
        model = FAMILIES["qwen2"](False)
        full = {name: torch.randn(w.shape) for name, w in model.named_parameters()}
        shard(model, trunk(model), trunk(model))
        named = model.named_parameters()
        return [torch.equal(full[n][own_slices(w)], shard_like(full[n], w)) for n, w in named]


@pytest.mark.long
@pytest.mark.parametrize(("size", "tensor_parallel"), [(3, 1), (4, 2)])
def test_slices_are_where_shards_lie(size, tensor_parallel):
    assert all(map(all, run_processes(size, cut, tensor_parallel)))


def adapted(directory: str) -> tuple[bool, bool]:
    with entered("cpu", 1, 60.0):
        found = []
        for in_parts in (True, False):
            model = load_causal_lm(directory, "float32", CPU, in_parts=in_parts)
            critic = Critic(upper_copy(trunk(model), 0), 20, head_device=CPU)
            add_adapter(model, LoraSection(rank=2, alpha=4), 5, "actor")
            shard(critic, critic.trunk, fill=partial(read_own_parts, device=CPU))
            found.append((give_shards(model), critic))
        return tuple(same_bits(*pair) for pair in zip(*found, strict=True))


def test_adapter_and_value_head_keep_their_numbers(tmp_path):
    directory = save("llama", True, tmp_path)
    assert run_processes(2, adapted, directory) == [(True, True)] * 2


def refusals(directories: dict[str, str]) -> dict[str, str]:
    with entered("cpu", 1, 60.0):
        said = {}
        for what, directory in directories.items():
            try:
                give_shards(load_causal_lm(directory, "float32", CPU, in_parts=True))
                said[what] = ""
            except UserError as error:
                said[what] = str(error)
        return said


def spoiled(folder: Path, what: str) -> str:
    save("llama", True, folder)
    file = folder / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    if what == "nan":
        tensors[name][-1] = torch.nan  # in the last process's rows
    elif what == "shape":
        tensors[name] = tensors[name][:-1].clone()
    elif what == "dtype":
        tensors[name] = tensors[name].to(torch.int8)
    elif what == "lacks":
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    if what == "index":
        file.rename(folder / "model-00001-of-00002.safetensors")
        places = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
        places |= {name: "model-00002-of-00002.safetensors"}
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


def test_bad_files_are_refused_in_a_sentence_by_all(tmp_path):
    kinds = ("nan", "shape", "dtype", "lacks", "index")
    directories = {what: spoiled(tmp_path / what, what) for what in kinds}
    name = r"model\.layers\.1\.mlp\.up_proj\.weight"
    expected = {
        "nan": rf"{name} in .*model\.safetensors holds NaN or infinite weights",
        "shape": rf"stores {name} as 21 x 16 in model\.safetensors.* 22 x 16",
        "dtype": rf"stores {name} as I8 in model\.safetensors, not as a float",
        "lacks": rf"holds no {name}",
        "index": r"names 'model-00002-of-00002\.safetensors' in .*index\.json, which is not there",
    }
    for said in run_processes(2, refusals, directories):
        for what, words in expected.items():
            with pytest.raises(UserError, match=words):
                raise UserError(said[what])
            assert "\n" not in said[what]
    for what in ("shape", "index"):  # alone too
        with pytest.raises(UserError, match=expected[what]):
            load_causal_lm(directories[what], "float32", CPU)


def test_a_model_that_files_hold_otherwise_is_read_whole(tmp_path):
    """A tied weight that is stored twice is tied only if both are equal, which takes reading."""
    directory = save("llama", True, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, file, {"format": "pt"})
    model = load_causal_lm(directory, "float32", CPU, in_parts=True)
    assert not is_unread(model)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
