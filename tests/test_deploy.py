"""The files of deploy/: read by parsers, as no container builder and no cluster is at hand."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tether.cli.field_options import parse_words
from tether.cli.main import app
from tether.config import Config
from tether.config.load import load_config

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
COMMANDS = {command.name for command in app.registered_commands}
# Of Docker's file reference.
INSTRUCTIONS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL",
    "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip
# Of sbatch's manual page, those that a job of several nodes needs.
SBATCH = {
    "account", "cpus-per-task", "error", "exclusive", "gpus-per-node", "job-name", "mem", "nodes",
    "ntasks-per-node", "output", "partition", "qos", "requeue", "signal", "time",
}  # fmt: skip


def config_of(words: list[str]) -> Config:
    """The config of `tether train RECIPE …`, on the shipped recipe in place of the user's."""
    assert words[0] == "train"
    assert words[0] in COMMANDS
    _, overrides = parse_words([word for word in words[2:] if word != "--resume"])
    return load_config("arithmetic", overrides)


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, with continued lines joined."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_container_file_installs_this_tree_and_runs_the_demo():
    found = instructions((DEPLOY / "Dockerfile").read_text())
    assert {name for name, _ in found} <= INSTRUCTIONS
    assert found[0][0] == "FROM"
    image = found[0][1]
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", image)  # a version, and no registry's host
    assert (
        f"Python {image.removeprefix('python:').partition('-')[0]}"
        in (ROOT / "constraints.txt").read_text()
    )  # what the pinned versions were tested with
    copied = [word for name, rest in found if name == "COPY" for word in rest.split()[:-1]]
    assert {"pyproject.toml", "constraints.txt", "src"} <= set(copied)
    for path in copied:
        assert (ROOT / path).exists(), path
    project = (ROOT / "pyproject.toml").read_text()
    for name in re.findall(r'^(?:readme|license-files) = \[?"(.+?)"', project, re.MULTILINE):
        assert name in copied, f"the build reads {name}"
    runs = " ".join(rest for name, rest in found if name == "RUN")
    assert '--constraint constraints.txt ".[ray]"' in runs
    users = [rest for name, rest in found if name == "USER"]
    assert users == ["tether"]
    assert "useradd" in runs
    [entry] = [json.loads(rest) for name, rest in found if name == "ENTRYPOINT"]
    [words] = [json.loads(rest) for name, rest in found if name == "CMD"]
    assert entry == ["tether"]
    assert words[1] == "arithmetic"
    assert config_of(words).threads == 2


@pytest.mark.parametrize(
    "broken", ["FORM python:3.11-slim-bookworm", "FROM python:3.11-slim-bookworm\nINSTALL x"]
)
def test_a_word_that_is_no_instruction_is_found(broken):
    assert not {name for name, _ in instructions(broken)} <= INSTRUCTIONS


def options_of(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.MULTILINE)
    assert len(found) == script.count("#SBATCH"), "each is one option, as --name or --name=value"
    return dict(found)


def test_the_slurm_script_starts_one_torchrun_per_node_and_resumes():
    script = (DEPLOY / "slurm.sh").read_text()
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    options = options_of(script)
    assert options.keys() <= SBATCH
    assert options["ntasks-per-node"] == "1"
    command = re.sub(r"\\\n", " ", script[script.index("srun ") :])
    words = shlex.split(command)
    torchrun, tether = words[: words.index("-m")], words[words.index("-m") + 2 :]
    assert torchrun[:2] == ["srun", "torchrun"]
    assert torchrun[torchrun.index("--nproc-per-node") + 1] == options["gpus-per-node"]
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(
        [word.replace("$SLURM_NNODES", "4") for word in torchrun[2:]] + ["-m", "tether"]
    )
    assert parsed.rdzv_endpoint == "$head:29500"
    assert "--resume" in tether
    assert config_of(tether).launch.weights == "sharded"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        assert f"export {name}=" in script
    # The signal comes before the end of the time, and torchrun waits for the save within that.
    before = int(options["signal"].partition("@")[2])
    assert float(parsed.shutdown_timeout) < before


def only(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
NAMED = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
POD = only(
    ["spec"],
    metadata={"type": "object"},
    spec=only(
        ["containers"],
        containers={
            "type": "array",
            "minItems": 1,
            "items": only(
                ["name", "image"],
                name={"type": "string", "pattern": f"^{NAMED.pattern}$"},
                image=TEXT,
                env={"type": "array", "items": only(["name", "value"], name=TEXT, value=TEXT)},
                resources=only([], limits=TEXTS, requests=TEXTS),
                volumeMounts={
                    "type": "array",
                    "items": only(["name", "mountPath"], name=TEXT, mountPath=TEXT),
                },
            ),
        },
        volumes={
            "type": "array",
            "items": only(
                ["name"],
                name=TEXT,
                persistentVolumeClaim=only(["claimName"], claimName=TEXT),
                emptyDir=only([], medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
            ),
        },
    ),
)
# What KubeRay's resource definition ray.io/v1 RayJob knows, of the pods only what is used here.
RAYJOB = only(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=only(["name"], name=TEXT, namespace=TEXT, labels=TEXTS),
    spec=only(
        ["entrypoint", "rayClusterSpec"],
        entrypoint=TEXT,
        backoffLimit=NUMBER,
        activeDeadlineSeconds=NUMBER,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=NUMBER,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        runtimeEnvYAML=TEXT,
        rayClusterSpec=only(
            ["headGroupSpec"],
            rayVersion=TEXT,
            enableInTreeAutoscaling={"type": "boolean"},
            headGroupSpec=only(
                ["rayStartParams", "template"],
                rayStartParams=TEXTS,
                serviceType=TEXT,
                template=POD,
            ),
            workerGroupSpecs={
                "type": "array",
                "items": only(
                    ["groupName", "rayStartParams", "template"],
                    groupName=TEXT,
                    replicas=NUMBER,
                    minReplicas=NUMBER,
                    maxReplicas=NUMBER,
                    numOfHosts=NUMBER,
                    rayStartParams=TEXTS,
                    template=POD,
                ),
            },
        ),
    ),
)


def rayjob() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())


def test_the_ray_job_is_what_kuberay_knows_and_has_a_gpu_for_every_worker():
    job = rayjob()
    jsonschema.validate(job, RAYJOB)
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[0] == "tether"
    assert "--resume" in words
    config = config_of(words[1:])
    cluster = job["spec"]["rayClusterSpec"]
    pods = [cluster["headGroupSpec"]["template"]]
    gpus = cpus = 0
    for group in cluster["workerGroupSpecs"]:
        pods.append(group["template"])
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        gpus += group["replicas"] * int(limits["nvidia.com/gpu"])
        cpus += group["replicas"] * int(limits["cpu"])
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    assert config.launch.num_workers == gpus
    assert config.launch.num_workers * config.threads <= cpus
    assert (config.launch.kind, config.launch.address, config.device) == ("ray", "auto", "cuda")
    for pod in pods:
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["image"] == "tether-ray:latest"
    assert str(config.run.dir).startswith("/shared/")


def test_what_kuberay_does_not_know_is_found():
    for change in (
        lambda job: job["spec"].update(backofLimit=2),
        lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].update(replica=2),
        lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update(
            {"num-cpus": 0}
        ),
        lambda job: job.update(apiVersion="ray.io/v1alpha1"),
    ):
        job = rayjob()
        change(job)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(job, RAYJOB)


@pytest.mark.parametrize("name", ["Dockerfile", "slurm.sh", "rayjob.yaml"])
def test_the_page_shows_the_file_as_it_is(name):
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    marker = f"<!-- file: deploy/{name} -->\n"
    shown = page.partition(marker)[2].partition("```\n")[0].partition("\n")[2]
    assert shown == (DEPLOY / name).read_text(encoding="utf-8")
