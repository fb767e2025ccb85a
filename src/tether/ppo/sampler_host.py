"""One of the samplers apart: the actor's model, the tools, and a local sampler over them.

It is made where it runs, from the config; weights follow with the work.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.config import Config
from tether.config.load import validate_config
from tether.models.loading import load_causal_lm
from tether.models.lora import add_adapter
from tether.models.precision import names_read_rounded
from tether.models.vocabulary import load_vocabulary
from tether.models.weights import load_trainable_parameters, trainable_parameters
from tether.ppo.roles import let_layers_learn, pick_device
from tether.rollout.chunks import Chunk
from tether.rollout.local import LocalSampler
from tether.rollout.tools.build import build_episode_source
from tether.types import Prompts, Rollout


def sent_weights(model: PreTrainedModel, config: Config) -> dict[str, Tensor]:
    """Copy the weights that learn, on the CPU, in the format in which samplers read them.

    Those of an adapter are as they are stored: they are merged before anything is rounded.
    """
    rounded = names_read_rounded(model) if config.model.lora is None else set()
    return {
        name: weight.detach().to("cpu", torch.bfloat16 if name in rounded else None, copy=True)
        for name, weight in trainable_parameters(model).items()
    }


class SamplerHost:
    """Samples chunks with the weights that it was given last."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        config = validate_config(mapping)
        torch.set_num_threads(config.rollout.sampler_threads or config.threads)
        settings, rollout = config.model, config.rollout
        device = pick_device(config.device)
        self.model = load_causal_lm(
            settings.actor, settings.dtype, device, settings.hub, settings.compute
        )
        vocabulary = load_vocabulary(settings.actor, self.model, settings.hub)
        layers = let_layers_learn(self.model, settings.actor, config)
        if settings.lora is not None:
            add_adapter(self.model, settings.lora, config.seed, "actor", layers)
        self.episodes = build_episode_source(rollout, vocabulary, config.data).episodes
        limits = vocabulary.eos_ids, rollout.max_response_tokens, rollout.temperature
        self.sampler = LocalSampler(*limits, rollout.cache_tokens)

    def load(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Use these weights from now on."""
        load_trainable_parameters(self.model, weights)
        self.sampler.sync(self.model, version)

    def sample(self, chunk: Chunk) -> Rollout:
        """Decode a chunk alone."""
        return self.sampler.run(self.episodes(_prompts(chunk)), chunk.choice, chunk.numbers)


def _prompts(chunk: Chunk) -> Prompts:
    """Return the rows' prompts, of which episodes read the ids alone."""
    rows = len(chunk)
    return Prompts(
        texts=[""] * rows,
        ids=chunk.prompt_ids,
        columns=[{}] * rows,
        positions=[*range(rows)],
        files=[""] * rows,
        messages=[None] * rows,
    )
