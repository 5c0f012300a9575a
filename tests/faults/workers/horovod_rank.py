"""One rank on bare Horovod: `horovod_rank.py cycles N`, `halves N`, `wait`, `outlive`, ...: see the
functions.

What a test reads is printed as JSON, one object a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError


def say(**facts: Any) -> None:
    """Print facts for the test; one write, or the lines of two ranks would mix."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def add(name: str) -> float:
    """Return how many ranks there are, by a sum over all."""
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum, name=name))


def error_of(name: str) -> tuple[str, float]:
    """Return which error a sum ends with, and after how many milliseconds."""
    begun = time.monotonic()
    try:
        return f"no error: {add(name)}", 0.0
    except HorovodInternalError as error:
        return type(error).__name__, 1000 * (time.monotonic() - begun)


def cycles(count: str) -> None:
    """Set Horovod up and take it down again and again, with a sum in between;
    say how many descriptors and threads there are after ten cycles, and after the last.
    """
    after: list[list[int]] = []
    for cycle in range(int(count)):
        hvd.init()
        assert add("ranks") == hvd.size() == 2
        hvd.shutdown()
        if cycle in (9, int(count) - 1):
            after.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
    say(cycles=int(count), after=after)


def halves(count: str) -> None:
    """Sum every float16 with another one,
    and tell how many sums differ in a bit from torch's; NaN equals NaN.
    """
    hvd.init()
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = [bits.view(torch.float16), bits.roll(int(count)).view(torch.float16)]
    found = hvd.allreduce(numbers[hvd.rank()], op=hvd.Sum, name="halves")
    expected = (numbers[0].float() + numbers[1].float()).half()
    same = (found.view(torch.int16) == expected.view(torch.int16)) | (
        found.isnan() & expected.isnan()
    )
    say(different=int((~same).sum()))
    hvd.shutdown()


def wait() -> None:
    """Take part in one sum, then in nothing more."""
    hvd.init()
    add("first")
    say(ready=True)
    time.sleep(600)


def sleep() -> None:
    """Rank 1 comes to a sum a second late;
    rank 0 says for how long it waited, and for how long its thread kept a processor busy.
    """
    hvd.init()
    add("first")
    if hvd.rank() == 1:
        time.sleep(1)
        add("second")
    else:
        begun, processor = time.monotonic(), time.thread_time()
        add("second")
        say(waited_s=time.monotonic() - begun, processor_s=time.thread_time() - processor)
    hvd.shutdown()


def outlive(scope: str, size: str) -> None:
    """Wait in a sum for a peer that dies, take Horovod down,
    and set it up as rank 0 of another size, in this process.
    """
    hvd.init()
    add("first")
    say(ready=True)
    waiting = error_of("second")[0]
    later, later_ms = error_of("third")
    begun = time.monotonic()
    hvd.shutdown()
    shutdown_ms = 1000 * (time.monotonic() - begun)
    os.environ |= {"HOROVOD_RENDEZVOUS_SCOPE": scope, "HOROVOD_RANK": "0", "HOROVOD_SIZE": size}
    os.environ |= {"HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": size}
    hvd.init()
    say(
        waiting=waiting,
        later=later,
        later_ms=later_ms,
        shutdown_ms=shutdown_ms,
        assignment=[hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()],
        ranks=add("first"),
    )


def retry() -> None:
    """Try to set Horovod up with a wrong secret, without a server, and as it should be."""
    right = os.environ["HOROVOD_RENDEZVOUS_SECRET"]
    port = os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    errors = []
    for secret, number in (("0" * 64, port), ("", port), (right, "9"), (right, port)):
        os.environ |= {"HOROVOD_RENDEZVOUS_SECRET": secret, "HOROVOD_GLOO_RENDEZVOUS_PORT": number}
        try:
            hvd.init()
        except HorovodInternalError as error:
            errors.append(str(error))
            assert not hvd.is_initialized()
    say(errors=errors, ranks=add("ranks"))


def fail() -> None:
    """Try to set Horovod up where that cannot be."""
    begun = time.monotonic()
    try:
        hvd.init()
    except HorovodInternalError as error:
        say(error=str(error), ms=1000 * (time.monotonic() - begun))


def late(seconds: str) -> None:
    """Let rank 1 come late to a sum."""
    hvd.init()
    add("first")
    time.sleep(float(seconds) if hvd.rank() == 1 else 0)
    say(late=error_of("awaited")[0])


if __name__ == "__main__":
    works = (cycles, halves, wait, sleep, outlive, retry, fail, late)
    {work.__name__: work for work in works}[sys.argv[1]](*sys.argv[2:])
