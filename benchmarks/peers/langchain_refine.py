"""LangChain, refine as its current packages have it: a loop over prompt | model | parser.

`RefineDocumentsChain` is deprecated since 0.3.1 and lives on in langchain-classic
(langchain_classic_refine.py). Keeps nothing if it is stopped.
"""

from argparse import Namespace

from harness import API_KEY, MAX_TOKENS, MODEL, NO_MEMORY, PROMPT, QUESTION, run
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable
from langchain_openai import ChatOpenAI


def refine_step(base_url: str) -> Runnable[dict[str, str], str]:
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key=API_KEY, max_tokens=MAX_TOKENS)
    return ChatPromptTemplate([("human", PROMPT)]) | model | StrOutputParser()


def read(options: Namespace, sections: list[str]) -> str:
    step = refine_step(options.base_url)
    memory = NO_MEMORY
    for section in sections:
        memory = step.invoke({"question": QUESTION, "memory": memory, "section": section})
    return memory


if __name__ == "__main__":
    run("langchain refine", read, packages=["langchain-core", "langchain-openai", "openai"])
