"""The least one can do: a loop that posts JSON with httpx. Keeps nothing if it is stopped."""

from argparse import Namespace

import httpx
from harness import API_KEY, MAX_TOKENS, MODEL, NO_MEMORY, run, user_message


def read(options: Namespace, sections: list[str]) -> str:
    memory = NO_MEMORY
    url = f"{options.base_url}/chat/completions"
    with httpx.Client(headers={"Authorization": f"Bearer {API_KEY}"}, timeout=60) as client:
        for section in sections:
            messages = user_message(section, memory)
            request = {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS}
            reply = client.post(url, json=request).raise_for_status().json()
            memory = reply["choices"][0]["message"]["content"]
    return memory


if __name__ == "__main__":
    run("bare httpx", read, packages=["httpx"])
