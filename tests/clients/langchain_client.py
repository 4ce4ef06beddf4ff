"""LangChain's chat class against the gateway: prints what it got as JSON. Run with the Python of the clients."""

import json
import sys

from langchain_openai import ChatOpenAI

given = json.load(sys.stdin)
model = ChatOpenAI(model="memagent", base_url=given["base_url"], api_key="none", max_retries=0)
messages = [("user", given["text"]), ("user", given["question"])]
short = model.invoke("Hello?")
long = model.invoke(messages)
streamed = "".join(str(chunk.content) for chunk in model.stream(messages))
try:
    ChatOpenAI(model="nosuch", base_url=given["base_url"], api_key="none", max_retries=0).invoke(
        "Hi"
    )
    error = "none"
except Exception as raised:
    error = type(raised).__name__
print(
    json.dumps(
        {
            "short": short.content,
            "long": long.content,
            "streamed": streamed,
            "tokens": long.usage_metadata["total_tokens"],
            "error": error,
        }
    )
)
