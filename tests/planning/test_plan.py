"""The plan of a run, with numbers worked out by hand for a Llama of two layers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import changed, configured, table
from transformers import GPT2Config, LlamaConfig

from tether import api
from tether.config.load import load_config
from tether.errors import UserError
from tether.models.forward import output_head, trunk
from tether.planning.cost import decoding, memory_bandwidth, model_operations, operations, sent
from tether.planning.dry_run import Batch, HeadedTrunk, backward_peak
from tether.planning.machine import Machine
from tether.planning.times import rates_of, stated_peak
from tether.support.units import byte_text, time_text

ROOT = Path(__file__).resolve().parents[2]

# tiny_model_dir: width 32, two heads of 16, two layers of q, k, v, o (32 x 32), gate, up, down
# (32 x 64) and two norms; an embedding of 260 that is the head as well, and a last norm.
MATRICES = 2 * (4 * 32 * 32 + 3 * 32 * 64)
ACTOR = MATRICES + 2 * 2 * 32 + 260 * 32 + 32
CRITIC = ACTOR + 33


@pytest.fixture
def shapes(tiny_model_dir, tmp_path) -> str:
    """The tiny model without its weights, with its tokenizer."""
    folder = tmp_path / "shapes"
    folder.mkdir()
    for path in Path(tiny_model_dir).iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    return str(folder)


@pytest.fixture
def bare(shapes, tmp_path) -> str:
    """Its config.json alone."""
    folder = tmp_path / "bare"
    folder.mkdir()
    return str(shutil.copy(Path(shapes) / "config.json", folder))


@pytest.fixture
def planned(tiny_config, shapes):
    def plan(**dotted):
        return api.check(changed(tiny_config, model__actor=shapes, **dotted))

    return plan


def part(plan, what: str) -> int:
    [found] = [part.size for part in plan.memory.parts if part.what == what]
    return found


def shown(plan) -> set[str]:
    return {part.what for part in plan.memory.parts}


def test_a_process_alone_holds_all_of_it(planned):
    plan = planned()
    assert part(plan, "weights") == 4 * (ACTOR + CRITIC + ACTOR)
    assert part(plan, "Adam's moments") == 2 * 4 * (ACTOR + CRITIC)
    assert part(plan, "actor's gradients") == 4 * ACTOR
    assert part(plan, "critic's gradients") == 4 * CRITIC
    assert plan.state_bytes == 4 * (5 * ACTOR + 4 * CRITIC)
    assert plan.checkpoint_bytes == 3 * 4 * (ACTOR + CRITIC)
    # 12 rows of the longest prompt, "0+333=?" between two special tokens, and 8 tokens more; a key
    # and a value of 2 x 16 numbers in each of two layers. One column is for padding.
    longest = max(len(f"{a}+{b}=?") for a in range(6) for b in (1, 22, 333)) + 2
    assert plan.longest_prompt == longest
    assert part(plan, "key-value cache") == 12 * (longest + 8 + 1) * 2 * 2 * 32 * 4
    assert "sampler's copy" not in shown(plan)
    assert plan.sent_lines() == []
    assert plan.notes


def test_sharded_weights_are_divided_by_the_processes(planned):
    plan = planned(launch={"num_workers": 3, "weights": "sharded"})
    assert part(plan, "weights") == pytest.approx(4 * (ACTOR + CRITIC + ACTOR) / 3, abs=3)
    assert part(plan, "Adam's moments") == pytest.approx(8 * (ACTOR + CRITIC) / 3, abs=4)
    assert part(plan, "actor's gradients") == pytest.approx(4 * ACTOR / 3, abs=1)
    assert part(plan, "sampler's copy") == 4 * ACTOR
    layer, outside = 4 * (MATRICES // 2 + 64), 4 * (260 * 32 + 32)
    assert part(plan, "whole layers") == 2 * layer + outside
    assert part(plan, "whole layers, learning") == 3 * layer + 2 * outside
    [loading] = [phase for phase in plan.memory.phases if phase.when == "loading"]
    read = 4 * 260 * 32 / 3  # of the embedding
    assert loading.size == pytest.approx(4 * (2 * ACTOR + CRITIC) / 3 + read, abs=3)
    saved = 3 * 4 * (ACTOR + CRITIC)
    assert part(plan, "checkpoint's share") == saved // 3 + 4 * 260 * 32


def test_tensor_parallelism_divides_the_matrices_of_the_layers_alone(planned):
    plan = planned(launch={"num_workers": 4, "tensor_parallel": 2, "weights": "sharded"})
    rest = 2 * 2 * 32 + 260 * 32 + 32
    assert part(plan, "actor's gradients") == 4 * (MATRICES // 2 + rest) // 2


def test_replicas_sum_their_gradients_in_one_piece(planned):
    plan = planned(launch={"num_workers": 2})
    assert part(plan, "weights") == 4 * (ACTOR + CRITIC + ACTOR)
    assert part(plan, "actor's gradients, flat") == 2 * 4 * ACTOR
    [step] = [phase for phase in plan.memory.phases if phase.when == "actor step"]
    assert "actor's activations" not in {part.what for part in step.parts}
    costs = {cost.what: cost.amount for cost in sent(plan.demand)}
    # Two epochs of 12 rows in minibatches of 5; 2 x (2 - 1) / 2 of all gradients each.
    assert costs["actor's gradients"] == 2 * 0.5 * 4 * ACTOR * 2 * 3
    assert costs["critic's gradients"] == 2 * 0.5 * 4 * CRITIC * 2 * 3


def test_a_sharded_pass_gathers_its_weights_and_scatters_its_gradients(planned):
    launch = {"num_workers": 2, "weights": "sharded"}
    plan = planned(launch=launch, actor__microbatch_tokens=2 * 17)
    each = launch | {"gradient_sync": "microbatch"}
    other = planned(launch=each, actor__microbatch_tokens=2 * 17)
    costs = {cost.what: cost.amount for cost in sent(plan.demand)}
    rows = plan.demand.longest_row
    assert rows == 17
    # 6 rows a process, two at a time; three roles read them.
    assert costs["weights, to read"] == pytest.approx(0.5 * 4 * (2 * ACTOR + CRITIC) * 3, abs=9)
    # Of 5 rows a step 3 at most are one process's: two microbatches in each of 2 x 3 steps.
    # Weights are gathered twice in each; gradients are scattered once per step, or in each.
    learn, amount = "actor's weights, to learn", 0.5 * 4 * ACTOR
    assert costs[learn] == pytest.approx(amount * (2 * 12 + 6), abs=99)
    found = {cost.what: cost.amount for cost in sent(other.demand)}
    assert found[learn] == pytest.approx(amount * 3 * 12, abs=99)
    assert part(plan, "actor's gradients") == pytest.approx(4 * ACTOR, abs=2)
    assert part(other, "actor's gradients") == pytest.approx(4 * ACTOR / 2, abs=2)
    assert costs["sampler's copy"] == 0.5 * 4 * ACTOR


def test_operations_are_two_a_parameter_and_token_forward_and_six_with_backward(planned):
    plan = planned(launch={"num_workers": 2, "teraflops": 1e-3, "link_gigabytes": 0.5})
    tokens = 12 * 17
    costs = {cost.what: cost.amount for cost in operations(plan.demand)}
    assert costs["sampling"] == 2 * ACTOR * (6 * 9 + 12 * 8)
    assert costs["forward passes"] == 2 * (2 * ACTOR + CRITIC) * tokens
    assert costs["actor update"] == 6 * ACTOR * tokens * 2
    assert costs["critic update"] == 6 * CRITIC * tokens * 2
    # Each process samples its 6 rows at once: 8 steps, each of which reads all weights.
    assert memory_bandwidth(plan.demand, 2.0) == 8 * 4 * ACTOR / 2
    seconds = sum(costs.values()) / 2e9
    sending = sum(cost.amount for cost in sent(plan.demand)) / 0.5e9
    [(_, total, _)] = [line for line in plan.time_lines() if line[0] == "in all"]
    assert total == f"{1000 * (seconds + sending):.2g} ms"


@pytest.mark.parametrize(("lag", "total"), [(0, "sum"), (1, "max"), (3, "max")])
def test_samplers_apart_take_turns_with_the_trainer_or_overlap_with_it(planned, lag, total):
    pytest.importorskip("ray", reason="Ray is an extra; `make test` installs it")
    plan = planned(launch={"samplers": 2, "teraflops": 3e-6}, rollout__lag=lag)
    tokens = 12 * 17
    apart = 2 * ACTOR * (6 * 9 + 12 * 8) / 2 / 3e6
    training = (2 * (2 * ACTOR + CRITIC) + 6 * (ACTOR + CRITIC) * 2) * tokens / 3e6
    seconds = apart + training if total == "sum" else max(apart, training)
    lines = {line[0]: line[1:] for line in plan.time_lines()}
    assert lines["samplers apart"] == (f"{apart:.1f} s", f"2, idle {1 - apart / seconds:.0%}")
    assert lines["trainer"][0] == f"{training:.1f} s"
    assert lines["trainer"][1].startswith(f"idle {1 - training / seconds:.0%}; ")
    assert lines["in all"][0] == f"{seconds:.1f} s"
    hidden = f"with rollout.lag: 1 an iteration takes {max(apart, training):.1f} s"
    assert (hidden in lines["trainer"][1]) == (lag == 0)


def test_a_shared_prompt_is_counted_once_where_its_rows_are_together(planned):
    """32 prompts of 9 tokens, 4 responses of 8 each: 41 tokens per prompt instead of 4 x 17."""
    rollout = {"prompts": 32, "samples_per_prompt": 4, "max_response_tokens": 8}
    given = {"rollout": rollout, "actor__minibatch_rows": 64, "critic__minibatch_rows": 64}
    tokens, packed = 128 * 17, 32 * 41

    def costs(**dotted) -> dict[str, float]:
        plan = planned(**given, **dotted)
        return {cost.what: cost.amount for cost in operations(plan.demand)}

    found = costs(actor__shuffle="prompts")
    assert found["forward passes"] == 2 * (2 * ACTOR + CRITIC) * packed
    assert found["actor update"] == 6 * ACTOR * packed * 2
    assert found["critic update"] == 6 * CRITIC * packed * 2
    drawn_by_row = costs()
    assert drawn_by_row["forward passes"] == found["forward passes"]
    assert drawn_by_row["actor update"] == 6 * ACTOR * tokens * 2
    assert costs(model__share_prompts=False)["forward passes"] == 2 * (2 * ACTOR + CRITIC) * tokens

    def line(**dotted) -> list:
        lines = planned(**given, **dotted).lines()
        return [line[1:] for line in lines if line[0] == "prompts computed once"]

    assert line() == [("for 4 rows", "tokens saved: forward passes 40%")]
    everywhere = "forward passes 40%, actor update 40%, critic update 40%"
    assert line(actor__shuffle="prompts") == [("for 4 rows", f"tokens saved: {everywhere}")]
    assert line(model__share_prompts=False) == []


def test_packed_rows_are_planned_with_a_copy_of_the_prompt_for_each(planned):
    """Less than rows that share nothing, more than as many tokens without copies."""
    batch = Batch(rows=32, length=17, response=8, prompts=8)
    assert batch.tokens == 8 * 9 + 32 * 8
    plan = planned(device="cuda")
    actor = plan.networks.actor
    model = HeadedTrunk(trunk(actor), "cuda", policy=output_head(actor))
    packed, plain = (backward_peak(model, b, 1, True) for b in (batch, Batch(32, 17, 8)))
    alone = backward_peak(model, Batch(8, 41, 32), 1, True)  # as many tokens, and no copies
    assert alone < packed < plain


def test_a_greedy_response_per_prompt_is_sampled_too_where_the_estimator_needs_it(planned):
    plan = planned(advantage__estimator="remax")
    costs = {cost.what: cost.amount for cost in operations(plan.demand)}
    assert costs["sampling"] == 2 * ACTOR * (6 * 9 + 12 * 8 + 6 * 9 + 6 * 8)


def test_recomputed_layers_cost_a_third_more_and_an_adapter_a_third_less(planned):
    def update(**dotted) -> float:
        plan = planned(**dotted)
        costs = {cost.what: cost for cost in operations(plan.demand)}
        return costs["actor update"].amount / (plan.actor.parameters * 12 * 17 * 2)

    assert update() == 6
    assert update(model__gradient_checkpointing=True) == 8
    assert update(model__lora={"rank": 2}) == 4


LAYER = MATRICES // 2 + 2 * 32
LEARNT = LAYER + 32  # the top layer and the last norm; the head is tied


def test_frozen_layers_are_held_once_and_passed_once(planned):
    """The lower of two layers, and an embedding that is the head as well, are frozen."""
    plan = planned(model__learn_layers=1)
    tokens = 12 * 17
    assert (plan.critic.parameters, plan.reference.parameters) == (LEARNT + 33, LEARNT)
    assert part(plan, "weights") == 4 * (ACTOR + LEARNT + 33 + LEARNT)
    assert part(plan, "Adam's moments") == 2 * 4 * (LEARNT + LEARNT + 33)
    assert part(plan, "actor's gradients") == 4 * LEARNT
    assert part(plan, "lower states") == tokens * 32 * 4
    assert plan.checkpoint_bytes == 3 * 4 * (LEARNT + LEARNT + 33)
    costs = {cost.what: cost.amount for cost in operations(plan.demand)}
    upper = LEARNT + 260 * 32
    assert costs["sampling"] == 2 * ACTOR * (6 * 9 + 12 * 8)
    assert costs["forward passes"] == 2 * (LAYER + upper + upper + LEARNT + 33) * tokens
    assert costs["actor update"] == (4 * upper + 2 * LEARNT) * tokens * 2
    assert costs["critic update"] == 6 * (LEARNT + 33) * tokens * 2
    whole = planned()
    assert part(plan, "actor's activations") < part(whole, "actor's activations")


def test_two_processes_hold_half_of_the_rows_and_lend_half_of_these(planned):
    """Three passes before the updates, and two epochs of actor and critic each."""
    plan = planned(model__learn_layers=1, launch={"num_workers": 2})
    costs = {cost.what: cost.amount for cost in sent(plan.demand)}
    assert part(plan, "lower states") == 6 * 17 * 32 * 4
    assert part(plan, "rows") == part(planned(), "rows") / 2
    passes = 3 + 2 + 2
    assert costs["lower states"] == passes * 0.5 * 6 * 17 * 32 * 4
    assert costs["rows"] == 0.5 * 6 * (passes * 8 * 17 + (3 * 5 + 4 * 34) * 8)
    assert costs["actor's gradients"] == 2 * 0.5 * 4 * LEARNT * plan.demand.steps("actor")


def test_more_layers_than_there_are_is_refused_without_weights(planned):
    with pytest.raises(UserError, match=r"model\.learn_layers is 3, but .* has 2 layers"):
        planned(model__learn_layers=3)


@pytest.mark.long
def test_a_layers_activations_are_what_autograd_keeps_of_it(planned, shapes):
    """What two layers more add, a token: width 32 in two heads, inner width 64."""

    def activations(layers: int) -> int:
        path = Path(shapes) / "config.json"
        shape = {**json.loads(path.read_text()), "num_hidden_layers": layers}
        path.write_text(json.dumps(shape))
        plan = planned(device="cuda", actor__microbatch_tokens=5 * 17, actor__minibatch_rows=10)
        return part(plan, "actor's activations")

    # The input of each norm, what it is divided down to, and its output; one number it is divided
    # by; q, k, v and what attention makes of them, and a number a head; gate, silu, up, product.
    kept = 2 * (3 * 32 + 1) + 4 * 32 + 2 + 4 * 64
    assert activations(6) - activations(4) == 4 * 2 * kept * 5 * 17


def test_glibc_holds_on_to_the_small_blocks_of_a_cpu(planned):
    """Everything here is smaller than the 32 MiB from which blocks are mapped one by one."""

    def learning(device: str) -> int:
        plan = planned(device=device)
        return part(plan, "actor's gradients") + part(plan, "actor's activations")

    assert learning("cpu") == pytest.approx(1.45 * learning("cuda"), rel=1e-3)


def test_recomputing_keeps_one_state_a_layer(planned):
    plain = planned(actor__microbatch_tokens=2048, actor__minibatch_rows=12)
    again = planned(
        actor__microbatch_tokens=2048, actor__minibatch_rows=12, model__gradient_checkpointing=True
    )
    assert part(again, "actor's activations") < part(plain, "actor's activations")


def test_shapes_take_what_the_loaded_models_would(tiny_config, planned):
    loaded = api.check(changed(tiny_config))
    assert loaded.notes == ()
    assert loaded.memory == planned().memory
    measured = "compute"  # a ratio of two speeds, where the processor has both
    lines = [[x for x in plan.lines() if x[0] != measured] for plan in (loaded, planned())]
    assert lines[0] == lines[1]


def test_without_a_tokenizer_prompts_are_as_long_as_they_may_be(tiny_config, bare):
    plan = api.check(changed(tiny_config, model__actor=bare, data__max_prompt_tokens=40))
    assert plan.longest_prompt == 40
    assert plan.train_prompts is None
    assert "holds no weights" in plan.notes[0]
    assert "no tokenizer" in plan.notes[1]
    assert ("iterations", "2", "over prompts that were not read") in plan.lines()


def test_data_are_validated_with_a_tokenizer_alone(tiny_config, shapes):
    with pytest.raises(UserError, match=r"more than data\.max_prompt_tokens = 3"):
        api.check(changed(tiny_config, model__actor=shapes, data__max_prompt_tokens=3))


def test_a_learned_reward_is_planned_for_as_well(planned, shapes):
    path = Path(shapes) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "id2label": {"0": "score"}}))
    plan = planned(reward={"kind": f"model:{shapes}"})
    assert plan.demand.reward.parameters == ACTOR + 32
    assert part(plan, "weights") == 4 * (ACTOR + CRITIC + ACTOR + ACTOR + 32)


def test_what_vllm_takes_is_its_own(planned):
    plan = planned(rollout__sampler="vllm")
    assert {"key-value cache", "packed weights"}.isdisjoint(shown(plan))
    assert "not counted" in str(plan.memory_lines())


def test_weights_that_do_not_fit_are_not_loaded(tiny_config, monkeypatch):
    monkeypatch.setattr("tether.planning.preview.free_bytes", lambda device: 2**10)
    plan = api.check(changed(tiny_config))
    assert "more than the 1 KiB that are free here" in plan.notes[0]
    assert plan.train_prompts == 18


@pytest.mark.parametrize(
    ("shape", "ways", "sentence"),
    [
        ({"num_attention_heads": 4}, 3, "does not divide the 4 attention heads"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 2},
            4,
            "does not divide the 2 key-value heads",
        ),
        (None, 2, "no plan to split a gpt2 model"),
    ],
)
def test_layers_that_do_not_divide_are_refused(tiny_config, tmp_path, shape, ways, sentence):
    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    config = GPT2Config(n_embd=32, n_head=4) if shape is None else LlamaConfig(**width, **shape)
    config.save_pretrained(tmp_path / "shape")
    launch = {"num_workers": ways, "tensor_parallel": ways, "weights": "sharded"}
    with pytest.raises(UserError, match=sentence):
        api.check(changed(tiny_config, model__actor=str(tmp_path / "shape"), launch=launch))


@pytest.mark.parametrize(
    ("dotted", "sentence"),
    [
        (
            {"launch": {"weights": "sharded"}, "actor__update": {"kind": "trpo"}},
            "actor.update.kind trpo needs all weights on every process",
        ),
        (
            {
                "launch": {"weights": "sharded"},
                "actor__update": {"kind": "penalty", "estimator": "full"},
            },
            "actor.update.estimator full needs a second copy of the actor",
        ),
        (
            {"launch": {"num_workers": 2, "tensor_parallel": 2}},
            "launch: tensor_parallel = 2 divides the weights, so it needs weights: sharded",
        ),
        (
            {
                "launch": {"num_workers": 2, "tensor_parallel": 2, "weights": "sharded"},
                "model__lora": {"rank": 2},
            },
            "launch.tensor_parallel = 2 does not split layers under an adapter",
        ),
        ({"launch": {"num_workers": 13}}, "launch.num_workers is 13, but an iteration has only 12"),
        (
            {"launch": {"num_workers": 4, "tensor_parallel": 3}},
            "launch: tensor_parallel is 3, which does not divide num_workers = 4",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused_before_anything_is_loaded(tiny_config, dotted, sentence):
    with pytest.raises(UserError, match=sentence):
        configured(tiny_config, **dotted)


def test_the_command_prints_memory_and_what_is_sent(tiny_config, shapes, tmp_path, capsys):
    from typer.testing import CliRunner

    from tether.cli.main import app

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(changed(tiny_config, model__actor=shapes)))
    words = ["check", str(recipe), "--launch.num_workers", "2", "--launch.teraflops", "1"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    for line in ("memory of a process", "= actor update", "peak", "actor's gradients", "in all"):
        assert line in result.output
    assert f"note: {shapes} holds no weights" in result.output


def test_bfloat16_halves_what_is_kept_of_its_products_and_no_weights(planned):
    """Inputs of products, which a layer keeps for its backward pass, take half the bytes."""
    rows = {"actor__microbatch_tokens": 2048, "actor__minibatch_rows": 12}
    plain, coarse = planned(**rows), planned(**rows, model__compute="bfloat16")
    for what in ("weights", "Adam's moments", "actor's gradients", "key-value cache"):
        assert part(coarse, what) == part(plain, what)
    assert part(coarse, "actor's activations") < part(plain, "actor's activations")


def test_a_plan_says_the_peak_of_the_other_format(planned):
    plain, coarse = planned(), planned(model__compute="bfloat16")
    peaks = [{line[0]: line[1] for line in plan.memory_lines()} for plan in (plain, coarse)]
    assert peaks[0]["peak in bfloat16"] == peaks[1]["peak"]
    assert peaks[1]["peak in float32"] == peaks[0]["peak"]
    assert "compute" in {line[0] for line in plain.lines()}
    trpo = planned(actor__update={"kind": "trpo"})
    assert "peak in bfloat16" not in {line[0] for line in trpo.memory_lines()}


@table(
    ("gain", "sentence"),
    [
        (1.0, "AVX2: bfloat16 gains memory here, and no time"),
        (1.94, "AVX2: products in bfloat16 are 1.9 x as fast here as in float32"),
    ],
)
def test_a_plan_says_what_bfloat16_gains_here(planned, gain, sentence):
    plan = replace(planned(), machine=Machine(2**34, 0.1, "AVX2", gain))
    assert ("compute", "float32", sentence) in plan.lines()


def test_decoding_is_counted_in_steps_that_read_all_weights(planned):
    """6 rows a process at once: 8 steps. A step reads the weights, and 9 + 8 / 2 cached tokens of
    each row: keys and values of two heads of 16 in two layers, 4 bytes each."""
    fast = {"num_workers": 2, "teraflops": 1e3, "bandwidth_gigabytes": 1e-3}
    plan = planned(launch=fast)
    found = decoding(plan.demand)
    assert (found.steps, found.launches) == (8, 0)
    assert found.step_bytes == 4 * ACTOR + 6 * 13 * (2 * 2 * 2 * 16 * 4)
    assert found.step_operations == 2 * ACTOR * 6
    seconds = 8 * found.step_bytes / 1e6 + 2 * ACTOR * 6 * 9 / 2e15
    [line] = [line for line in plan.time_lines() if line[0] == "sampling"]
    assert line[1] == time_text(seconds)
    assert line[2] == f"8 steps, each reads {byte_text(found.step_bytes)}; bound by memory"

    slow = planned(launch=fast | {"teraflops": 1e-9})
    assert decoding(slow.demand).seconds(1e-9, 1e6) == (8 * 2 * ACTOR * 6 / 1e3, "products")


def test_rows_that_do_not_fit_the_cache_are_sampled_in_waves(planned):
    """34 tokens of cache are two rows of 17: 6 rows are three waves of 8 steps."""
    fields = {"launch": {"num_workers": 2}, "rollout__cache_tokens": 34}
    assert decoding(planned(**fields).demand).steps == 24


def test_a_gpu_s_host_starts_kernels_one_by_one_for_the_local_sampler(planned):
    """82 a step and 85 a layer, at 6 microseconds each."""
    plan = planned(launch={"device_kind": "h100-80gb"})
    found = decoding(plan.demand)
    assert found.launches == 82 + 2 * 85
    seconds, bound = found.seconds(400, 3e12)
    assert seconds == pytest.approx(8 * 252 * 6e-6)
    assert bound == "the host, which starts its kernels"


@table(
    "kind, compute, expected",
    [
        ("h100-80gb", "float32", (0.4 * 67, 0.7 * 3350e9, 0.7 * 450e9)),
        ("h100-80gb", "bfloat16", (0.4 * 989, 0.7 * 3350e9, 0.7 * 450e9)),
        ("a100-40gb", "bfloat16", (0.4 * 312, 0.7 * 1555e9, 0.7 * 300e9)),
    ],
)
def test_a_named_device_gives_rates_and_their_source(tiny_config, kind, compute, expected):
    config = configured(tiny_config, launch={"device_kind": kind}, model__compute=compute)
    rates = rates_of(config, Machine(10**9, 0.05))
    assert (rates.teraflops, rates.bandwidth, rates.link) == pytest.approx(expected)
    peak = expected[0] / 0.4
    assert rates.whence.startswith(f"40% of {peak:g} TFLOP/s in {compute}, 70% of ")
    assert rates.whence.endswith(f"(NVIDIA's data sheet, {kind.split('-')[0].upper()} SXM)")


def test_what_was_measured_goes_before_a_data_sheet(tiny_config):
    launch = {"device_kind": "h100-80gb", "teraflops": 300, "bandwidth_gigabytes": 2000}
    rates = rates_of(configured(tiny_config, launch=launch), None)
    assert (rates.teraflops, rates.bandwidth, rates.link) == (300, 2e12, 0.7 * 450e9)
    assert rates.whence.startswith("70% of 450 GB/s between devices (")


def test_a_plan_says_whether_it_fits_the_named_device(planned):
    plan = planned(launch={"device_kind": "l4-24gb"})
    assert plan.demand.device == "cuda"
    room = {line[0]: line[1:] for line in plan.memory_lines()}["a l4-24gb has"]
    assert room[0] == byte_text(24 * 10**9)
    assert room[1].startswith("the peak fits (NVIDIA's data sheet, L4")
    assert not plan.does_not_fit
    full = planned(launch={"device_kind": "l4-24gb"}, rollout__cache_tokens=10**9)
    assert full.memory.peak.size < 24e9  # it holds no more rows than there are


def test_an_unknown_device_is_refused_with_the_names_that_are_known(tiny_config):
    with pytest.raises(
        UserError, match=r"device_kind is 'h100'; write one of a100-40gb, .*h100-80"
    ):
        configured(tiny_config, launch={"device_kind": "h100"})


@table(
    "launch, words",
    [
        ({"num_workers": 2}, ["2", "by torchrun; a copy of the weights each; gloo"]),
        (
            {"num_workers": 4, "weights": "sharded", "tensor_parallel": 2, "kind": "ray"},
            ["4", "by Ray; sharded by FSDP2, 2 share each layer; gloo"],
        ),
    ],
)
def test_the_plan_says_processes_sharding_and_backend(planned, launch, words):
    [line] = [
        line for line in planned(launch=launch, device="cpu").lines() if line[0] == "processes"
    ]
    assert line[1] == words[0]
    assert line[2].endswith(words[1])
    assert not [line for line in planned().lines() if line[0] == "processes"]


def test_operations_of_a_model_are_those_of_its_tokens_without_recomputed_layers(planned):
    """100 tokens, 60 of them responses; 2 samples per prompt read the other 40 once for both."""
    plain, again = (
        planned(model__gradient_checkpointing=g, rollout__samples_per_prompt=2, rollout__prompts=6)
        for g in (False, True)
    )
    epochs = plain.config.actor.epochs, plain.config.critic_epochs
    expected = 2 * ACTOR * (60 + 40 / 2) + 2 * (2 * ACTOR + CRITIC) * 100
    expected += 6 * (ACTOR * epochs[0] + CRITIC * epochs[1]) * 100
    for plan in (plain, again):
        assert model_operations(plan.demand, 100, 60) == expected


def test_the_peak_is_the_stated_one_or_the_data_sheet_s(tiny_config):
    def peak(**launch):
        return stated_peak(configured(tiny_config, launch=launch))

    assert peak() is None
    assert peak(device_kind="a100-80gb") == 19.5
    assert peak(device_kind="a100-80gb", teraflops=200) == 200


@pytest.mark.long
def test_a_70b_is_planned_to_load_within_80_gb_of_every_process(monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = api.check(load_config("docs/plans/70b.yaml"))
    [loading] = [phase.size for phase in plan.memory.phases if phase.when == "loading"]
    assert loading < 80e9
    assert part(plan, "weights") * plan.demand.workers > 80e9  # which no single one of them could
