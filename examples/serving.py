"""Many requests at once, each streamed as it comes: python examples/serving.py"""

import asyncio

import speccompile
from speccompile import pretrained

QUESTIONS = ["Name three rivers.", "Say 'all is well' five times.", "What is a prime number?", "Count to twenty."]


async def answer(engine, tokenizer, question: str) -> str:  # type: ignore[no-untyped-def]
    chat = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    request = engine.submit(ids, max_new_tokens=40, stop="!", tokenizer=tokenizer)
    async for piece in request.stream(text=True):
        print(f"{question:32} {piece!r}")
    result = request.result()
    times = result.timings
    return f"{question:32} {result.finish_reason}, first token after {times.first_token:.2f} s: {result.text!r}"


async def main() -> None:
    model, tokenizer = pretrained.load("smollm2")  # or a local folder, or a hub id
    with speccompile.wrap(model, mode="ngram", max_batch=4, max_len=512) as spec:
        for line in await asyncio.gather(*(answer(spec.engine, tokenizer, question) for question in QUESTIONS)):
            print(line)
        print(f"{spec.stats.acceptance_length:.2f} tokens a row and target pass, {spec.engine.capacity()}")


if __name__ == "__main__":
    asyncio.run(main())
