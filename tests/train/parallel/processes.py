"""Several processes that run a function of the tests together, as torchrun would start them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch

SECONDS = 120


def together(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What the function gives in each process; an error of one is raised with its traceback."""
    running = _started(size, function, arguments)
    answers = [_answer(pipe) for _, pipe in running]
    for process, _ in running:
        process.kill()
    problems = [text for good, text in answers if not good]
    assert not problems, "\n".join(problems)
    return [answer for _, answer in answers]


def killed_together(size: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Processes of which the function kills one or more; the others are killed then, as torchrun does."""
    running = _started(size, function, arguments)
    ended = wait([process.sentinel for process, _ in running], SECONDS)
    assert ended, f"nothing was killed in {SECONDS} s"
    for process, _ in running:
        process.kill()
        process.join()
    assert -signal.SIGKILL in {process.exitcode for process, _ in running}
    assert not any(pipe.poll() and not pipe.closed and _answer(pipe)[0] for _, pipe in running)


def _started(
    size: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> list[tuple[ForkServerProcess, Connection]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["qkv.train.parallel.together"])  # torch is loaded once
    port, running = _free_port(), []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_one, args=(theirs, rank, size, port, function, arguments), daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours))
    return running


def _answer(ours: Connection) -> tuple[bool, Any]:
    if not ours.poll(SECONDS):
        return False, f"no answer in {SECONDS} s"
    try:
        answer: tuple[bool, Any] = ours.recv()
    except EOFError:
        return False, "ended without an answer"
    return answer


def _one(
    pipe: Connection, rank: int, size: int, port: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    with _Telling(rank, pipe):
        pipe.send((True, function(*arguments)))
        pipe.poll(SECONDS)  # the first process has what the others find each other by: it stays until it is killed
    os._exit(0)  # what is still open ends with the process


class _Telling:
    """Sends what goes wrong within the block."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank, self.pipe = rank, pipe

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.pipe.send((False, f"rank {self.rank}: {''.join(traceback.format_exception(error))}"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
