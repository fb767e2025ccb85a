"""`tether check`: load and validate everything that a run needs.

Where weights are missing or do not fit, the plan is made from the models' config.json files.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from tether.config import Config
from tether.data.prompts import OnProgress, load_heldout, load_prompts
from tether.dist.ray_samplers import refuse_no_room, refuse_small_cluster
from tether.models.locate import find_model, has_tokenizer, has_weights
from tether.models.vocabulary import load_vocabulary
from tether.planning.machine import free_bytes, this_machine
from tether.planning.plan import Plan, check_layers_divide, make_plan
from tether.planning.workload import Networks, outline_networks
from tether.ppo.roles import build_roles, build_scorer, room_for_prompts
from tether.ppo.scoring import NUM_TRIED, Trial, try_reward
from tether.rewards.functions import Reward, columns_for_reward, learned_model
from tether.support.units import byte_text


def preview(config: Config, reward: Reward | None, reading: OnProgress | None = None) -> Plan:
    """Plan a run on this machine, and try its reward on a few rows; nothing is trained."""
    refuse_no_room(config.launch)
    refuse_small_cluster(config.launch)
    torch.set_num_threads(config.threads)
    machine = this_machine(config.device)
    return replace(_preview(config, reward, reading), machine=machine)


def _preview(config: Config, reward: Reward | None, reading: OnProgress | None) -> Plan:
    reason = _why_not_loaded(config)
    if reason is None:
        roles = build_roles(config, reward, reading)
        try:
            tried = try_reward(roles.reward, roles.train_prompts.first(NUM_TRIED), config)
        finally:
            roles.reward.close()
        return replace(make_plan(config, roles), tried=tuple(tried))
    networks = outline_networks(config)
    check_layers_divide(config, networks)
    return _plan_shapes(config, networks, reward, reason, reading)


def _plan_shapes(
    config: Config,
    networks: Networks,
    reward: Reward | None,
    reason: str,
    reading: OnProgress | None,
) -> Plan:
    """Plan without weights; the prompts are read if there is a tokenizer for them."""
    settings, columns = config.model, columns_for_reward(config.reward, reward)
    room = room_for_prompts(config, networks.actor.config)
    if not has_tokenizer(settings.actor, settings.hub):
        longest = min(config.data.max_prompt_tokens, room or config.data.max_prompt_tokens)
        unread = (
            f"{settings.actor} has no tokenizer, so the prompts were not read; each is taken to "
            f"have data.max_prompt_tokens = {longest} tokens"
        )
        return Plan(config, networks, longest, notes=(*config.departures, reason, unread))
    vocabulary = load_vocabulary(settings.actor, networks.actor, settings.hub)

    reader = vocabulary.tokenizer, columns, room, reading
    train_prompts = load_prompts(config.data.train, config.data, *reader)
    heldout = load_heldout(config.data, *reader)
    tried: list[Trial] = []
    if learned_model(config.reward) is None or reward is not None:
        scorer = build_scorer(config, reward, train_prompts, torch.device("cpu"))
        try:
            tried = try_reward(scorer, train_prompts.first(NUM_TRIED), config)
        finally:
            scorer.close()
    return Plan(
        config=config,
        networks=networks,
        longest_prompt=train_prompts.longest,
        train_prompts=len(train_prompts),
        heldout_prompts=len(heldout) if heldout else 0,
        evaluated_prompts=heldout.evaluated(config.train.eval_prompts) if heldout else 0,
        notes=(*config.departures, reason),
        tried=tuple(tried),
    )


def _why_not_loaded(config: Config) -> str | None:
    """Return what keeps the models from being loaded here, if anything does."""
    names, hub = list(_models(config)), config.model.hub
    for name in names:
        if not has_weights(name, hub):
            return f"{name} holds no weights, so the models were planned for and not loaded"
    needed = sum(_file_bytes(find_model(name, hub)) for name in names)
    free = free_bytes(config.device)
    if needed > free:
        return (
            f"the models' files have {byte_text(needed)}, more than the {byte_text(free)} that "
            f"are free here, so they were planned for and not loaded"
        )
    return None


def _models(config: Config) -> Iterator[str]:
    """Yield the model of each role that has weights of its own.

    With `model.learn_layers`, copies of the actor's are small.
    """
    settings = config.model
    yield settings.actor
    others = []
    if config.has_critic and not config.critic.shared_trunk:
        others.append(settings.critic or settings.actor)
    if config.kl.needs_reference and not settings.adapter_off_is_reference:
        others.append(settings.reference or settings.actor)
    yield from (n for n in others if settings.learn_layers is None or n != settings.actor)
    judge = learned_model(config.reward)
    if judge is not None:
        yield judge


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
