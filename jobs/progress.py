"""Progress of long work in this process: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

LINE_INTERVAL_S = 10.0
Item = TypeVar("Item")


def shows_bar() -> bool:
    """Return whether progress bars make sense: only on a terminal."""
    return sys.stdout.isatty()


def progress(items: Iterable[Item], total: int | None, what: str) -> Iterator[Item]:
    """Yield the items, telling how far it is; `what` opens each line, `total` is None where unknown."""
    if shows_bar():
        yield from tqdm(items, total=total, desc=what)
        return
    start_s = last_s = time.monotonic()
    count = 0
    for count, item in enumerate(items, start=1):
        yield item
        now_s = time.monotonic()
        if now_s - last_s >= LINE_INTERVAL_S:
            last_s = now_s
            print(f"{what}: {_state(count, total, now_s - start_s)}", flush=True)
    print(f"{what}: {count} done in {time.monotonic() - start_s:.1f} s", flush=True)


def _state(count: int, total: int | None, elapsed_s: float) -> str:
    rate = count / elapsed_s
    if total is None:
        return f"{count}, {rate:.1f}/s"
    return f"{count}/{total}, {rate:.1f}/s, {(total - count) / rate:.0f} s left"
