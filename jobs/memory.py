"""How much memory a job and its workers take."""

import threading
from types import TracebackType

import psutil

INTERVAL_S = 15.0  # reading the sizes walks every page: each 2 s it took most of a core


class MemoryWatch:
    """Samples, in a thread, the memory of this process and all its descendants while the `with` block runs.

    peak_bytes: the largest sum of proportional set sizes, in bytes: a page that n processes share counts once.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._stop.wait(INTERVAL_S):
            family = [process, *process.children(recursive=True)]
            self.peak_bytes = max(self.peak_bytes, sum(_pss(member) for member in family))


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it ended meanwhile
        return 0
