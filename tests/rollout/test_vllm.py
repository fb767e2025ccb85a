"""vLLM as the sampler. The first half needs no vLLM; the second is run by `make vllm`, in an
environment of its own, and is skipped elsewhere."""

import json
import os
import resource
import signal
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from queue import Queue
from threading import Thread
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import configured, response, table, tiny_llama
from models.families import EOS_IDS, GPT2, SHARED, SMOL, WINDOW, make_family
from safetensors.torch import save_file
from torch.multiprocessing import reductions
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tether.config import LoraSection
from tether.errors import RunStopped, UserError
from tether.models.lora import add_adapter
from tether.models.weights import trainable_parameters
from tether.ppo.roles import build_roles
from tether.rollout import vllm, vllm_engine, vllm_weights
from tether.rollout.engine import EngineSampler, GenerationRequest
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Draw, Greedy, SingleTurn

from .test_engine import Talk

PROMPTS = [[5, 9, 200, 4], [1], [11, 12], [0, 0, 0, 0, 0, 21], [250], [3, 2, 1]]
SETTINGS = vllm.Settings(eos_ids=(256,), max_row_tokens=64, cache_bytes=10**8, threads=1)


def test_without_the_package_one_sentence_names_the_extra(tiny_config, monkeypatch):
    monkeypatch.setattr(vllm, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"rollout\.sampler vllm needs .*\.\[vllm\]"):
        build_roles(configured(tiny_config, rollout__sampler="vllm"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rollout__reuse_log_probs": True}, "reuse_log_probs does not go with rollout.sampler"),
        ({"rollout__temperature": 0.001}, "vLLM samples at no less than 0.01"),
        ({"model__dtype": "float64"}, "float64 does not go with rollout.sampler vllm"),
        (
            {"rollout__vllm__colocated": True, "launch__num_workers": 2},
            "colocated does not go with several",
        ),
        ({"rollout__correction": {"cap": 0.5}}, "rollout.correction.cap"),
        (
            {"rollout__vllm__colocated": True, "rollout__vllm__tensor_parallel": 2},
            "does not go with colocated",
        ),
        ({"rollout__vllm__memory_share": 1.5}, "rollout.vllm.memory_share"),
    ],
)
def test_what_does_not_go_with_vllm_is_refused(tiny_config, fields, sentence):
    with pytest.raises(UserError, match=sentence):
        configured(tiny_config, rollout__sampler="vllm", **fields)


def test_the_correction_is_by_token_for_vllm_and_none_for_the_local_sampler(tiny_config):
    local, other = (configured(tiny_config, rollout__sampler=s) for s in ("local", "vllm"))
    assert (local.correction.kind, local.may_mismatch) == ("none", False)
    assert (other.correction.kind, other.correction.cap) == ("token", 2.0)
    assert other.may_mismatch
    off = configured(tiny_config, rollout__sampler="vllm", rollout__correction={"kind": "none"})
    assert off.correction.kind == "none"
    assert off.may_mismatch  # it is measured all the same
    with pytest.raises(UserError, match=r"reuse_log_probs does not go with rollout\.correction"):
        configured(tiny_config, rollout__correction={}, rollout__reuse_log_probs=True)


def test_weights_have_a_checkpoint_s_names_and_an_adapter_is_merged():
    model = make_family("smollm2")
    plain = {name: x.clone() for name, x in vllm_engine.named_weights(model)}
    assert plain.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
    assert plain["lm_head.weight"].equal(plain["model.embed_tokens.weight"])  # tied, yet named
    add_adapter(model, LoraSection(rank=2, alpha=4.0), 0, "actor")
    with torch.no_grad():
        for weight in trainable_parameters(model).values():
            weight.normal_()
    merged = {name: x.clone() for name, x in vllm_engine.named_weights(model)}
    assert merged.keys() == plain.keys()
    layer = model.model.layers[0].self_attn.q_proj
    a, b = (getattr(layer, f"lora_{x}")["default"].weight for x in "AB")
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(merged[name], plain[name] + 2.0 * b @ a)
    assert merged["model.norm.weight"].equal(plain["model.norm.weight"])


def test_the_written_shape_has_a_head_of_its_own(tmp_path, tiny_model):
    vllm_engine.write_config(tiny_model, None, tmp_path)
    written = type(tiny_model.config).from_pretrained(tmp_path)
    assert written.tie_word_embeddings is False
    assert written.architectures == ["LlamaForCausalLM"]
    assert tiny_model.config.tie_word_embeddings is True


# A package called vllm whose model adds up its weights: its token is the sum of the head's first
# row, rounded, and its log-prob half the seed.
FAKE = """
    import os
    from types import SimpleNamespace as Of

    import torch

    class Model:
        def __init__(self):
            self.weights = {"lm_head.weight": torch.ones(2, 3), "model.norm.weight": torch.ones(3)}

        def named_parameters(self):
            return self.weights.items()

        def load_weights(self, weights):
            lacking = os.environ.get("FAKE_LACKS", "").split(",")
            found = {name: weight for name, weight in weights if name not in lacking}
            self.weights.update(found)
            return set(found)

    class SamplingParams:
        def __init__(self, **fields):
            self.__dict__.update(fields)

    class LLM:
        def __init__(self, model, max_model_len, **fields):
            if max_model_len < 10:
                raise ValueError("no room\\nfor anything")
            self.model = Model()
            self.transfer = fields.get("weight_transfer_config")

        def collective_rpc(self, method, args=(), kwargs=None):
            if callable(method):
                return [method(Of(get_model=lambda: self.model), *args)]
            assert method == "reload_weights"
            assert self.transfer is None
            self.model.load_weights(kwargs["weights_iterator"])

        def reset_prefix_cache(self):
            self.token = round(float(self.model.weights["lm_head.weight"][0].sum()))

        def generate(self, prompts, settings, use_tqdm):
            if prompts[0]["prompt_token_ids"] == [13]:
                os._exit(5)
            if prompts[0]["prompt_token_ids"] == [14]:
                raise RuntimeError("out of\\nblocks")
            return [Of(outputs=[self.row(p["prompt_token_ids"], s)])
                    for p, s in zip(prompts, settings)]

        def row(self, ids, s):
            token_ids = (*ids[:s.max_tokens - 1], self.token)
            logprobs = [{i: Of(logprob=s.seed / 2)} for i in token_ids]
            return Of(token_ids=token_ids, logprobs=logprobs)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(textwrap.dedent(FAKE))
    ours = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(ours))


class InThread:
    """A child process that is a thread of this one."""

    usable = True

    def __init__(self, module, setup, **more) -> None:
        self.orders, self.answers = Queue(), Queue()
        respond = vllm_engine.set_up(json.loads(json.dumps(setup)))

        def serve() -> None:
            for line in iter(self.orders.get, None):
                for answer in respond(line):
                    self.answers.put(json.loads(json.dumps(answer)))

        Thread(target=serve, daemon=True).start()

    def send(self, lines) -> None:
        for line in lines:
            self.orders.put(line)

    def receive(self, seconds):
        return self.answers.get(timeout=60)

    def kill(self) -> None:
        self.orders.put(None)


@pytest.fixture
def in_thread(fake, tmp_path, monkeypatch):
    """The fake, with another text if one is given, in this process."""

    def use(text: str = FAKE):
        made = {"vllm": ModuleType("vllm"), "vllm.config": ModuleType("vllm.config")}
        exec(textwrap.dedent(text), vars(made["vllm"]))
        made["vllm.config"].WeightTransferConfig = SimpleNamespace
        monkeypatch.setattr(vllm_engine, "import_module", made.__getitem__)
        monkeypatch.setattr(vllm, "ChildProcess", InThread)
        monkeypatch.setattr(vllm, "shares_gpu", lambda device, settings: True)
        return vllm.VllmProcess(SETTINGS)

    return use


def head_of(value: float):
    model = tiny_llama(260, 256)
    with torch.no_grad():
        model.get_output_embeddings().weight[0] = value / 32
    return model


def test_the_process_takes_weights_samples_and_says_how_it_failed(fake):
    engine = vllm.VllmProcess(SETTINGS)
    ask = [GenerationRequest([3, 4], 2, 1.0, 17), GenerationRequest([5, 6, 7], 3, 1.0, 18)]
    for token in (9, 21):
        engine.load(head_of(token))
        first, second = engine.generate(ask)
        assert (first.ids, first.log_probs) == ([3, token], [8.5, 8.5])
        assert (second.ids, second.log_probs) == ([5, 6, token], [9.0, 9.0, 9.0])
    child = engine.child
    assert [path.name for path in child.folder.glob("*.safetensors")] == []  # not as a file
    with pytest.raises(RunStopped, match="vLLM failed: RuntimeError: out of blocks"):
        engine.generate([GenerationRequest([14], 2, 1.0, 0)])
    assert not child.process.usable
    assert not child.folder.exists()
    engine.load(head_of(2))  # a new process
    with pytest.raises(RunStopped, match="The process of vLLM ended with code 5"):
        engine.generate([GenerationRequest([13], 2, 1.0, 0)])


# The same with vLLM's own transfer: a handle is a list of numbers here.
TRANSFER = """
    class Transferring(LLM):
        def init_weight_transfer_engine(self, request):
            assert request == {"init_info": {}} and self.transfer == Of(backend="ipc")
            self.begun = []

        def start_weight_update(self):
            self.begun.append([])

        def update_weights(self, request):
            update, = [request["update_info"]]
            [name], [dtype], [shape] = (update[x] for x in ("names", "dtype_names", "shapes"))
            [[numbers]] = [one.values() for one in update["ipc_handles"]]
            weight = torch.tensor(numbers, dtype=getattr(torch, dtype)).view(shape)
            self.begun[-1] += self.model.load_weights([(name, weight)])

        def finish_weight_update(self):
            assert len(self.begun[-1]) > 1

    LLM = Transferring
"""


def test_on_one_gpu_weights_go_by_handles_through_vllms_own_transfer(in_thread, monkeypatch):
    monkeypatch.setattr(reductions, "reduce_tensor", lambda x: (None, x.flatten().tolist()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid="u"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    engine = in_thread(FAKE + TRANSFER)
    for token in (9, 21):
        engine.load(head_of(token))
        [row] = engine.generate([GenerationRequest([3, 4], 2, 1.0, 17)])
        assert row.ids == [3, token]
    assert [path.name for path in engine.child.folder.glob("weights*")] == []
    engine.close()


def test_a_handle_goes_through_json_and_comes_back_as_torch_made_it():
    storage = torch.UntypedStorage
    handle = (torch.Tensor, torch.Size([2, 3]), (3, 1), 0, storage, torch.bfloat16, 0)
    handle += (b"\x00\xff", 24, 0, False, b"r", 0, b"", True)
    update = {
        "names": ["w"],
        "ipc_handles": [{"gpu": [vllm_weights.as_plain(part) for part in handle]}],
    }
    found = vllm_weights.update_of(json.loads(json.dumps(update)))["update_info"]
    assert found == {"names": ["w"], "ipc_handles": [{"gpu": handle}]}


def test_a_vllm_without_a_transfer_gets_them_through_the_pipe(in_thread):
    engine = in_thread(FAKE.replace("self.transfer = ", "del fields; self.transfer = None #"))
    engine.load(head_of(9))
    assert engine.generate([GenerationRequest([3, 4], 2, 1.0, 17)])[0].ids == [3, 9]
    engine.close()


def test_weights_that_vllm_does_not_take_are_one_sentence(in_thread, monkeypatch):
    monkeypatch.setenv("FAKE_LACKS", "model.norm.weight")
    engine = in_thread(FAKE.replace("self.transfer = ", "del fields; self.transfer = None #"))
    with pytest.raises(
        UserError, match=r"did not take 1 weights of this .*\(model\.norm\.weight\)"
    ):
        engine.load(head_of(1))
    assert engine.child is None


def test_tensors_come_through_the_pipe_as_they_are(tmp_path):
    """Of every number format, empty and large ones; a reader that goes away ends the writing."""
    sent = [
        ("a", torch.randn(300, 4001)),  # more than the pipe holds
        ("b", torch.randn(3, 2).bfloat16().t()),
        ("c", torch.tensor(2.5)),
        ("none", torch.zeros(0, 4)),
        ("d", torch.arange(5)),
    ]
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as apart:
        reading = apart.submit(lambda: list(vllm_weights.read_tensors(path)))
        vllm_weights.write_tensors(path, sent, lambda: True)
        found = reading.result(30)
        assert [name for name, _ in found] == [name for name, _ in sent]
        assert all(
            a.equal(b) and a.dtype == b.dtype for (_, a), (_, b) in zip(sent, found, strict=True)
        )
        reading = apart.submit(lambda: next(vllm_weights.read_tensors(path)))
        vllm_weights.write_tensors(path, sent[1:2] + sent[:1] * 3, lambda: True)
        assert reading.result(30)[0] == "b"
    vllm_weights.write_tensors(path, sent, lambda: False)  # nobody is there


@pytest.mark.long
def test_a_model_that_vllm_refuses_is_one_sentence_and_leaves_no_process(fake):
    engine = vllm.VllmProcess(vllm.Settings((256,), 9, 10**8, 1))
    with pytest.raises(UserError, match="does not start with this model: ValueError: no room for"):
        engine.load(head_of(1))
    assert engine.child is None


def test_shared_memory_that_is_too_small_is_one_sentence(tmp_path):
    """As on a small /dev/shm, a file above 50 kB cannot be written."""
    path, (soft, hard) = tmp_path / "x" / "w", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.parent.mkdir()
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match=r"vLLM take 1 MB, and \S* has .* MB free .*--shm-size"):
            vllm.write_weights({"w": torch.ones(300_000)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(path.parent.iterdir()) == []


def test_what_a_killed_run_left_in_shared_memory_is_removed_by_the_next(tmp_path):
    running, lock = vllm.make_locked_folder(tmp_path)
    killed = os.fork()
    if killed == 0:
        left, _ = vllm.make_locked_folder(tmp_path)
        (left / vllm.WEIGHTS).write_bytes(b"weights")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    mine, own = vllm.make_locked_folder(tmp_path)
    assert {*tmp_path.iterdir()} == {running, mine}
    os.close(lock)
    os.close(own)


class Sleeper:
    """A vLLM that remembers what it was told."""

    def __init__(self, **fields) -> None:
        self.fields, self.told, self.awake = fields, [], True

    def sleep(self, level: int) -> None:
        self.told.append(f"sleep {level}")
        self.awake = False

    def wake_up(self) -> None:
        self.told.append("wake")
        self.awake = True

    def collective_rpc(self, method, args=(), kwargs=None):
        assert self.awake
        name = method if isinstance(method, str) else method.__name__
        if name not in ("note_weights", "missing_weights"):
            self.told.append((name, *args) if args else name)

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts, settings, use_tqdm):
        assert self.awake
        return []


def started(monkeypatch, tmp_path, gpus: int, **fields):
    made = SimpleNamespace(LLM=Sleeper, SamplingParams=dict)
    monkeypatch.setattr(vllm_engine, "import_module", lambda name: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    (tmp_path / "config.json").write_text("{}")
    settings = replace(SETTINGS, **fields)
    return vllm_engine.start_llm(str(tmp_path), "float32", settings), settings


def test_fields_of_the_config_reach_vllm(monkeypatch, tmp_path):
    llm, _ = started(monkeypatch, tmp_path, gpus=0)
    assert llm.fields["enforce_eager"] is True
    assert llm.fields["tensor_parallel_size"] == 1
    assert llm.fields["enable_sleep_mode"] is False
    assert "gpu_memory_utilization" not in llm.fields
    given = {"eager": False, "tensor_parallel": 2, "sleep": True, "memory_share": 0.25}
    llm, _ = started(monkeypatch, tmp_path, gpus=2, **given)
    names = ("enforce_eager", "tensor_parallel_size", "enable_sleep_mode", "gpu_memory_utilization")
    assert [llm.fields[name] for name in names] == [False, 2, True, 0.25]
    assert llm.fields["kv_cache_memory_bytes"] == SETTINGS.cache_bytes


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ("Free memory on device cuda:0 (4/80 GiB) on startup is less than desired", "memory_share"),
        ("64 GiB KV cache is needed, which is larger than the available", "cache_gigabytes"),
    ],
)
def test_a_vllm_without_room_names_the_field(monkeypatch, tmp_path, said, field):
    def refuse(self, **fields):
        raise ValueError(said)

    monkeypatch.setattr(Sleeper, "__init__", refuse)
    with pytest.raises(UserError, match=rf"does not start with this model: .*; \w+ .*\.{field}"):
        started(monkeypatch, tmp_path, gpus=1)


def test_vllm_sleeps_between_samplings_and_wakes_for_weights(monkeypatch, tmp_path):
    llm, settings = started(monkeypatch, tmp_path, gpus=1, sleep=True)
    engine = vllm_engine.VllmEngine(settings)
    engine.llm = llm
    engine.load(tiny_llama(260, 256))
    engine.generate([])
    engine.rest()
    assert llm.told == ["wake", "reload_weights", "wake", "sleep 1"]
    engine.load(tiny_llama(260, 256))
    assert llm.awake


def test_processes_that_share_layers_read_the_file_themselves(monkeypatch, tmp_path):
    """An iterator over tensors cannot be sent to them."""
    llm, settings = started(monkeypatch, tmp_path, gpus=2, tensor_parallel=2)
    path = str(tmp_path / "weights")
    order = {"load": path, "whole": True}
    assert list(vllm_engine._follow(llm, order, settings)) == [{"loaded": True}]
    assert llm.told == [("read_weights", path)]
    save_file({"a": torch.ones(2), "b": torch.zeros(1)}, path)
    found = {}
    worker = SimpleNamespace(reload_weights=lambda weights_iterator: found.update(weights_iterator))
    vllm_engine.read_weights(worker, path)
    assert {name: x.tolist() for name, x in found.items()} == {"a": [1.0, 1.0], "b": [0.0]}


@table(
    "fields, gpus, sentence",
    [
        ({"sleep": True}, 0, "sleep gives a GPU's memory back, and there is none"),
        ({"tensor_parallel": 4}, 2, "needs as many GPUs, and there are 2; write 2"),
        ({"tensor_parallel": 2}, 0, "there are 0; write 1"),
    ],
)
def test_what_the_gpus_cannot_do_is_refused(fields, gpus, sentence):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: gpus)
        with pytest.raises(UserError, match=sentence):
            vllm._refuse_what_gpus_lack(replace(SETTINGS, **fields))


def test_the_child_sees_the_gpus_that_it_divides_layers_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    settings = replace(SETTINGS, tensor_parallel=2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert vllm._environment(torch.device("cuda", 1), SETTINGS)["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    assert vllm._environment(torch.device("cuda", 1), settings)["CUDA_VISIBLE_DEVICES"] == "5,7"


needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vllm is not installed here; `make vllm` runs this"
)


# Its CPU kernels want heads of 32 numbers or more.
WIDE = {**SHARED, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
TIED = {**SMOL, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
MODELS = {
    "smollm2": lambda: LlamaForCausalLM(LlamaConfig(**{**SHARED, **TIED})),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**WIDE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**WIDE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**WIDE, head_dim=32)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**WIDE, sliding_window=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**{**GPT2, "n_embd": 64, "n_head": 2})),
}


def make(name: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return MODELS[name]().eval()


@pytest.fixture(scope="module")
def engines():
    """Engines by kind and shape, each started once; the rest of a test is new weights."""
    made = {}

    def engine(kind: str, family: str):
        settings = vllm.Settings((256, *EOS_IDS), 64, 10**8, 1)
        if (kind, family) not in made:
            made[kind, family] = getattr(vllm, kind)(settings)
        return made[kind, family]

    yield engine
    for engine in made.values():
        if isinstance(engine, vllm.VllmProcess):
            engine.close()


def both(engine, model, episodes, choice, eos_ids, temperature=1.0, limit=12):
    """The rollouts of the local sampler and of vLLM, on the same weights."""
    found = []
    for sampler in (
        LocalSampler(eos_ids, limit, temperature),
        EngineSampler(engine, eos_ids, limit, temperature),
    ):
        sampler.sync(model, 0)
        found.append(sampler.run(episodes(), choice))
    return found


def texts(rollout):
    return [response(rollout, row) for row in range(len(rollout.finish_reasons))]


def singles():
    return [SingleTurn(ids) for ids in PROMPTS]


@needs_vllm
@pytest.mark.parametrize("kind", ["VllmEngine", "VllmProcess"])
def test_its_greedy_text_follows_new_weights(engines, kind):
    seen = []
    for seed in (0, 1, 2):
        model = make("smollm2", seed)  # a head tied to the embedding
        local, ours = both(engines(kind, "smollm2"), model, singles, Greedy(), frozenset(EOS_IDS))
        assert texts(ours) == texts(local)
        assert ours.finish_reasons == local.finish_reasons
        torch.testing.assert_close(
            ours.rollout_log_probs, local.rollout_log_probs, rtol=0, atol=1e-4
        )
        seen.append(texts(ours))
    assert seen[0] != seen[1] != seen[2] != seen[0]


@needs_vllm
@pytest.mark.parametrize("family", [name for name in MODELS if name != "smollm2"])
def test_other_families_follow_their_weights_too(engines, family):
    for seed in (0, 1):
        model = make(family, seed)
        engine = engines("VllmProcess", family)
        local, ours = both(engine, model, singles, Greedy(), frozenset(EOS_IDS))
        assert texts(ours) == texts(local)
    engine.close()


@needs_vllm
def test_a_shape_that_it_has_not_is_one_sentence():
    """Windows on some layers and not on others: a family of ours that is none of vLLM's."""
    model = Qwen2ForCausalLM(Qwen2Config(**WIDE, **WINDOW))
    engine = vllm.VllmProcess(SETTINGS)
    with pytest.raises(UserError, match=r"vLLM does not start with this model: .*[Ss]liding"):
        engine.load(model)


@needs_vllm
def test_an_adapter_is_sampled_with(engines):
    model = make("smollm2")
    before = both(engines("VllmProcess", "smollm2"), model, singles, Greedy(), frozenset())[1]
    add_adapter(model, LoraSection(rank=4), 0, "actor")
    with torch.no_grad():
        for weight in trainable_parameters(model).values():
            weight.normal_(std=0.3)
    local, ours = both(engines("VllmProcess", "smollm2"), model, singles, Greedy(), frozenset())
    assert texts(ours) == texts(local)
    assert texts(ours) != texts(before)


@needs_vllm
def test_recorded_log_probs_are_the_trainer_s_at_the_run_s_temperature(engines):
    from tether.data.batching import join
    from tether.models.policy import Policy

    model, draw = make("smollm2"), Draw(3, "token", 0)
    _, ours = both(engines("VllmProcess", "smollm2"), model, singles, draw, frozenset(EOS_IDS), 0.6)
    policy = Policy(model, 0.6, 4096)
    expected = policy.log_probs(join(ours), ours.response_mask)
    torch.testing.assert_close(ours.rollout_log_probs, expected, rtol=0, atol=1e-4)


@needs_vllm
def test_rows_are_the_same_alone_and_in_company(engines):
    sampler = EngineSampler(engines("VllmProcess", "smollm2"), frozenset(EOS_IDS), 12, 1.0)
    sampler.sync(make("smollm2"), 0)
    draw = Draw(3, "token", 5)
    whole = sampler.run(singles(), draw)
    part = sampler.run(singles()[2:4], draw, numbers=[2, 3])
    assert texts(part) == texts(whole)[2:4]
    assert texts(sampler.run(singles(), draw)) == texts(whole)
    assert texts(sampler.run(singles(), Draw(4, "token", 5))) != texts(whole)


@needs_vllm
def test_tokens_come_as_often_as_the_model_says(engines):
    model, rows = make("smollm2"), 4000
    sampler = EngineSampler(engines("VllmProcess", "smollm2"), frozenset(), 1, 1.0)
    sampler.sync(model, 0)
    rollout = sampler.run([SingleTurn([5, 9])] * rows, Draw(0, "token", 0))
    with torch.no_grad():
        expected = model(torch.tensor([[5, 9]])).logits[0, -1].softmax(0)
    shares = torch.bincount(rollout.response_ids[:, 0], minlength=len(expected)) / rows
    error = (expected * (1 - expected) / rows).sqrt()
    assert ((shares - expected).abs() <= 5 * error + 1e-9).all()


@needs_vllm
def test_a_text_that_ends_a_turn_ends_it_and_costs_nothing_more(byte_tokenizer):
    settings = vllm.Settings((256,), 64, 10**8, 1, reads_text=True)
    engine, model = vllm.VllmProcess(settings, byte_tokenizer), make("llama")
    engine.load(model)
    [free] = engine.generate([GenerationRequest([5, 9], 30, 0.0, 0)])
    text = byte_tokenizer.decode(free.ids)
    mark = next(text[at : at + 2] for at in range(4, 20) if text[at : at + 2].isascii())
    [stopped] = engine.generate([GenerationRequest([5, 9], 30, 0.0, 0, stop=(mark,))])
    engine.close()
    assert stopped.ids == free.ids[: len(stopped.ids)]
    assert byte_tokenizer.decode(stopped.ids).endswith(mark)
    assert byte_tokenizer.decode(stopped.ids).count(mark) == 1


@needs_vllm
@pytest.mark.parametrize("every", [3, 10])
def test_several_turns_are_the_local_sampler_s(engines, every):
    def talks():
        return [Talk(ids, every) for ids in PROMPTS]

    model, engine = make("smollm2"), engines("VllmProcess", "smollm2")
    local, ours = both(engine, model, talks, Greedy(), frozenset(EOS_IDS))
    assert texts(ours) == texts(local)
    assert ours.response_mask.equal(local.response_mask)
    assert ours.finish_reasons == local.finish_reasons
