"""The order in which prompts are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from speccompile.runtime.request import Request
from speccompile.runtime.slots import Slots

#: Pieces of other prompts that may be read, one after another, before one of the oldest prompt.
MOST_PASSES = 3
#: Prompts with at most so many tokens left are equally short.
SHORT = 16
#: How many waiting requests are looked up in the slots. A look-up compares a prompt with the tokens of all slots.
MOST_LOOKUPS = 32
#: Clients of which the newest turn is known.
MOST_CLIENTS = 1024


class ReadingOrder:
    """Chooses the prompt of which the next piece is read, among those of the highest priority:

    - the one with the fewest tokens left, so that a short prompt does not wait for a long one. Lengths are compared by
      their power of two. Of equals one that was begun is finished before another one begins, and the oldest goes first;
    - after :data:`MOST_PASSES` pieces of others, the oldest request of a client, so that neither a long prompt nor a
      client waits for ever. Clients have these turns one after another, at first the one with the fewest slots.

    Tokens whose KV is in a slot are not left to read. Where the chosen request waits for a slot and begins like a
    prompt that is being read, the next piece is of that prompt: then both have its KV.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        # The number of the oldest request, and how many pieces of others were read since one of it.
        self._oldest = -1
        self._passes = 0
        # The number of the newest turn of each client, in rising order.
        self._loop: dict[tuple[str, ...], int] = {}
        self._turn = 0

    def choose(self, readers: Sequence[Request], waiting: Sequence[Request]) -> Request | None:
        """The request whose prompt is read next; None if there is none.

        Args:
            readers: requests with a slot whose prompt has been read in part.
            waiting: requests that may get a slot now, in the order of the queue.
        """
        readers = [request for request in readers if not request.finished]
        requests = [*readers, *(request for request in waiting if not request.finished)]
        if not requests:
            return None
        highest = max(request.params.priority for request in requests)
        requests = [request for request in requests if request.params.priority == highest]
        if len(requests) == 1:
            # Nothing has to be looked up.
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
        self._passes, self._turn = 0, self._turn + 1
        self._loop.pop(_client(request), None)
        self._loop[_client(request)] = self._turn
        if len(self._loop) > MOST_CLIENTS:
            del self._loop[next(iter(self._loop))]

    def _find_oldest(self, requests: Sequence[Request]) -> Request:
        slots = Counter(part for owner in self._slots.owned for part in _parts(owner))

        def seniority(request: Request) -> tuple[int, list[int], int]:
            # Its own slot is no reason to let others pass.
            taken = [slots[part] - (request.slot >= 0) for part in _parts(request)]
            return self._loop.get(_client(request), 0), taken, request.number

        return min(requests, key=seniority)

    def _find_shortest(self, requests: Sequence[Request]) -> Request:
        lookups = MOST_LOOKUPS
        keys: list[tuple[int, bool, int]] = []
        for request in requests:
            left, waits = len(request.prompt) - request.cached, request.slot < 0
            if waits and lookups and left > SHORT:
                left -= self._slots.known_length(request)
                lookups -= 1
            keys.append((max(left, SHORT).bit_length(), waits, request.number))
        return requests[keys.index(min(keys))]

    def _or_forerunner(self, request: Request, readers: Sequence[Request]) -> Request:
        """``request``, or the reader that is about to read tokens which ``request`` begins with."""
        if request.slot >= 0:
            return request
        return next((reader for reader in readers if self._slots.will_know(request, reader)), request)


def _client(request: Request) -> tuple[str, ...]:
    """The widest name of the client of ``request``; that of requests without one is empty."""
    return request.params.client[:1]


def _parts(request: Request) -> Iterator[tuple[str, ...]]:
    """The client of ``request``: its widest name, and the same with each narrower one."""
    client = request.params.client
    return (client[:count] for count in range(1, len(client) + 1))
