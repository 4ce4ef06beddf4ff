"""A loop around the async openai client. Retries failed calls; keeps nothing if it is stopped."""

import asyncio
from argparse import Namespace

from harness import API_KEY, MAX_TOKENS, MODEL, NO_MEMORY, run, user_message
from openai import AsyncOpenAI


async def read(options: Namespace, sections: list[str]) -> str:
    memory = NO_MEMORY
    async with AsyncOpenAI(base_url=options.base_url, api_key=API_KEY) as client:
        for section in sections:
            messages = user_message(section, memory)
            reply = await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=MAX_TOKENS
            )
            memory = reply.choices[0].message.content
    return memory


if __name__ == "__main__":
    run(
        "bare openai async",
        lambda options, sections: asyncio.run(read(options, sections)),
        packages=["openai"],
    )
