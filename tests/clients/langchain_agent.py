"""A LangChain agent in its own process, as `command:PYTHON langchain_agent.py` of a training."""

import json
import sys

from langchain_openai import ChatOpenAI

task = json.loads(sys.stdin.readline())
reply = ChatOpenAI(model="policy", max_tokens=8).invoke(task["question"])
print(json.dumps({"answer": reply.content}))
