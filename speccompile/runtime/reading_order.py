"""The order in which prompts are processed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from speccompile.runtime.request import Request
from speccompile.runtime.slots import Slots

#: Pieces of other prompts that may be processed in a row before a piece of the oldest prompt. With 3, long prompts wait
#: for minutes where short ones arrive without a break, and those gain nothing (``benchmarks.first_token``).
MOST_PASSES = 1
#: Prompts with at most this many tokens left count as equally short.
SHORT = 16
#: Number of waiting requests that are looked up in the slots. A look-up compares a prompt with the tokens of all slots.
MOST_LOOKUPS = 32
#: Number of names of clients whose newest piece is remembered.
MOST_CLIENTS = 1024


class ReadingOrder:
    """Chooses the prompt whose next piece is processed, among those of the highest priority:

    - The prompt with the fewest tokens left, so a short prompt does not wait for a long one. Lengths are compared by
      their power of two. Among equals, a prompt that was begun is finished before another one begins, and the oldest
      goes first.
    - After :data:`MOST_PASSES` pieces of other prompts, the oldest request of a client, so neither a long prompt nor a
      client waits for ever. Clients get these pieces in rotation, beginning with the one with the fewest slots.

    Tokens whose KV is in a slot count as processed. If the chosen request waits for a slot, and begins like a prompt
    that is being processed, the next piece is of that prompt. Both requests can then use its KV.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        # The number of the oldest request, and the number of other requests' pieces since a piece of it.
        self._oldest = -1
        self._passes = 0
        # The number of the newest piece of each name of a client, in ascending order.
        self._newest: dict[tuple[str, ...], int] = {}
        self._count = 0

    def choose(self, readers: Sequence[Request], waiting: Sequence[Request]) -> Request | None:
        """Return the request whose prompt is processed next; None without requests.

        Args:
            readers: requests with a slot whose prompt has been processed in part.
            waiting: requests that may get a slot now, in the order of the queue.
        """
        readers = [request for request in readers if not request.finished]
        requests = [*readers, *(request for request in waiting if not request.finished)]
        if not requests:
            return None
        highest = max(request.params.priority for request in requests)
        requests = [request for request in requests if request.params.priority == highest]
        if len(requests) == 1:
            # One request needs no look-up.
            self._oldest = requests[0].number
            return requests[0]
        oldest = self._or_forerunner(self._find_oldest(requests), readers)
        self._oldest = oldest.number
        if self._passes >= MOST_PASSES:
            return oldest
        return self._or_forerunner(self._find_shortest(requests), readers)

    def note(self, request: Request) -> None:
        """Count a piece of the prompt of ``request``, which was chosen."""
        if request.number != self._oldest:
            self._passes += 1
            return
        self._passes, self._count = 0, self._count + 1
        for part in _parts(request):
            self._newest.pop(part, None)
            self._newest[part] = self._count
        while len(self._newest) > MOST_CLIENTS:
            del self._newest[next(iter(self._newest))]

    def _find_oldest(self, requests: Sequence[Request]) -> Request:
        slots = Counter(part for owner in self._slots.owned for part in _parts(owner))

        def seniority(request: Request) -> tuple[int, list[int], int, int]:
            # The request's own slot does not count.
            taken = [slots[part] - (request.slot >= 0) for part in _parts(request)]
            client = request.params.client
            # Requests of one HTTP request may all end in one step, and then none of them has a slot.
            newest = 0 if request.slot >= 0 else self._newest.get(client, 0)
            return self._newest.get(client[:1], 0), taken, newest, request.number

        return min(requests, key=seniority)

    def _find_shortest(self, requests: Sequence[Request]) -> Request:
        lookups = MOST_LOOKUPS
        keys: list[tuple[int, bool, int]] = []
        for request in requests:
            left, waits = request.length - request.cached, request.slot < 0
            if waits and lookups and left > SHORT:
                left -= self._slots.known_length(request)
                lookups -= 1
            keys.append((max(left, SHORT).bit_length(), waits, request.number))
        return requests[keys.index(min(keys))]

    def _or_forerunner(self, request: Request, readers: Sequence[Request]) -> Request:
        """Return ``request``, or the reader that is going to process tokens which ``request`` begins with."""
        if request.slot >= 0:
            return request
        return next((reader for reader in readers if self._slots.will_know(request, reader)), request)


def _parts(request: Request) -> Iterator[tuple[str, ...]]:
    """Yield the names of the client of ``request``: the widest one, and those with one more part each."""
    client = request.params.client
    return (client[:count] for count in range(1, len(client) + 1))
