"""A loop around the openai client. Retries failed calls; keeps nothing if it is stopped."""

from argparse import Namespace

from harness import API_KEY, MAX_TOKENS, MODEL, NO_MEMORY, run, user_message
from openai import OpenAI


def read(options: Namespace, sections: list[str]) -> str:
    memory = NO_MEMORY
    with OpenAI(base_url=options.base_url, api_key=API_KEY) as client:
        for section in sections:
            messages = user_message(section, memory)
            reply = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=MAX_TOKENS
            )
            memory = reply.choices[0].message.content
    return memory


if __name__ == "__main__":
    run("bare openai", read, packages=["openai"])
