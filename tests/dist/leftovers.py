"""What a command leaves behind: processes, and ports on which they listen."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found[1:]


def wait_until_gone(pids: list[int], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, [
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in alive
        ]
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def listening(pids: list[int]) -> list[str]:
    """The addresses on which processes listen."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(file))
    found = []
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                digits, port = fields[1].split(":")
                words = [bytes.fromhex(digits[i : i + 8])[::-1] for i in range(0, len(digits), 8)]
                host = socket.inet_ntop(family, b"".join(words)).removeprefix("::ffff:")
                found.append(f"{host}:{int(port, 16)}")
    return found
