"""Reading ahead of the training, in a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

from ..data.batches import PackedBatch


class Reader:
    """The batches of one rank in order; a context.

    A batch that cannot be read raises its error at the `next` that would have returned it, after
    all batches before it were handed out. What was read and not asked for leaves no trace: the
    cursor of a run counts trained batches.

    Args:
        read: index -> batch, on the device where it is used; called in one thread.
        indices: which batches, in order.
        ahead: batches read before they are asked for; 0 reads each when it is.
    """

    def __init__(
        self, read: Callable[[int], PackedBatch], indices: Iterable[int], ahead: int
    ) -> None:
        self._read = read
        self._indices = iter(indices)
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, "batches") if ahead else None
        self._pending: deque[Future[PackedBatch]] = deque()

    def __enter__(self) -> Reader:
        """Begin reading; the first batch is there when this returns, since waiting for it is part
        of the start and no step's."""
        try:
            self._fill()
            wait(list(self._pending)[:1])
        except BaseException:
            self._end(wait=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Begin no other reading, and let the one that has begun end. An error does not wait for
        it: it may hang on a server, whose connection is closed further out."""
        self._end(wait=kind is None)

    def next(self) -> PackedBatch:
        """The next batch; StopIteration after the last."""
        if self._thread is None:
            return self._read(next(self._indices))
        self._fill()
        if not self._pending:
            raise StopIteration
        batch = self._pending.popleft().result()
        self._fill()
        return batch

    def _end(self, wait: bool) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait, cancel_futures=True)

    def _fill(self) -> None:
        while self._thread is not None and len(self._pending) < self._ahead:
            index = next(self._indices, None)
            if index is None:
                return
            self._pending.append(self._thread.submit(self._read, index))
