"""Weights in parts over the processes: the numbers of whole ones, in a share of the memory."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import changed, few_or_many, mask_of, sequences_of, slow_log_probs
from tokenizers import Tokenizer, models
from torch.nn.functional import pad
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dist.processes import free_port, run_processes
from dist.test_runs import assert_same, at, difference, lines, ragged, train  # noqa: F401
from tether import api
from tether.algo.losses import LossInputs, policy_loss
from tether.algo.masked import weighted_sum
from tether.config import ClipUpdate, LoraSection
from tether.dist.dtensor import as_dtensor, copy_from_full, full_tensor, local_shard, shard_like
from tether.dist.fsdp import release_gathered, run_head, shard, unsharded_model
from tether.dist.rows import spread
from tether.dist.tensor_parallel import refuse_unshareable
from tether.dist.world import entered, world
from tether.errors import UserError
from tether.models.critic import Critic
from tether.models.forward import recompute_in_backward
from tether.models.lora import add_adapter
from tether.models.policy import AdapterOffReference, Policy
from tether.models.reward_model import RewardModel, decoder_head
from tether.models.weights import trainable_parameters
from tether.ppo.optimizer import Optimizer
from tether.ppo.updates.minibatches import MinibatchSchedule, UpdateReport, optimizer_steps
from tether.types import ALL_HERE, Experience, Minibatch

VOCABULARY = 37  # divided by nothing
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))  # nobody reads it
GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = [(3, 5), (4, 2), (2, 9), (6, 1), (3, 4), (5, 7), (2, 2)]
ROWS = [
    tuple(torch.randint(VOCABULARY, (n,), generator=GENERATOR).tolist() for n in pair)
    for pair in LENGTHS
]


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(1)
    match kind.split()[0]:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=6, tie_word_embeddings=True))
        case "gpt2":
            model = GPT2LMHeadModel(
                GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=VOCABULARY, n_positions=64)
            )
    for weight in model.parameters():
        if weight.ndim == 1:  # biases and norms that are 0 and 1 would hide a mistake
            weight.data += 0.1 * torch.randn(weight.shape)
    return model.double().eval()


def experience() -> Experience:
    sequences = sequences_of(ROWS)
    mask, generator = mask_of(sequences), torch.Generator().manual_seed(2)
    drawn = torch.randn(3, *mask.shape, generator=generator, dtype=torch.float64) * mask
    zeros = torch.zeros_like(drawn[0])
    return Experience(
        sequences=sequences,
        response_mask=mask,
        old_log_probs=drawn[0] - 3 * mask,
        ref_log_probs=zeros,
        kl=zeros,
        values=zeros,
        final_values=zeros[:, 0],
        token_level_scores=zeros,
        token_level_rewards=zeros,
        advantages=zeros,
        returns=drawn[1],
        policy_advantages=drawn[2],
        correction_weights=torch.ones_like(zeros),
    )


class Watched(Optimizer):
    """Keeps the gradients of its first step."""

    first: list | None = None

    def step(self) -> torch.Tensor:
        if self.first is None:
            self.first = [full_tensor(p.grad).clone().numpy() for p in self.parameters]
        return super().step()


# Of microbatches, and of what they send; those of the steps alone.
counts: Counter[str] = Counter()
in_steps: dict[str, int] = {}


@contextmanager
def counting_sums() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce"):
            usual = getattr(torch.distributed, name, None)  # FSDP's choice differs by version
            if usual is None:
                continue

            def counted(*args, usual=usual, name=name, **kwargs):
                counts[name.partition("_s")[0]] += 1
                return usual(*args, **kwargs)

            patch.setattr(torch.distributed, name, counted)
        yield


def schedule(role: str) -> MinibatchSchedule:
    return MinibatchSchedule(
        role=role,
        seed=3,
        iteration=0,
        epochs=1,
        minibatch_rows=3,
        microbatch_tokens=8,  # a row each
        aggregation="token_mean",
        max_response_tokens=9,
    )


def take_steps(told: Experience, role: str, optimizer, loss_of, report: UpdateReport) -> None:
    for step in optimizer_steps(told, schedule(role), optimizer, report):
        for batch in step.microbatches():
            counts["microbatches"] += 1
            loss = loss_of(batch)
            step.add_loss("loss", loss)
            loss.backward()
        step.finish()


def learn(kind: str) -> dict:
    """Read all rows, take three steps over them as a run does, and read them again. Each process
    has its own rows."""
    model, told, rows = build(kind), experience(), spread(len(ROWS))
    if rows is not ALL_HERE:
        told = replace(told.select(rows.numbers), rows=rows)

    def of_all(x: torch.Tensor) -> np.ndarray:
        wide = pad(x, (0, max(r for _, r in LENGTHS) - x.shape[1])) if x.ndim > 1 else x
        return rows.everyone(wide).numpy()

    if "lora" in kind:
        add_adapter(model, LoraSection(rank=3, alpha=6), 0, "actor")
    if "recomputed" in kind:
        recompute_in_backward(model)
    policy, critic = Policy(model, 0.9, 20), Critic(build(kind), 20)
    if "replicated" not in kind:
        by_step = "each" not in kind
        trunk = model.base_model
        shard(model, trunk, called=trunk, keep_whole=True, sync_by_step=by_step)
        shard(critic, critic.trunk, sync_by_step=by_step)
    sequences, mask = told.sequences, told.response_mask
    optimizer = Watched(trainable_parameters(model).values(), 0.01, 0.5)
    critic_optimizer = Watched(trainable_parameters(critic).values(), 0.01, 5.0)

    def actor_loss(batch: Minibatch) -> torch.Tensor:
        states = policy.states(batch.sequences)
        new, entropies = policy.log_probs_and_entropies(
            states, batch.sequences, batch.response_mask
        )
        inputs = LossInputs(new, batch.old_log_probs, batch.policy_advantages, batch.response_mask)
        loss = policy_loss(ClipUpdate(), inputs)
        return weighted_sum(loss.per_token - 0.1 * entropies, batch.weights)

    def critic_loss(batch: Minibatch) -> torch.Tensor:
        errors = critic(batch.sequences)[:, :-1] - batch.returns
        return weighted_sum(errors**2, batch.weights)

    found = {}
    if "lora" in kind:  # before anyone reads with the adapter
        zeros = torch.zeros_like(told.old_log_probs)
        found["base"] = of_all(AdapterOffReference(policy).log_probs(sequences, mask, zeros))
    found["log-probs before"] = of_all(policy.log_probs(sequences, mask))
    reports = UpdateReport(), UpdateReport()
    counts.clear()
    take_steps(told, "actor", optimizer, actor_loss, reports[0])
    take_steps(told, "critic", critic_optimizer, critic_loss, reports[1])
    in_steps.update(counts)
    assert reports[0].steps_taken == reports[1].steps_taken == 3
    found["log-probs"] = of_all(policy.log_probs(sequences, mask))
    found["values"], found["final values"] = map(of_all, critic.values(sequences, mask))
    for role, report in zip(("actor", "critic"), reports, strict=True):
        norm = report.meter.values()[f"{role}/grad_norm"]
        found[f"{role} norm"] = torch.tensor(norm).numpy()
    plain = unsharded_model(model)
    assert (plain is model) is (world().size == 1 or "replicated" in kind)
    with torch.no_grad():
        found["logits"] = plain(input_ids=experience().sequences.ids).logits.numpy()
    for name, source in ("actor", optimizer), ("critic", critic_optimizer):
        found |= {f"{name} gradient {i}": g for i, g in enumerate(source.first)}
        found |= {f"{name} {k}": full_tensor(v).numpy() for k, v in source.state().items()}
    for name, module in ("actor", model), ("critic", critic):
        found |= {f"{name} {k}": full_tensor(w).numpy() for k, w in module.named_parameters()}
    return found


def assert_agree(one: dict, other: dict, tolerance: float = 1e-9) -> None:
    assert one.keys() == other.keys()
    gaps = {name: float(abs(one[name] - other[name]).max()) for name in one}
    assert not {name: gap for name, gap in gaps.items() if not gap < tolerance}


IN_PARTS = "llama", "qwen2 recomputed", "gpt2", "llama lora"
SHARED = "qwen2", "qwen3 recomputed"


def learn_all(kinds: tuple[str, ...], tensor_parallel: int) -> dict[str, dict]:
    with entered("cpu", tensor_parallel, 60.0):
        return {kind: learn(kind) for kind in kinds}


def assert_learn_as_one(kinds: tuple[str, ...], tensor_parallel: int, size: int = 2) -> None:
    together = run_processes(size, learn_all, kinds, tensor_parallel)
    for kind in kinds:
        alone = learn(kind)
        for found in together:
            assert_agree(alone, found[kind])


@few_or_many("kinds", IN_PARTS[:1], IN_PARTS[1:])
def test_two_processes_with_parts_learn_as_one(kinds):
    assert_learn_as_one(kinds, 1)


def count_sums(kind: str) -> tuple[dict, dict]:
    with entered("cpu", 1, 60.0), counting_sums():
        return learn(kind), in_steps


STEPS = 6  # three of the actor, three of the critic
UNITS = 3 * 3 + 3 * 4  # two layers and the rest of the actor, the critic's embedding as well
# Is there a row, what the minibatch's cells weigh, the losses, the norm of shards or gradients.
SMALL = 4 * STEPS


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", lambda n: {"reduce": UNITS, "all_reduce": SMALL}),
        ("llama replicated", lambda n: {"all_reduce": SMALL}),
        pytest.param(
            "llama each",
            lambda n: {"reduce": UNITS * n // STEPS},
            marks=pytest.mark.long,
        ),
    ],
)
def test_gradients_are_summed_once_per_step(kind, expected):
    alone = learn(kind)
    for found, counted in run_processes(2, count_sums, kind):
        if "replicated" in kind:  # each process noted its own part of them
            found |= {name: alone[name] for name in alone if " gradient " in name}
        assert_agree(alone, found)
        assert counted["microbatches"] > STEPS
        for name, number in expected(counted["microbatches"]).items():
            assert counted.get(name, 0) == number


@pytest.mark.long
def test_two_processes_that_share_layers_learn_as_one():
    assert_learn_as_one(SHARED, 2)


@pytest.mark.long
def test_four_processes_with_parts_of_shared_layers_learn_as_one():
    """22 inner units: 11 for each that shares a layer, and 6 and 5 of them for the replicas."""
    assert_learn_as_one(("qwen3",), 2, size=4)


@few_or_many(("kind", "tensor_parallel"), ("qwen2", 2), ("qwen2 recomputed", 1))
def test_log_probs_from_parts_are_those_of_transformers(kind, tensor_parallel):
    model = build("qwen2")
    slow = [slow_log_probs(model, *row, 0.9).detach() for row in ROWS]
    for found in run_processes(2, learn_all, (kind,), tensor_parallel):
        read = torch.tensor(found[kind]["log-probs before"])
        for row, expected in zip(read, slow, strict=True):
            assert (row[: len(expected)] - expected).abs().max() < 1e-12


def held(tensor_parallel: int = 1) -> tuple[int, int]:
    """Bytes of tensors that live in this process, whoever holds them: between forward and backward,
    with weights and Adam's moments, and after it, with gradients as well."""
    with entered("cpu", tensor_parallel, 60.0):
        before = living_bytes()
        shape = SHAPE | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
        model = LlamaForCausalLM(LlamaConfig(**shape))
        shard(model, model.base_model, called=model.base_model)
        optimizer = Optimizer(model.parameters(), 0.01, 1.0)
        for _ in range(2):
            optimizer.step()
            states = model.base_model(input_ids=torch.arange(8)[None]).last_hidden_state
            loss = run_head(model.lm_head, lambda head, x: head.forward(x), states)
            loss = loss.logsumexp(-1).sum()
            during = living_bytes() - before
            loss.backward()
            del states, loss
        return during, living_bytes() - before


def living_bytes() -> int:
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not x.is_meta]
    tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
    storages = [local_shard(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.long
def test_parts_take_a_share_of_the_memory():
    """Four bytes a number. After a pass no layer is gathered any more, nor embedding nor head.
    Who shares layers has all that is outside them."""
    inside = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    outside = 2 * 512 * 64 + 5 * 64
    [(during, after)] = run_processes(1, held)
    activations = during - 12 * (inside + outside)
    assert 0 < activations < 4 * inside / 2
    assert after == pytest.approx(16 * (inside + outside), rel=0.01)
    for one in run_processes(2, held):
        assert one[0] == pytest.approx(6 * (inside + outside) + activations, rel=0.02)
        assert one[1] == pytest.approx(after / 2, rel=0.01)
    for one in run_processes(2, held, 2):
        assert one[1] == pytest.approx(16 * (inside / 2 + outside), rel=0.01)


def judge(kind: str) -> list[float]:
    """Scores of dialogues by a reward model in parts."""
    with entered("cpu", 1, 60.0):
        torch.manual_seed(1)
        shape = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
        if kind == "llama":
            model = LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1))
        else:
            model = BertForSequenceClassification(BertConfig(**shape, num_labels=1))
        model = model.double().eval().requires_grad_(False)
        trunk = model.base_model
        shard(model, trunk, called=trunk if decoder_head(model) else model)
        return (
            RewardModel(model, TOKENIZER, 12)
            .scores([prompt + rest for prompt, rest in ROWS])
            .tolist()
        )


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_reward_model_in_parts_gives_the_same_scores(kind):
    alone = judge(kind)
    assert len(set(alone)) == len(ROWS)
    for other in run_processes(2, judge, kind):
        assert other == pytest.approx(alone, abs=1e-12)


SHARDED = {"launch__weights": "sharded"}
RUNS = {
    "shared trunk": {"critic": {"shared_trunk": True}, "kl__refresh_reference_every": 1},
    "lora": {
        "model__lora": {"rank": 2},
        "model__critic_lora": {"rank": 2},
        "model__gradient_checkpointing": True,
        "rollout__reuse_log_probs": True,
        "kl__in_loss": {"coef": 0.1, "estimator": "full"},
    },
    "shared layers": {"launch__tensor_parallel": 2, "train__eval_every": 2},
    "frozen layers": {
        "model__learn_layers": 1,
        "kl__in_loss": {"coef": 0.1, "estimator": "full"},
        "kl__refresh_reference_every": 1,
    },
}


def train_all(configs: dict[int, dict]) -> list[str]:
    """One after the other, each at a port of its own."""
    runs = []
    for port, config in configs.items():
        os.environ["MASTER_PORT"] = str(port)
        runs.append(train(config))
    return runs


@few_or_many("names", ["lora"], ["shared trunk", "shared layers", "frozen layers"])
def test_runs_with_weights_in_parts_are_those_with_whole_ones(ragged, names):  # noqa: F811
    short = changed(ragged, train__iterations=2, actor__epochs=1, critic__epochs=1)
    kinds = {kind: changed(short, **RUNS[kind]) for kind in names}
    configs = {free_port(): at(config, f"two {kind}", **SHARDED) for kind, config in kinds.items()}
    parts, _ = run_processes(2, train_all, configs)
    for (kind, config), run in zip(kinds.items(), parts, strict=True):
        one = train(at(config, f"one {kind}", launch={}))
        assert_same(one, run, 1e-9)


@pytest.mark.long
def test_a_run_goes_on_however_its_weights_lie(ragged):  # noqa: F811
    """One iteration on two processes, one alone, one on two again; a critic, a reference."""
    full = changed(
        ragged,
        kl__in_loss={"coef": 0.1, "estimator": "full"},
        actor__epochs=1,
        critic__epochs=1,
        train__iterations=3,
    )
    one = train(at(full, "one"))
    first, second, third = (at(full, "run", **SHARDED, train__iterations=n) for n in (1, 2, 3))
    run, _ = run_processes(2, train, first)
    train(second, resume=True)
    run_processes(2, train, third, True)
    a, b = (lines(run, "metrics.jsonl") for run in (one, run))
    assert len(a) == len(b) == 3
    assert difference(a, b) < 1e-9
    assert len(list(Path(run).glob("checkpoints/000003/actor/model-*.safetensors"))) == 2
    api.generate("1+1=?", run, max_tokens=2)


def there_and_back() -> list[bool]:
    """Parts of tensors that nothing divides evenly, and moments that lie like them."""
    with entered("cpu", 1, 60.0):
        layer = torch.nn.Linear(3, 5)
        shard(layer)
        checks = []
        for weight, shape in (layer.weight, (5, 3)), (layer.bias, (5,)):
            tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
            copy_from_full(weight, tensor)
            checks.append(torch.equal(full_tensor(weight), tensor))
            checks.append(torch.equal(local_shard(weight), tensor.chunk(2)[world().rank]))
            moment = as_dtensor(shard_like(tensor + 1, weight), weight)
            checks.append(torch.equal(full_tensor(moment), tensor + 1))
            step = torch.tensor(3.0)
            checks.append(as_dtensor(step, weight) is step and shard_like(step, weight) is step)
        try:
            copy_from_full(layer.bias, torch.zeros(6))
        except RuntimeError as error:
            checks.append("(5,)" in str(error))
        return checks


def test_parts_of_a_tensor_make_up_the_whole():
    assert run_processes(2, there_and_back) == [[True] * 9] * 2


def stale() -> float:
    """A pass, other weights, a pass: how far the second is from one over those weights."""
    with entered("cpu", 1, 60.0):
        model, other = build("llama"), build("llama")
        for weight in other.parameters():
            weight.data += 0.1
        shard(model, model.base_model, called=model.base_model)
        weights = list(model.parameters())  # as an optimizer holds them
        policy, told = Policy(model, 1.0, 20), experience()
        policy.log_probs(told.sequences, told.response_mask)
        for weight, new in zip(weights, other.parameters(), strict=True):
            copy_from_full(weight, new)
        found = policy.log_probs(told.sequences, told.response_mask)
        expected = Policy(other, 1.0, 20).log_probs(told.sequences, told.response_mask)
        return float((found - expected).abs().max())


def test_what_a_pass_has_gathered_is_not_read_again_after_a_change():
    assert max(run_processes(2, stale)) < 1e-12


def odd_ones() -> tuple[str, bool]:
    """What is said of an adapter on shared layers, and whether a frozen model stays so."""
    with entered("cpu", 2, 60.0):
        frozen = build("qwen3").requires_grad_(False)
        shard(frozen, frozen.base_model, called=frozen.base_model)
        adapted = build("llama")
        add_adapter(adapted, LoraSection(rank=3, alpha=6), 0, "actor")
        try:
            shard(adapted, adapted.base_model, called=adapted.base_model)
        except UserError as error:
            return str(error), any(weight.requires_grad for weight in frozen.parameters())
    return "", True


def test_shared_layers_take_no_adapter_and_stay_frozen():
    for said, learns in run_processes(2, odd_ones):
        assert said.startswith("launch.tensor_parallel does not split layers.*.self_attn.q_proj")
        assert not learns


@pytest.mark.parametrize(
    ("config", "size", "why"),
    [
        (GPT2Config(), 2, "no plan to split a gpt2 model"),
        (LlamaConfig(**SHAPE), 4, "4 does not divide the 2 key-value heads of a llama model"),
        (LlamaConfig(**SHAPE), 3, "3 does not divide the 4 attention heads"),
        (LlamaConfig(**SHAPE | {"intermediate_size": 23}), 2, "the 23 units in a feed-forward"),
    ],
)
def test_a_model_whose_layers_cannot_be_shared_is_refused(config, size, why):
    with pytest.raises(UserError, match=why):
        refuse_unshareable(config, size)


def test_alone_a_model_is_its_own_whole():
    model = build("llama")
    shard(model, model.base_model, called=model.base_model, keep_whole=True)
    release_gathered()
    assert unsharded_model(model) is model
    assert all(type(weight) is torch.nn.Parameter for weight in model.parameters())
