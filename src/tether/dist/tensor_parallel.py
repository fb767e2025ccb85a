"""Tensor parallelism: torch's, by the plans of transformers.

Each process has some of the heads and some of the inner units of every layer; their outputs are
added up at the end of each. Embeddings, norms and the output head are whole on all of them.
"""

from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PretrainedConfig, PreTrainedModel

from tether.dist.world import world
from tether.errors import UserError

HEADS = 2  # the dimension of rows x length x heads x width in which a norm of queries is cut


def share_layers(trunk: PreTrainedModel) -> None:
    """Replace each layer by this process's shard of it."""
    mesh = world().shared_mesh["tensor"]
    if mesh.size() == 1:
        return
    refuse_unshareable(trunk.config, mesh.size())
    plan = {name: _style(trunk, name, kind) for name, kind in _plan(trunk.config).items()}
    learn = {name: weight.requires_grad for name, weight in trunk.named_parameters()}
    parallelize_module(trunk, mesh, plan, src_data_rank=None)
    for name, weight in trunk.named_parameters():
        weight.requires_grad_(learn[name])  # torch lets all norms learn


def refuse_unshareable(config: PretrainedConfig, size: int) -> None:
    """Refuse a model whose layers cannot be split so many ways, as far as its config tells."""
    field, model = f"launch.tensor_parallel = {size}", f"a {config.model_type} model"
    if not _plan(config):
        raise UserError(
            f"{field}: transformers has no plan to split {model}; leave it at 1 and shard its "
            f"weights instead."
        )
    heads = config.num_attention_heads
    counts = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "units in a feed-forward layer": getattr(config, "intermediate_size", size),
    }
    for what, number in counts.items():
        if number % size:
            raise UserError(f"{field} does not divide the {number} {what} of {model}.")


def _plan(config: PretrainedConfig) -> dict[str, str]:
    return getattr(config, "base_model_tp_plan", None) or {}


def _style(trunk: PreTrainedModel, pattern: str, kind: str) -> ParallelStyle:
    """Return torch's style for a plan's entry; refuse one without an equivalent or a layer."""
    modules = [m for name, m in trunk.named_modules() if _matches(name, pattern)]
    if modules and all(isinstance(module, nn.Linear) for module in modules):
        match kind:
            case "colwise":
                return ColwiseParallel()
            case "rowwise":
                return RowwiseParallel()
    if modules and kind == "replicated_with_grad_allreduce":
        width = getattr(trunk.config, "head_dim", None)
        if all([w.shape for w in module.parameters()] == [(width,)] for module in modules):
            return SequenceParallel(sequence_dim=HEADS, use_local_output=True)
    raise UserError(
        f"launch.tensor_parallel does not split {pattern} of a {trunk.config.model_type} model "
        f"({kind}, or under an adapter); leave it at 1."
    )


def _matches(name: str, pattern: str) -> bool:
    words, patterns = name.split("."), pattern.split(".")
    return len(words) == len(patterns) and all(map(fnmatchcase, words, patterns))
