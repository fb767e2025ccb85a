"""The samplers apart of a run: `launch.samplers`."""

from dataclasses import replace
from functools import partial

from tether.config import Config
from tether.dist.ray_samplers import RayFleet
from tether.dist.world import world
from tether.errors import UserError
from tether.ppo.roles import Roles
from tether.ppo.sampler_host import SamplerHost, sent_weights
from tether.rollout.apart import SamplersApart
from tether.rollout.pool import Fleet, SamplerPool
from tether.rollout.sampler import DistributedSampler


def set_samplers_apart(roles: Roles, config: Config) -> tuple[Roles, SamplersApart]:
    """Start `launch.samplers`, and let them sample in place of this process."""
    if world().size > 1:
        raise UserError(
            f"launch.samplers = {config.launch.samplers} serve one training process, and "
            f"{world().size} were started; start one, or write launch.samplers: 0."
        )
    samplers = start_samplers(config)
    return replace(roles, sampler=DistributedSampler(samplers)), samplers


def start_samplers(config: Config) -> SamplersApart:
    """Start the samplers and wait for the first."""
    launch = config.launch
    fleet = make_fleet(config)
    pool = SamplerPool(
        fleet,
        launch.samplers,
        launch.timeout_seconds,
        launch.start_timeout_seconds,
        launch.max_restarts,
    )
    try:
        pool.start()
    except BaseException:
        pool.close()
        raise
    most_new, sent = config.rollout.max_response_tokens, partial(sent_weights, config=config)
    return SamplersApart(pool, sent, most_new, config.chunk_tokens)


def make_fleet(config: Config) -> Fleet:
    """Connect to where the samplers will be."""
    mapping = config.model_dump(mode="json", by_alias=True)
    fleet = RayFleet(partial(SamplerHost, mapping), config.launch)
    fleet.connect()
    return fleet
