"""A smolagents agent in its own process, as `command:PYTHON smolagents_agent.py` of a training."""

import json
import os
import sys

from smolagents import ChatMessage, OpenAIServerModel

task = json.loads(sys.stdin.readline())
model = OpenAIServerModel(
    model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
messages = [ChatMessage(role="user", content=[{"type": "text", "text": task["question"]}])]
reply = model.generate(messages, max_tokens=8)
print(json.dumps({"answer": reply.content or ""}))
