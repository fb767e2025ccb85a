"""Several processes of one test: each runs a function in a world of its own, and all report."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch

MODELS = ("llama", "qwen2", "qwen3", "gpt2", "bert")
PRELOADED = [
    "tether.api",
    "peft",
    "hypothesis",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    *(f"transformers.models.{name}.modeling_{name}" for name in MODELS),
]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)


def run_processes(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns in each of `size` processes that know of each other."""
    port = free_port()
    answers = [_server.Pipe(duplex=False) for _ in range(size)]
    processes = [
        _server.Process(target=_run, args=(rank, size, port, answers[rank][1], function, arguments))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = []
    try:
        for answer, sender in answers:
            sender.close()
            found.append(answer.recv() if answer.poll(120) else (False, "no answer in 120 s"))
    except EOFError:
        found.append((False, "a process died"))
    finally:
        for process in processes:
            process.join(10 if len(found) == size else 1)
            process.kill()
    failed = [text for fine, text in found if not fine]
    assert not failed, "\n".join(failed)
    return [result for _, result in found]


def _run(rank, size, port, answer, function, arguments) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    try:
        answer.send((True, function(*arguments)))
    except BaseException:
        answer.send((False, f"process {rank}:\n{traceback.format_exc()}"))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
