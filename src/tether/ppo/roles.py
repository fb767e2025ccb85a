"""The four roles (actor, critic, reference, reward) and what they need, built once per run."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.config import TRL, Config, LaunchSection, LoraSection
from tether.data.chat_templates import asks_for_date, fix_date
from tether.data.prompts import (
    HeldoutSets,
    OnProgress,
    PromptSet,
    encode_prompts,
    load_heldout,
    load_prompts,
)
from tether.dist.collectives import on_first_process
from tether.dist.environment import local_rank
from tether.dist.fsdp import release_gathered, shard, with_outer_weights
from tether.dist.tensor_parallel import refuse_unshareable
from tether.dist.world import local_device, world
from tether.errors import UserError
from tether.models.critic import Critic, NoCritic, ValueFunction
from tether.models.forward import (
    Network,
    can_pack_prompts,
    recompute_in_backward,
    trunk,
)
from tether.models.frozen_layers import (
    freeze_other_layers,
    lacks_lower_layers,
    refuse_unsplittable,
    upper_copy,
)
from tether.models.loading import load_causal_lm, load_trunk
from tether.models.locate import find_model, has_tokenizer
from tether.models.lora import add_adapter
from tether.models.policy import (
    AdapterOffReference,
    FrozenReference,
    NoReference,
    Policy,
    PromptedReference,
    Reference,
)
from tether.models.precision import computed_in
from tether.models.reward_model import load_head_weight, load_reward_model
from tether.models.stored import read_own_parts
from tether.models.vocabulary import Vocabulary, load_tokenizer, load_vocabulary
from tether.models.weights import trainable_parameters
from tether.ppo.optimizer import Optimizer
from tether.rewards.functions import (
    ENVIRONMENT,
    ENVIRONMENTS,
    SOURCES,
    Reward,
    RewardPart,
    columns_for_reward,
    learned_model,
    parts_of,
)
from tether.rewards.learned import LearnedScorer, measure_scale
from tether.rewards.scorers import (
    EnvironmentScorer,
    InProcessScorer,
    PartScorer,
    Scale,
    Scorer,
    SumScorer,
)
from tether.rewards.servers import HttpScorer, JudgeScorer
from tether.rewards.workers import ChildScorer
from tether.rollout.chunks import ChunkedSampler
from tether.rollout.engine import EngineSampler
from tether.rollout.local import LocalSampler
from tether.rollout.own_rows import sample_own
from tether.rollout.sampler import DistributedSampler, Draw, Episodes, Sampler
from tether.rollout.tools.build import build_episode_source
from tether.rollout.vllm import build_vllm
from tether.types import CUT_OFF, Prompts, Rollout


@dataclass(frozen=True)
class Roles:
    """Everything that takes part in an iteration."""

    vocabulary: Vocabulary
    train_prompts: PromptSet
    heldout_prompts: HeldoutSets | None
    sampler: Sampler
    episodes: Episodes
    actor: Policy
    critic: ValueFunction
    reference: Reference
    reward: Scorer
    actor_optimizer: Optimizer
    critic_optimizer: Optimizer | None
    share_prompts: bool  # training passes may compute a prompt once for all of its rows
    broken: list[str]  # rows of data and of corpora that were left out, and why
    day: datetime.date | None = None  # the date that the chat template is given, if it asks


def build_roles(
    config: Config, reward: Reward | None = None, reading: OnProgress | None = None
) -> Roles:
    """Load and check everything that a run needs, without training."""
    device = pick_device(config.device)
    columns = columns_for_reward(config.reward, reward)
    environment = config.rollout.environment
    if environment is not None and environment.kind == TRL:  # which rows have of their episodes
        columns = [name for name in columns if name != ENVIRONMENTS]

    rollout = config.rollout
    models = config.model
    in_parts = loads_in_parts(config.launch)
    source = models.dtype, device, models.hub, models.compute, in_parts
    model = load_causal_lm(models.actor, *source)
    vocabulary = load_vocabulary(models.actor, model, models.hub)
    day = template_day(config, vocabulary)
    fix_date(vocabulary.tokenizer, day)

    layers = let_layers_learn(model, config.model.actor, config)
    lower_layers = layers[0] if layers else 0
    tokens = config.actor.microbatch_tokens
    actor = Policy(model, rollout.temperature, tokens, lower_layers)
    # Before the prompts: a chat template may have to show the tools in each of them.
    turns = build_episode_source(rollout, vocabulary, config.data)
    if not turns.gives_rewards and any(p.kind == ENVIRONMENT for p in parts_of(config.reward)):
        raise UserError(
            "reward.kind environment takes `get_reward` of the environment's class, which has "
            "none; add one, or name a reward function."
        )
    reader = vocabulary.tokenizer, columns, room_for_prompts(config, model.config), reading
    train_prompts = load_prompts(config.data.train, config.data, *reader)
    heldout_prompts = load_heldout(config.data, *reader)
    if heldout_prompts is not None:
        heldout_prompts = heldout_prompts.without(train_prompts)
    scorer = build_scorer(config, reward, train_prompts, device)
    critic = _build_critic(config, actor, layers, scorer.units(), device)
    reference = _build_reference(config, actor, vocabulary, device)
    if config.model.reference_system_prompt is not None:
        sets = [train_prompts, *(heldout_prompts.by_name.values() if heldout_prompts else ())]
        if any(some.stored for some in sets):
            raise UserError(
                "model.reference_system_prompt reads every prompt before the run, which data.cache "
                "and .arrow files are there to avoid; leave one of them out."
            )
        room = room_for_prompts(config, model.config)
        told = _teacher_prompts(config, sets, vocabulary.tokenizer, room)
        reference = PromptedReference(reference, told)
    _make_ready_to_learn(model, config.model.lora, config, "actor", layers, device)
    if config.launch.tensor_parallel > 1:
        refuse_unshareable(model.config, config.launch.tensor_parallel)
    if config.launch.weights == "sharded":
        _shard_weights(config.launch, model, critic, reference, scorer, device)
    # From here on all weights have been read. What these passes gather is let go again: optimizers
    # hold shards.
    refuse_unsplittable(model, lower_layers, config.model.actor)
    share_prompts = _may_share_prompts(config, train_prompts, model, critic, reference)
    release_gathered()
    actor_weights = [*trainable_parameters(model).values()]
    if config.critic.shared_trunk:
        actor_weights += _critic_weights(critic)
    return Roles(
        vocabulary=vocabulary,
        train_prompts=train_prompts,
        heldout_prompts=heldout_prompts,
        sampler=DistributedSampler(build_sampler(config, vocabulary)),
        episodes=turns.episodes,
        actor=actor,
        critic=critic,
        reference=reference,
        reward=scorer,
        actor_optimizer=_build_actor_optimizer(config, actor_weights),
        critic_optimizer=_build_critic_optimizer(config, critic),
        share_prompts=share_prompts,
        broken=[
            *train_prompts.broken,
            *(heldout_prompts.broken if heldout_prompts else []),
            *turns.broken,
        ],
        day=day,
    )


def template_day(config: Config, vocabulary: Vocabulary) -> datetime.date | None:
    """Return the date that the chat template is given in the whole run; None if it asks for none.

    The first process decides, as midnight may fall between two of them.
    """
    if not asks_for_date(vocabulary.tokenizer):
        return config.data.date
    return config.data.date or on_first_process(datetime.date.today)


def build_sampler(config: Config, vocabulary: Vocabulary) -> Sampler:
    """Build the sampler that `rollout.sampler` names; vLLM starts with the first `sync`."""
    rollout = config.rollout
    limits = vocabulary.eos_ids, rollout.max_response_tokens, rollout.temperature
    if rollout.sampler == "local":
        sampler = LocalSampler(*limits, rollout.cache_tokens)
        tokens, most_new = config.chunk_tokens, rollout.max_response_tokens
        return sampler if tokens is None else ChunkedSampler(sampler, most_new, tokens)
    return EngineSampler(build_vllm(config, vocabulary), *limits)


def let_layers_learn(model: PreTrainedModel, name: str, config: Config) -> range | None:
    """Freeze what `model.learn_layers` does not name; return those layers, None if all learn."""
    if config.model.learn_layers is None:
        return None
    return freeze_other_layers(model, config.model.learn_layers, name)


def _make_ready_to_learn(
    model: PreTrainedModel,
    lora: LoraSection | None,
    config: Config,
    role: str,
    layers: range | None,
    device: torch.device,
) -> None:
    if lora is not None:
        add_adapter(model, lora, config.seed, role, layers, device)
    if config.model.gradient_checkpointing:
        recompute_in_backward(model)


def _may_share_prompts(
    config: Config,
    prompts: PromptSet,
    actor: PreTrainedModel,
    critic: ValueFunction,
    reference: Reference,
) -> bool:
    """Tell whether rows may share prompts: where prompts have several, in all roles or in none."""
    if not config.shares_prompts:
        return False
    rollout = config.rollout
    longest_row = prompts.longest + rollout.max_response_tokens
    if rollout.environment is not None:  # the text of its reset follows the prompt
        longest_row += rollout.max_observation_tokens
    layers = trunk(actor)
    networks = [Network(actor, layers, called=layers)]
    networks += [*critic.networks(), *reference.networks()]
    return all(_packs_prompts(network, longest_row) for network in networks)


def _packs_prompts(network: Network, longest_row: int) -> bool:
    other = network.trunk
    # A copy of the actor's upper layers packs what the actor packs.
    if not isinstance(other, PreTrainedModel) or lacks_lower_layers(other):
        return True
    if network.called is other:
        return can_pack_prompts(other, longest_row)
    return with_outer_weights(network.module, lambda: can_pack_prompts(other, longest_row))


def loads_in_parts(launch: LaunchSection) -> bool:
    """Tell whether each process reads only its shards of the weights."""
    return launch.weights == "sharded" and world().size > 1


def _shard_weights(
    launch: LaunchSection,
    actor: PreTrainedModel,
    critic: ValueFunction,
    reference: Reference,
    scorer: Scorer,
    device: torch.device,
) -> None:
    """Give every process a shard of every role's weights."""
    layers, fill = trunk(actor), partial(read_own_parts, device=device)
    give = partial(shard, fill=fill, sync_by_step=launch.gradient_sync == "step")
    give(actor, layers, layers, keep_whole=True, computed_in=computed_in(layers))
    for network in (*critic.networks(), *reference.networks(), *scorer.networks()):
        computed = None if network.trunk is None else computed_in(network.trunk)
        give(network.module, network.trunk, network.called, computed_in=computed)


def _build_reference(
    config: Config, actor: Policy, vocabulary: Vocabulary, device: torch.device
) -> Reference:
    """Build it from the actor's model as it was loaded, unless another is named."""
    settings = config.model
    if not config.kl.needs_reference:
        return NoReference()
    if settings.adapter_off_is_reference:
        return AdapterOffReference(actor)
    name, dtype = settings.reference or settings.actor, settings.reference_dtype or settings.dtype
    own_names = None
    if (name, dtype) == (settings.actor, settings.dtype):  # some files take a minute to read
        model = upper_copy(actor.model, actor.lower_layers)
        if actor.lower_layers:
            own_names = trainable_parameters(actor.model).keys()
    else:
        source = dtype, device, settings.hub, settings.compute, loads_in_parts(config.launch)
        model = load_causal_lm(name, *source)
        _refuse_other_vocabulary(name, model, actor, vocabulary, config)
    return FrozenReference(
        model,
        config.rollout.temperature,
        config.actor.microbatch_tokens,
        refreshed=config.refreshes_reference,
        own_names=own_names,
    )


def _teacher_prompts(
    config: Config,
    sets: Sequence[PromptSet],
    tokenizer: PreTrainedTokenizerBase,
    room: int | None,
) -> dict[tuple[int, ...], list[int]]:
    """Return the ids of every prompt with the reference's system turn, by its ids without."""
    found: dict[tuple[int, ...], list[int]] = {}
    for prompts in (some.prompts for some in sets):
        asked = [own or text for own, text in zip(prompts.messages, prompts.texts, strict=True)]
        told = encode_prompts(tokenizer, asked, config.model.reference_system_prompt)
        for row, ids in enumerate(told):
            where = f"{prompts.files[row]}, line {prompts.positions[row] + 1}"
            if isinstance(ids, UserError):
                raise UserError(f"{where}, with model.reference_system_prompt: {ids}")
            if room is not None and len(ids) > room:
                raise UserError(
                    f"{where}: with model.reference_system_prompt the prompt has {len(ids)} "
                    f"tokens, but the model's positions leave room for {room}; shorten one of them."
                )
            found[tuple(prompts.ids[row])] = ids
    return found


def _refuse_other_vocabulary(
    name: str, model: PreTrainedModel, actor: Policy, vocabulary: Vocabulary, config: Config
) -> None:
    """Refuse a reference, or teacher, that means other tokens by the same ids."""
    hub, own = config.model.hub, vocabulary.tokenizer.get_vocab()
    theirs = load_tokenizer(name, hub).get_vocab() if has_tokenizer(name, hub) else own
    sizes = [int(network.config.vocab_size) for network in (actor.model, model)]
    exact = config.kl.in_loss.coef > 0 and config.kl.in_loss.estimator == "full"
    if theirs == own and min(sizes) > max(own.values()) and (not exact or sizes[0] == sizes[1]):
        return
    raise UserError(
        f"model.reference {name} has another vocabulary than {config.model.actor} ({sizes[1]} and "
        f"{sizes[0]} tokens), so its log-probs are about other tokens; name a model with the same "
        f"tokenizer."
    )


def _build_critic(
    config: Config,
    actor: Policy,
    layers: range | None,
    scale: Scale | None,
    device: torch.device,
) -> ValueFunction:
    """Build the critic; `scale` is that of the reward model's scores, if there is one.

    One of the actor's weights has the actor's layers that learn, `layers`, and above.
    """
    settings, tokens = config.model, config.critic.microbatch_tokens
    if not config.has_critic:
        return NoCritic()
    name, dtype = settings.critic or settings.actor, settings.critic_dtype or settings.dtype
    if config.critic.shared_trunk:
        critic = Critic(actor.model, tokens, shared_trunk=True, head_device=device)
    else:
        same = (name, dtype) == (settings.actor, settings.dtype)
        if same:
            model = upper_copy(trunk(actor.model), actor.lower_layers)
        else:
            source = dtype, device, settings.hub, settings.compute, loads_in_parts(config.launch)
            model = load_trunk(name, *source)
            layers = let_layers_learn(model, name, config)
        _make_ready_to_learn(model, settings.critic_lora, config, "critic", layers, device)
        critic = Critic(model, tokens, reads_lower_states=same, head_device=device)
    if scale is not None:
        start_value_head(critic, config, scale)
    return critic


def _build_actor_optimizer(config: Config, weights: list[nn.Parameter]) -> Optimizer:
    s = config.actor
    return Optimizer(weights, s.lr, s.max_grad_norm, s.weight_decay, s.betas, s.eps)


def _build_critic_optimizer(config: Config, critic: ValueFunction) -> Optimizer | None:
    if not config.has_critic or config.critic.shared_trunk:
        return None
    return Optimizer(
        _critic_weights(critic),
        config.critic_lr,
        config.critic.max_grad_norm,
        config.critic_weight_decay,
        config.critic_betas,
        config.critic_eps,
    )


def _critic_weights(critic: ValueFunction) -> list[nn.Parameter]:
    """Return what the critic learns beside the actor's weights."""
    found = [trainable_parameters(network.module) for network in critic.networks()]
    return [weight for named in found for weight in named.values()]


def build_scorer(
    config: Config, reward: Reward | None, prompts: PromptSet, device: torch.device
) -> Scorer:
    """Build the scorer of the reward.

    A function passed in Python and a reward model run in this process; a function that the config
    names runs in a child process.
    """
    if reward is not None:
        return InProcessScorer(reward, config.reward.concurrency)
    name = learned_model(config.reward)
    if name is not None:
        return build_learned_scorer(config, name, prompts, device)
    scorers = [_part_scorer(parts, config) for parts in _neighbours(parts_of(config.reward))]
    return scorers[0] if len(scorers) == 1 else SumScorer(scorers)


def _neighbours(parts: Sequence[RewardPart]) -> list[list[RewardPart]]:
    """Group neighbouring parts that run in the same processes: functions and rules."""
    grouped = groupby(parts, key=lambda part: part.kind if part.kind in SOURCES else "")
    groups = [(kind, list(group)) for kind, group in grouped]
    return [
        piece
        for kind, group in groups
        for piece in ([[part] for part in group] if kind else [group])
    ]


def _part_scorer(parts: Sequence[RewardPart], config: Config) -> PartScorer:
    """Build what scores some parts of the reward."""
    settings = config.reward
    match parts[0].kind:
        case "environment":
            return EnvironmentScorer(parts[0])
        case "judge":
            return JudgeScorer(parts[0], settings.timeout_seconds, settings.concurrency)
        case "http":
            return HttpScorer(parts[0])
    return ChildScorer(
        parts,
        settings.timeout_seconds,
        settings.import_timeout_seconds,
        settings.workers,
        settings.concurrency,
        settings.memory_gigabytes,
    )


def pick_device(name: str) -> torch.device:
    """Return the device of this process; `auto` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available() and local_rank() >= torch.cuda.device_count():
        raise UserError(
            f"Process {local_rank()} of this machine has no GPU, as there are "
            f"{torch.cuda.device_count()}; start a process per GPU (torchrun --nproc-per-node "
            f"{torch.cuda.device_count()}), or write --device cpu."
        )
    try:
        return torch.empty(0, device=local_device(name)).device
    except (RuntimeError, AssertionError):
        raise UserError(f"There is no device {name!r}; write cpu or auto.") from None


def room_for_prompts(config: Config, model_config: object) -> int | None:
    """Return the tokens that the model's positions leave for a prompt; None if not limited."""
    positions = getattr(model_config, "max_position_embeddings", None)
    if positions is None:
        return None
    rollout = config.rollout
    room = positions - rollout.max_response_tokens
    if rollout.environment is not None:  # the text of its reset follows the prompt
        room -= rollout.max_observation_tokens
    if room < 1:
        raise UserError(
            f"rollout.max_response_tokens = {config.rollout.max_response_tokens} fills the "
            f"{positions} positions of {config.model.actor}; lower it."
        )
    return room


NUM_RESPONSES = 256  # the standard error of the mean is then 1/16 of a standard deviation


def build_learned_scorer(
    config: Config, name: str, train_prompts: PromptSet, device: torch.device
) -> LearnedScorer:
    """Load the reward model and measure its scale on responses of the reference.

    The scale follows from the config and its files alone. A checkpoint holds it all the same, so
    that a resumed run has the same one.
    """
    tokens = config.actor.microbatch_tokens
    reward = load_reward_model(name, config.model.dtype, device, tokens, config.model.compute)
    scorer = LearnedScorer(reward, config.data.system_prompt, Scale())
    asked = train_prompts.for_iteration(0, NUM_RESPONSES, config.seed, config.data.shuffle)
    prompts, sampled, vocabulary = reference_rollout(config, asked, "normalise", device)
    rows = _as_asked(prompts, sampled, vocabulary)
    raw = sampled.rows.gather(scorer.raw_scores(rows))
    scorer.scale = measure_scale([x for x in raw if isinstance(x, float)])
    return scorer


def start_value_head(critic: Critic, config: Config, scale: Scale) -> None:
    """Start the value head of a critic on a reward model's trunk with the reward model's head.

    It is put into the units of the score, so a value starts as the score of the response so far.
    """
    if config.model.critic is None or scale.std == 0:
        return
    weight = load_head_weight(find_model(config.model.critic), critic.head.in_features)
    if weight is None:
        return
    with torch.no_grad():
        critic.head.weight.copy_(weight.to(critic.head.weight.dtype) / scale.std)
        critic.head.bias.fill_(-scale.mean / scale.std)


def _as_asked(
    prompts: Prompts, sampled: Rollout, vocabulary: Vocabulary
) -> list[dict[str, object]]:
    """Return responses as rows for the reward."""
    ids, lengths = sampled.response_ids.tolist(), sampled.response_lengths.tolist()
    return [
        {
            "prompt": prompts.messages[row] or prompts.texts[row],
            "response": vocabulary.decode(ids[row][: lengths[row]]),
            "finished": sampled.finish_reasons[row] not in CUT_OFF,
        }
        for row in range(len(prompts))
    ]


def reference_rollout(
    config: Config, prompts: Prompts, purpose: str, device: torch.device
) -> tuple[Prompts, Rollout, Vocabulary]:
    """Sample a response of the reference to each of this process's prompts, and return both; the
    model is loaded for this only."""
    settings, rollout = config.model, config.rollout
    name = settings.reference or settings.actor
    dtype = settings.reference_dtype or settings.dtype
    model = load_causal_lm(name, dtype, device, settings.hub, settings.compute)
    vocabulary = load_vocabulary(name, model, settings.hub)
    limits = vocabulary.eos_ids, rollout.max_response_tokens, rollout.temperature
    sampler = DistributedSampler(LocalSampler(*limits))
    sampler.sync(model, 0)
    episodes = build_episode_source(rollout, vocabulary, config.data).episodes
    asked, sampled = sample_own(sampler, episodes, prompts, Draw(config.seed, purpose, 0))
    return asked, sampled.to(torch.device("cpu")), vocabulary
