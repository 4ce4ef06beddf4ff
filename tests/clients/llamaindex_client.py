"""LlamaIndex's OpenAI chat class against the gateway: prints what it got as JSON."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

given = json.load(sys.stdin)


def model(name):
    return OpenAILike(
        model=name,
        api_base=given["base_url"],
        api_key="none",
        is_chat_model=True,
        context_window=10_000_000,
        max_retries=0,
    )


messages = [ChatMessage(role="user", content=given["text"])]
messages.append(ChatMessage(role="user", content=given["question"]))
short = model("memagent").chat([ChatMessage(role="user", content="Hello?")])
long = model("memagent").chat(messages)
streamed = "".join(part.delta or "" for part in model("memagent").stream_chat(messages))
try:
    model("nosuch").chat(messages[1:])
    error = "none"
except Exception as raised:
    error = type(raised).__name__
print(
    json.dumps(
        {
            "short": short.message.content,
            "long": long.message.content,
            "streamed": streamed,
            "tokens": long.raw.usage.total_tokens,
            "error": error,
        }
    )
)
