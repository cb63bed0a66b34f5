"""Bodies that are large, slow to parse, or not what they should be."""

from __future__ import annotations

import asyncio
import gzip
import itertools

from benchmarks.attacks.attack import CHAT, CLOSED, COMPLETIONS, RESPONSES, Outcome, Target, attack, head

#: A little less than the largest body that a server accepts if not told otherwise.
LARGE = 4 * 2**20 - 1024
#: A server refuses these with 413 or 400, or closes the connection, and the rest of the body is lost with it.
REFUSED = (400, 413, CLOSED)


def repeated(begin: bytes, item: bytes, end: bytes) -> bytes:
    """A body of nearly the largest size."""
    return begin + item * ((LARGE - len(begin) - len(end)) // len(item)) + end


@attack(413, CLOSED)
async def giant_body(target: Target) -> Outcome:
    size = 2**30
    return await target.send(itertools.chain([head(CHAT, size)], itertools.repeat(b" " * 65536, size // 65536)))


@attack(413, CLOSED)
async def giant_body_in_chunks(target: Target) -> Outcome:
    return await target.send(
        itertools.chain([head(CHAT, None)], itertools.repeat(b"10000\r\n" + b" " * 65536 + b"\r\n"))
    )


@attack(*REFUSED)
async def long_text(target: Target) -> Outcome:
    return await target.post(CHAT, repeated(b'{"messages": [{"role": "user", "content": "', b"a b ", b'"}]}'))


@attack(*REFUSED)
async def messages_that_are_numbers(target: Target) -> Outcome:
    return await target.post(CHAT, repeated(b'{"messages": [1', b",1", b"]}"))


@attack(*REFUSED)
async def messages_that_are_empty(target: Target) -> Outcome:
    return await target.post(CHAT, repeated(b'{"messages": [{}', b",{}", b"]}"))


@attack(*REFUSED)
async def messages_as_many_as_parsed(target: Target) -> Outcome:
    item = b',{"role": "user", "content": "a"}'
    return await target.post(CHAT, b'{"messages": [{"role": "user", "content": "a"}' + item * 40_000 + b"]}")


@attack(*REFUSED)
async def tools_that_are_numbers(target: Target) -> Outcome:
    return await target.post(CHAT, repeated(b'{"messages": [], "tools": [1', b",1", b"]}"))


@attack(*REFUSED)
async def items_that_are_numbers(target: Target) -> Outcome:
    return await target.post(RESPONSES, repeated(b'{"input": [1', b",1", b"]}"))


@attack(*REFUSED)
async def long_name_over_a_list_with_an_escape(target: Target) -> Outcome:
    return await target.post(CHAT, repeated(b'{"' + b"k" * 2_000_000 + b'": ["\\u0041"', b",1", b"]}"))


@attack(*REFUSED)
async def half_of_a_surrogate_pair(target: Target) -> Outcome:
    return await target.post(CHAT, repeated(b'{"messages": ["\\ud800"', b',"a"', b"]}"))


@attack(*REFUSED)
async def unknown_name_of_megabytes(target: Target) -> Outcome:
    return await target.post(CHAT, repeated(b'{"', b"a", b'": 1}'))


@attack(*REFUSED)
async def many_unknown_names(target: Target) -> Outcome:
    names = ",".join(f'"top_{number}": 1' for number in range(100_000))
    return await target.post(COMPLETIONS, ('{"prompt": "a", ' + names + "}").encode())


@attack(200, *REFUSED)
async def same_name_again_and_again(target: Target) -> Outcome:
    return await target.post(COMPLETIONS, b'{"prompt": "a"' + b', "prompt": "a"' * 100_000 + b"}")


@attack(*REFUSED)
async def deep_nesting(target: Target) -> Outcome:
    depth = target.rng.choice([65, 1000, 60_000, 1_000_000])
    return await target.post(CHAT, b'{"messages": ' + b"[" * depth + b"]" * depth + b"}")


@attack(*REFUSED)
async def deep_nesting_that_never_ends(target: Target) -> Outcome:
    return await target.post(CHAT, repeated(b'{"messages": ', b"[", b""))


@attack(*REFUSED)
async def no_unicode(target: Target) -> Outcome:
    return await target.post(CHAT, repeated(b'{"messages": "', b"\xff\xfe", b'"}'))


@attack(*REFUSED)
async def number_of_millions_of_digits(target: Target) -> Outcome:
    return await target.post(COMPLETIONS, repeated(b'{"prompt": [', b"9", b"]}"))


@attack(*REFUSED)
async def string_without_an_end(target: Target) -> Outcome:
    return await target.post(COMPLETIONS, repeated(b'{"prompt": "', b'\\"', b""))


@attack(*REFUSED)
async def spaces_alone(target: Target) -> Outcome:
    return await target.post(COMPLETIONS, repeated(b"", b" \n", b""))


@attack(*REFUSED)
async def no_json(target: Target) -> Outcome:
    bodies = (
        b"",
        b"{",
        b"[1]",
        b"null",
        b"NaN",
        b'{"prompt": NaN}',
        b'{"prompt": 1e999}',
        b"\x00" * 1000,
        b"\xef\xbb\xbf{}",
    )
    return await target.post(target.rng.choice([CHAT, COMPLETIONS, RESPONSES]), target.rng.choice(bodies))


@attack(415)
async def another_type(target: Target) -> Outcome:
    return await target.post(CHAT, b"messages=a", Content_Type="application/x-www-form-urlencoded")


@attack(*REFUSED)
async def compressed_zeros(target: Target) -> Outcome:
    return await target.post(CHAT, gzip.compress(b" " * 2**24), Content_Encoding="gzip")


@attack(*REFUSED)
async def chunks_of_one_byte(target: Target) -> Outcome:
    return await target.send(itertools.chain([head(COMPLETIONS, None)], itertools.repeat(b"1\r\n \r\n" * 2000)))


@attack(*REFUSED)
async def large_bodies_together(target: Target) -> Outcome:
    """Hold as many connections as the server permits, each with all but the last byte of a large body."""
    body = repeated(b'{"messages": [1', b",1", b"]}")

    async def hold() -> None:
        async with target.connection() as (reader, writer):
            writer.write(head(CHAT, len(body)) + body[:-1])
            await reader.read(1)

    holding = [asyncio.create_task(hold()) for _ in range(24)]
    try:
        await asyncio.sleep(5)
        return await target.post(CHAT, body)
    finally:
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)
